"""A problem on a window of its time, and a network for it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ...maps import Scheme
from ..discretization.residual import compute_derivatives
from ..domains import SpaceTime
from ..problem.conditions import Condition, FieldAtTime
from ..problem.problem import Problem
from .modules import Rescaled


def restrict_to_window(
    problem: Problem, start: float, end: float, initial_values: FieldAtTime | None = None
) -> Problem:
    """Return the problem from time `start` to `end`.

    Args:
        problem: of the whole time.
        start, end: of the window.
        initial_values: gives all fields at the beginning of the window, or their time derivatives;
            None for the first window, which begins as the problem does.
    """
    assert isinstance(problem.domain, SpaceTime)
    conditions: list[Condition] = list(problem.conditions)
    if initial_values is not None:
        conditions = [c.with_initial_values(initial_values, problem.fields) for c in conditions]
    restricted = problem.restrict(problem.domain.slab(start, end), conditions)
    restricted.name += f", t = {start:.4g} to {end:.4g}"
    return restricted


def read_initial_values(previous: nn.Module, time_axis: int) -> FieldAtTime:
    """Return the fields of a network, or their time derivatives, as functions of points."""

    def evaluate(points: Tensor, order: int) -> Tensor:
        """Return ∂ᵗu of this order at points (N, d): (N, m)."""
        index = (time_axis,) * order
        scheme = Scheme.of([index])
        x = points.to(next(previous.parameters()))
        return compute_derivatives(previous, x[None], scheme)[scheme.position[index], 0]

    return evaluate


def can_be_cut_in_time(problem: Problem) -> bool:
    """Return True if the problem can be solved on one window of time after the other."""
    try:
        require_cut_in_time(problem)
    except PullbackError:
        return False
    return True


def require_cut_in_time(problem: Problem) -> SpaceTime:
    """Return the domain; raise if the problem cannot be cut in time."""
    domain = problem.domain
    if not isinstance(domain, SpaceTime):
        raise PullbackError(
            "Time slabs need time", f"the domain is {domain!r}", "Use SpaceTime(space, (t0, t1))"
        )
    for condition in problem.conditions:
        if condition.on is not None and not callable(condition.on):
            raise PullbackError(
                f"The condition {condition.name!r} names a region of the whole domain",
                "every slab has a domain of its own",
                "Give its region as a function of the domain: on=lambda domain: domain.face(...)",
            )
    for condition in problem.conditions:
        if condition.is_integral and condition.on is None:
            raise PullbackError(
                f"The condition {condition.name!r} is an integral over all time",
                "every slab has a domain of its own",
                "Give on=lambda domain: domain.final, so that it holds at the end of every slab",
            )
    _refuse_repeated(problem, domain)
    return domain


def _refuse_repeated(problem: Problem, domain: SpaceTime) -> None:
    """Raise if something else than an `Initial` holds at the first time: only that is handed on."""
    if not any(condition.is_initial for condition in problem.conditions):
        raise PullbackError(
            "Time slabs need an initial condition",
            "without one the slabs do not know of each other",
            "State the initial value by Initial(...), not by the network or another condition",
        )
    for condition in problem.conditions:
        if condition.is_initial or condition.is_equation:
            continue
        points = condition.region(domain).sample_sites(4)[0]
        if bool((points.x[:, -1] == domain.time[0]).all()):
            raise PullbackError(
                f"The condition {condition.name!r} holds at the first time",
                "every slab would repeat it at its own beginning",
                "State it by Initial(...), whose values are handed on from slab to slab",
            )


@torch.no_grad()
def rescale_time(network: nn.Module, restricted: Problem, *, keep_function: bool) -> nn.Module:
    """Return a copy of the network whose `Rescaled` maps the times of a window to [−1, 1].

    The old time is t = s·t' + c in terms of the new. If the function is to stay the same, the
    first layer W t + b becomes (sW)t' + (b + cW): its parameters are small again at late times.
    A network without such layers is copied as it is.
    """
    rescaled = copy.deepcopy(network)
    wrapper = next((m for m in rescaled.modules() if isinstance(m, Rescaled)), None)
    if wrapper is None:
        return rescaled
    start = float(restricted.domain.low[-1])
    end = float(restricted.domain.high[-1])
    low = float(wrapper.low[-1])
    high = float(wrapper.high[-1])
    wrapper.low[-1] = start
    wrapper.high[-1] = end
    if not keep_function:
        return rescaled
    first = next((m for m in wrapper.modules() if isinstance(m, nn.Linear)), None)
    if first is None or first.bias is None:
        return copy.deepcopy(network)
    time_column = first.weight[:, -1].clone()
    first.weight[:, -1].mul_((end - start) / (high - low))
    first.bias.add_(time_column * ((start + end - low - high) / (high - low)))
    x = restricted.domain.sample(64, "sobol", seed=0).x.to(first.weight)
    tolerance = torch.finfo(x.dtype).eps ** 0.5
    if torch.allclose(rescaled(x), network(x), rtol=tolerance):
        return rescaled
    return copy.deepcopy(network)
