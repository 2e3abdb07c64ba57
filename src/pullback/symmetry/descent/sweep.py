r"""Retractions for the hot loop: no synchronization with the host, few launches.

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

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..._core.space import compute_dtype
from ..actions.scaling import Leg
from ..slices.equal_norm import EqualNorm
from ..slices.slice import Slice
from ..slices.units import ScalingUnits

#: tensors that move with a parameter: multiplied by its factor to this power
Followers = Mapping[str, Sequence[tuple[Tensor, int]]]
_PIECE = 2**17
_FAR, _ROUNDS = 30.0, 3


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


class UnitSweep:
    """Closed-form balancing of the units, class after class.

    Args:
        slice: a `Balanced` one.
        params: by name; scaled in place.
    """

    def __init__(self, slice: Slice, params: Mapping[str, Tensor]) -> None:
        units = slice.units
        self.classes = [_Class(units, color, params) for color in units.colors]

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

    def __init__(
        self, units: ScalingUnits, color: Sequence[int], params: Mapping[str, Tensor]
    ) -> None:
        self._sizes = [units.sizes[i] for i in color]
        self._into: list[list[_Side]] = []
        self._out: list[list[_Side]] = []
        powers = []
        for i in color:
            scaling = units.scalings[i]
            sides = [_Side(leg, scaling.units, params[leg.name]) for leg in scaling.legs]
            self._into.append([s for s in sides if s.power > 0])
            self._out.append([s for s in sides if s.power < 0])
            powers.append(units.exponent(i))
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

    def run(
        self,
        turn: int | None = None,
        followers: Followers | None = None,
        moved: Tensor | None = None,
    ) -> None:
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
            for target, power in (followers or {}).get(name, ()):
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
