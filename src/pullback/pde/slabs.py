"""Long times in pieces: each slab starts from where the last one ended."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from ..maps.jets import Jet, Scheme, Unsupported, nested
from .conditions import Condition, Initial
from .domains import SpaceTime
from .history import History
from .problem import Problem
from .run import Run
from .settings import Settings
from .solution import Solution


class Slabs(nn.Module):
    """One network per slab of time; the last coordinate says which."""

    edges: Tensor

    def __init__(self, networks: list[nn.Module], edges: Tensor) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        which = torch.bucketize(x[:, -1].contiguous(), self.edges[1:-1].to(x.dtype))
        out = self.networks[0](x)
        for i, network in enumerate(self.networks):
            if i:
                out = torch.where((which == i)[:, None], network(x), out)
        return out


def march(
    problem: Problem,
    network: nn.Module,
    count: int,
    checkpoint: str | Path | None,
    settings: Settings,
) -> Solution:
    """Solve slab after slab; each network starts from the last one."""
    domain = problem.domain
    if not isinstance(domain, SpaceTime):
        raise PullbackError(
            "Time slabs need time", f"the domain is {domain!r}", "Use SpaceTime(space, (t0, t1))"
        )
    explicit = [c.name for c in problem.conditions if c.on is not None and not callable(c.on)]
    if explicit:
        raise PullbackError(
            f"The condition {explicit[0]!r} names a region of the whole domain",
            "every slab has a domain of its own",
            "Give its region as a function of the domain: on=lambda domain: domain.face(...)",
        )
    edges = torch.linspace(*domain.time, count + 1, dtype=torch.float64)
    networks: list[nn.Module] = []
    history, stopped, budget, spent = History(), "", settings.budget, 0.0
    unknowns: dict[str, float] = {}
    for i in range(count):
        part = domain.slab(float(edges[i]), float(edges[i + 1]))
        conditions = [
            _continued(c, problem, networks[-1] if networks else None) for c in problem.conditions
        ]
        here = copy.deepcopy(networks[-1] if networks else network)
        path = None if checkpoint is None else Path(f"{checkpoint}.{i}")
        if budget is not None:
            settings = replace(settings, budget=max(0.0, budget - spent))
        run = Run(problem.restricted(part, conditions), here, settings, path)
        solved = run.go()
        networks.append(here)
        spent += run.history.spent - run.begun
        history, stopped = history.joined(solved.history), solved.stopped
        unknowns = solved.unknowns
        if stopped.startswith(("the budget", "a callback")):
            edges = torch.cat([edges[: i + 1], edges[-1:]])
            break
    whole = Slabs(networks, edges.to(next(networks[0].parameters())))
    return Solution(problem, whole, history, unknowns=unknowns, stopped=stopped)


def _continued(condition: Condition, problem: Problem, before: nn.Module | None) -> Condition:
    """An initial condition whose values are those of the last slab at its end."""
    if before is None or not isinstance(condition, Initial):
        return condition
    at = problem.fields.index(condition.field) if condition.field else 0
    time = problem.domain.dim - 1
    out = copy.copy(condition)

    @torch.no_grad()
    def ended(points: Tensor, order: int) -> Tensor:
        x = points.to(next(before.parameters()))
        if not order:
            return before(x)[:, at]
        scheme = Scheme.of([(time,)])
        try:
            found = before(Jet.input(x, scheme)).stacked()
        except Unsupported:
            found = nested(before, x, scheme)
        return found[scheme.position[time,], :, at]

    out.value = lambda points: ended(points, 0)
    if condition.velocity is not None:
        out.velocity = lambda points: ended(points, 1)
    return out
