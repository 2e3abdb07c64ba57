"""Whether zero solves the conditions of a problem, and with it many other states."""

from __future__ import annotations

import torch

from ..discretization.residual import LocalResidual
from ..discretization.sites import draw_sites
from ..problem.conditions import Condition
from ..problem.problem import Problem

#: points at which a condition is evaluated
_POINTS = 64
#: seed of these, a prime that no run uses
_SEED = 15_487_469


def is_solved_by_zero(problem: Problem) -> bool:
    """Return True if all conditions hold for u = 0: nothing is prescribed but zero."""
    return all(_holds_for_zero(problem, condition) for condition in problem.conditions)


def has_many_states(problem: Problem) -> bool:
    """Return True for an eigenvalue problem: u = 0 solves all but an integral that normalizes u.

    Such a problem has an unknown coefficient and many solutions, ground state and excited ones.
    """
    integrals = [condition for condition in problem.conditions if condition.target]
    if not integrals or not problem.unknowns:
        return False
    others = [condition for condition in problem.conditions if condition not in integrals]
    return all(_holds_for_zero(problem, condition) for condition in others)


def _holds_for_zero(problem: Problem, condition: Condition) -> bool:
    """Return True if the residual of a condition vanishes where all fields do."""
    if not condition.vanishes:
        return True
    if condition.target is not None:
        return condition.target == 0
    count = condition.region(problem.domain).point_count or _POINTS
    sites = draw_sites(problem, condition, count, "sobol", _SEED)
    local = LocalResidual(problem, condition, sites)
    zeros = torch.zeros_like(sites[0].x[:, 0])
    return not bool(local(dict.fromkeys(local.keys, zeros)).any())
