"""How fast a solution may oscillate, read off a problem's data and its linear part."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..discretization.residual import LocalResidual
from ..domains import Region
from ..domains.sampling import Points
from ..problem.conditions import Condition
from ..problem.problem import Problem


@dataclass(frozen=True)
class WaveThresholds:
    """How waves are looked for."""

    #: half waves across a domain that are not called oscillation: an arch and its neighbours
    smooth_half_waves: float = 3.0
    #: lines along an axis on which data are evaluated, so that one of them misses a node of the
    #: data; and points on each, two for each of 512 half waves
    lines: int = 8
    points_on_line: int = 1024
    #: share of the domain's extent that a line within a region must have: a shorter one resolves
    #: wave numbers to two half waves of the domain at best, with its window to four
    shortest_line: float = 0.25
    #: share of the largest amplitude below which a wave number is not counted: a Hann window's
    #: side lobes are below 3 %
    faint_amplitude: float = 0.05
    #: share of the data below which a whole spectrum is round-off, of float32 too (1e-7)
    roundoff_amplitude: float = 1e-6
    #: times as many points in a Fourier transform, for a finer spectrum: a peak is found to a
    #: quarter of a period
    padding: int = 4
    #: periods by which a Hann window widens a line of the spectrum, at the level of faint ones
    window_lobe: float = 1.85
    #: points at which the equations are linearized: four along each side of a square
    linearization_points: int = 16
    #: share of their terms that is left when a plane wave solves the equations: the tried half
    #: waves are ¼ apart, and at ten of them a square is then off by up to 3 %
    singular_share: float = 0.05
    #: half waves that are tried: from the first to the last, so many of them, ¼ apart
    fewest_half_waves: float = 0.5
    most_half_waves: float = 256.0
    tried_half_waves: int = 2**10


THRESHOLDS = WaveThresholds()


@dataclass(frozen=True)
class Oscillation:
    """How a solution oscillates.

    Attributes:
        wavenumbers: the largest along each axis, (d,), in radians a length.
        half_waves: as many across the domain, along each axis, (d,).
        has_waves: whether these are waves; else a layer or a bump has such a broad spectrum.
    """

    wavenumbers: Tensor
    half_waves: Tensor
    has_waves: bool


@dataclass(frozen=True)
class DataSpectrum:
    """The wave numbers of data.

    Attributes:
        band: the largest along each axis, (d,).
        has_peak: whether there is a peak beyond what is smooth.
    """

    band: Tensor
    has_peak: bool

    def join(self, other: DataSpectrum) -> DataSpectrum:
        """Return the spectrum of both data."""
        band = torch.maximum(self.band, other.band)
        return DataSpectrum(band, self.has_peak or other.has_peak)


def estimate_oscillation(problem: Problem) -> Oscillation:
    """Return the wave numbers that a problem's solution may have, estimated.

    1. Data: sources, boundary and initial values on lines along an axis, times a Hann window. Of
       their Fourier transform the largest wave number with 5 % of the largest amplitude counts.
       They are waves if the spectrum has a peak beyond three half waves.
    2. Waves e^(iκ·x) that solve the equations, linearized at u = 0. Without time: κ along one axis
       (Helmholtz: κ = k). With time: the frequency of a wave whose κ in space is that of the data
       (wave equation: ω = cκ). Where coefficients vary, the median of 16 points.

    What oscillates for another reason, as a nonlinear wave may, is not seen.
    """
    data = _make_empty_spectrum(problem)
    for condition in problem.conditions:
        if condition.prescribes_values:
            data = data.join(_analyze_data(problem, condition))
    free_waves = _find_free_waves(problem, data.band)
    lengths = (problem.domain.high - problem.domain.low) / math.pi  # of half a wave
    half_waves = torch.maximum(data.band, free_waves) * lengths
    has_data_waves = data.has_peak and float(half_waves.max()) > THRESHOLDS.smooth_half_waves
    has_free_waves = float((free_waves * lengths).max()) > THRESHOLDS.smooth_half_waves
    return Oscillation(half_waves / lengths, half_waves, has_data_waves or has_free_waves)


def is_linear(problem: Problem) -> bool:
    """Return True if all equations are linear in the fields, with unknown coefficients fixed.

    Their slopes at u = 0 are compared with those at another u.
    """
    points = problem.domain.sample(THRESHOLDS.linearization_points, "sobol")
    zero = torch.zeros_like(points.x[:, 0])
    for condition in problem.conditions:
        if condition.is_equation:
            local = LocalResidual(problem, condition, (points,))
            if not local.is_affine(dict.fromkeys(local.keys, zero)):
                return False
    return True


def _make_empty_spectrum(problem: Problem) -> DataSpectrum:
    """Return the spectrum of no data."""
    return DataSpectrum(torch.zeros(problem.domain.dim, dtype=torch.float64), False)


def _analyze_data(problem: Problem, condition: Condition) -> DataSpectrum:
    """Return the wave numbers of what is left of a residual where all fields are zero."""
    spectrum = _make_empty_spectrum(problem)
    region = condition.region(problem.domain)
    if not isinstance(region, Region) or region.point_count is not None:
        return spectrum
    starts = region.sample(THRESHOLDS.lines, "sobol")
    for axis in range(problem.domain.dim):
        lines = _draw_lines(problem, region, starts, axis)
        if lines:
            spectrum = spectrum.join(_analyze_lines(problem, condition, lines, axis))
    return spectrum


def _analyze_lines(
    problem: Problem, condition: Condition, lines: list[Points], axis: int
) -> DataSpectrum:
    """Return the wave numbers along an axis of the residual at zero fields, on lines."""
    extent = float(problem.domain.high[axis] - problem.domain.low[axis])
    band = torch.zeros(problem.domain.dim, dtype=torch.float64)
    has_peak = False
    values = _evaluate_at_zero(problem, condition, Points.cat(lines))
    for line, line_values in zip(lines, values.split(THRESHOLDS.points_on_line), strict=True):
        length = _measure_length(line, axis)
        if length < THRESHOLDS.shortest_line * extent:
            continue
        band_periods, peak_periods = _count_periods(line_values)
        wavenumber = 2 * math.pi * band_periods / length
        peak = 2 * math.pi * peak_periods / length
        band[axis] = max(float(band[axis]), wavenumber)
        has_peak = has_peak or peak * extent > THRESHOLDS.smooth_half_waves * math.pi
    return DataSpectrum(band, has_peak)


def _measure_length(line: Points, axis: int) -> float:
    """Return the extent of a line along its axis."""
    return float(line.x[-1, axis] - line.x[0, axis])


def _draw_lines(problem: Problem, region: Region, starts: Points, axis: int) -> list[Points]:
    """Return lines along an axis through points of a region; none if all are short."""
    lines = []
    for number in range(len(starts)):
        line = _draw_line(problem, region, starts, number, axis)
        if line is not None:
            lines.append(line)
    extent = float(problem.domain.high[axis] - problem.domain.low[axis])
    if all(_measure_length(line, axis) < THRESHOLDS.shortest_line * extent for line in lines):
        return []
    return lines


def _draw_line(
    problem: Problem, region: Region, starts: Points, number: int, axis: int
) -> Points | None:
    """Return equidistant points along an axis through a point, as far as the region goes.

    It is None if the point of the line that is next to it is outside.
    """
    count = THRESHOLDS.points_on_line
    start = starts.x[number]

    def place(low: Tensor, high: Tensor) -> Tensor:
        x = start.repeat(count, 1)
        x[:, axis] = low + (high - low) * torch.linspace(0, 1, count, dtype=x.dtype)
        return x

    across = place(problem.domain.low[axis], problem.domain.high[axis])
    is_inside = region.contains(across)
    nearest = int((across[:, axis] - start[axis]).abs().argmin())
    if not bool(is_inside[nearest]):
        return None
    outside = (~is_inside).nonzero().flatten().tolist()
    first = max((i + 1 for i in outside if i < nearest), default=0)
    last = min((i - 1 for i in outside if i > nearest), default=count - 1)
    x = place(across[first, axis], across[last, axis])
    normals = starts.normals
    if normals is not None:
        normals = normals[number].expand(count, -1)
    return Points(x, torch.ones_like(x[:, 0]), normals)


def _evaluate_at_zero(problem: Problem, condition: Condition, points: Points) -> Tensor:
    """Return the residual where all fields are zero, (N, R)."""
    local = LocalResidual(problem, condition, (points,))
    zero = torch.zeros_like(points.x[:, 0])
    return local(dict.fromkeys(local.keys, zero)).nan_to_num(0, 0, 0)


def _count_periods(values: Tensor) -> tuple[float, float]:
    """Return periods of values (N, R) on a line: of the band they fill, and of the last peak.

    The band is that of the values less their mean. Peaks are those of the values themselves: a
    small ripple on a large constant is none.
    """
    window = torch.hann_window(len(values)).to(values)[:, None]
    varying = _compute_spectrum((values - values.mean(0)) * window)
    band = _find_last_period(varying, float(values.abs().max()))
    peaks = _compute_spectrum(values * window)
    inner = peaks[1:-1]
    is_peak = (inner > peaks[:-2]) & (inner > peaks[2:])
    peaks[1:-1] = torch.where(is_peak, inner, 0 * inner)
    return max(band - THRESHOLDS.window_lobe, 0.0), _find_last_period(peaks, 0.0)


def _compute_spectrum(values: Tensor) -> Tensor:
    """Return the amplitudes of values (N, R), all components together."""
    transform = torch.fft.rfft(values, n=THRESHOLDS.padding * len(values), dim=0)
    return transform.abs().square().sum(1).sqrt()


def _find_last_period(amplitudes: Tensor, size: float) -> float:
    """Return the most periods with an amplitude that counts, 0 if all are round-off."""
    largest = float(amplitudes.max())
    roundoff = THRESHOLDS.roundoff_amplitude * size * THRESHOLDS.points_on_line
    if not largest or largest <= roundoff:
        return 0.0
    loud = (amplitudes >= THRESHOLDS.faint_amplitude * largest).nonzero()
    return int(loud.max()) / THRESHOLDS.padding


def _find_free_waves(problem: Problem, data_band: Tensor) -> Tensor:
    """Return the wave numbers (d,) at which the linear part of the equations is singular."""
    wavenumbers = torch.zeros_like(data_band)
    equations = [c for c in problem.conditions if c.is_equation and c.on is None]
    if not equations:
        return wavenumbers
    points = problem.domain.sample(THRESHOLDS.linearization_points, "sobol")
    symbols = [_Symbol(problem, condition, points) for condition in equations]
    axes = range(len(data_band))
    time_axes = [axis for axis in axes if axis not in problem.coordinates.space]
    for axis in time_axes or axes:
        k = _list_wave_vectors(problem, axis)
        if time_axes:
            k[:, :axis] = data_band[:axis]
            k[:, axis + 1 :] = data_band[axis + 1 :]
        largest = (k[:, axis].abs()[:, None] * _is_singular(symbols, k)).amax(0)  # by point
        wavenumbers[axis] = largest.median()
    return wavenumbers


def _list_wave_vectors(problem: Problem, axis: int) -> Tensor:
    """Return wave vectors (K, d) along an axis, of both signs, that may solve the equations."""
    half_waves = torch.linspace(
        THRESHOLDS.fewest_half_waves,
        THRESHOLDS.most_half_waves,
        THRESHOLDS.tried_half_waves,
        dtype=torch.float64,
    )
    extent = problem.domain.high[axis] - problem.domain.low[axis]
    k = torch.zeros(2 * len(half_waves), problem.domain.dim, dtype=torch.float64)
    k[:, axis] = torch.cat([-half_waves, half_waves]) * math.pi / extent
    return k


def _is_singular(symbols: list[_Symbol], k: Tensor) -> Tensor:
    """Return for which wave vectors (K, d), and where, plane waves solve the equations: (K, N)."""
    entries = [symbol(k) for symbol in symbols]
    totals = torch.cat([entry.total for entry in entries], -2)  # (K, N, R, m)
    sizes = torch.cat([entry.size for entry in entries], -2)
    if totals.shape[-2] < totals.shape[-1]:
        return torch.zeros(totals.shape[:2], dtype=torch.bool)
    row_units = sizes.sum(-1, keepdim=True)
    is_row_empty = row_units == 0
    row_units = row_units.masked_fill(is_row_empty, 1.0)
    column_units = (sizes / row_units).amax(-2, keepdim=True)
    column_units = torch.where(column_units > 0, column_units, 1.0)
    balanced = totals / (row_units * column_units)
    balanced = torch.where(is_row_empty, 1.0 + 0j, balanced)
    return torch.linalg.svdvals(balanced)[..., -1] < THRESHOLDS.singular_share


@dataclass(frozen=True)
class SymbolEntries:
    """The symbol of an equation at wave vectors and points.

    Attributes:
        total: Σ a_α (iκ)^α of every component and field, (K, N, R, m).
        size: Σ |a_α κ^α|, which is larger where terms cancel, (K, N, R, m).
    """

    total: Tensor
    size: Tensor


class _Symbol:
    """Σ a_α(x) (iκ)^α of an equation linearized at zero fields.

    A pressure enters by its first derivative and a velocity by its second: for large κ a row of
    such a system hardly sees the pressure. That is no free wave, so `_is_singular` gives every
    field units of its own.
    """

    def __init__(self, problem: Problem, condition: Condition, points: Points) -> None:
        local = LocalResidual(problem, condition, (points,))
        zero = torch.zeros_like(points.x[:, 0])
        self._fields = problem.fields
        self._space = problem.coordinates.space
        slopes = local.linearize(dict.fromkeys(local.keys, zero)).slopes
        self._slopes = {key: slope.nan_to_num(0, 0, 0) for key, slope in slopes.items()}

    def __call__(self, k: Tensor) -> SymbolEntries:
        """Return the symbol at wave vectors (K, d)."""
        count, components = next(iter(self._slopes.values())).shape
        shape = (len(k), count, components, len(self._fields))
        total = torch.zeros(shape, dtype=torch.complex128)
        size = torch.zeros(shape, dtype=torch.float64)
        for (_, field, index), slope in self._slopes.items():  # there is one site
            if index is None:
                factor = -k[:, list(self._space)].square().sum(1) + 0j
            else:
                factor = (1j * k[:, list(index)]).prod(1)
            term = factor[:, None, None] * slope
            column = self._fields.index(field)
            total[..., column] += term
            size[..., column] += term.abs()
        return SymbolEntries(total, size)
