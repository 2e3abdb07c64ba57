"""An objective: terms on derivatives of a network, or residuals, and their problem of one step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from .._core.errors import PullbackError, reraise_fatal
from .._core.factor import Blocks, Diagonal, Factor
from .._core.processes import Processes
from .._core.state import RandomState
from ..grams import RowBlock
from ..maps import IntegralMap, ObjectiveMap, OperatorMap
from ..metrics import Metric
from .problem import Place, StepProblem

_TRIAL_BYTES = {"cpu": 2**26, "cuda": 2**33}  # about the cache; about the memory


class Term(ABC):
    """ℓ(z) for the values z of a map, with the metric that goes with it."""

    def __init__(self, map: ObjectiveMap | OperatorMap | IntegralMap) -> None:
        self.map = map

    @abstractmethod
    def loss(self, z: Tensor) -> Tensor:
        """ℓ(z), a scalar."""

    @abstractmethod
    def slope(self, z: Tensor) -> Tensor:
        """∂ℓ/∂z."""

    @abstractmethod
    def factor(self, z: Tensor) -> Factor:
        """S with S Sᵀ the metric at z."""

    #: whether S r = ∂ℓ/∂z is solved by r = z
    whitened: bool = False


class Squares(Term):
    """½‖z‖², in the Euclidean metric of z: Gauss–Newton."""

    whitened = True

    def loss(self, z: Tensor) -> Tensor:
        return 0.5 * z.square().sum()

    def slope(self, z: Tensor) -> Tensor:
        return z

    def factor(self, z: Tensor) -> Factor:
        return Diagonal(torch.ones_like(z))


class EnergyTerm(Term):
    """Σ_i q_i e_i(z_i), in the metric q_i ∇²e_i(z_i) of the energy's own second variation.

    Args:
        map: its values z (N, C) are what the density depends on.
        density: z ↦ e (N,), entry i of z_i alone, convex in it.
        weights: q, (N,).
    """

    def __init__(
        self, map: ObjectiveMap | OperatorMap, density: Callable[[Tensor], Tensor], weights: Tensor
    ) -> None:
        super().__init__(map)
        self._density, self._weights = density, weights

    def loss(self, z: Tensor) -> Tensor:
        return (self._weights * self._density(z)).sum()

    def slope(self, z: Tensor) -> Tensor:
        return grad(self.loss)(z)

    def factor(self, z: Tensor) -> Factor:
        size = z.shape[1]
        eye = torch.eye(size, dtype=z.dtype, device=z.device)
        columns = [jvp(grad(self.loss), (z,), (e.expand_as(z),))[1] for e in eye]
        return Blocks.of_metric(torch.stack(columns, -1), (size,))


class Objective:
    """A loss Σ_k ℓ_k(φ_k(w)) as terms whose maps know their own structure.

    On several processes the loss is the sum of their objectives'.

    Args:
        terms: ℓ_k with φ_k.
        shared: whether other processes have terms too, so that here may be none.
    """

    def __init__(self, terms: Sequence[Term], *, shared: bool = False) -> None:
        self.terms = tuple(terms)
        if not self.terms and not shared:
            raise PullbackError("The objective has no terms", "there is no loss", "Pass some")

    def loss(self, params: Mapping[str, Tensor]) -> Tensor:
        """L, a scalar."""
        first, *others = (term.loss(term.map(params)) for term in self.terms)
        return sum(others, first)


class ObjectiveProblem(StepProblem):
    """L = Σ_k ℓ_k(z_k): half the square of the weighted residuals, or an `Objective`'s terms.

    The metric is that of the terms (Gauss–Newton for residuals), unless other values are given to
    measure with (`metric_batch`): then it is the optimizer's metric on those.
    """

    proven = True  # by torch.func, or once by the operator's map itself

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        objective: Objective | Callable[..., Any],
        reduction: str,
        processes: Processes | None = None,
    ) -> None:
        super().__init__(params, processes)
        self._random = RandomState(self.space.device)
        self._reduction = reduction
        if not isinstance(objective, Objective):
            source = self._averaged(self._repeatable(objective))
            objective = Objective([Squares(source)] if source.rows else [], shared=True)
        self._objective, self._terms = objective, objective.terms

    def _repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same random numbers at every evaluation: loss, Jacobian and trials must agree."""
        random = RandomState(self.space.device)

        def repeated(point: dict[str, Tensor]) -> Any:
            random.restore()
            return function(point)

        return repeated

    def _averaged(self, function: Callable[..., Any]) -> ObjectiveMap:
        """The residuals of this process; a mean is one over the samples of all processes."""
        source = ObjectiveMap(function, self._reduction)
        if not self.processes.is_single:
            with self.processes.raise_together(), torch.no_grad():
                own = source.samples(self.params)
            found: dict[str, int] = {}
            for counts in self.processes.gather_objects(own):
                for name, n in counts.items():
                    found[name] = found.get(name, 0) + n
            source = ObjectiveMap(function, self._reduction, found, rows=sum(own.values()))
        return source

    def evaluate(self) -> str:
        unmixed = torch.autocast(self.space.device.type, enabled=False)
        with unmixed, self.processes.raise_together():
            linears = [term.map.linearize(self.params) for term in self._terms]
            pairs = list(zip(self._terms, linears, strict=True))
            # carried forward, one trial is work enough for a core
            self._apart = self.space.device.type == "cpu" and all(x.structured for x in linears)
            self._footprint = sum(getattr(x, "footprint", 64 * x.value.numel()) for x in linears)
            own = _sum([term.loss(x.value) for term, x in pairs], self.space.zeros())
        self.loss = float(self.summed(own)[0])
        if not math.isfinite(self.loss):
            return self.broken()
        with unmixed, self.processes.raise_together():
            self._parts = [RowBlock(x, term.factor(x.value)) for term, x in pairs]
            shares = []
            for (term, x), part in zip(pairs, self._parts, strict=True):
                slope = term.slope(x.value)
                # where rows cost no more than a reverse pass, the gradient comes from them
                rows = x.structured and term.whitened
                shares.append(part.lift(slope.flatten()) if rows else x.vjp(slope))
            zero = self.space.zeros(self.space.size)
            white = [x for term, x in zip(self._terms, shares, strict=True) if term.whitened]
            gradient, pulled = _sum(shares, zero), _sum(white, zero)
        # r is used where a term of any process has one
        self._whitened = not self.processes.all_agree(not white)
        self.gradient, self._pulled = self.summed(gradient, pulled)
        if not bool(self.gradient.any()) and self.loss != 0:
            self._refuse_constant()
        return self.broken()

    def _refuse_constant(self) -> None:
        ones = torch.ones_like(self.gradient)
        if self.processes.all_agree(
            not any(bool(part.linearization.jvp(ones).any()) for part in self._parts)
        ):
            raise PullbackError(
                "The objective does not depend on the parameters",
                "its residuals have no gradient",
                "Use the given parameter dict, for example with torch.func.functional_call",
            )

    def parts(self, metric: Metric, batch: Any) -> tuple[list[RowBlock], Tensor | None]:
        if batch is not None:
            values = self._averaged(self._repeatable(batch))
            with self.processes.raise_together():
                linears = [values.linearize(self.params)] if values.rows else []
                return [RowBlock(x, metric.factor(x.value)) for x in linears], None
        if not self._whitened:
            return self._parts, None
        white = [
            part.linearization.value.flatten()
            if term.whitened
            else torch.zeros(part.count, dtype=self.space.dtype, device=self.space.device)
            for term, part in zip(self._terms, self._parts, strict=True)
        ]
        return self._parts, torch.cat([self.space.zeros(0), *white])

    def pulled(self) -> Tensor:
        return self._pulled

    def losses(self, moves: Tensor, place: Place) -> Tensor:
        with self.processes.raise_together():
            own = self._losses(moves, place)
        return self.summed(own)[0]

    def _losses(self, moves: Tensor, place: Place) -> Tensor:
        def loss(move: Tensor) -> Tensor:
            return self._objective.loss(place(self.params, move))

        if not self._terms:
            return moves.new_zeros(len(moves))
        if self._apart:
            with torch.no_grad():
                return torch.stack([loss(move) for move in moves])
        room = _TRIAL_BYTES.get(moves.device.type, 2**28)
        chunk = max(1, room // (self._footprint * moves.element_size()))
        with torch.no_grad():
            try:
                return vmap(loss, chunk_size=chunk, randomness="same")(moves)
            except RuntimeError as error:
                reraise_fatal(error)  # else the objective or retraction branches on its data
                return torch.stack([loss(move) for move in moves])

    def rollback(self) -> None:
        self._random.restore()


def _sum(tensors: list[Tensor], zero: Tensor) -> Tensor:
    return torch.stack(tensors).sum(0) if tensors else zero
