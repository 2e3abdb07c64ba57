"""Which points are used at which step: how many, drawn how, when anew, where refined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..._core.errors import refuse_unknown
from ..arguments import check_count, check_seed, is_integer, require
from ..domains import PointSet
from ..domains.sampling import Points, Sampler
from ..problem.conditions import Condition, Energy, Equation, Integral
from ..problem.problem import Problem
from .sites import Sites, draw_sites
from .term import build_term
from .trial import Trial

_FEWEST, _MOST = 1000, 10_000
_PER_PARAMETER = 4
_CANDIDATES = 8  # times the points of an equation, of which a refinement chooses
_QUADRATURE = {1: 2**8, 2: 2**10}  # points of an integral by dimension; 2¹² beyond


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

    def due(self, step: int) -> bool:
        """Whether points move before this step."""
        return step > 0 and step % self.every == 0 and not self.over(step - 1)

    def over(self, step: int) -> bool:
        """Whether points stay from this step on."""
        return self.until is not None and step >= self.until


class SamplingPlan:
    """Points per condition, the same for loss, gradient and Gram of a step."""

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
        self.problem, self.seed = problem, check_seed(seed)
        usable = resample is None or is_integer(resample, 1)
        require(usable, "The resampling interval", resample, "Use steps ≥ 1")
        self.resample = resample
        #: the schedule of refinements, where there is one
        self.refine = refine if isinstance(refine, Refine) else None
        #: whether points move where a run overfits them
        self.adaptive = refine == "auto" and resample is None
        # along characteristics and layers a grid sees the same few places again and again
        still = problem.domain.dim <= 2 and not problem.domain.evolves
        self.sampler = sampler or ("grid" if still and resample is None else "sobol")
        if isinstance(points, Mapping):
            for name in points:
                refuse_unknown("condition", name, [c.name for c in problem.conditions])
        elif points is not None:
            check_count(points, "points")
        self.counts = {c.name: self._count(c, parameters, points) for c in problem.conditions}

    def _count(self, condition: Condition, parameters: int, points: Any) -> int:
        if isinstance(points, Mapping) and condition.name in points:
            return check_count(points[condition.name], f"points[{condition.name!r}]")
        if condition.points is not None:
            return check_count(condition.points, "points")
        region = condition.region(self.problem.domain)
        if isinstance(region, PointSet):
            return len(region)
        if isinstance(condition, Integral):
            return _QUADRATURE.get(self.problem.domain.dim, 2**12)
        inside = isinstance(condition, (Equation, Energy))
        if isinstance(points, int):
            return points if inside else max(points // 4, 1)
        most = max(_FEWEST, min(_PER_PARAMETER * parameters, max(_MOST, 2 * parameters)))
        return most if inside else most // 4

    def at(self, step: int) -> int:
        """The draw that a step belongs to; steps of one draw share their points."""
        return 0 if self.resample is None else step // self.resample

    def draw(self, number: int) -> dict[str, Sites]:
        """The points of one draw, by condition."""
        seed = self.seed + 1_000_003 * number
        return {
            c.name: draw_sites(self.problem, c, self.counts[c.name], self.sampler, seed + i)
            for i, c in enumerate(self.problem.conditions)
        }

    def refined(self, sites: dict[str, Sites], trial: Trial, step: int) -> dict[str, Sites]:
        """Some points of every equation moved to where its residual is large."""
        out = dict(sites)
        for i, c in enumerate(self.problem.conditions):
            movable = not isinstance(c.region(self.problem.domain), PointSet)
            if isinstance(c, Equation) and movable and len(sites[c.name]) == 1:
                seed = self.seed + 7_368_787 * (step + 1) + i
                out[c.name] = (self._concentrated(c, sites[c.name][0], trial, seed),)
        return out

    @torch.no_grad()
    def _concentrated(self, c: Equation, old: Points, trial: Trial, seed: int) -> Points:
        count = _CANDIDATES * len(old)
        drawn = draw_sites(self.problem, c, count, "uniform", seed)
        candidates = drawn[0].to(old.x.dtype, old.x.device)
        like = next(trial.parameters())
        values = build_term(self.problem, c, trial, (candidates.to(like.dtype, like.device),))
        r = values.map(dict(trial.named_parameters())).norm(dim=1).cpu()
        density = r / r.mean().clamp(min=torch.finfo(r.dtype).tiny) + 1
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.multinomial(density, max(1, len(old) // 2), generator=generator)
        kept = torch.randperm(len(old), generator=generator)[: len(old) - len(chosen)]
        kept, chosen = kept.to(old.x.device), chosen.to(old.x.device)
        x = torch.cat([old.x[kept], candidates.x[chosen]])
        normals = None
        if old.normals is not None and candidates.normals is not None:
            normals = torch.cat([old.normals[kept], candidates.normals[chosen]])
        return Points(x, torch.full_like(x[:, 0], 1 / len(x)), normals)
