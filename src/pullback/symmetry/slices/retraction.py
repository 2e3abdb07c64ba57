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

from collections.abc import Mapping
from math import log
from typing import Protocol

import torch
from torch import Tensor

from ..._core.checks import refuse_values
from ...grams import Gram
from ...solvers import ConjugateGradient
from ..actions.scaling import Leg
from .units import ScalingUnits, wide

_NEAR, _MOST = 0.5, 400
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


def log_squares(units: ScalingUnits, params: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """log Σ (w_e/m)² of each parameter over its axes without units, and m = max |w_e| of all.

    Squares of w_e itself may vanish or overflow; zeros have −inf.
    """
    found = []
    for part in units.parts:
        refuse_values(f"Parameter {part.name!r}", params[part.name])
        w = params[part.name].detach()
        found.append(w.to(wide(w)).abs())
    largest = torch.stack([w.amax() for w in found]).amax()
    largest = torch.where(largest > 0, largest, 1.0)
    out = []
    for part, w in zip(units.parts, found, strict=True):
        ratio = w / largest
        apart = w.log() - largest.log()  # where the ratio is no number any more
        logs = 2 * torch.where(ratio > torch.finfo(w.dtype).tiny, ratio.log(), apart)
        axes = [d for d, size in enumerate(part.shape) if size == 1 and logs.shape[d] != 1]
        out.append((logs.logsumexp(axes, keepdim=True) if axes else logs).expand(part.shape))
    return out, largest


def _log_sums(leg: Leg, logs: Tensor, units: int) -> Tensor:
    """log Σ exp(logs) over the entries of each unit, (units,); −inf for none."""
    axes = [d for d, size in enumerate(leg.unit.shape) if size == 1 and logs.shape[d] != 1]
    flat = (logs.logsumexp(axes, keepdim=True) if axes else logs).reshape(-1)
    # the last place collects entries of no unit
    index = (leg.unit % (units + 1)).reshape(-1)
    top = flat.new_full((units + 1,), -torch.inf).scatter_reduce_(0, index, flat, "amax")
    top = torch.where(torch.isfinite(top), top, 0.0)
    sums = torch.zeros_like(top).index_add_(0, index, (flat - top[index]).exp())
    return (sums.log() + top)[:-1]


class UnitNorms:
    """in_u = Σ w² over what leads into each unit, out_u over what leads out; their logarithms.

    They are equal at the least Σw² of the orbit, which is convex in t: its gradient is in − out,
    its Hessian twice the Gram K of the generators.
    """

    near = _NEAR

    def __init__(self, units: ScalingUnits, params: Mapping[str, Tensor]) -> None:
        self.units = units
        self._logs, self.largest = log_squares(units, params)
        self.zeros = self._logs[0].new_zeros(units.total)
        into, out = self._sums(self.zeros)
        self.dead = ~(torch.isfinite(into) & torch.isfinite(out))

    def energies(self, t: Tensor) -> list[Tensor]:
        """log (w_e/m)² of every parameter at log-scales t."""
        pairs = zip(self.units.parts, self._logs, strict=True)
        return [logs + 2 * part.log_factor(t) for part, logs in pairs]

    def _sums(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """log in/m² and log out/m²: (U,)."""
        into, out = torch.full_like(t, -torch.inf), torch.full_like(t, -torch.inf)
        for part, energies in zip(self.units.parts, self.energies(t), strict=True):
            for leg in part.legs:
                side = into if leg.power > 0 else out
                sums = _log_sums(leg, energies, self.units.total) + log(abs(leg.power))
                torch.logaddexp(side, sums, out=side)
        return into, out

    def imbalance(self, t: Tensor) -> Tensor:
        into, out = self._sums(t)
        return torch.where(self.dead, 0.0, out - into)

    def newton(self, t: Tensor, tolerance: float) -> Tensor:
        gram = OrbitGram(self, t)
        step = -0.5 * gram.solve(gram.slope, tolerance)
        return step / step.abs().amax().clamp(min=1.0)


class OrbitGram(Gram):
    """K (U, U) at t over e^top·m²: dense where it is small, else by products.

    Dead units have no generator: they stand apart with a 1 on the diagonal.

    Attributes:
        slope: (in − out) of each unit over e^top·m²; 0 for dead ones.
        top: the logarithm of the largest (w_e/m)².
    """

    def __init__(self, norms: UnitNorms, t: Tensor) -> None:
        self._dead, self._units, self.size = norms.dead, norms.units, len(t)
        self.dtype, self.device = t.dtype, t.device
        logs = norms.energies(t)
        self.top = torch.stack([each.amax() for each in logs]).amax().nan_to_num(neginf=0.0)
        self._energies = [(each - self.top).exp() for each in logs]
        self.slope, self._diagonal = torch.zeros_like(t), torch.zeros_like(t)
        for part, energies in zip(self._units.parts, self._energies, strict=True):
            self.slope += self._units.collect(part, energies)
            for leg in part.legs:
                self._diagonal += leg.power**2 * leg.sums(energies, self.size)
        # legs of one parameter that meet in a unit, as on a skip, matter for the solver only
        self.slope = torch.where(self._dead, 0.0, self.slope)
        bad = self._dead | ~(self._diagonal > 0)
        self._diagonal = torch.where(bad, 1.0, self._diagonal)

    def _scaled(self, v: Tensor) -> Tensor:
        """The diagonal's inverse times v."""
        return v / self._diagonal

    def matvec(self, v: Tensor) -> Tensor:
        """K v on the living units, v on the dead ones."""
        alive, out = torch.where(self._dead, 0.0, v), torch.zeros_like(v)
        for part, energies in zip(self._units.parts, self._energies, strict=True):
            out += self._units.collect(part, energies * part.log_factor(alive))
        return torch.where(self._dead, v, out)

    def dense(self) -> Tensor:
        """The matrix."""
        u = self.size + 1  # the last collects entries of no unit
        flat = self._diagonal.new_zeros(u * u)
        for part, energies in zip(self._units.parts, self._energies, strict=True):
            for leg in part.legs:
                for other in part.legs:
                    index = ((leg.unit % u) * u + other.unit % u).expand(part.shape)
                    power = leg.power * other.power
                    flat.index_add_(0, index.reshape(-1), power * energies.reshape(-1))
        k, alive = flat.view(u, u)[:-1, :-1], ~self._dead
        return torch.where(alive[:, None] & alive, k, 0.0) + self._dead.to(k.dtype).diag()

    def solve(self, rhs: Tensor, tolerance: float | None = None) -> Tensor:
        """K⁻¹ rhs, 0 on dead units; to round-off, or with a relative residual of this size."""
        rhs = torch.where(self._dead, 0.0, rhs)
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
