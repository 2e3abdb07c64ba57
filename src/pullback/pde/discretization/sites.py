"""The points at which a condition is imposed, and this process's share of them."""

from __future__ import annotations

from typing import Any

from ..._core.errors import PullbackError
from ..._core.processes import Processes
from ..domains import Region
from ..domains.sampling import Points
from ..problem import conditions
from ..problem.conditions import Condition
from ..problem.problem import Problem

Sites = tuple[Points, ...]


def draw_sites(problem: Problem, condition: Condition, n: int, sampler: Any, seed: int) -> Sites:
    """Points of the condition's region, refused where they leave the domain."""
    domain = problem.domain
    region = condition.region(domain)
    if tuple(region.names) != tuple(domain.names):
        raise PullbackError(
            f"The region of {condition.name!r} does not fit the domain",
            f"its coordinates are {region.names}, the domain's {domain.names}",
            "Use a boundary, face or part of the problem's domain",
        )
    if isinstance(condition, conditions.Integral) and isinstance(region, Region):
        found = region.quadrature(n)
    else:
        found = region.sample(n, sampler, seed=seed)
    sites = found if isinstance(found, tuple) else (found,)
    for points in sites:
        outside = ~domain.contains(points.x)
        if bool(outside.any()):
            raise PullbackError(
                f"The condition {condition.name!r} lies outside the domain",
                f"{int(outside.sum())} of {len(points)} points do, such as "
                f"{points.x[outside][0].tolist()}",
                "Use a region of the problem's domain",
            )
    return sites


def take_share(condition: Condition, sites: Sites, processes: Processes) -> Sites:
    """This process's points; those of a sum that is squared are all the first one's."""
    if processes.is_single:
        return sites
    if condition.whole:
        return tuple(p.share(0 if processes.rank == 0 else len(p), 1) for p in sites)
    return tuple(p.share(processes.rank, processes.size) for p in sites)
