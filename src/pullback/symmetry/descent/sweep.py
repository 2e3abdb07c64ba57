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

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from ..._core.space import compute_dtype
from ..actions.scaling import Leg
from ..slices import EqualNorm, Slice

#: tensors that move with a parameter: multiplied by its factor to this power
Followers = Mapping[str, Sequence[tuple[Tensor, int]]]
_PIECE = 2**17
_FAR, _ROUNDS = 30.0, 3


class _Side:
    """One leg of a scaling, ready to be reduced and scaled."""

    def __init__(self, leg: Leg, units: int, w: Tensor) -> None:
        shape = [1] * (w.ndim - leg.unit.ndim) + list(leg.unit.shape)
        unit = leg.unit.to(w.device).reshape(shape)
        self.w, self.leg, self._units = w, Leg(leg.name, unit, leg.power), units
        #: whether there is one place for each unit, in order
        self._ordered = torch.equal(unit.flatten(), torch.arange(units, device=unit.device))

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

    def run(
        self,
        turn: int | None = None,
        followers: Followers | None = None,
        moved: Tensor | None = None,
    ) -> None:
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
                    for target, times in ((side.w, 1), *(followers or {}).get(side.leg.name, ())):
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
