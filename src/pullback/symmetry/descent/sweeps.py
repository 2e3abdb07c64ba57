r"""Retractions after a step that do not synchronize with the host and need few launches.

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
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..._core.space import compute_dtype
from ..actions.scaling import Leg
from ..slices import EqualNorm, Slice


@dataclass(frozen=True)
class SweepThresholds:
    """Numbers that steer sweeps.

    Attributes:
        cache_entries: entries of a piece whose columns are added up at once on a CPU: 1 MiB in
            float64, which a second-level cache holds.
        largest_log_scale: of a layer in one retraction. A layer that is nearly zero would
            otherwise overflow; e^30 is 1e13.
        inverse_rounds: of X ← 2X − XAX in one retraction. Each squares the error, which is that of
            one step's change before.
        warm_up: retractions at construction after which that iteration has converged from any
            matrix that occurs.
    """

    cache_entries: int = 2**17
    largest_log_scale: float = 30.0
    inverse_rounds: int = 3
    warm_up: int = 16


THRESHOLDS = SweepThresholds()


class Follower(NamedTuple):
    """A tensor that moves with a parameter: it is multiplied by the factor to a power."""

    tensor: Tensor
    power: int


#: by the parameter's name
Followers = Mapping[str, Sequence[Follower]]


def find_norms(ws: list[Tensor]) -> list[Tensor]:
    """Return |w| of each, added up in float32 at least."""
    dtype = compute_dtype(ws[0].dtype)
    if dtype == ws[0].dtype:
        return list(torch._foreach_norm(ws, 2))
    return list(torch._foreach_norm(ws, 2, dtype))


# --- units ----------------------------------------------------------------------------------


class _ScaledLeg:
    """One leg of a scaling with its parameter.

    Attributes:
        w: the parameter.
        leg: with a unit index that has as many axes as w.
    """

    def __init__(self, leg: Leg, units: int, w: Tensor) -> None:
        self.w = w
        self.leg = leg.on(w)
        self._units = units
        #: whether there is one place for each unit, in order
        self._is_ordered = torch.equal(
            self.leg.unit.flatten(), torch.arange(units, device=w.device)
        )

    def norms(self) -> Tensor:
        """|w_u| of each unit, (units,)."""
        norms = self._reduce_other_axes()
        if self._is_ordered:
            return norms.flatten()
        squares = norms.view(self.leg.unit.shape).square()
        return self.leg.sums(squares, self._units).sqrt()

    def _reduce_other_axes(self) -> Tensor:
        """The norms over the axes along which units do not differ."""
        dtype = compute_dtype(self.w.dtype)
        axes = [d for d, size in enumerate(self.leg.unit.shape) if size == 1]
        if not axes:
            return self.w.to(dtype)
        if axes == [0] and self.w.device.type == "cpu":
            return _find_column_norms(self.w.flatten(1), dtype).view(self.w.shape[1:])
        return torch.linalg.vector_norm(self.w, 2, axes, dtype=dtype)

    def scale_(self, target: Tensor, factors: Tensor) -> None:
        """Multiply a tensor of the shape of w by its units' factors."""
        unit = self.leg.unit
        if self._is_ordered:
            target.mul_(factors.view(unit.shape))
        else:
            # Index −1 reads the appended 1: such entries are not scaled.
            target.mul_(torch.cat([factors, factors.new_ones(1)])[unit])


def _find_column_norms(w: Tensor, dtype: torch.dtype) -> Tensor:
    """|w_j| of the columns of (n, m): (m,), by pieces that a CPU's cache holds."""
    squares = torch.zeros(w.shape[1], dtype=dtype)
    row_count = max(1, THRESHOLDS.cache_entries // max(1, w.shape[1]))
    for piece in w.split(row_count):
        squares += piece.to(dtype).square().sum(0)
    return squares.sqrt()


class UnitSweep:
    """Closed-form balancing of the units, class after class of scalings that share no parameter.

    Args:
        slice: a `Balanced` one.
        params: by name; scaled in place.

    Attributes:
        turns: the number of classes.
    """

    def __init__(self, slice: Slice, params: Mapping[str, Tensor]) -> None:
        self._units = slice.units
        self.turns = len(slice.units.colors)
        #: legs by scaling
        self._legs: list[list[_ScaledLeg]] = []
        #: x of each scaling's units, in α = (|out|/|in|)^x
        self._exponents: list[Tensor] = []
        first = params[slice.units.names[0]]
        template = first.new_empty(0, dtype=compute_dtype(first.dtype))
        for i, scaling in enumerate(slice.units.scalings):
            legs = [_ScaledLeg(leg, scaling.units, params[leg.name]) for leg in scaling.legs]
            self._legs.append(legs)
            exponent = slice.units.exponent(i)
            self._exponents.append(template.new_full((scaling.units,), exponent))

    def run(self, turn: int | None, followers: Followers, log_scales: Tensor | None) -> None:
        """Balance one class, in turn, or all of them; followers are scaled along.

        Args:
            turn: the number of the class; None for all.
            followers: that are scaled with parameters.
            log_scales: (U,), to which those of this sweep are added.
        """
        colors = self._units.colors
        if turn is not None:
            colors = [colors[turn]]
        for color in colors:
            self._balance(color, followers, log_scales)

    def _balance(
        self, color: Sequence[int], followers: Followers, log_scales: Tensor | None
    ) -> None:
        """Balance the units of scalings that share no parameter."""
        scales = self._find_scales(color)
        sizes = [self._units.sizes[i] for i in color]
        #: powers of α by exponent, then by scaling
        pieces = {1: scales.split(sizes)}
        for k, i in enumerate(color):
            if log_scales is not None:
                piece = self._units.split(log_scales)[i]
                piece.add_(pieces[1][k].to(log_scales.dtype).log())
            for leg in self._legs[i]:
                targets = [Follower(leg.w, 1), *followers.get(leg.leg.name, ())]
                for target in targets:
                    power = leg.leg.power * target.power
                    if power not in pieces:
                        pieces[power] = scales.pow(power).split(sizes)
                    leg.scale_(target.tensor, pieces[power][k])

    def _find_scales(self, color: Sequence[int]) -> Tensor:
        """α = (|out|/|in|)^x of the units of some scalings, one after the other."""
        incoming = []
        outgoing = []
        for i in color:
            incoming.append(_combine_norms(s for s in self._legs[i] if s.leg.power > 0))
            outgoing.append(_combine_norms(s for s in self._legs[i] if s.leg.power < 0))
        exponents = torch.cat([self._exponents[i] for i in color])
        scales = (torch.cat(outgoing) / torch.cat(incoming)).abs().pow(exponents)
        # Dead units, and those whose weights are no longer finite, stay as they are.
        return torch.where((scales > 0) & (scales < torch.inf), scales, 1.0)


def _combine_norms(legs: Iterable[_ScaledLeg]) -> Tensor:
    """√Σ|w_u|² over the legs on one side of a scaling, (units,)."""
    return reduce(torch.hypot, [leg.norms() for leg in legs])


# --- layers ---------------------------------------------------------------------------------


class LayerSweep:
    """Retraction of merged scalings.

    Args:
        slice: `EqualNorm`, or `Balanced` of merged scalings.
        params: by name; scaled in place.

    Attributes:
        turns: 1, since all layers are retracted at once.
        is_orthogonal: whether the slice is orthogonal to orbits: equal norms are balanced without
            biases.
    """

    turns = 1

    def __init__(self, slice: Slice, params: Mapping[str, Tensor]) -> None:
        self._names = slice.units.names
        self._params = params
        self._powers = slice.units.powers
        self._twice_powers = 2 * self._powers
        if isinstance(slice, EqualNorm):
            self._block_sums = slice.block_sums
            self._differences = slice.differences
        else:  # what leads into each layer, what leads out, and their difference
            sides = torch.cat([self._powers.mT, -self._powers.mT])
            self._block_sums = sides.clamp(min=0)
            identity = torch.eye(slice.units.total).to(self._powers)
            self._differences = torch.cat([identity, -identity], 1)
        is_linear = all(map(_has_equal_rows, self._list_block_powers()))
        #: further steps with the inverse of the first one's Jacobian
        self._chord_steps = 1
        if is_linear:
            self._chord_steps = 0
        elif params[self._names[0]].dtype == torch.float64:
            self._chord_steps = 2
        self.is_orthogonal = is_linear or not isinstance(slice, EqualNorm)
        #: the inverse of the Jacobian at the last retraction: the start of the next
        self._inverse = self._powers.new_zeros(slice.units.total, slice.units.total)
        if self._inverse.is_cuda:
            for _ in range(THRESHOLDS.warm_up):
                self._find_log_scales(self._squared_norms())

    def _list_block_powers(self) -> list[Tensor]:
        """Return the powers of the parameters in each block."""
        return [self._powers[row > 0] for row in self._block_sums]

    def run(self, turn: int | None, followers: Followers, log_scales: Tensor | None) -> None:
        """Retract; followers are scaled along, and log-scales added to `log_scales`, (U,)."""
        ws = [self._params[name] for name in self._names]
        t = self._find_log_scales(self._squared_norms())
        if log_scales is not None:
            log_scales.add_(t)
        # The factors have the precision of the weights: kernels that convert on the way are slow.
        factors = (self._powers @ t).exp().to(compute_dtype(ws[0].dtype)).unbind()
        for name, w, factor in zip(self._names, ws, factors, strict=True):
            w.mul_(factor)
            for follower in followers.get(name, ()):
                follower.tensor.mul_(factor**follower.power)

    def _squared_norms(self) -> Tensor:
        """|w|² of all parameters, (P,)."""
        ws = [self._params[name].detach() for name in self._names]
        return torch.stack(find_norms(ws)).to(self._powers).square()

    def _find_log_scales(self, squares: Tensor) -> Tensor:
        """Return t (U,) that brings parameters with squared norms (P,) to the slice."""
        sums = self._block_sums @ squares
        shares = self._block_sums * squares / sums[:, None]
        inverse = self._invert(self._differences @ (shares @ self._twice_powers))
        t = -(inverse @ (self._differences @ sums.log()))
        for _ in range(self._chord_steps):
            sums = self._block_sums @ (squares * (self._twice_powers @ t).exp())
            t = torch.addmv(t, inverse, self._differences @ sums.log(), alpha=-1)
        # If one layer is zero or not finite, nothing is scaled: the sum spreads its NaN to all.
        t = (t + 0 * t.sum()).nan_to_num(0.0, 0.0, 0.0)
        return t.clamp_(-THRESHOLDS.largest_log_scale, THRESHOLDS.largest_log_scale)

    def _invert(self, jacobian: Tensor) -> Tensor:
        """J⁻¹; on a GPU by products from the last one, so that no host is needed."""
        if not jacobian.is_cuda:
            return torch.linalg.inv_ex(jacobian)[0]
        return self._inverse.copy_(invert_by_products(jacobian, self._inverse))


def _has_equal_rows(powers: Tensor) -> bool:
    """Return True if all rows are equal: then a block's norm is log-linear in t."""
    return bool((powers == powers[0]).all())


def invert_by_products(a: Tensor, last: Tensor) -> Tensor:
    """Return A⁻¹ after a few rounds of X ← 2X − XAX from the inverse of a matrix near A.

    Where that is far off, from Aᵀ/|A|², which converges, if not within one call. With it, and ever
    after, |1 − AX|² is less than the number of rows.
    """
    error = torch.eye(len(a), dtype=a.dtype, device=a.device).addmm_(a, last, alpha=-1)
    is_near = torch.linalg.vector_norm(error) < len(a) ** 0.5
    x = torch.where(is_near, last, a.mT / torch.linalg.vector_norm(a).square())
    for _ in range(THRESHOLDS.inverse_rounds):
        x = torch.addmm(x, x @ a, x, beta=2, alpha=-1)
    return x.nan_to_num(0.0, 0.0, 0.0)
