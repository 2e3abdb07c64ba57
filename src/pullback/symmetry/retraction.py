r"""The way along an orbit to its point on a slice, from norms alone.

All units of several scalings have one vector t of log-scales: w_e ← w_e exp(Σ_legs power·t_unit).
What that does to norms needs only the *energies* of a parameter, the squares w_e² added up over the
axes along which units do not differ. For a linear layer these are (out, in), for whole layers they
are one number.

A slice says which norms are to be equal: c(t) = ½ log(in/out) = 0, one number per scale. Two kinds
of norms have the same three answers, `imbalance`, `newton` and `dead`:

    UnitNorms     in_u and out_u of every unit           balanced slices
    BlockNorms    norms of neighboring blocks of layers  slices of equal norms

`to_slice` solves c(t) = 0 for both. Far away t_u ← t_u + ¼ log(out_u/in_u), for units that share no
parameter at once; this never overshoots. Near by, Newton's method ends at round-off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import log
from typing import Protocol

import torch
from torch import Tensor

from .._core.checks import refuse_values
from .._core.errors import PullbackError
from ..grams import Gram
from ..solvers import ConjugateGradient
from .actions.scaling import Leg, Scaling

_NEAR, _MOST = 0.5, 400
_DENSE = 1024


@dataclass(frozen=True)
class ScaledParameter:
    """A parameter's legs, counted in the common vector of units."""

    name: str
    legs: tuple[Leg, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the energies: that of all legs' units together."""
        return tuple(torch.broadcast_shapes(*(leg.unit.shape for leg in self.legs)))

    def log_factor(self, t: Tensor) -> Tensor:
        """Σ power·t_unit, (*batch, *shape)."""
        return reduce(torch.add, [leg.rates(t) for leg in self.legs])


class ScalingUnits:
    """The units of some scalings, U in all, and the parameters that they scale."""

    def __init__(self, scalings: Sequence[Scaling], params: Mapping[str, Tensor]) -> None:
        self.scalings = tuple(scalings)
        self.sizes = tuple(s.units for s in self.scalings)
        self.total = sum(self.sizes)
        _refuse(self.scalings, params)
        legs: dict[str, list[Leg]] = {}
        start = 0
        for scaling in self.scalings:
            for leg in scaling.legs:
                w = params[leg.name]
                unit = leg.on(w).unit
                if scaling.units == 1 and leg.complete:
                    unit = unit.new_zeros([1] * w.ndim)
                unit = torch.where(unit < 0, -1, unit + start)
                legs.setdefault(leg.name, []).append(Leg(leg.name, unit, leg.power))
            start += scaling.units
        self.parts = tuple(ScaledParameter(name, tuple(found)) for name, found in legs.items())

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that are scaled."""
        return tuple(part.name for part in self.parts)

    @property
    def powers(self) -> Tensor:
        """Σ_legs power of every parameter and unit, (parameters, U), where each is one block."""
        first = self.parts[0].legs[0].unit
        eye = torch.eye(self.total, dtype=wide(first), device=first.device)
        return torch.stack([part.log_factor(eye).reshape(-1) for part in self.parts])

    @cached_property
    def colors(self) -> list[list[int]]:
        """Scalings that share no parameter, in as few classes as a greedy choice finds."""
        names = [set(s.names) for s in self.scalings]
        out: list[list[int]] = []
        for i, mine in enumerate(names):
            for color in out:
                if all(mine.isdisjoint(names[j]) for j in color):
                    color.append(i)
                    break
            else:
                out.append([i])
        return out

    def exponent(self, index: int) -> float:
        """x in α = (|out|/|in|)^x, which balances a unit of this scaling by itself.

        Half of it where two units share entries: both sides of one parameter, as on a skip.
        """
        legs = self.scalings[index].legs
        apart = len({leg.name for leg in legs}) == len(legs)
        return (0.5 if apart else 0.25) / max(abs(leg.power) for leg in legs)

    def split(self, t: Tensor) -> tuple[Tensor, ...]:
        """(…, U) by scaling."""
        return t.split(self.sizes, dim=-1)

    def scaled(self, params: Mapping[str, Tensor], t: Tensor) -> dict[str, Tensor]:
        """The scaled parameters; the product is taken in the precision of t."""
        out = {}
        for part in self.parts:
            w = params[part.name].detach()
            out[part.name] = times_exp(w.to(t.dtype), part.log_factor(t)).to(w.dtype)
        return out

    def pair(self, params: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> Tensor:
        """⟨Z_u, v⟩ for the generators Z_u = Σ_legs power·w_u: (U,)."""
        first = params[self.parts[0].name]
        out = torch.zeros(self.total, dtype=wide(first), device=first.device)
        for part in self.parts:
            w = params[part.name].detach()
            if part.name in v:
                out += self.collect(part, w.to(out) * v[part.name].to(out))
        return out

    def spread(self, params: Mapping[str, Tensor], a: Tensor) -> dict[str, Tensor]:
        """Σ_u a_u Z_u, by name."""
        out = {}
        for part in self.parts:
            w = params[part.name].detach()
            out[part.name] = (w.to(a) * part.log_factor(a)).to(w.dtype)
        return out

    def collect(self, part: ScaledParameter, values: Tensor) -> Tensor:
        """Σ_legs power·(sum of the unit's values): (U,)."""
        out = values.new_zeros(self.total)
        for leg in part.legs:
            out += leg.power * leg.sums(values, self.total)
        return out


def times_exp(w: Tensor, log: Tensor) -> Tensor:
    """w·e^log, in two halves: the product may be finite where the factor is not."""
    half = (log / 2).exp()
    return w * half * half


def wide(w: Tensor) -> torch.dtype:
    """The dtype of norms that decide: float64, where the device has it."""
    return torch.float32 if w.device.type == "mps" else torch.float64


def _refuse(scalings: Sequence[Scaling], params: Mapping[str, Tensor]) -> None:
    """Raise where there are no scalings, or where they are not of these parameters."""
    if not scalings:
        raise PullbackError(
            "There is no slice",
            "the model has no positive-scaling symmetry that its optimized parameters take part in",
            "Use torch.optim.SGD, or name scalings by hand: find(model, x, actions=[Scaling(...)])",
        )
    into: dict[int, list[tuple[Scaling, Leg]]] = {}
    for scaling in scalings:
        for leg in scaling.legs:
            if leg.name not in params or not _fits(leg, params[leg.name]):
                raise PullbackError(
                    f"The symmetry scales {leg.name!r}",
                    "the model has no such parameter, or one of another shape",
                    "Find the symmetries of this very model",
                )
            if leg.power > 0:
                earlier = into.setdefault(id(params[leg.name]), [])
                _refuse_overlap(scaling, leg, earlier)
                earlier.append((scaling, leg))


def _fits(leg: Leg, w: Tensor) -> bool:
    """Whether the leg's units broadcast to the parameter's shape."""
    have, told = [1] * leg.unit.ndim + list(w.shape), leg.unit.shape
    return all(n in (1, size) for n, size in zip(told[::-1], have[::-1], strict=False))


def _refuse_overlap(scaling: Scaling, leg: Leg, earlier: Sequence[tuple[Scaling, Leg]]) -> None:
    """Raise where entries lead into units of two scalings."""
    for other, theirs in earlier:
        if other is not scaling and bool(((leg.unit >= 0) & (theirs.unit >= 0)).any()):
            raise PullbackError(
                f"Parameter {leg.name!r} is shared across two orbits",
                f"it leads into {other.about!r} and into {scaling.about!r}, which would scale it "
                "by different numbers",
                "Scale the tied units together, or leave both scalings out",
            )


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
            cg = ConjugateGradient(
                0.0, tol=tolerance or 0.0, preconditioner=lambda v: v / self._diagonal
            )
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
