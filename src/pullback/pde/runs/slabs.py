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
from ..judgement.history import History
from ..judgement.solution import PDESolution
from ..judgement.stop import Stop, StopReason
from ..judgement.verdict import Outcome, PDEVerdict
from ..networks.modules import Slabs
from ..problem.problem import Problem
from .run import Run
from .settings import Settings
from .time_windows import MarchControl, TimeWindow, TimeWindows, find_time_windows


class SlabMarch:
    """Solves slab after slab; each network starts from the last one.

    A number of slabs are equally long, and inner times say where others end. "auto" controls their
    lengths as integrators of ordinary differential equations do theirs. The first slab is the whole
    time. One that does not converge is halved, as long as two halvings halve its residuals. It is
    given up after a quarter of its steps where these are above 1 % of their terms. After a quick
    slab the next is twice as long.

    Args:
        problem, network: of the whole time.
        checkpoint: the file that slab i saves to has i behind this name.
        settings: of every slab; the budget is that of all of them.
        windows: of time; by default each has a copy of the network.
    """

    def __init__(
        self,
        problem: Problem,
        network: nn.Module,
        checkpoint: str | Path | None,
        settings: Settings,
        windows: TimeWindows | None = None,
    ) -> None:
        self._windows = windows or find_time_windows(problem)
        self._control = self._windows.control
        self._problem = problem
        self._network = network
        self._checkpoint = checkpoint
        self._settings = self._windows.adapt(settings)
        self._window: TimeWindow | None = None
        self._edges = [self._windows.start]
        self._networks: list[nn.Module] = []
        self._verdicts: list[PDEVerdict] = []
        self._last: PDESolution | None = None
        self._planned_count: int | None = None
        self._history = History()
        self._spent = 0.0
        self._attempts = 0

    def solve(
        self, slabs: int | str | Sequence[float], *, is_whole_hopeless: bool = False
    ) -> PDESolution:
        """Solve so many slabs, those that end at given times, or "auto".

        Args:
            slabs: a number, inner edges, or "auto".
            is_whole_hopeless: whether the whole time is not tried first with "auto".
        """
        if isinstance(slabs, str):
            first_share = self._control.first_share if is_whole_hopeless else 1.0
            self._solve_adaptively(first_share)
        else:
            self._solve_up_to(_place_edges(slabs, self._windows.start, self._windows.end))
        return self._join_slabs()

    def _solve_up_to(self, edges: list[float]) -> None:
        """Solve slabs that end at these times."""
        self._planned_count = len(edges)
        for i, end in enumerate(edges):
            run = self._begin_slab(end, slabs_later=len(edges) - 1 - i)
            if self._append_slab(run, run.advance(), end):
                break

    def _solve_adaptively(self, first_share: float) -> None:
        """Solve slabs that are as long as they converge."""
        end = self._windows.end
        duration = end - self._windows.start
        length = first_share * duration
        shortest = self._control.shortest_share * duration
        residuals: list[float] = []  # of the attempts at this slab
        while (time_left := end - self._edges[-1]) > 0:
            length = min(length, time_left)
            if self._has_spent_budget:
                length = time_left
            until = end if length == time_left else self._edges[-1] + length
            run = self._begin_slab(until, slabs_later=time_left / length - 1)
            solution = run.advance(self._control.look_share)
            residuals.append(_read_early_residual(run, solution))
            if _is_halving_useless(residuals, self._control):
                shortest = length
            is_shortest = length <= 1.001 * shortest
            if is_shortest or not residuals[-1] > self._control.hopeless_residual:
                solution = run.advance()
            if not is_shortest and not self._is_good_enough(run, solution):
                self._spent += run.seconds_spent
                length /= 2
                continue
            residuals.clear()
            if self._append_slab(run, solution, until):
                break
            if self._was_easy(run, solution):
                length *= 2

    def _was_easy(self, run: Run, solution: PDESolution) -> bool:
        """Return True if a slab took few steps and has small residuals."""
        most_steps = self._control.easy_share * self._settings.limits.steps
        is_accurate = solution.verdict.relative <= self._control.easy_residual
        return len(run.history) < most_steps and is_accurate

    def _is_good_enough(self, run: Run, solution: PDESolution) -> bool:
        """Return True if a slab converged, or nothing is left to do it better with."""
        verdict = solution.verdict
        if self._ends_march(solution) or self._exhausts_budget(run):
            return True
        accurate_residual = self._control.accurate_residual
        if accurate_residual is not None:
            return verdict.relative <= max(accurate_residual, verdict.exact)
        is_within_tolerance = verdict.stop.reason is StopReason.TOLERANCE_REACHED
        return verdict.name in {Outcome.CONVERGED, Outcome.UNJUDGED} or is_within_tolerance

    @property
    def seconds_spent(self) -> float:
        """Seconds of all steps, those of slabs that were given up too."""
        return self._spent

    def _exhausts_budget(self, run: Run) -> bool:
        """Return True if the budget of all slabs is spent with this one."""
        return self._is_beyond_budget(self._spent + run.seconds_spent)

    @property
    def _has_spent_budget(self) -> bool:
        """Return True if nothing of the budget is left for the next slab."""
        return self._is_beyond_budget(self._spent)

    def _is_beyond_budget(self, seconds: float) -> bool:
        """Return True if the budget of all slabs allows no more seconds than these.

        A run with a checkpoint goes on when called again, and decides as if never interrupted.
        """
        budget = self._settings.limits.budget
        if budget is None or self._checkpoint is not None:
            return False
        return seconds >= budget

    def _begin_slab(self, end: float, slabs_later: float) -> Run:
        """Return a run over the next slab, which shares the budget that is left with later ones."""
        previous = self._networks[-1] if self._networks else None
        window = self._windows.open(self._edges[-1], end, self._network, previous)
        self._window = window
        path = None
        if self._checkpoint is not None:
            path = Path(f"{self._checkpoint}.{self._attempts}")
        self._attempts += 1
        settings = self._share_budget(slabs_later)
        if end < self._windows.end:
            settings = settings.with_smaller_tolerance(self._control.earlier_tolerance)
        return Run(window.problem, window.network, settings, path)

    def _share_budget(self, slabs_later: float) -> Settings:
        """Return the settings of the next slab.

        With a checkpoint it may use all that is left, since the run goes on when called again;
        otherwise all slabs must get to their ends now.
        """
        budget = self._settings.limits.budget
        if budget is None:
            return self._settings
        left = max(0.0, budget - self._spent)
        if self._checkpoint is not None or not self._control.shares_budget:
            return self._settings.with_budget(left)
        weight = 1.0
        if not self._networks:
            weight = self._control.first_window_budget
        return self._settings.with_budget(left * weight / (weight + slabs_later))

    def _append_slab(self, run: Run, solution: PDESolution, end: float) -> bool:
        """Add a slab that ends at this time; return True if the march ends early with it.

        Its network then stands for all later times, of which the user is warned.
        """
        assert self._window is not None
        self._networks.append(self._window.restore_units())
        self._verdicts.append(solution.verdict)
        self._edges.append(end)
        self._spent += run.seconds_spent
        self._history = self._history.join(solution.history)
        self._last = solution
        if not self._ends_march(solution) or end >= self._windows.end:
            return False
        message = f"{self._problem.name} is solved up to t = {end:.4g} alone"
        if solution.verdict.stop.reason is StopReason.BUDGET_SPENT:
            message += ", and extrapolated beyond. Call again to go on from the checkpoint"
        if run.is_main_process:
            warnings.warn(message, stacklevel=5)
        self._edges[-1] = self._windows.end
        return True

    def _ends_march(self, solution: PDESolution) -> bool:
        """Return True if a callback ends all slabs, or a budget from which another call goes on."""
        reason = solution.verdict.stop.reason
        if reason is StopReason.CALLBACK:
            return True
        return reason is StopReason.BUDGET_SPENT and self._checkpoint is not None

    def _join_slabs(self) -> PDESolution:
        """Return the slabs as one solution."""
        last = self._last
        networks = self._networks
        assert last is not None
        edges = torch.tensor(self._edges, dtype=torch.float64)
        verdict = summarize_verdicts(
            self._verdicts,
            self._planned_count or len(networks),
            ended=self._ends_march(last),
        )
        whole_budget = self._settings.limits.budget
        verdict = replace(verdict, stop=verdict.stop.with_whole_budget(whole_budget))
        is_solved = verdict.name is Outcome.CONVERGED and not self._has_spent_budget
        if self._control.accurate_residual is not None and is_solved:
            verdict = replace(verdict, stop=Stop(StopReason.ALL_SLABS, len(networks)))
        return PDESolution(
            self._problem,
            Slabs(networks, edges.to(next(networks[0].parameters()))),
            self._history,
            unknowns=last.unknowns,
            verdict=verdict,
            weights=last.weights,
            loss=last.loss,
            nested=last.nested,
        )


def _read_early_residual(run: Run, solution: PDESolution) -> float:
    """Return the relative residuals of a slab when it was first looked at."""
    if run.early_residual is None:
        return solution.verdict.relative
    return run.early_residual


def _is_halving_useless(residuals: list[float], control: MarchControl) -> bool:
    """Return True if several halvings of a slab did not halve its residuals."""
    count = control.halvings_compared
    if len(residuals) <= count:
        return False
    return residuals[-1] > residuals[-1 - count] / control.useful_fall


def _place_edges(slabs: int | Sequence[float], start: float, end: float) -> list[float]:
    """Return the times at which slabs end."""
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


def summarize_verdicts(verdicts: list[PDEVerdict], count: int, *, ended: bool) -> PDEVerdict:
    """Return the verdict on the slab that went worst.

    It is that on the last slab if the march ended before all `count` slabs were solved.
    """
    severity = list(Outcome)
    chosen = len(verdicts) - 1
    if len(verdicts) == count and not ended:
        ranks = [(severity.index(verdict.name), verdict.relative) for verdict in verdicts]
        chosen = ranks.index(max(ranks))
    verdict = verdicts[chosen]
    return replace(verdict, stop=replace(verdict.stop, slab=chosen + 1, slabs=count))
