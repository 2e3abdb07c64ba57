"""Whether zero solves the conditions of a problem; eigenvalue problems and their states."""

from __future__ import annotations

import math

import torch

from ..problem.conditions import Condition
from ..problem.problem import Problem
from .residual import LocalResidual
from .seeds import SEEDS
from .sites import draw_sites

#: points at which a condition is evaluated
_POINTS = 64
#: the order of the Laplacian
_SECOND_ORDER = 2


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


def has_ground_state_without_nodes(problem: Problem) -> bool:
    """Return True if the lowest state of an eigenvalue problem has one sign.

    That holds for one field and equations of second order, −Δu + Vu = λu with or without a term
    u³ (Courant and Hilbert, Methods of Mathematical Physics I, chapter VI). It is False where an
    integral of value zero keeps a state orthogonal to others.
    """
    if len(problem.fields) > 1 or not has_many_states(problem):
        return False
    for condition in problem.conditions:
        if condition.target == 0:
            return False
        if condition.is_equation and _find_order(problem, condition) > _SECOND_ORDER:
            return False
    return True


def find_constant_state(problem: Problem) -> float:
    """Return the constant c for which a normalizing integral of a power of u has its value.

    It is 1 where there is none. A network for an eigenvalue problem begins with it.
    """
    for condition in problem.conditions:
        if not condition.target:
            continue
        one = _integrate_constant(problem, condition, 1.0)
        two = _integrate_constant(problem, condition, 2.0)
        if one * condition.target > 0 and two / one > 1:
            return (condition.target / one) ** (1 / math.log2(two / one))
    return 1.0


def _integrate_constant(problem: Problem, integral: Condition, value: float) -> float:
    """Return an integral of fields that all have a constant value."""
    sites = draw_sites(problem, integral, _POINTS, "sobol", SEEDS.inspection)
    local = LocalResidual(problem, integral, sites)
    constants = {}
    for key in local.keys:
        constant = value if key[-1] == () else 0.0
        constants[key] = torch.full_like(sites[0].x[:, 0], constant)
    return float((sites[0].weights @ local(constants)).sum())


def _find_order(problem: Problem, equation: Condition) -> int:
    """Return the order of an equation's highest derivative."""
    sites = draw_sites(problem, equation, _POINTS, "sobol", SEEDS.inspection)
    return LocalResidual(problem, equation, sites).order


def _holds_for_zero(problem: Problem, condition: Condition) -> bool:
    """Return True if a condition holds for u = 0.

    Energies and priors, which no solution meets exactly, do not speak against it.
    """
    if not condition.holds_exactly:
        return True
    if condition.target is not None:
        return condition.target == 0
    count = condition.region(problem.domain).point_count or _POINTS
    sites = draw_sites(problem, condition, count, "sobol", SEEDS.inspection)
    local = LocalResidual(problem, condition, sites)
    zeros = torch.zeros_like(sites[0].x[:, 0])
    return not bool(local(dict.fromkeys(local.keys, zeros)).any())
