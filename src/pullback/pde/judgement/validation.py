"""The residuals of a network at fresh points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..._core.processes import Processes
from ...maps import Scheme
from ...maps.jets import Index
from ..discretization.residual import LocalResidual, compute_derivatives
from ..discretization.seeds import SEEDS
from ..discretization.sites import Sites, draw_sites, take_share
from ..discretization.term import build_term
from ..discretization.trial import Trial, select_unknowns
from ..problem.conditions import Condition
from ..problem.problem import Problem


@dataclass(frozen=True)
class ValidationThresholds:
    """Where residuals are measured, and what their terms are compared with."""

    #: bounds of the number of fresh points of a condition: a mean square of n Gaussian residuals
    #: has the relative error √(2/n), 6 % and 2 % here
    fewest_points: int = 500
    most_points: int = 4000
    #: points at which the sizes of derivatives are measured: 6 %, as above
    size_points: int = 500
    #: axes of a Laplacian whose second derivatives are measured; the others are alike
    laplacian_axes: int = 8
    #: a field counts at least as this share of the largest: below that its relative residual would
    #: be mostly noise
    smallest_field: float = 1e-2
    #: a derivative counts at least as this share of that of a wave with the domain's own lengths:
    #: four digits of mean squares, as many as count as solved
    smallest_derivative: float = 1e-2
    #: share of the points with the largest residuals, by which these are called concentrated: 25 to
    #: 200 points, more than an accident
    few_points: float = 0.05


THRESHOLDS = ValidationThresholds()


@dataclass(frozen=True)
class Residual:
    """One condition at fresh points.

    Attributes:
        rms: root of its mean square, all components together.
        largest: the largest absolute value at a point.
        size: root mean square of the terms that should cancel.
        affine: whether it is linear in the fields.
        concentration: share of the mean square at the twentieth of the points where it is largest.
        largest_at: the point of the largest value, by coordinate; empty for integrals.
    """

    rms: float
    largest: float
    size: float
    affine: bool
    concentration: float = 0.0
    largest_at: Mapping[str, float] = field(default_factory=dict)

    @property
    def relative(self) -> float:
        """rms/size: 1 where nothing cancels, 0 where the condition holds."""
        return self.rms / self.size if self.size else 0.0


#: root mean squares of derivatives over the domain, by field and index; None is the Laplacian
DerivativeSizes = dict[tuple[str, Index | None], float]


class Validation:
    """Fresh Sobol points for every condition; measured points are taken as they are.

    Args:
        problem, trial: what must hold, and of what.
        counts, weights, seed: the run's own, by condition.
        processes: among which the points are shared; this one alone by default.
    """

    def __init__(
        self,
        problem: Problem,
        trial: Trial,
        counts: Mapping[str, int],
        weights: Mapping[str, float],
        seed: int,
        processes: Processes | None = None,
    ) -> None:
        self._processes = processes or Processes()
        self._problem = problem
        self._trial = trial
        self._seed = seed
        self._counts: dict[str, int] = {}
        for condition in problem.conditions:
            count = counts[condition.name]
            if condition.is_integral:  # a quadrature has no seed: one of twice the points is fresh
                self._counts[condition.name] = 2 * count
            else:
                bounded = min(max(count, THRESHOLDS.fewest_points), THRESHOLDS.most_points)
                self._counts[condition.name] = bounded
        self.weights = dict(weights)

    def draw(self, condition: Condition, number: int, count: int | None = None) -> Sites:
        """Return the fresh points of this number, in the precision of the trial."""
        if count is None:
            count = self._counts[condition.name]
        measured_count = condition.region(self._problem.domain).point_count
        if measured_count is not None:
            count = measured_count
        offset = self._problem.conditions.index(condition)
        seed = self._seed + SEEDS.validation_stride * (number + 1) + offset
        sites = draw_sites(self._problem, condition, count, "sobol", seed)
        parameter = next(self._trial.parameters())
        return tuple(points.to(parameter.dtype, parameter.device) for points in sites)

    @torch.no_grad()
    def loss(self, number: int) -> float:
        """Return the loss at the fresh points of this number."""
        params = {name: p.detach() for name, p in self._trial.named_parameters()}
        loss = 0.0
        with self._processes.raise_together():
            for condition in self._problem.conditions:
                sites = self.draw(condition, number)
                total = sites[0].weights.sum()
                sites = take_share(condition, sites, self._processes)
                if len(sites[0]):
                    weight = self.weights[condition.name]
                    term = build_term(self._problem, condition, self._trial, sites, weight, total)
                    loss += float(term.loss(term.map(params)))
        return self._processes.sum_numbers([loss])[0]

    def residuals(self, number: int = 0) -> dict[str, Residual]:
        """Return every condition that should vanish, by name; energies and priors should not."""
        params = {name: p.detach() for name, p in self._trial.named_parameters()}
        unknowns = select_unknowns(params)
        conditions = [c for c in self._problem.conditions if c.holds_exactly]
        sites = {c.name: self.draw(c, number) for c in conditions}
        locals_by_name = {
            c.name: LocalResidual(self._problem, c, sites[c.name], unknowns) for c in conditions
        }
        sizes = self._measure_derivatives(locals_by_name.values())
        residuals: dict[str, Residual] = {}
        for condition in conditions:
            local = locals_by_name[condition.name]
            if condition.target is not None:
                weights = sites[condition.name][0].weights
                residual = _measure_integral(local, self._trial, weights, condition.target)
            else:
                x = sites[condition.name][0].x
                names = self._problem.domain.names
                residual = _measure_residual(local, self._trial, sizes, x, names)
            residuals[condition.name] = residual
        return residuals

    def relative(self, number: int = 0) -> float:
        """Return the largest relative residual; measurements have noise, and are left out."""
        return self._largest(number, is_measured=False, default=math.nan)

    def misfit(self, number: int = 0) -> float:
        """Return the largest relative residual of measurements, 0 if there are none."""
        if not any(condition.is_measured for condition in self._problem.conditions):
            return 0.0
        return self._largest(number, is_measured=True, default=0.0)

    def _largest(self, number: int, *, is_measured: bool, default: float) -> float:
        """Return the largest relative residual of measurements, or of all other conditions."""
        residuals = {}
        with self._processes.raise_together():
            if self._processes.rank == 0:
                residuals = self.residuals(number)
        names = {c.name for c in self._problem.conditions if c.is_measured is is_measured}
        relative = [residual.relative for name, residual in residuals.items() if name in names]
        largest = max(relative, default=default)
        if any(map(math.isnan, relative)):  # of residuals and terms that overflow
            largest = math.inf
        return self._processes.broadcast_object(largest)

    def _measure_derivatives(self, locals_: Iterable[LocalResidual]) -> DerivativeSizes:
        """Return the root mean squares over the domain of the derivatives that residuals ask for.

        That of the Laplacian is that of its terms, which may cancel. Where derivatives vanish, the
        field's own variation is their scale.
        """
        indices: set[Index | None] = set()
        for local in locals_:
            indices |= local.indices
        derivatives = _MeasuredDerivatives(self._problem, self._trial, indices, self._seed)
        sizes: DerivativeSizes = {}
        for index in indices:
            by_field = derivatives.measure(index)
            floor = THRESHOLDS.smallest_field * float(by_field.max())
            values = by_field.clamp(min=floor).tolist()
            for name, value in zip(self._problem.fields, values, strict=True):
                sizes[name, index] = value
        return sizes


class _MeasuredDerivatives:
    """Derivatives of a network at points of the domain."""

    def __init__(
        self, problem: Problem, trial: Trial, indices: set[Index | None], seed: int
    ) -> None:
        self._space = problem.coordinates.space
        self._pairs: list[Index] = []
        if None in indices:
            self._pairs = [(axis, axis) for axis in self._space[: THRESHOLDS.laplacian_axes]]
        plain_indices = {index for index in indices if index is not None}
        self._scheme = Scheme.of(plain_indices | set(self._pairs))
        parameter = next(trial.parameters())
        points = problem.domain.sample(THRESHOLDS.size_points, "sobol", seed=seed)
        channels = compute_derivatives(trial, points.x.to(parameter)[None], self._scheme)
        channels = channels.double()  # (T, 1, N, m)
        self._sizes = root_mean_square(channels, (1, 2))
        fields = channels[self._scheme.position[()], 0]
        self._variation = root_mean_square(fields - fields.mean(0), 0)
        self._wavenumbers = (math.pi / (problem.domain.high - problem.domain.low)).tolist()

    def measure(self, index: Index | None) -> Tensor:
        """Return the root mean square of a derivative of each field, (m,)."""
        if index is not None:
            return self._bound_below(index)
        terms = torch.stack([self._bound_below(pair) for pair in self._pairs])
        return len(self._space) ** 0.5 * root_mean_square(terms, 0)

    def _bound_below(self, index: Index) -> Tensor:
        """Return a root mean square, at least a share of that of a wave as large as the field."""
        wave = math.prod(self._wavenumbers[axis] for axis in index)
        least = THRESHOLDS.smallest_derivative * wave * self._variation
        return torch.maximum(self._sizes[self._scheme.position[index]], least)


def root_mean_square(values: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return √mean(values²) along axes, also of numbers whose squares are not representable."""
    largest = values.abs().amax(dim, keepdim=True)
    is_usable = (largest > 0) & largest.isfinite()
    unit = torch.where(is_usable, largest, torch.ones_like(largest))
    return (unit * (values / unit).square().mean(dim, keepdim=True).sqrt()).squeeze(dim)


def _measure_integral(
    local: LocalResidual, trial: Trial, weights: Tensor, value: float
) -> Residual:
    """Return ∫f − value, beside ∫|f| and the value."""
    derivatives = local.differentiate(trial)
    integrand = local(derivatives)
    difference = abs(float((weights @ integrand).sum()) - value)
    size = math.hypot(float((weights @ integrand.abs()).sum()), value)
    return Residual(difference, difference, size, local.is_affine(derivatives))


def _measure_residual(
    local: LocalResidual, trial: Trial, sizes: DerivativeSizes, x: Tensor, names: Sequence[str]
) -> Residual:
    """Return the residual beside the terms of its linearization, Σ ∂F/∂c · c and the source.

    Args:
        local: the residual as a function of derivatives.
        trial: whose derivatives these are.
        sizes: root mean squares of derivatives over the domain.
        x: its points, (N, d).
        names: of the coordinates.
    """
    derivatives = local.differentiate(trial)
    values, slopes = local.linearize(derivatives)
    source = values.clone()
    term_sizes: list[float] = []
    for key, slope in slopes.items():
        _, name, index = key
        source -= slope * derivatives[key][:, None]
        term_sizes.append(_measure_columns(slope) * sizes[name, index])
    term_sizes.append(_measure_columns(source))
    largest = float(values.abs().max())
    squares = (values / (largest or 1.0)).square().sum(1)
    few = max(1, int(THRESHOLDS.few_points * len(squares)))
    total = max(float(squares.sum()), torch.finfo(torch.float64).tiny)
    worst_point = x[int(squares.argmax())].tolist()
    return Residual(
        rms=_measure_columns(values),
        largest=largest,
        size=math.hypot(*term_sizes),
        affine=local.is_affine(derivatives),
        concentration=float(squares.topk(few).values.sum()) / total,
        largest_at=dict(zip(names, worst_point, strict=True)),
    )


def _measure_columns(values: Tensor) -> float:
    """Return the root of the mean square of each column of (N, R), added up over the columns."""
    return values.shape[1] ** 0.5 * float(root_mean_square(values, (0, 1)))
