"""Long times in pieces: each slab starts from where the last one ended."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from ..._core.errors import PullbackError
from ..domains import SpaceTime
from ..judgement.history import History
from ..judgement.solution import PDESolution
from ..judgement.verdict import PDEVerdict
from ..networks.modules import Slabs
from ..networks.windows import rescale_time, restrict_to_window
from ..problem.conditions import Equation, Initial
from ..problem.problem import Problem
from .run import Run
from .settings import Settings

_SHORTEST = 1 / 16  # of the whole time: slabs that are not halved any more
_LOOK = 0.25  # of its steps and its budget, after which a slab is looked at
_HOPELESS = 1e-2  # of their terms: residuals at which it is given up then
_COLD = 2.0  # times the budget of a later slab: the first begins with random parameters


class SlabMarch:
    """Slab after slab; each network starts from the last one.

    A number of slabs are equally long, and inner times say where others end. "auto" controls their
    lengths as integrators of ordinary differential equations do theirs. The first slab is the whole
    time. One that does not converge is halved, as long as two halvings halve its residuals. It is
    given up after a quarter of its steps where these are above 1 % of their terms. After a quick
    slab the next is twice as long.

    Args:
        problem, network: of the whole time.
        checkpoint: the file that slab i saves to has i behind this name.
        settings: of every slab; the budget is that of all of them.
    """

    def __init__(
        self,
        problem: Problem,
        network: nn.Module,
        checkpoint: str | Path | None,
        settings: Settings,
    ) -> None:
        self.domain = _checked(problem)
        self._problem, self._network = problem, network
        self._checkpoint, self._settings = checkpoint, settings
        self._edges = [self.domain.time[0]]
        self._networks: list[nn.Module] = []
        self._verdicts: list[PDEVerdict] = []
        self._last: PDESolution | None = None
        self._count = 0
        self._history, self._spent, self._attempts = History(), 0.0, 0

    def solve(self, slabs: int | str | Sequence[float]) -> PDESolution:
        """Solve so many slabs, those that end at given times, or "auto"."""
        if isinstance(slabs, str):
            self._adapt()
        else:
            edges = _edges(slabs, *self.domain.time)
            self._count = len(edges)
            for i, end in enumerate(edges):
                run = self._begin(end, len(edges) - 1 - i)
                if self._keep(run, run.go(), end):
                    break
        return self._joined()

    def _adapt(self) -> None:
        """Slabs as long as they converge."""
        start, end = self.domain.time
        length, shortest = end - start, _SHORTEST * (end - start)
        looks: list[float] = []  # residuals of the attempts at this slab
        while (left := end - self._edges[-1]) > 0:
            length = min(length, left)
            until = end if length == left else self._edges[-1] + length
            run = self._begin(until, left / length - 1)
            solved = run.go(_LOOK)
            looks.append(solved.verdict.relative if run.looked is None else run.looked)
            if len(looks) > 2 and looks[-1] > looks[-3] / 2:  # a shorter one is no easier
                shortest = length
            short = length <= 1.001 * shortest
            if short or not looks[-1] > _HOPELESS:
                solved = run.go()
            if not short and not self._good_enough(run, solved):
                self._spent += run.history.spent - run.begun
                length /= 2
                continue
            looks.clear()
            if self._keep(run, solved, until):
                break
            length *= 2 if len(run.history) < self._settings.steps / 2 else 1

    def _good_enough(self, run: Run, solved: PDESolution) -> bool:
        """Whether a slab is kept: it converged, or nothing is left to do it better with."""
        verdict, budget = solved.verdict, self._settings.budget
        spent = self._spent + run.history.spent - run.begun
        # a checkpoint's run goes on when called again, and decides as if never interrupted
        poor = budget is not None and self._checkpoint is None and spent >= budget
        ended = poor or bool(_ended(solved, self._checkpoint))
        return ended or verdict.name in ("converged", "") or verdict.reason.startswith("the tol")

    def _begin(self, end: float, later: float) -> Run:
        """A run over the next slab, which shares what is left of the budget with so many later."""
        start, before = self._edges[-1], self._networks[-1] if self._networks else None
        part = restrict_to_window(self._problem, start, end, before)
        network = rescale_time(before or self._network, part, same=before is not None)
        path = None if self._checkpoint is None else Path(f"{self._checkpoint}.{self._attempts}")
        self._attempts += 1
        settings, budget = self._settings, self._settings.budget
        if budget is not None:
            own = _COLD if before is None else 1
            # a checkpoint's run goes on when called again; another must get to the end now
            share = own / (own + later) if path is None else 1
            settings = replace(settings, budget=max(0.0, budget - self._spent) * share)
        return Run(part, network, settings, path)

    def _keep(self, run: Run, solved: PDESolution, end: float) -> bool:
        """Add a slab; whether the march ends here."""
        self._networks.append(run.network)
        self._verdicts.append(solved.verdict)
        self._edges.append(end)
        self._spent += run.history.spent - run.begun
        self._history, self._last = self._history.joined(solved.history), solved
        why = _ended(solved, self._checkpoint)
        if not why or end >= self.domain.time[1]:
            return False
        said = f"{self._problem.name} is solved up to t = {end:.4g} alone"
        if why == "budget":
            said += ", and extrapolated beyond. Call again to go on from the checkpoint"
        if run.first:
            warnings.warn(said, stacklevel=5)
        self._edges[-1] = self.domain.time[1]
        return True

    def _joined(self) -> PDESolution:
        """The slabs together."""
        solved, networks = self._last, self._networks
        assert solved is not None
        edges = torch.tensor(self._edges, dtype=torch.float64)
        return PDESolution(
            self._problem,
            Slabs(networks, edges.to(next(networks[0].parameters()))),
            self._history,
            unknowns=solved.unknowns,
            verdict=summarize_verdicts(
                self._verdicts, self._count or len(networks), bool(_ended(solved, self._checkpoint))
            ),
            weights=solved.weights,
            loss=solved.loss,
            nested=solved.nested,
        )


def _edges(slabs: int | Sequence[float], start: float, end: float) -> list[float]:
    """The times at which slabs end."""
    if isinstance(slabs, int):
        return torch.linspace(start, end, slabs + 1, dtype=torch.float64).tolist()[1:]
    edges = [*map(float, slabs), end]
    if not all(a < b for a, b in pairwise([start, *edges])):
        raise PullbackError(
            "The slabs are not in order",
            f"they end at {edges} in the time from {start:g} to {end:g}",
            "Give increasing times within the domain's, its ends not among them",
        )
    return edges


def _ended(solved: PDESolution, checkpoint: str | Path | None) -> str:
    """Whether a callback or a budget that another call goes on from ends all slabs, or nothing."""
    reason = solved.verdict.reason
    if reason.startswith("a callback"):
        return "callback"
    return "budget" if checkpoint is not None and reason.startswith("the budget") else ""


def _checked(problem: Problem) -> SpaceTime:
    """The domain of a problem that can be cut in time."""
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
    return domain


def summarize_verdicts(verdicts: list[PDEVerdict], count: int, ended: bool) -> PDEVerdict:
    """The verdict on the slab that went worst, or on the last one where the march ended early."""
    order = ["", "converged", "unfinished", "stalled", "overfitted"]
    at = len(verdicts) - 1
    if len(verdicts) == count and not ended:
        at = max(range(count), key=lambda i: (order.index(verdicts[i].name), verdicts[i].relative))
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
