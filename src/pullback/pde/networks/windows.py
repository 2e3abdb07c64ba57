"""A problem on a part of its time, and a network for it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ...maps import Scheme
from ..discretization.residual import derivatives
from ..domains import SpaceTime
from ..problem.conditions import Condition, Initial
from ..problem.problem import Problem
from .modules import Rescaled


def restrict_to_window(
    problem: Problem, start: float, end: float, before: nn.Module | None = None
) -> Problem:
    """The problem from `start` to `end`; `before` is the last slab's network, or None."""
    assert isinstance(problem.domain, SpaceTime)
    conditions = [continue_from_slab(c, problem, before) for c in problem.conditions]
    part = problem.restricted(problem.domain.slab(start, end), conditions)
    part.name += f", t = {start:.4g} to {end:.4g}"
    return part


def continue_from_slab(
    condition: Condition, problem: Problem, before: nn.Module | None
) -> Condition:
    """An initial condition whose values are those of the last slab at its end."""
    if before is None or not isinstance(condition, Initial):
        return condition
    at = problem.fields.index(condition.field) if condition.field else 0
    out = copy.copy(condition)

    def ended(points: Tensor, order: int) -> Tensor:
        index = (problem.domain.dim - 1,) * order
        scheme, x = Scheme.of([index]), points.to(next(before.parameters()))
        return derivatives(before, x[None], scheme)[scheme.position[index], 0, :, at]

    out.value = lambda points: ended(points, 0)
    if condition.velocity is not None:
        out.velocity = lambda points: ended(points, 1)
    return out


@torch.no_grad()
def rescale_time(network: nn.Module, part: Problem, *, same: bool) -> nn.Module:
    """A copy of the network whose `Rescaled` maps the times of a part to [−1, 1].

    The old time is t = s·t' + c in terms of the new. Where the function is to stay the same, the
    first layer W t + b becomes (sW)t' + (b + cW): its parameters are small again at late times.
    A network without such layers is copied as it is.
    """
    out = copy.deepcopy(network)
    scaled = next((m for m in out.modules() if isinstance(m, Rescaled)), None)
    if scaled is None:
        return out
    assert isinstance(part.domain, SpaceTime)
    start, end = part.domain.time
    low, high = float(scaled.low[-1]), float(scaled.high[-1])
    scaled.low[-1], scaled.high[-1] = start, end
    if not same:
        return out
    first = next((m for m in scaled.modules() if isinstance(m, nn.Linear)), None)
    if first is None or first.bias is None:
        return copy.deepcopy(network)
    column = first.weight[:, -1].clone()
    first.weight[:, -1].mul_((end - start) / (high - low))
    first.bias.add_(column * ((start + end - low - high) / (high - low)))
    x = part.domain.sample(64, "sobol", seed=0).x.to(first.weight)
    kept = torch.allclose(out(x), network(x), rtol=torch.finfo(x.dtype).eps ** 0.5)
    return out if kept else copy.deepcopy(network)
