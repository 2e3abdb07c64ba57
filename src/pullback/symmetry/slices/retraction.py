r"""The way along an orbit to its point on a slice, from norms alone.

A slice says which norms are to be equal: c(t) = ½ log(in/out) = 0, one number per scale. Sums of
squares along the orbit are Σ w_e² exp(2(Mt)_e), so that c comes from the *energies* w_e² and the
log-scales t. Two kinds of norms have the same three answers, `imbalance`, `newton` and `dead`:

    UnitNorms     in_u and out_u of every unit           balanced slices
    BlockNorms    norms of neighboring blocks of layers  slices of equal norms

`to_slice` solves c(t) = 0 for both. Far away t_u ← t_u + ¼ log(out_u/in_u), for units that share no
parameter at once; this never overshoots. Near by, Newton's method ends at round-off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ...grams import Gram
from ...solvers import ConjugateGradient
from ..actions.scaling import Leg
from .units import ScaledParameter, ScalingUnits, wide

_NEAR, _WIDE, _MOST = 0.5, 100.0, 400
_DENSE = 1024


class Norms(Protocol):
    """What a slice compares, along an orbit.

    Attributes:
        units: that scale the parameters.
        zeros: t = 0, (U,).
        near: Newton's method is tried where no imbalance is larger.
        dead: (U,) units that no scale can bring to the slice.
    """

    units: ScalingUnits
    near: float
    zeros: Tensor
    dead: Tensor

    def imbalance(self, t: Tensor) -> Tensor:
        """log(out/in) of every unit, 0 for dead ones: (U,)."""
        ...

    def newton(self, t: Tensor, tolerance: float) -> Tensor:
        """Newton's step for imbalance(t) = 0, with a relative error of about this size."""
        ...


def to_slice(norms: Norms, t: Tensor, eps: float) -> Tensor:
    """Log-scales (U,) of the orbit's point on the slice, from t on.

    Where the norms agree to the parameters' own round-off eps, t stays as it is.
    """
    worst = _worst(norms, t)
    if worst <= 16 * eps:
        return t
    # half precisions and float32 keep no more than this of it
    enough = eps / 16 if eps > torch.finfo(torch.float64).eps else 0.0
    for _ in range(_MOST):
        near = worst <= norms.near
        trial = t + norms.newton(t, min(0.1, worst)) if near else sweep(norms, t)
        now = _worst(norms, trial)
        if near and worst < 1e-6 and not now <= worst / 2:  # round-off
            return trial if now < worst else t
        if near and not now < worst:
            trial = sweep(norms, t)
            now = _worst(norms, trial)
        t, worst = trial, now
        if worst <= enough:
            break
    return t


def sweep(norms: Norms, t: Tensor) -> Tensor:
    """t_u + ¼ log(out/in), class after class of units that share no parameter."""
    sizes = torch.tensor(norms.units.sizes, device=t.device)
    for color in norms.units.colors:
        rates = torch.zeros(len(sizes), dtype=t.dtype)
        for i in color:
            rates[i] = norms.units.exponent(i) / 2
        t = t + rates.to(t.device).repeat_interleave(sizes) * norms.imbalance(t)
    return t


def _worst(norms: Norms, t: Tensor) -> float:
    return float(norms.imbalance(t).abs().amax())


class ParameterEnergy:
    """The squares w_e² of one parameter over the largest, summed over axes without units.

    The factor of an entry is a product over its legs, so that sums over the entries of a matrix are
    products with it: Σ_j s_ij f_i g_j = f ∘ (s g). The logarithm of the scale is counted from that
    of `unit`², which all parameters share: logarithms that are compared with each other are small.
    """

    def __init__(self, part: ScaledParameter, w: Tensor, top: Tensor, unit: Tensor) -> None:
        self.part = part
        top = torch.where(top > 0, top, unit)
        ratio = top / unit
        self.log = 2 * torch.where(ratio > 0, ratio.log(), top.log() - unit.log())
        self.squares = part.reduce((w.detach().to(top) / top).square()).expand(part.shape)
        #: which of two legs tells rows apart, where the other one tells columns
        self._rows = _rows(part.legs)

    def factors(self, t: Tensor) -> tuple[list[Tensor], Tensor]:
        """exp(2·power·t_unit) of each leg over its largest, and log of what was divided out."""
        rest = torch.cat([t, t.new_zeros(1)])  # for −1: not scaled
        out, shift = [], self.log
        for leg in self.part.legs:
            y = 2 * leg.power * rest[leg.unit]
            top = y.amax()
            out.append((y - top).exp())
            shift = shift + top
        return out, shift

    def contract(self, leg: int, others: Sequence[Tensor]) -> Tensor:
        """Σ of s_e Π_{b≠leg} x_b over the entries of each place of a leg's units: `unit.shape`."""
        unit = self.part.legs[leg].unit
        if self._rows is not None:
            matrix = self.squares.reshape(self.part.legs[self._rows].unit.numel(), -1)
            matrix = matrix if leg == self._rows else matrix.mT
            return (matrix @ others[1 - leg].reshape(-1)).reshape(unit.shape)
        values = self.squares
        for b, x in enumerate(others):
            values = values if b == leg else values * x
        axes = [d for d, size in enumerate(unit.shape) if size == 1 and values.shape[d] != 1]
        return values.sum(axes, keepdim=True) if axes else values


def energies(
    units: ScalingUnits, params: Mapping[str, Tensor]
) -> tuple[list[ParameterEnergy], Tensor]:
    """The energies of all parameters that some units scale, and the largest |w_e| of all."""
    tops = [_top(part.name, params[part.name]) for part in units.parts]
    unit = torch.stack(tops).amax()
    unit = torch.where(unit > 0, unit, 1.0)
    pairs = zip(units.parts, tops, strict=True)
    return [ParameterEnergy(part, params[part.name], top, unit) for part, top in pairs], unit


def _top(name: str, w: Tensor) -> Tensor:
    """max |w_e|; raises where that is not finite."""
    w = w.detach().to(wide(w))
    top = w.abs().amax() if w.numel() else w.new_zeros(())
    if not bool(torch.isfinite(top)):
        raise PullbackError(
            f"Parameter {name!r} is not finite",
            "it contains nan or inf, so that it has no norm",
            "Load a checkpoint, or lower the learning rate",
        )
    return top


def _rows(legs: Sequence[Leg]) -> int | None:
    """Which of two legs has the earlier one of two different axes; None where that is not so."""
    axes = [[d for d, size in enumerate(leg.unit.shape) if size != 1] for leg in legs]
    if len(legs) != 2 or any(len(each) != 1 for each in axes) or axes[0] == axes[1]:
        return None
    return 0 if axes[0] < axes[1] else 1


class UnitNorms:
    """in_u = Σ w² over what leads into each unit, out_u over what leads out.

    They are equal at the least Σw² of the orbit, which is convex in t: its gradient is in − out,
    its Hessian twice the Gram K of the generators.
    """

    near = _NEAR

    def __init__(self, units: ScalingUnits, params: Mapping[str, Tensor]) -> None:
        self.units = units
        self.parts, self.unit = energies(units, params)
        self.zeros = self.parts[0].squares.new_zeros(units.total)
        into, out = self._log_sums(self.zeros)
        self.dead = ~(torch.isfinite(into) & torch.isfinite(out))

    def _log_sums(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """log in/unit² and log out/unit²: (U,)."""
        into, out = torch.full_like(t, -torch.inf), torch.full_like(t, -torch.inf)
        for energy in self.parts:
            factors, shift = energy.factors(t)
            for a, leg in enumerate(energy.part.legs):
                values = factors[a] * energy.contract(a, factors)
                sums = abs(leg.power) * leg.sums(values, self.units.total)
                side = into if leg.power > 0 else out
                torch.logaddexp(side, sums.log() + shift, out=side)
        return into, out

    def imbalance(self, t: Tensor) -> Tensor:
        into, out = self._log_sums(t)
        return torch.where(self.dead, 0.0, out - into)

    def newton(self, t: Tensor, tolerance: float) -> Tensor:
        gram = OrbitGram(self, t)
        step = -0.5 * gram.solve(gram.slope, tolerance)
        return step / step.abs().amax().clamp(min=1.0)


class LargestEntries:
    """The same with largest entries instead of sums of squares, which would vanish or overflow."""

    near = 0.0

    def __init__(self, units: ScalingUnits, params: Mapping[str, Tensor]) -> None:
        self.units = units
        self._logs = [_log_largest(part, params[part.name]) for part in units.parts]
        self.zeros = self._logs[0].new_zeros(units.total)

    def spread(self) -> float:
        """The largest difference between logarithms of one parameter's entries but zeros."""
        found = [logs[torch.isfinite(logs)] for logs in self._logs]
        return max((float(x.amax() - x.amin()) for x in found if len(x)), default=0.0)

    def imbalance(self, t: Tensor) -> Tensor:
        n = self.units.total + 1  # the last collects entries of no unit
        into, out = (t.new_full((n,), -torch.inf) for _ in range(2))
        for part, logs in zip(self.units.parts, self._logs, strict=True):
            values = logs + part.log_factor(t)
            for leg in part.legs:
                side = into if leg.power > 0 else out
                index = (leg.unit % n).expand(part.shape)
                side.scatter_reduce_(0, index.reshape(-1), values.reshape(-1), "amax")
        found = 2 * (out - into)[:-1]
        return torch.where(torch.isfinite(found), found, 0.0)

    def coarse(self) -> Tensor:
        """t (U,) that brings the entries of each parameter within e^100 of each other."""
        t = self.zeros
        if self.spread() > _WIDE:
            for _ in range(_MOST):
                if float(self.imbalance(t).abs().amax()) <= _WIDE:
                    break
                t = sweep(self, t)  # pyright: ignore[reportArgumentType]
        return t


def _log_largest(part: ScaledParameter, w: Tensor) -> Tensor:
    """log max |w_e| over axes without units, −inf for zeros: of the part's shape."""
    w = w.detach().to(wide(w)).abs()
    axes = [d for d, size in enumerate(part.shape) if size == 1 and w.shape[d] != 1]
    return (w.amax(axes, keepdim=True) if axes and w.numel() else w).log().expand(part.shape)


class OrbitGram(Gram):
    """K (U, U) at t over e^top·unit²: dense where it is small, else by products.

    Dead units have no generator: they stand apart with a 1 on the diagonal.

    Attributes:
        slope: (in − out) of each unit over e^top·unit²; 0 for dead ones.
        top: log of what K and the slope are divided by.
    """

    def __init__(self, norms: UnitNorms, t: Tensor) -> None:
        self._norms, self.size = norms, len(t)
        self.dtype, self.device = t.dtype, t.device
        self._factors, shifts = zip(*(energy.factors(t) for energy in norms.parts), strict=True)
        self.top = torch.stack(shifts).amax()
        self._scales = [(shift - self.top).exp() for shift in shifts]
        self.slope, self._diagonal = torch.zeros_like(t), torch.zeros_like(t)
        ones = torch.ones_like(t)
        for k, energy in enumerate(norms.parts):
            for a, leg in enumerate(energy.part.legs):
                sums = self._cross(k, a, a, ones)
                self.slope += leg.power * sums
                self._diagonal += leg.power**2 * sums
        # legs of one parameter that meet in a unit, as on a skip, matter for the solver only
        self.slope = torch.where(norms.dead, 0.0, self.slope)
        bad = norms.dead | ~(self._diagonal > 0)
        self._diagonal = torch.where(bad, 1.0, self._diagonal)

    def _cross(self, k: int, a: int, b: int, v: Tensor) -> Tensor:
        """Σ of the energies of a unit's entries (by leg a) times v of their unit by leg b: (U,)."""
        energy, factors = self._norms.parts[k], self._factors[k]
        legs = energy.part.legs
        chosen = torch.cat([v, v.new_zeros(1)])[legs[b].unit]
        others = [f * chosen if i == b else f for i, f in enumerate(factors)]
        values = energy.contract(a, others) * others[a] * self._scales[k]
        return legs[a].sums(values, self._norms.units.total)

    def _scaled(self, v: Tensor) -> Tensor:
        """The diagonal's inverse times v."""
        return v / self._diagonal

    def matvec(self, v: Tensor) -> Tensor:
        """K v on the living units, v on the dead ones."""
        dead = self._norms.dead
        masked = torch.where(dead, 0.0, v)
        out = torch.zeros_like(v)
        for k, energy in enumerate(self._norms.parts):
            legs = energy.part.legs
            for a, leg in enumerate(legs):
                for b, other in enumerate(legs):
                    out += leg.power * other.power * self._cross(k, a, b, masked)
        return torch.where(dead, v, out)

    def dense(self) -> Tensor:
        """The matrix."""
        dead = self._norms.dead
        u = len(dead) + 1  # the last collects entries of no unit
        flat = self._diagonal.new_zeros(u * u)
        for k, energy in enumerate(self._norms.parts):
            part, values = energy.part, energy.squares * self._scales[k]
            for f in self._factors[k]:
                values = values * f
            for leg in part.legs:
                for other in part.legs:
                    index = ((leg.unit % u) * u + other.unit % u).expand(part.shape)
                    power = leg.power * other.power
                    flat.index_add_(0, index.reshape(-1), power * values.reshape(-1))
        k = flat.view(u, u)[:-1, :-1]
        alive = ~dead
        return torch.where(alive[:, None] & alive, k, 0.0) + dead.to(k.dtype).diag()

    def solve(self, rhs: Tensor, tolerance: float | None = None) -> Tensor:
        """K⁻¹ rhs, 0 on dead units; to round-off, or with a relative residual of this size."""
        rhs = torch.where(self._norms.dead, 0.0, rhs)
        if len(rhs) > _DENSE:
            cg = ConjugateGradient(0.0, tol=tolerance or 0.0, preconditioner=self._scaled)
            return cg.solve(self, rhs).x
        # unit diagonal: units of very different size do not spoil each other
        k = self.dense()
        diagonal = k.diagonal()
        normal = diagonal > torch.finfo(k.dtype).tiny  # below that products would overflow
        scale = torch.where(normal, diagonal, 1.0).rsqrt()
        k = k * scale[:, None] * scale
        factor, info = torch.linalg.cholesky_ex(k)
        if not bool(info):
            return scale * torch.cholesky_solve((scale * rhs)[:, None], factor)[:, 0]
        return scale * (torch.linalg.pinv(k, hermitian=True) @ (scale * rhs))
