"""Steps that compare the loss with its quadratic model: trust regions and damping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from .._core.checks import refuse_number
from .._core.errors import PullbackError, require
from ..solvers import Path
from .base import Local, Move, Step, failed, in_chunks, positive


@dataclass(frozen=True)
class RatioDamping:
    """λ after a step, from ρ = actual/predicted reduction of the loss.

    λ ← increase·λ where ρ < low or ρ is NaN, λ ← decrease·λ where ρ > high, both within
    [smallest, largest].

    >>> RatioDamping().next(1.0, ratio=0.1)
    2.0
    """

    low: float = 0.25
    high: float = 0.75
    increase: float = 2.0
    decrease: float = 1 / 3
    smallest: float = 1e-16
    largest: float = 1e8

    def __post_init__(self) -> None:
        good = all(isinstance(value, (int, float)) for value in vars(self).values())
        good = good and 0 <= self.low <= self.high < inf and 1 <= self.increase < inf
        good = good and 0 < self.decrease <= 1 and 0 <= self.smallest <= self.largest < inf
        remedy = "Use 0 ≤ low ≤ high, increase ≥ 1, 0 < decrease ≤ 1, 0 ≤ smallest ≤ largest"
        require(good, "The control of the damping", self, remedy)

    def next(self, damping: float, ratio: float, increase: float | None = None) -> float:
        """The next λ; `increase` replaces the factor by which it grows."""
        factor = 1.0
        if not ratio >= self.low:
            factor = self.increase if increase is None else increase
        elif ratio > self.high:
            factor = self.decrease
        return min(max(damping * factor, self.smallest), self.largest)


def clip_factor(squared_length: Tensor, limit: float) -> Tensor:
    """min(1, √(limit/squared_length)): what shortens a vector to length √limit at most.

    The device is not waited for; NaN stays NaN.

    >>> clip_factor(torch.tensor([16.0, 0.0]), limit=4.0)
    tensor([0.5000, 1.0000])
    """
    return (limit / squared_length.clamp(min=limit)).sqrt()


class LevenbergMarquardt(Step):
    r"""Full steps of the damped system, with λ set by ρ = actual/predicted reduction.

    λ falls by `decrease` where ρ > 0.75, grows by `increase` where ρ < 0.25, and a step that
    raises the loss is rejected and tried again with more damping.

    With a `target` it takes long steps, as `TargetRatio` does, for solvers that factorize for one λ
    at a time: λ falls after every step that is taken, and grows until ρ exceeds the target.

    Args:
        damping: the first λ; afterwards it is part of the optimizer's state.
        increase: factor by which λ grows; without a target it doubles with each rejection in a row.
        decrease: factor by which λ falls.
        target: the ratio that suffices, such as 0.01; take `decrease=1 / 16` with it.
        tries: how often to raise λ before the step is given up.
        bounds: λ stays between these.
    """

    def __init__(
        self,
        damping: float = 1e-3,
        *,
        increase: float = 2.0,
        decrease: float = 1 / 3,
        target: float | None = None,
        tries: int = 10,
        bounds: tuple[float, float] = (1e-16, 1e8),
    ) -> None:
        self.damping = positive("LevenbergMarquardt(damping=...)", damping)
        self.target, low, high = target, 0.25, 0.75
        if target is not None:
            refuse_number("LevenbergMarquardt(target=...)", target, below=1, positive=True)
            low = high = target
        both = isinstance(bounds, (tuple, list)) and len(bounds) == 2
        require(both, "LevenbergMarquardt(bounds=...)", bounds, "Use the least and the largest λ")
        self.control = RatioDamping(low, high, increase, decrease, *bounds)
        refuse_number("LevenbergMarquardt(tries=...)", tries, least=1, whole=True)
        self.tries = tries

    @property
    def numbers(self) -> dict[str, float]:
        return {"damping": self.damping}

    def take(self, local: Local) -> Move:
        damping = local.state.get("damping", self.damping)
        growth = self.control.increase
        move = None
        for trial in range(1, self.tries + 1):
            solution = local.direction(damping)
            move, ratio = failed(solution), float("nan")
            if move is None:
                loss = local.loss_at(solution.x)
                predicted = local.predicted(solution.x)
                ratio = (local.loss - loss) / predicted if predicted > 0 else ratio
                if ratio > (1e-4 if self.target is None else self.target):
                    local.state["damping"] = self.control.next(solution.damping, ratio, growth)
                    return Move(solution.x, 1.0, solution, True, loss, "", trial)
                reason = "the loss did not fall far enough at any damping tried"
                move = Move(solution.x, 0.0, solution, False, None, reason, trial)
            damping = self.control.next(damping, ratio, growth)
            growth *= 2 if self.target is None else 1
        local.state["damping"] = damping
        assert move is not None
        return move


class QuadraticModel(Step):
    r"""The move αd + βm that lowers the model most, d the natural gradient and m the last move.

    Minimizes −gᵀx + ½xᵀ(G + λ)x over the plane of d and m, so that neither a learning rate nor a
    momentum is left to choose.

    Args:
        momentum: whether to use the last move.
    """

    def __init__(self, momentum: bool = True) -> None:
        self.momentum = momentum

    @property
    def numbers(self) -> dict[str, float]:
        return {"count": 0} if self.momentum else {}

    @property
    def vectors(self) -> tuple[str, ...]:
        return ("move",) if self.momentum else ()

    def take(self, local: Local) -> Move:
        solution = local.direction()
        if (rejection := failed(solution)) is not None:
            return rejection
        span = [solution.x]
        count = local.state.get("count", 0)
        if self.momentum and count:
            span.append(local.state["move"].to(solution.x))
        products = [[x @ y for y in map(local.image, span)] for x in span]
        lengths = [[x @ y for y in span] for x in span]
        slopes = [local.gradient @ x for x in span]
        factors = best_factors(slopes, products, lengths, solution.damping)
        move = torch.stack(span).T @ factors
        if self.momentum:
            local.state |= {"move": move, "count": count + 1}
        return Move(move, 1.0, solution)


def best_factors(
    slopes: Sequence[Tensor],
    products: Sequence[Sequence[Tensor]],
    lengths: Sequence[Sequence[Tensor]],
    damping: float,
) -> Tensor:
    """The c that minimizes −bᵀc + ½cᵀ(P + λS)c: b slopes gᵀx_i, P products, S inner products.

    Directions are brought to the same length first; those that the model does not see get nothing.
    """
    b = torch.stack(list(slopes)).double()
    p = torch.stack([torch.stack(list(row)) for row in products]).double()
    s = torch.stack([torch.stack(list(row)) for row in lengths]).double()
    matrix = (p + p.T) / 2 + damping * s
    size = matrix.diagonal().clamp(min=0).sqrt()
    unit = torch.where(size > 0, 1 / size, 0.0)
    inverse = torch.linalg.pinv(unit[:, None] * matrix * unit, rtol=1e-10, hermitian=True)
    return (unit * (inverse @ (unit * b))).to(slopes[0].dtype)


class TargetRatio(Step):
    r"""Try many trust radii at once and take the largest with ρ above a small target.

    The factorization gives every damped solution, so for a geometric window of radii around the
    last one the secular equation ‖x(λ)‖ = radius is solved for all λ together; each trial's true
    loss gives ρ = actual/predicted reduction. ρ is taken to fall with the radius: on a CPU, where
    trials are made one by one, the last good radius is found by bisection; on CUDA all are tried,
    and beyond the first bad one none counts. If none qualifies the step is rejected and the radius
    shrinks by the window.

    Args:
        target: the ratio to exceed; small values keep the steps long. Demanding more, or taking
            the lowest loss instead of the largest radius, stalls (`benchmarks/trust.py`).
        radii: number of trial radii. Their spacing matters more than their range.
        window: radii run from radius/window to radius·window.
        radius: the first one, in parameter space.
    """

    def __init__(
        self, target: float = 0.01, radii: int = 24, window: float = 3.0, radius: float = 1.0
    ) -> None:
        self.target, self.radii, self.window, self.radius = target, radii, window, radius

    @property
    def numbers(self) -> dict[str, float]:
        return {"radius": self.radius}

    def take(self, local: Local) -> Move:
        path = local.path()
        if path is None or local.lr is None:
            raise PullbackError(
                "TargetRatio cannot work here",
                "it needs every damped solution from one factorization, and one learning rate",
                "Use PseudoInverse() or Sketched(...), no wrapper around the step (Clip, Spring, "
                "TrustNorm), and the same lr in all groups",
            )
        radius = local.state.get("radius", self.radius)
        solution = local.direction(0.0)
        if (rejection := failed(solution)) is not None:
            return rejection
        exponents = torch.linspace(
            -1, 1, self.radii, dtype=path.gamma.dtype, device=path.gamma.device
        )
        radii = radius * self.window**exponents
        dampings = path.damping_for(radii)
        predicted = path.predicted(dampings, local.lr).tolist()
        best, loss, trials = self._search(local, path, dampings, predicted)
        if best < 0:
            local.state["radius"] = radius / self.window
            reason = "the loss fell too little, or rose, at every trust radius tried"
            return Move(solution.x, 0.0, solution, False, None, reason, trials)
        x, damping = path.at(dampings[best]), float(dampings[best])
        local.state["radius"] = float(radii[best]) if damping > 0 else float(x.norm())
        chosen = type(solution)(x, damping, solution.rank, None, solution.status)
        return Move(x, 1.0, chosen, True, loss, "", trials)

    def _search(
        self, local: Local, path: Path, dampings: Tensor, predicted: list[float]
    ) -> tuple[int, float, int]:
        """The index of the radius to take (or −1), its loss, and how many were tried.

        The ratio falls with the radius, so where trials are made one by one the last good radius is
        found by bisection.
        """

        def good(loss: float, i: int) -> bool:
            actual = local.loss - loss  # the ratio is infinite or NaN where nothing is predicted
            ratio = actual / predicted[i] if predicted[i] else actual * inf
            return ratio > self.target

        if dampings.is_cuda:  # waiting for a device costs more than trials
            found = in_chunks(lambda d: local.losses(path.at(d)), dampings, local.gradient)
            losses = found.tolist()
            flags = [good(x, i) for i, x in enumerate(losses)]
            best = (flags.index(False) if False in flags else len(flags)) - 1
            return best, losses[best], len(losses)
        low, high, best, tried = -1, self.radii, local.loss, 0  # good below, bad above
        while high - low > 1:
            i = (low + high) // 2
            loss = float(local.losses(path.at(dampings[i : i + 1]))[0])
            tried += 1
            if good(loss, i):
                low, best = i, loss
            else:
                high = i
        return low, best, tried
