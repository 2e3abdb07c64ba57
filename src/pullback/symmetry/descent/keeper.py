r"""Keeps an optimizer's parameters on a slice, and its state in step with them.

Retractions after a step do not synchronize with the host and need few launches.

After a step from a point of the slice the distance is O(lr²), with momentum μ O(lr²/(1−μ)²).

*Units* that share no weight are balanced exactly and at once by the closed form α² = |out|/|in|;
the scalings of a chain fall into two such classes, every other layer. One class costs one reading
of the weights and one multiplication. What is left behind is of the order of a step's imbalance
and shrinks with each sweep: it does not accumulate.

*Layers* need a few numbers each. With squared norms q (P,) of the parameters and powers B (P, U)
of the scalings, the parameters at log-scales t have x = q exp(2Bt). Newton's method from t = 0
finds D log(R x) = 0, where R (blocks, P) adds up what is compared and D (U, blocks) takes
differences. Where that is linear in t, one step is all; else it leaves O(δ²) of a distance δ, and
each further one with the same inverse one more power: two of them end where a second Newton step
would. (In float32 one is enough.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..._core.capture import unwrap_model
from ..._core.checks import refuse_number
from ..._core.errors import PullbackError
from ..._core.replay import Replay, is_recording
from ..._core.space import compute_dtype
from ..actions.scaling import Leg, Scaling
from ..retraction import ScalingUnits, times_exp, wide
from ..slices import EqualNorm, Retraction, Slice, make_slice

#: tensors that move with a parameter: multiplied by its factor to this power
Followers = Mapping[str, Sequence[tuple[Tensor, int]]]
_PIECE = 2**17
_FAR, _ROUNDS = 30.0, 3


class _Side:
    """One leg of a scaling, ready to be reduced and scaled."""

    def __init__(self, leg: Leg, units: int, w: Tensor) -> None:
        self.w, self.leg, self._units = w, leg.on(w), units
        #: whether there is one place for each unit, in order
        self._ordered = torch.equal(self.leg.unit.flatten(), torch.arange(units, device=w.device))

    def norms(self) -> Tensor:
        """|w_u| of each unit, (units,)."""
        w, dtype = self.w, compute_dtype(self.w.dtype)
        axes = [d for d, size in enumerate(self.leg.unit.shape) if size == 1]
        if axes == [0] and w.device.type == "cpu":
            norms = _column_norms(w.flatten(1), dtype).view(w.shape[1:])
        else:
            norms = torch.linalg.vector_norm(w, 2, axes, dtype=dtype) if axes else w.to(dtype)
        if self._ordered:
            return norms.flatten()
        return self.leg.sums(norms.view(self.leg.unit.shape).square(), self._units).sqrt()

    def scale_(self, target: Tensor, factors: Tensor) -> None:
        """Multiply a tensor of the shape of w by its units' factors."""
        unit = self.leg.unit
        if self._ordered:
            target.mul_(factors.view(unit.shape))
        else:
            target.mul_(torch.cat([factors, factors.new_ones(1)])[unit])  # for −1: not scaled


def _column_norms(w: Tensor, dtype: torch.dtype) -> Tensor:
    """|w_j| of the columns of (n, m): (m,), by pieces that a CPU's cache holds."""
    out = torch.zeros(w.shape[1], dtype=dtype)
    for piece in w.split(max(1, _PIECE // max(1, w.shape[1]))):
        out += piece.to(dtype).square().sum(0)
    return out.sqrt()


class UnitSweep:
    """Closed-form balancing of the units, class after class of scalings that share no parameter.

    Args:
        slice: a `Balanced` one.
        params: by name; scaled in place.
    """

    def __init__(self, slice: Slice, params: Mapping[str, Tensor]) -> None:
        self._units = slice.units
        self._sides = [
            [_Side(leg, scaling.units, params[leg.name]) for leg in scaling.legs]
            for scaling in slice.units.scalings
        ]
        self.turns = len(slice.units.colors)
        like = params[slice.units.names[0]]
        like = like.new_empty(0, dtype=compute_dtype(like.dtype))
        #: x of each scaling's units, in α = (|out|/|in|)^x
        self._exponents = [
            like.new_full((s.units,), slice.units.exponent(i))
            for i, s in enumerate(slice.units.scalings)
        ]

    def run(self, turn: int | None, followers: Followers, moved: Tensor | None) -> None:
        """Balance one class, in turn, or all of them; followers are carried along.

        Log-scales are added to `moved`, (U,).
        """
        for color in self._units.colors if turn is None else [self._units.colors[turn]]:
            scales = self._scales(color)
            sizes = [self._units.sizes[i] for i in color]
            pieces = {1: scales.split(sizes)}
            for k, i in enumerate(color):
                if moved is not None:
                    self._units.split(moved)[i].add_(pieces[1][k].to(moved.dtype).log())
                for side in self._sides[i]:
                    for target, times in ((side.w, 1), *followers.get(side.leg.name, ())):
                        power = side.leg.power * times
                        if power not in pieces:
                            pieces[power] = scales.pow(power).split(sizes)
                        side.scale_(target, pieces[power][k])

    def _scales(self, color: Sequence[int]) -> Tensor:
        """α = (|out|/|in|)^x of the units of some scalings, one after the other."""
        into, out = (
            torch.cat([_joint(s for s in self._sides[i] if s.leg.power * sign > 0) for i in color])
            for sign in (1, -1)
        )
        scales = (out / into).abs().pow(torch.cat([self._exponents[i] for i in color]))
        # dead units, and those whose weights are no longer finite, stay as they are
        return torch.where((scales > 0) & (scales < torch.inf), scales, 1.0)


def _joint(sides: Iterable[_Side]) -> Tensor:
    """√Σ|w_u|² over the sides of a scaling, (units,)."""
    return reduce(torch.hypot, [side.norms() for side in sides])


class LayerSweep:
    """Retraction of merged scalings.

    Args:
        slice: `EqualNorm`, or `Balanced` of merged scalings.
        params: by name; scaled in place.
    """

    #: all layers are retracted at once
    turns = 1

    def __init__(self, slice: Slice, params: Mapping[str, Tensor]) -> None:
        self.names, self._params = slice.units.names, params
        self._powers = slice.units.powers
        self._twice = 2 * self._powers
        if isinstance(slice, EqualNorm):
            self._adds, self._differences = slice.adds, slice.differences
        else:  # what leads into each layer, what leads out, and their difference
            self._adds = torch.cat([self._powers.mT, -self._powers.mT]).clamp(min=0)
            eye = torch.eye(slice.units.total).to(self._powers)
            self._differences = torch.cat([eye, -eye], 1)
        blocks = [self._powers[row > 0] for row in self._adds]
        linear = all(bool((block == block[0]).all()) for block in blocks)
        first = params[self.names[0]]
        self._chords = 0 if linear else 2 if first.dtype == torch.float64 else 1
        #: whether the slice is orthogonal to orbits: equal norms are balanced without biases
        self.orthogonal = not isinstance(slice, EqualNorm) or linear
        # of the Jacobian at the last retraction: the start of the next
        self._inverse = self._powers.new_zeros(slice.units.total, slice.units.total)
        if self._inverse.is_cuda:
            for _ in range(16):
                self._log_scales(self._squares())

    def run(self, turn: int | None, followers: Followers, moved: Tensor | None) -> None:
        """Retract; followers are carried along, and log-scales added to `moved`, (U,)."""
        ws = [self._params[n] for n in self.names]
        # in the precision of the weights: kernels that convert as they go are slow
        low = compute_dtype(ws[0].dtype)
        t = self._log_scales(self._squares())
        if moved is not None:
            moved.add_(t)
        factors = (self._powers @ t).exp().to(low).unbind()
        for name, w, factor in zip(self.names, ws, factors, strict=True):
            w.mul_(factor)
            for target, power in followers.get(name, ()):
                target.mul_(factor**power)

    def _squares(self) -> Tensor:
        """|w|² of all parameters, (P,)."""
        ws = [self._params[n].detach() for n in self.names]
        return torch.stack(norms_of(ws)).to(self._powers).square()

    def _log_scales(self, squares: Tensor) -> Tensor:
        sums = self._adds @ squares
        shares = self._adds * squares / sums[:, None]
        inverse = self._inverted(self._differences @ (shares @ self._twice))
        t = -(inverse @ (self._differences @ sums.log()))
        for _ in range(self._chords):
            sums = self._adds @ (squares * (self._twice @ t).exp())
            t = torch.addmv(t, inverse, self._differences @ sums.log(), alpha=-1)
        # a layer that is zero or not finite: nothing is scaled
        return (t + 0 * t.sum()).nan_to_num(0.0, 0.0, 0.0).clamp_(-_FAR, _FAR)

    def _inverted(self, jacobian: Tensor) -> Tensor:
        """J⁻¹; on a GPU by products from the last one, so that no host is needed."""
        if not jacobian.is_cuda:
            return torch.linalg.inv_ex(jacobian)[0]
        return self._inverse.copy_(inverse_by_products(jacobian, self._inverse))


def inverse_by_products(a: Tensor, last: Tensor) -> Tensor:
    """A few rounds of X ← 2X − XAX towards A⁻¹, from an inverse of something like A.

    Where that is far off, from Aᵀ/|A|², which converges, if not within one call. With it, and ever
    after, |1 − AX|² is less than the number of rows.
    """
    off = torch.eye(len(a), dtype=a.dtype, device=a.device).addmm_(a, last, alpha=-1)
    near = torch.linalg.vector_norm(off) < len(a) ** 0.5
    x = torch.where(near, last, a.mT / torch.linalg.vector_norm(a).square())
    for _ in range(_ROUNDS):
        x = torch.addmm(x, x @ a, x, beta=2, alpha=-1)
    return x.nan_to_num(0.0, 0.0, 0.0)


def norms_of(ws: list[Tensor]) -> list[Tensor]:
    """|w| of each, added up in float32 at least."""
    dtype = compute_dtype(ws[0].dtype)
    return list(torch._foreach_norm(ws, 2, None if dtype == ws[0].dtype else dtype))


def idle(groups: Sequence[Mapping[str, Any]]) -> bool:
    """True where all learning rates and gradients are zero, so that a step changes nothing.

    `torch.distributed.checkpoint` takes such a step to make an optimizer create its state. A rate
    on a device counts as nonzero: reading it would wait.
    """
    rates = [group.get("lr", 1.0) for group in groups]
    if any((isinstance(lr, Tensor) and lr.device.type != "cpu") or float(lr) for lr in rates):
        return False
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return not any(g.is_sparse or bool(g.any()) for g in gradients)


class Keeper:
    """Retracts the model's parameters after a step, with what moves along.

    Args:
        model: whose parameters are scaled.
        scalings: its symmetries. Those that touch a parameter that is not optimized are left out.
        kind: of the slice, one of `SLICES`, or a function of the scalings that chooses one.
        every, sweeps, captured: as in `SliceSGD`.
        watched: whether `run` returns log-scales, for state that cannot follow by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        scalings: Sequence[Scaling],
        kind: str | Callable[[Sequence[Scaling]], str],
        every: int = 1,
        sweeps: int | None = None,
        captured: int | None = None,
        watched: bool = False,
    ) -> None:
        for name, value in (("every", every), ("sweeps", sweeps), ("captured", captured)):
            if value is not None or name == "every":
                refuse_number(f"{name}=", value, least=1, whole=True)
        self.named = dict(unwrap_model(model).named_parameters(remove_duplicate=False))
        self.scalings, self.every, self.sweeps = tuple(scalings), every, sweeps
        self.captured = captured
        self._kind = kind
        #: the parameters that the optimizer moves, by id
        self.optimized: set[int] = set()
        self._seen: tuple[bool, ...] | None = None
        self._replay = Replay()
        self.slice: Slice | None = None
        self._sweep: UnitSweep | LayerSweep | None = None
        self._watched = watched
        self._far: Tensor | None = None
        ScalingUnits(scalings, self.named)  # refuses at once what is not usable
        self._own = [self.named[n] for n in dict.fromkeys(n for s in scalings for n in s.names)]

    def own(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Choose the scalings again for the parameters in these groups."""
        self.optimized = {id(p) for group in groups for p in group["params"]}
        self._seen = None
        self.refresh()

    def refresh(self) -> None:
        """Choose the scalings whose parameters are all optimized and not frozen."""
        flags = tuple(p.requires_grad for p in self._own)
        if flags == self._seen:
            return
        self._seen = flags
        free = {n for n, p in self.named.items() if p.requires_grad and id(p) in self.optimized}
        usable = [s for s in self.scalings if free.issuperset(s.names)]
        self.slice = self._sweep = self._far = None
        self._replay = Replay()
        if usable:
            kind = self._kind if isinstance(self._kind, str) else self._kind(usable)
            self.slice = make_slice(kind, usable, self.named)
            whole = all(prod(part.shape) == 1 for part in self.slice.units.parts)
            kind_of_sweep = LayerSweep if whole else UnitSweep
            self._sweep = kind_of_sweep(self.slice, self.named)
            if self.captured is not None and self.captured % self.period:
                self._refuse_graph(self.captured)

    @torch.no_grad()
    def retract_(self, followers: Followers) -> Retraction | None:
        """Retract to round-off from any distance, followers included."""
        if self.slice is None:
            return None
        done = self.slice.retract_()
        t = torch.cat(done.scales)
        for part in self.slice.units.parts:
            for target, power in followers.get(part.name, ()):
                moved = times_exp(target.to(t.dtype), power * part.log_factor(t))
                target.copy_(moved.to(target.dtype))
        return done

    @property
    def orthogonal(self) -> bool:
        """Whether the slice is orthogonal to orbits, so that gradients of a loss are tangent."""
        return not isinstance(self._sweep, LayerSweep) or self._sweep.orthogonal

    @property
    def period(self) -> int:
        """The number of steps after which the pattern of retractions repeats."""
        turns = self._sweep.turns if self._sweep is not None and self.sweeps is None else 1
        return self.every * turns

    def due(self, steps: int) -> bool:
        """Whether a step with this number, from 1, is followed by a retraction."""
        if self._sweep is None:
            return False
        # what a graph holds is replayed as it is, whatever the number of the step
        if self.captured is None and self.period > 1 and is_recording(self._own[0]):
            self._refuse_graph(1)
        return steps % self.every == 0

    def _refuse_graph(self, steps: int) -> NoReturn:
        raise PullbackError(
            f"A graph of {steps} step{'s' if steps > 1 else ''} would leave retractions out",
            f"steps differ, and come around after {self.period}: a replay does always the same",
            f"Record {self.period} steps, or a multiple, and say so: captured={self.period}; or "
            "make them all alike: every=1, sweeps=1",
        )

    def run(self, steps: int, followers: Followers) -> Tensor | None:
        """Retract after a step, by sweeps; where they are watched, the log-scales (U,)."""
        sweep = self._sweep
        if sweep is None or self.slice is None:
            return None
        if self._watched and self._far is None:
            first = self.named[self.slice.units.names[0]]
            self._far = torch.zeros(self.slice.units.total, dtype=wide(first), device=first.device)
        far = self._far.zero_() if self._far is not None else None
        turns = (
            [(steps // self.every - 1) % sweep.turns]
            if self.sweeps is None
            else [None] * self.sweeps
        )
        moved = [self.named[n] for n in self.slice.units.names]
        moved += [target for found in followers.values() for target, _ in found]
        moved += [] if far is None else [far]
        for turn in turns:
            self._replay.run(turn, moved, lambda turn=turn: sweep.run(turn, followers, far))
        return far
