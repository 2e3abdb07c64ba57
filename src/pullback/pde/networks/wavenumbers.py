"""How fast a solution may oscillate, read off a problem's data and its linear part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..discretization.residual import LocalResidual
from ..domains import PointSet, Region
from ..domains.sampling import Points
from ..problem.conditions import Condition, Dirichlet, Equation, Initial, Robin
from ..problem.problem import Problem

SMOOTH = 3.0  #: half waves across a domain that are not called oscillation
_LINES, _ALONG = 8, 1024  # lines along an axis, and points on each
_FAINT = 0.05  # of the largest amplitude, below which a wave number is not counted
_PADDED = 4  # times as many points in a Fourier transform, for a finer spectrum
_LOBE = 1.85  # periods by which a Hann window widens a line of the spectrum, at this level
_SHORT = 0.25  # of the domain's extent: lines within a region are at least this long
_PLACES = 16  # at which the equations are linearized
_SINGULAR = 0.05  # share of their terms left when a wave solves the equations
_TURNS = torch.linspace(0.5, 256, 2**10, dtype=torch.float64)  # half waves that are tried


@dataclass(frozen=True)
class Oscillation:
    """How a solution oscillates.

    Attributes:
        wavenumbers: the largest along each axis, (d,), in radians a length.
        half_waves: as many across the domain, along each axis, (d,).
        waves: whether these are waves; else a layer or a bump has such a broad spectrum.
    """

    wavenumbers: Tensor
    half_waves: Tensor
    waves: bool


def oscillation(problem: Problem) -> Oscillation:
    """Estimate the wave numbers of a problem's solution.

    1. Data: sources, boundary and initial values on lines along an axis, times a Hann window. Of
       their Fourier transform the largest wave number with 5 % of the largest amplitude counts.
       They are waves if the spectrum has a peak beyond three half waves.
    2. Waves e^(iκ·x) that solve the equations, linearized at u = 0. Without time: κ along one axis
       (Helmholtz: κ = k). With time: the frequency of a wave whose κ in space is that of the data
       (wave equation: ω = cκ). Where coefficients vary, the median of 16 places.

    What oscillates for another reason, as a nonlinear wave may, is not seen.
    """
    found, peaked = torch.zeros(problem.domain.dim, dtype=torch.float64), False
    for condition in problem.conditions:
        if isinstance(condition, (Equation, Dirichlet, Robin, Initial)):
            band, peak = _data(problem, condition)
            found, peaked = torch.maximum(found, band), peaked or peak
    free = _waves(problem, found)
    extent = (problem.domain.high - problem.domain.low) / math.pi
    half_waves = torch.maximum(found, free) * extent
    peaked = peaked and float(half_waves.max()) > SMOOTH
    waves = peaked or float((free * extent).max()) > SMOOTH
    return Oscillation(half_waves / extent, half_waves, waves)


def is_linear(problem: Problem) -> bool:
    """Whether all equations are linear in the fields; unknown coefficients are held."""
    points = problem.domain.sample(_PLACES, "sobol")
    equations = [c for c in problem.conditions if isinstance(c, Equation)]
    residuals = [LocalResidual(problem, c, (points,)) for c in equations]
    zero = torch.zeros_like(points.x[:, 0])
    return all(x.affine(dict.fromkeys(x.keys, zero)) for x in residuals)


def _data(problem: Problem, condition: Condition) -> tuple[Tensor, bool]:
    """The wave numbers of what is left of a residual where all fields are zero.

    Returns:
        The largest along each axis, and whether there is a peak beyond what is smooth.
    """
    region = condition.region(problem.domain)
    out, peaked = torch.zeros(problem.domain.dim, dtype=torch.float64), False
    if not isinstance(region, Region) or isinstance(region, PointSet):
        return out, peaked
    starts = region.sample(_LINES, "sobol")
    extent = problem.domain.high - problem.domain.low
    for axis in range(problem.domain.dim):
        found = [_line(problem, region, starts, i, axis) for i in range(len(starts))]
        lines = [x for x in found if x is not None]
        lengths = [float(x.x[-1, axis] - x.x[0, axis]) for x in lines]
        if lines and max(lengths) >= _SHORT * float(extent[axis]):
            values = _residual(problem, condition, Points.cat(lines)).split(_ALONG)
            for v, n in zip(values, lengths, strict=True):
                if n >= _SHORT * float(extent[axis]):
                    band, peak = (2 * math.pi * x / n for x in _periods(v))
                    out[axis] = max(float(out[axis]), band)
                    peaked = peaked or peak * float(extent[axis]) > SMOOTH * math.pi
    return out, peaked


def _line(problem: Problem, region: Region, starts: Points, i: int, axis: int) -> Points | None:
    """Equidistant points along an axis through a point, as far as the region goes."""
    low, high = problem.domain.low[axis], problem.domain.high[axis]

    def along(a: Tensor, b: Tensor) -> Tensor:
        x = starts.x[i].repeat(_ALONG, 1)
        x[:, axis] = a + (b - a) * torch.linspace(0, 1, _ALONG, dtype=x.dtype)
        return x

    whole = along(low, high)
    inside = region.contains(whole)
    at = int((whole[:, axis] - starts.x[i, axis]).abs().argmin())
    if not bool(inside[at]):
        return None
    outside = (~inside).nonzero().flatten()
    first = int(outside[outside < at].amax()) + 1 if bool((outside < at).any()) else 0
    last = int(outside[outside > at].amin()) - 1 if bool((outside > at).any()) else _ALONG - 1
    x = along(whole[first, axis], whole[last, axis])
    normals = None if starts.normals is None else starts.normals[i].expand(_ALONG, -1)
    return Points(x, torch.ones_like(x[:, 0]), normals)


def _residual(problem: Problem, condition: Condition, points: Points) -> Tensor:
    """The residual where all fields are zero, (N, R)."""
    local = LocalResidual(problem, condition, (points,))
    return local({key: torch.zeros_like(points.x[:, 0]) for key in local.keys}).nan_to_num(0, 0, 0)


def _periods(values: Tensor) -> tuple[float, float]:
    """Periods of values (N, R) at equidistant points: the band they fill, and the last peak."""
    window = torch.hann_window(len(values)).to(values)[:, None]
    band = _loud(_spectrum((values - values.mean(0)) * window), float(values.abs().max()))
    full = _spectrum(values * window)
    inner = full[1:-1]
    full[1:-1] = torch.where((inner > full[:-2]) & (inner > full[2:]), inner, 0 * inner)
    peak = _loud(full, 0.0)
    return max(band - _LOBE, 0.0), peak


def _spectrum(values: Tensor) -> Tensor:
    found = torch.fft.rfft(values, n=_PADDED * len(values), dim=0)
    return found.abs().square().sum(1).sqrt()


def _loud(amplitudes: Tensor, size: float) -> float:
    """The last periods with an amplitude that counts."""
    top = float(amplitudes.max())
    if top <= 1e-6 * size * _ALONG or not top:
        return 0.0
    return int((amplitudes >= _FAINT * top).nonzero().max()) / _PADDED


def _waves(problem: Problem, known: Tensor) -> Tensor:
    """Wave numbers at which the linear part of the equations is singular."""
    equations = [c for c in problem.conditions if isinstance(c, Equation) and c.on is None]
    out = torch.zeros_like(known)
    if not equations:
        return out
    points = problem.domain.sample(_PLACES, "sobol")
    symbols = [_Symbol(problem, c, points) for c in equations]
    extent = problem.domain.high - problem.domain.low
    time = [i for i in range(len(known)) if i not in problem.coordinates.space]
    for axis in time or range(len(known)):
        tried = torch.cat([-_TURNS, _TURNS]) * math.pi / extent[axis]
        k = torch.zeros(len(tried), len(known), dtype=torch.float64)
        if time:
            k[:] = known
        k[:, axis] = tried
        largest = (tried.abs()[:, None] * _singular(symbols, k)).amax(0)  # by place
        out[axis] = largest.median()
    return out


def _singular(symbols: list[_Symbol], k: Tensor) -> Tensor:
    """For which wave vectors (K, d), and where, a plane wave solves the equations: (K, N)."""
    rows = torch.cat([s(k) for s in symbols], -2)  # (K, N, R, m)
    if rows.shape[-2] < rows.shape[-1]:
        return torch.zeros(rows.shape[:2], dtype=torch.bool)
    return torch.linalg.svdvals(rows)[..., -1] < _SINGULAR


class _Symbol:
    """Σ a_α(x) (iκ)^α of an equation linearized at zero fields, over Σ |a_α κ^α|."""

    def __init__(self, problem: Problem, condition: Condition, points: Points) -> None:
        local = LocalResidual(problem, condition, (points,))
        zero = torch.zeros_like(points.x[:, 0])
        self._fields, self._space = problem.fields, problem.coordinates.space
        self._slopes = {
            key: slope.nan_to_num(0, 0, 0)
            for key, slope in local.slopes(dict.fromkeys(local.keys, zero))[1].items()
        }

    def __call__(self, k: Tensor) -> Tensor:
        """(K, N, R, m) for wave vectors (K, d); ones where the equation has no terms."""
        count, components = next(iter(self._slopes.values())).shape
        shape = len(k), count, components, len(self._fields)
        total = torch.zeros(shape, dtype=torch.complex128)
        size = torch.zeros(shape[:-1], dtype=torch.float64)
        for (_, field, index), slope in self._slopes.items():
            if index is None:
                factor = -k[:, list(self._space)].square().sum(1) + 0j
            else:
                factor = (1j * k[:, list(index)]).prod(1)
            term = factor[:, None, None] * slope
            total[..., self._fields.index(field)] += term
            size += term.abs()
        return torch.where((size > 0)[..., None], total / size[..., None], 1.0 + 0j)
