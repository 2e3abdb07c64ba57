r"""Retractions for the hot loop: no synchronization with the host, few launches.

After a step from a balanced point the imbalance is O(lr²), since the gradient is tangent; with
momentum μ, O(lr²/(1−μ)²). Units that share no weight are balanced exactly and at once by the closed
form α² = |out|/|in|; the scalings of a chain fall into two such classes, every other layer. One
class costs one reading of the weights and one multiplication. What is left behind is of the order
of a step's imbalance and shrinks with each sweep: it does not accumulate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..._core.space import compute_dtype
from ..actions.scaling import Leg
from ..slices.balance import colors, coupled
from ..slices.slice import Slice
from ..slices.units import Units

#: tensors that move with a parameter: multiplied by its factor to this power
Followers = Mapping[str, Sequence[tuple[Tensor, int]]]
_PIECE = 2**17


class _Side:
    """One leg, ready to be reduced and scaled: the axis of units in front of a view of w."""

    def __init__(self, leg: Leg, units: int, w: Tensor) -> None:
        self.w, self.power, self.name, self._units = w, leg.power, leg.name, units
        shape = [1] * (w.ndim - leg.unit.ndim) + list(leg.unit.shape)
        self._unit = leg.unit.to(w.device).reshape(shape)
        axes = [d for d, size in enumerate(self._unit.shape) if size != 1]
        self._complete = leg.complete
        self._axis = axes[0] if len(axes) == 1 and units > 1 and leg.complete else None
        self._repeats = 1
        flat = self._unit.reshape(-1)
        if self._axis is not None:
            repeats, rest = divmod(len(flat), units)
            grid = torch.arange(units, device=flat.device).repeat_interleave(max(repeats, 1))
            if rest or not torch.equal(grid, flat):
                self._axis = None
            self._repeats = repeats

    @property
    def plain(self) -> bool:
        """Whether w itself has one entry per unit."""
        return self.w.ndim == 1 and self._axis == 0 and self._repeats == 1

    def view(self, w: Tensor) -> Tensor:
        """W with an axis of units of its own."""
        assert self._axis is not None
        return w if self._repeats == 1 else w.unflatten(self._axis, (self._units, self._repeats))

    def norms(self) -> Tensor:
        """|w_u| of each unit, (units,)."""
        w, dtype = self.w, compute_dtype(self.w.dtype)
        if self.plain:
            return w.to(dtype)
        if self._axis == 1 and w.device.type == "cpu":
            return _column_squares(w.flatten(1), dtype).view(self._units, -1).sum(1).sqrt()
        if self._axis is not None:
            seen = self.view(w)
            axes = [d for d in range(seen.ndim) if d != self._axis]
            return torch.linalg.vector_norm(seen, 2, axes, dtype=dtype)
        if self._units == 1 and self._complete:
            return torch.linalg.vector_norm(w, dtype=dtype).reshape(1)
        leg = Leg(self.name, self._unit, 1)
        return leg.sums(w.to(dtype).square(), self._units).sqrt()

    def scale_(self, target: Tensor, factors: Tensor) -> None:
        """Multiply a tensor of the shape of w by its units' factors."""
        if self._axis is None:
            if not self._complete:
                factors = torch.cat([factors, factors.new_ones(1)])
            target.mul_(factors[self._unit])
            return
        seen = self.view(target)
        seen.mul_(factors.view([-1 if d == self._axis else 1 for d in range(seen.ndim)]))


def _column_squares(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ_i w_ij² for (n, m): (m,), by pieces that a CPU's cache holds."""
    out = torch.zeros(w.shape[1], dtype=dtype)
    for piece in w.split(max(1, _PIECE // max(1, w.shape[1]))):
        out += piece.to(dtype).square().sum(0)
    return out


class Sweep:
    """Closed-form balancing of the units, class after class.

    Args:
        slice: a `Balanced` one.
        params: by name; scaled in place.
    """

    def __init__(self, slice: Slice, params: Mapping[str, Tensor]) -> None:
        units = slice.units
        self.classes = [_Class(units, color, params) for color in colors(units)]

    @property
    def turns(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    def run(
        self,
        turn: int | None = None,
        followers: Followers | None = None,
        moved: Tensor | None = None,
    ) -> None:
        """Balance one class, in turn, or all of them; followers are carried along.

        Log-scales are added to `moved`, (U,).
        """
        chosen = self.classes if turn is None else [self.classes[turn % len(self.classes)]]
        for part in chosen:
            part.run(followers or {}, moved)


class _Class:
    """Scalings that share no parameter."""

    def __init__(self, units: Units, color: Sequence[int], params: Mapping[str, Tensor]) -> None:
        self._sizes = [units.sizes[i] for i in color]
        self._into: list[list[_Side]] = []
        self._out: list[list[_Side]] = []
        powers = []
        for i in color:
            scaling = units.scalings[i]
            sides = [_Side(leg, scaling.units, params[leg.name]) for leg in scaling.legs]
            self._into.append([s for s in sides if s.power > 0])
            self._out.append([s for s in sides if s.power < 0])
            most = max(abs(s.power) for s in sides)
            powers.append((0.25 if coupled(units, i) else 0.5) / most)
        # (out/in)^½, less where units of one scaling share weights
        self._powers = powers
        first = self._into[0][0].w
        starts = [sum(units.sizes[:i]) for i in color]
        places = [torch.arange(s, s + units.sizes[i]) for s, i in zip(starts, color, strict=True)]
        self._places = torch.cat(places).to(first.device)

    def run(self, followers: Followers, moved: Tensor | None = None) -> None:
        into, out = self._norms(self._into), self._norms(self._out)
        scales = (out / into).pow(self._exponent(into))
        # dead units, and those whose weights are no longer finite, stay as they are
        scales = torch.where((scales > 0) & (scales < torch.inf), scales, 1.0)
        if moved is not None:
            moved.index_add_(0, self._places, scales.to(moved.dtype).log())
        known = {1: scales.split(self._sizes)}
        plain: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i, sides in enumerate(zip(self._into, self._out, strict=True)):
            for side in (*sides[0], *sides[1]):
                for target, times in ((side.w, 1), *followers.get(side.name, ())):
                    total = side.power * times
                    if total not in known:
                        known[total] = scales.pow(total).split(self._sizes)
                    factors = known[total][i]
                    if side.plain and target.dtype == factors.dtype:
                        plain[0].append(target)
                        plain[1].append(factors)
                    else:
                        side.scale_(target, factors)
        if plain[0]:
            torch._foreach_mul_(*plain)

    def _exponent(self, like: Tensor) -> float | Tensor:
        if len(set(self._powers)) == 1:
            return self._powers[0]
        each = zip(self._sizes, self._powers, strict=True)
        return torch.cat([like.new_full((n,), power) for n, power in each])

    def _norms(self, sides: list[list[_Side]]) -> Tensor:
        """√Σ over the sides of each scaling, one after the other: (units of the class,)."""
        depth = max(len(each) for each in sides)
        total: Tensor | None = None
        for rank in range(depth):
            found = [each[rank].norms() if rank < len(each) else None for each in sides]
            like = next(f for f in found if f is not None)
            row = torch.cat(
                [
                    like.new_zeros(n) if f is None else f
                    for f, n in zip(found, self._sizes, strict=True)
                ]
            )
            total = row if total is None else torch.hypot(total, row)
        assert total is not None
        return total.abs()
