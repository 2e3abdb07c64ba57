"""The points at which a condition is imposed, and this process's share of them."""

from __future__ import annotations

from ..._core.errors import PullbackError
from ..._core.processes import Processes
from ..domains import Domain, Region
from ..domains.sampling import Points, Sampler
from ..problem.conditions import Condition
from ..problem.problem import Problem

#: the points of a condition; those of a periodic one are on two faces, in the same order
Sites = tuple[Points, ...]


def draw_sites(
    problem: Problem, condition: Condition, n: int, sampler: str | Sampler, seed: int
) -> Sites:
    """Return about n points of the condition's region; raise if they leave the domain.

    Those of an integral are the nodes of a quadrature, which has no seed.
    """
    region = condition.region(problem.domain)
    if tuple(region.names) != tuple(problem.domain.names):
        raise PullbackError(
            f"The region of {condition.name!r} does not fit the domain",
            f"its coordinates are {region.names}, the domain's {problem.domain.names}",
            "Use a boundary, face or part of the problem's domain",
        )
    if condition.is_integral and isinstance(region, Region):
        sites: Sites = (region.quadrature(n),)
    else:
        sites = region.sample_sites(n, sampler, seed=seed)
    for points in sites:
        _refuse_outside(points, condition, problem.domain)
    return sites


def _refuse_outside(points: Points, condition: Condition, domain: Domain) -> None:
    outside = ~domain.contains(points.x)
    if bool(outside.any()):
        raise PullbackError(
            f"The condition {condition.name!r} lies outside the domain",
            f"{int(outside.sum())} of {len(points)} points do, such as "
            f"{points.x[outside][0].tolist()}",
            "Use a region of the problem's domain",
        )


def take_share(condition: Condition, sites: Sites, processes: Processes) -> Sites:
    """Return the points of this process; those of an integral are all the first one's."""
    if processes.is_single:
        return sites
    if not condition.is_integral:
        return tuple(points.share(processes.rank, processes.size) for points in sites)
    if processes.rank == 0:
        return tuple(points.share(0, 1) for points in sites)
    return tuple(points.share(len(points), 1) for points in sites)
