"""A problem on a window of its time, and a network for it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ...maps import Scheme
from ..discretization.residual import compute_derivatives
from ..domains import SpaceTime
from ..problem.conditions import Condition
from ..problem.problem import Problem
from .modules import Rescaled


def restrict_to_window(
    problem: Problem, start: float, end: float, previous: nn.Module | None = None
) -> Problem:
    """Return the problem from time `start` to `end`.

    Args:
        problem: of the whole time.
        start, end: of the window.
        previous: the network of the window before, which gives the initial values; None for the
            first window.
    """
    assert isinstance(problem.domain, SpaceTime)
    conditions = [continue_from(c, problem, previous) for c in problem.conditions]
    restricted = problem.restrict(problem.domain.slab(start, end), conditions)
    restricted.name += f", t = {start:.4g} to {end:.4g}"
    return restricted


def continue_from(condition: Condition, problem: Problem, previous: nn.Module | None) -> Condition:
    """Return the condition with initial values of a network; others than initial ones stay."""
    if previous is None:
        return condition
    time_axis = problem.domain.dim - 1

    def evaluate(points: Tensor, order: int) -> Tensor:
        """Return ∂ᵗu of this order at points (N, d): (N, m)."""
        index = (time_axis,) * order
        scheme = Scheme.of([index])
        x = points.to(next(previous.parameters()))
        return compute_derivatives(previous, x[None], scheme)[scheme.position[index], 0]

    return condition.with_initial_values(evaluate, problem.fields)


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
    assert isinstance(restricted.domain, SpaceTime)
    start, end = restricted.domain.time
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
