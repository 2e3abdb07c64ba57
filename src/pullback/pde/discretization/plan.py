"""Which points are used at which step: how many, drawn how, when anew, where refined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.errors import refuse_unknown
from ..arguments import check_count, check_seed, is_integer, require
from ..domains.sampling import Points, Sampler
from ..problem.conditions import Condition
from ..problem.problem import Problem
from .seeds import SEEDS
from .sites import Sites, draw_sites
from .term import build_term
from .trial import Trial


@dataclass(frozen=True)
class PointCounts:
    """How many points there are by default."""

    #: points of an equation for each parameter, so that the network cannot fit them one by one
    per_parameter: int = 4
    #: and their bounds: 1,000 are 32 along each side of a square, and A takes 200 MB with
    #: 10,000 and 2,500 parameters. With more than half as many parameters there are two for each.
    fewest: int = 1000
    most: int = 10_000
    fewest_per_parameter: int = 2
    #: other conditions live on fewer dimensions, and get one in so many
    equation_to_other: int = 4
    #: candidates for each point of an equation, among which a refinement chooses: their residuals
    #: take eight forward passes, few beside a factorization
    candidates: int = 8

    def of_equations(self, parameters: int) -> int:
        """Return the number of points of an equation, for a network of so many parameters."""
        most = max(self.most, self.fewest_per_parameter * parameters)
        return max(self.fewest, min(self.per_parameter * parameters, most))

    def of_integrals(self, dim: int) -> int:
        """Return the number of nodes of a quadrature: 2⁸ on a line, 2¹⁰ in a plane, else 2¹²."""
        return 2 ** min(6 + 2 * dim, 12)


COUNTS = PointCounts()


@dataclass(frozen=True)
class Refine:
    """Points where the residual is large: density ∝ |r| / mean |r| + 1.

    Every `every` steps (up to step `until`, where it is given) half of an equation's points are
    drawn anew; all points count alike, so the loss looks closer where they gather.
    """

    every: int = 50
    until: int | None = None

    def __post_init__(self) -> None:
        usable = is_integer(self.every, 1) and (self.until is None or is_integer(self.until, 0))
        require(usable, "The refinement", self, "Use every ≥ 1, and until ≥ 0 or None")

    def is_due(self, step: int) -> bool:
        """Return True if points move before this step."""
        return step > 0 and step % self.every == 0 and not self.is_over(step - 1)

    def is_over(self, step: int) -> bool:
        """Return True if points stay from this step on."""
        return self.until is not None and step >= self.until


class SamplingPlan:
    """Points per condition, the same for loss, gradient and Gram of a step.

    Args:
        problem: whose conditions need points.
        parameters: of the network, which decide how many points there are by default.
        points, sampler, seed, resample, refine: options of `solve`, which explains them.

    Attributes:
        counts: points by condition.
        sampler: that draws them.
        resample: steps between two draws, None for one draw.
        refine: the schedule of refinements, if there is one.
        adaptive: whether points move where a run overfits them.
    """

    def __init__(
        self,
        problem: Problem,
        parameters: int,
        *,
        points: int | Mapping[str, int] | None = None,
        sampler: str | Sampler | None = None,
        seed: int = 0,
        resample: int | None = None,
        refine: Refine | str | None = None,
    ) -> None:
        self.problem = problem
        self.seed = check_seed(seed)
        usable = resample is None or is_integer(resample, 1)
        require(usable, "The resampling interval", resample, "Use steps ≥ 1")
        self.resample = resample
        self.refine = refine if isinstance(refine, Refine) else None
        self.adaptive = refine == "auto" and resample is None
        self.sampler = sampler or self._choose_sampler()
        _check_point_counts(points, problem)
        self.counts = {c.name: self._count(c, parameters, points) for c in problem.conditions}

    def _choose_sampler(self) -> str:
        """Return the sampler by default: a grid in a plane, unless there is time.

        Along characteristics and layers a grid sees the same few places again and again.
        """
        domain = self.problem.domain
        if domain.dim <= 2 and not domain.evolves and self.resample is None:
            return "grid"
        return "sobol"

    def _count(
        self, condition: Condition, parameters: int, points: int | Mapping[str, int] | None
    ) -> int:
        """Return the number of points of a condition: the caller's, that of the region, or ours."""
        if isinstance(points, Mapping) and condition.name in points:
            return check_count(points[condition.name], f"points[{condition.name!r}]")
        if condition.points is not None:
            return check_count(condition.points, "points")
        measured_count = condition.region(self.problem.domain).point_count
        if measured_count is not None:
            return measured_count
        if condition.is_integral:
            return COUNTS.of_integrals(self.problem.domain.dim)
        equation_count = COUNTS.of_equations(parameters)
        if isinstance(points, int):
            equation_count = points
        if condition.states_problem:
            return equation_count
        return max(equation_count // COUNTS.equation_to_other, 1)

    def draw_number(self, step: int) -> int:
        """Return the number of the draw that a step belongs to; its steps share their points."""
        if self.resample is None:
            return 0
        return step // self.resample

    def draw(self, number: int) -> dict[str, Sites]:
        """Return the points of one draw, by condition."""
        seed = self.seed + SEEDS.draw_stride * number
        sites: dict[str, Sites] = {}
        for i, condition in enumerate(self.problem.conditions):
            count = self.counts[condition.name]
            sites[condition.name] = draw_sites(
                self.problem, condition, count, self.sampler, seed + i
            )
        return sites

    def refine_sites(self, sites: dict[str, Sites], trial: Trial, step: int) -> dict[str, Sites]:
        """Return the sites with half of every equation's points moved to large residuals."""
        refined = dict(sites)
        for i, condition in enumerate(self.problem.conditions):
            is_movable = condition.region(self.problem.domain).point_count is None
            if condition.is_equation and is_movable and len(sites[condition.name]) == 1:
                seed = self.seed + SEEDS.refinement_stride * (step + 1) + i
                points = sites[condition.name][0]
                refined[condition.name] = (self._concentrate(condition, points, trial, seed),)
        return refined

    @torch.no_grad()
    def _concentrate(self, condition: Condition, points: Points, trial: Trial, seed: int) -> Points:
        """Return the points with half of them replaced by candidates of large residuals."""
        count = COUNTS.candidates * len(points)
        candidates = draw_sites(self.problem, condition, count, "uniform", seed)[0]
        residuals = self._measure_residuals(condition, candidates, trial)
        density = residuals / residuals.mean().clamp(min=torch.finfo(residuals.dtype).tiny) + 1
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.multinomial(density, max(1, len(points) // 2), generator=generator)
        order = torch.randperm(len(points), generator=generator)
        staying = order[: len(points) - len(chosen)]
        return _join_points(points, staying, candidates, chosen)

    def _measure_residuals(self, condition: Condition, points: Points, trial: Trial) -> Tensor:
        """Return |r| of a condition at points, (N,) on the CPU."""
        parameter = next(trial.parameters())
        sites = (points.to(parameter.dtype, parameter.device),)
        term = build_term(self.problem, condition, trial, sites)
        return term.map(dict(trial.named_parameters())).norm(dim=1).cpu()


def _join_points(points: Points, staying: Tensor, candidates: Points, chosen: Tensor) -> Points:
    """Return some of the points and some of the candidates; all count alike."""
    device = points.x.device
    candidates = candidates.to(points.x.dtype, device)
    staying = staying.to(device)
    chosen = chosen.to(device)
    x = torch.cat([points.x[staying], candidates.x[chosen]])
    normals = None
    if points.normals is not None and candidates.normals is not None:
        normals = torch.cat([points.normals[staying], candidates.normals[chosen]])
    return Points(x, torch.full_like(x[:, 0], 1 / len(x)), normals)


def _check_point_counts(points: int | Mapping[str, int] | None, problem: Problem) -> None:
    """Raise for a number of points, or the name of a condition, that cannot be used."""
    if isinstance(points, Mapping):
        for name in points:
            refuse_unknown("condition", name, [c.name for c in problem.conditions])
    elif points is not None:
        check_count(points, "points")
