"""Long times in pieces: each slab starts from where the last one ended."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from ..maps.jets import Jet, Scheme, Unsupported, nested
from .conditions import Condition, Equation, Initial
from .domains import SpaceTime
from .history import History
from .networks import Slabs
from .problem import Problem
from .run import Run
from .settings import Settings
from .solution import Solution
from .verdict import Verdict


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
    whole = [c.name for c in problem.conditions if c.whole and c.on is None]
    if whole:
        raise PullbackError(
            f"The condition {whole[0]!r} is an integral over all time",
            "every slab has a domain of its own",
            "Give on=lambda domain: domain.final, so that it holds at the end of every slab",
        )
    _refuse_repeated(problem, domain)
    edges = torch.linspace(*domain.time, count + 1, dtype=torch.float64)
    networks: list[nn.Module] = []
    verdicts: list[Verdict] = []
    history, budget, spent = History(), settings.budget, 0.0
    solved = None
    for i in range(count):
        part = domain.slab(float(edges[i]), float(edges[i + 1]))
        conditions = [
            _continued(c, problem, networks[-1] if networks else None) for c in problem.conditions
        ]
        here = copy.deepcopy(networks[-1] if networks else network)
        path = None if checkpoint is None else Path(f"{checkpoint}.{i}")
        if budget is not None:
            # a checkpoint's run goes on when called again; another must get to the end now
            share = 1 if checkpoint is not None else count - i
            settings = replace(settings, budget=max(0.0, budget - spent) / share)
        run = Run(problem.restricted(part, conditions), here, settings, path)
        solved = run.go()
        networks.append(here)
        verdicts.append(solved.verdict)
        spent += run.history.spent - run.begun
        history = history.joined(solved.history)
        reason = solved.verdict.reason
        early = reason.startswith("the budget") and checkpoint is not None
        if i + 1 < count and (early or reason.startswith("a callback")):
            said = f"{problem.name} is solved up to t = {float(edges[i + 1]):.4g} alone"
            if early:
                said += ", and extrapolated beyond. Call again to go on from the checkpoint"
            if run.first:
                warnings.warn(said, stacklevel=3)
            edges = torch.cat([edges[: i + 1], edges[-1:]])
            break
    assert solved is not None
    whole = Slabs(networks, edges.to(next(networks[0].parameters())))
    return Solution(
        problem,
        whole,
        history,
        unknowns=solved.unknowns,
        verdict=_overall(verdicts, count),
        weights=solved.weights,
        loss=solved.loss,
        nested=solved.nested,
    )


def _overall(verdicts: list[Verdict], count: int) -> Verdict:
    """The verdict on the slab that went worst, or on the last one where the end was not reached."""
    order = ["", "converged", "unfinished", "stalled", "overfitted"]
    at = len(verdicts) - 1
    if len(verdicts) == count and not verdicts[-1].reason.startswith(("the budget", "a callback")):
        at = max(range(count), key=lambda i: (order.index(verdicts[i].name), i))
    found = verdicts[at]
    return replace(found, reason=f"{found.reason} in slab {at + 1} of {count}")


def _refuse_repeated(problem: Problem, domain: SpaceTime) -> None:
    """What holds at the first time must be an `Initial`: only that is handed on."""
    if not any(isinstance(c, Initial) for c in problem.conditions):
        raise PullbackError(
            "Time slabs need an initial condition",
            "without one the slabs do not know of each other",
            "State the initial value by Initial(...), not by the network or another condition",
        )
    for c in problem.conditions:
        if isinstance(c, (Initial, Equation)):
            continue
        found = c.region(domain).sample(4)
        points = found[0] if isinstance(found, tuple) else found
        if bool((points.x[:, -1] == domain.time[0]).all()):
            raise PullbackError(
                f"The condition {c.name!r} holds at the first time",
                "every slab would repeat it at its own beginning",
                "State it by Initial(...), whose values are handed on from slab to slab",
            )


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
