"""Which networks are tried, and for how long, where the first one does not get on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..._core.errors import PullbackError
from ..judgement.integration import IntegrationFailed
from ..judgement.solution import PDESolution
from ..judgement.stop import StopReason
from ..judgement.verdict import Outcome
from ..networks.field_sizes import choose_units
from ..problem.problem import Problem
from .perturbation import enlarge_outputs, reinitialize
from .run import Run
from .settings import Settings
from .slabs import SlabMarch
from .state_windows import find_state_windows
from .time_windows import can_march


@dataclass(frozen=True)
class Candidate:
    """How a network begins that is tried beside the given one.

    Attributes:
        words: what the verdict calls it.
        gain: factor of the weights of the first layer; sharp fronts want large ones.
    """

    words: str
    gain: float


@dataclass(frozen=True)
class StrategyThresholds:
    """When a network creeps, and what is spent on others.

    Measured on 20 seeds of Burgers' equation with 300 steps, of which five are stuck: at step 75 or
    120 the pace of their loss at fresh points would divide residuals by 1.0 to 1.4 until the end,
    that of a network which took 300 steps to an error of 0.04 by 2.0, that of fourteen others by
    3.8 or more. One slow seed, which is solved at the end, is replaced too. After 30 steps the two
    kinds do not differ. Allen–Cahn, Poisson 5D and heat 4+1D are far beyond that.

    Attributes:
        look_shares: of the steps and the budget, after which a network is looked at; the first is
            step 75 there, the others are for networks that get stuck later.
        early_share: the same for ordinary differential equations, whose slabs of time are cheap.
        fewest_steps: of a run that is looked at; shorter ones are over too soon.
        looked_steps: at least so many are taken before a look. If a small budget allows fewer,
            nothing can be said.
        pace_steps: over which the fall of the loss at fresh points is measured; refinements move
            points every thirty or so, and the loss at these jumps.
        promising_residual: relative residuals of a network that gets on.
        creeping_ratio: by which residuals would be multiplied in the steps that are left, at the
            present pace; a network with large ones that are not divided by 2.5 creeps.
        falling_residual, promising_fall: residuals and falls of an ordinary differential equation
            that is not cut in time yet; near 1 a falling loss may lead to the trivial solution.
        useful_ratio: of residuals, below which another network replaces the first one: one half,
            since residuals that are nearly alike say nothing about the end.
        solve_share: of the budget, that the last network must be left: most networks that get on
            need 150 of 300 steps.
        spent_share: of the steps, that all networks may have taken before another one is tried; a
            solve then takes about twice its steps at most.
        march_steps_share: of the steps, that a slab of time may take.
        march_reserve: of the budget, that is left for slabs of an ordinary differential equation:
            a tenth of a minute's budget was enough for all but one of nine, which took half.
        seed_stride: between the seeds of two candidates, a prime other than that of restarts.
    """

    look_shares: tuple[float, ...] = (0.25, 0.4, 0.6)
    early_share: float = 0.1
    fewest_steps: int = 100
    looked_steps: int = 25
    pace_steps: int = 30
    promising_residual: float = 1e-2
    creeping_ratio: float = 0.4
    falling_residual: float = 0.1
    promising_fall: float = 0.05
    useful_ratio: float = 0.5
    solve_share: float = 0.4
    spent_share: float = 1.0
    march_steps_share: float = 0.25
    march_reserve: float = 0.3
    seed_stride: int = 6151


THRESHOLDS = StrategyThresholds()
#: networks beside the given one
CANDIDATES = (
    Candidate("other initial values", 1.0),
    Candidate("other initial values again", 1.0),
    Candidate("a first layer twice as steep", 2.0),
)
#: what the verdict calls a march in time
_SLABS = "slabs of time"


class Attempt:
    """A network that is tried.

    Attributes:
        words: what the verdict calls it.
        run: its solve in progress.
        solution: what it has come to.
    """

    def __init__(self, words: str, run: Run) -> None:
        self.words = words
        self.run = run
        self.solution: PDESolution | None = None

    def get_solution(self) -> PDESolution:
        """Return the solution of the last call of `advance`."""
        assert self.solution is not None
        return self.solution

    def advance(self, share: float, seconds_elsewhere: float = 0.0) -> PDESolution:
        """Step up to a share of the steps and the budget, of which others took some seconds."""
        self.solution = self.run.advance(share, seconds_elsewhere=seconds_elsewhere)
        return self.solution

    @property
    def residual(self) -> float:
        """The largest residual at fresh points, as a share of its terms.

        The loss may be small where a condition of small values is not met at all.
        """
        return self.get_solution().verdict.relative

    @property
    def is_promising(self) -> bool:
        """Return True if residuals are small, or not large and the loss falls quickly."""
        if self.residual <= THRESHOLDS.promising_residual:
            return True
        is_falling = self.get_solution().verdict.falling >= THRESHOLDS.promising_fall
        return is_falling and self.residual <= THRESHOLDS.falling_residual

    @property
    def is_creeping(self) -> bool:
        """Return True if residuals are large, and would stay so in the steps that are left."""
        if self.is_slow or self.get_solution().verdict.stop.is_requested:
            return False
        if self._is_beginning_anew or self.residual <= THRESHOLDS.promising_residual:
            return False
        remaining = (1 - self._measure_pace()) ** (self.run.steps_left / 2)  # the loss is a square
        return remaining > THRESHOLDS.creeping_ratio

    @property
    def _is_beginning_anew(self) -> bool:
        """Return True if the run started anew by itself, too few steps ago to have a pace."""
        restarted = self.run.history.restarted
        return bool(restarted) and len(self.run.history) - restarted[-1] < THRESHOLDS.pace_steps

    def _measure_pace(self) -> float:
        """Return the share by which the loss at fresh points fell in each of the last steps.

        It is that at the run's own points where fresh ones are seldom drawn.
        """
        history = self.run.history
        last = len(history.validated) - 1
        begin = max(history.restarted, default=0)
        for number in reversed(range(last)):
            steps = history.validated[last] - history.validated[number]
            if history.validated[number] <= begin:
                break
            if steps >= THRESHOLDS.pace_steps and history.fresh_loss[number] > 0:
                ratio = history.fresh_loss[last] / history.fresh_loss[number]
                return 1 - max(0.0, ratio) ** (1 / steps)
        return self.get_solution().verdict.falling

    @property
    def is_slow(self) -> bool:
        """Return True if the budget allowed too few steps to say anything."""
        return len(self.run.history) < THRESHOLDS.looked_steps

    def describe(self) -> str:
        """Return what was tried and how far it came."""
        steps = len(self.run.history)
        return f"{self.words} (residuals of {self.residual:.1g} after {steps} steps)"


def should_use_strategy(problem: Problem, settings: Settings, *, has_checkpoint: bool) -> bool:
    """Return True if several networks may be tried.

    A caller who chooses the optimizer, who wants no patience, or whose run goes on from a
    checkpoint gets the one network alone. Energies have no residuals to compare networks by.
    """
    limits = settings.limits
    if has_checkpoint or limits.patience is None or settings.method.optimizer is not None:
        return False
    if any(condition.is_energy for condition in problem.conditions):
        return False
    return limits.steps >= THRESHOLDS.fewest_steps


class Strategy:
    """Solves with the given network, and looks for another beginning where that one creeps.

    1. Look: the network is looked at after a quarter of its steps, and twice more. If it gets on it
       takes the others too, and nothing else happens.
    2. Restart: networks with other initial values take its place, until one gets on. At most three
       are tried, and one before a problem is cut in time.
    3. March: if none gets on and the problem has an initial value, time is cut into slabs. For
       ordinary differential equations that comes before other networks, with small ones.
    4. Finish: the best network takes all its steps. Another one is tried if it is stuck above the
       tolerance that the caller asked for. Time is cut where that is not enough.

    All stages share the budget. What was tried is in the verdict.

    Args:
        problem, network: what is solved, and with what; the network has the best parameters at the
            end, unless time was cut.
        settings: the options of `solve`.
    """

    def __init__(self, problem: Problem, network: nn.Module, settings: Settings) -> None:
        self._problem = problem
        self._network = network
        self._settings = settings
        self._initial = copy.deepcopy(network)
        self._least_share = THRESHOLDS.looked_steps / settings.limits.steps
        self._attempts: list[Attempt] = []
        self._march_seconds = 0.0
        self._state_windows = find_state_windows(problem)

    def solve(self) -> PDESolution:
        """Return the best solution."""
        first = Attempt("the given network", Run(self._problem, self._network, self._settings))
        self._attempts.append(first)
        if self._state_windows is not None:
            first.advance(max(THRESHOLDS.early_share, self._least_share))
            if first.is_promising or self._has_ended(first.get_solution()):
                return self._finish(first)
            return self._march(first) or self._finish(first)
        best = self._find_beginning(first)
        if best.is_creeping and self._can_march:
            return self._march(best) or self._finish(best)
        return self._finish(best)

    @property
    def _seconds_spent(self) -> float:
        return sum(a.run.seconds_spent for a in self._attempts) + self._march_seconds

    @property
    def _seconds_left(self) -> float | None:
        """Seconds of the budget that are left; None without a budget."""
        budget = self._settings.limits.budget
        if budget is None:
            return None
        return max(0.0, budget - self._seconds_spent)

    @property
    def _can_march(self) -> bool:
        """Return True if time can be cut, was not cut before, and seconds are left."""
        return not self._march_seconds and self._has_budget and can_march(self._problem)

    @property
    def _has_budget(self) -> bool:
        seconds = self._seconds_left
        return seconds is None or seconds > 0

    def _has_ended(self, solution: PDESolution) -> bool:
        """Return True if the caller has what was asked for, or ended the solve."""
        return solution.verdict.stop.is_requested

    def _find_beginning(self, first: Attempt) -> Attempt:
        """Return the first of several networks that does not creep, or the best if all do.

        It has taken most of its steps.
        """
        attempt = first
        self._follow(first)
        candidates = CANDIDATES
        if self._can_march:
            candidates = CANDIDATES[:1]
        for number, candidate in enumerate(candidates, start=1):
            if not attempt.is_creeping or not self._can_try_another:
                break
            attempt = self._try_candidate(number, candidate) or attempt
        if attempt.is_creeping:
            return _choose_attempt(self._attempts, first)
        return attempt

    def _follow(self, attempt: Attempt) -> None:
        """Step to each of `look_shares`, until the network creeps or the solve has ended."""
        available_share = 1.0
        budget = self._settings.limits.budget
        if budget:
            available_share -= self._seconds_elsewhere(attempt) / budget
        for share in THRESHOLDS.look_shares:
            attempt.advance(min(max(share, self._least_share), available_share))
            if attempt.is_creeping or self._has_ended(attempt.get_solution()):
                return

    @property
    def _can_try_another(self) -> bool:
        """Return True if steps and budget allow another network."""
        limits = self._settings.limits
        steps = sum(len(attempt.run.history) for attempt in self._attempts)
        if steps > THRESHOLDS.spent_share * limits.steps:
            return False
        seconds = self._seconds_left
        if seconds is None or limits.budget is None:
            return True
        return seconds >= THRESHOLDS.solve_share * limits.budget

    def _try_candidate(self, number: int, candidate: Candidate) -> Attempt | None:
        """Return a network after its first steps; None if it is flat, or its residuals overflow."""
        network = self._make_network(number, candidate)
        try:
            attempt = Attempt(candidate.words, Run(self._problem, network, self._settings))
        except PullbackError:
            return None
        self._attempts.append(attempt)
        try:
            self._follow(attempt)
        except PullbackError:
            self._attempts.remove(attempt)
            return None
        return attempt

    def _make_network(self, number: int, candidate: Candidate) -> nn.Module:
        """Return a copy of the given network with other initial values, as large as the data."""
        network = copy.deepcopy(self._initial)
        seed = self._settings.sampling.seed + THRESHOLDS.seed_stride * number
        reinitialize(network, torch.Generator().manual_seed(seed), candidate.gain)
        enlarge_outputs(network, choose_units(self._problem))
        return network

    def _march(self, best: Attempt) -> PDESolution | None:
        """Return the solution in slabs of time, by what is left of the budget.

        It is None if the best network has smaller residuals, or a slab cannot begin.
        """
        limits = self._settings.limits
        steps = max(1, int(THRESHOLDS.march_steps_share * limits.steps))
        limits = replace(limits, steps=steps, budget=self._seconds_left)
        march = SlabMarch(
            self._problem,
            copy.deepcopy(self._initial),
            None,
            replace(self._settings, limits=limits),
            self._state_windows,
        )
        try:
            solution = march.solve("auto", is_whole_hopeless=True)
        except (IntegrationFailed, PullbackError):
            return None
        finally:
            self._march_seconds = max(march.seconds_spent, torch.finfo(torch.float64).tiny)
        if self._has_ended(solution) or solution.verdict.relative < best.residual:
            return self._describe(solution, _SLABS)
        return None

    def _finish(self, best: Attempt) -> PDESolution:
        """Return the solution of a network after all its steps; the given one gets its values."""
        solution = best.get_solution()
        if not self._has_ended(solution):
            best.advance(1.0, self._seconds_elsewhere(best) + self._seconds_reserved)
            best = self._try_again(best)
            solution = best.get_solution()
        if best.run.network is not self._network:
            self._network.load_state_dict(best.run.network.state_dict())
            solution.network = self._network
        if self._is_unsolved(solution) and self._can_march:
            marched = self._march(best)
            if marched is not None:
                return marched
        return self._describe(solution, best.words)

    def _try_again(self, best: Attempt) -> Attempt:
        """Return another network after all its steps, where the best is stuck above `tol`.

        It is the best one itself where that is not so, or the other does not come closer.
        """
        number = len(self._attempts)
        is_possible = number <= len(CANDIDATES) and self._can_try_another
        if not is_possible or not self._is_stuck_above_tolerance(best):
            return best
        other = self._try_candidate(number, CANDIDATES[number - 1])
        if other is None or other.is_creeping:
            return best
        if not self._has_ended(other.get_solution()):
            other.advance(1.0, self._seconds_elsewhere(other))
        if self._has_ended(other.get_solution()):
            return other
        return _choose_attempt([best, other], best)

    def _is_stuck_above_tolerance(self, attempt: Attempt) -> bool:
        """Return True if a network's loss is level, and the caller asked for more than it gave.

        Ordinary initial value problems are cut in time instead.
        """
        if self._settings.limits.tol is None or self._state_windows is not None:
            return False
        verdict = attempt.get_solution().verdict
        is_level = verdict.stop.reason is StopReason.LOSS_LEVEL
        return is_level and attempt.residual > verdict.exact

    def _seconds_elsewhere(self, attempt: Attempt) -> float:
        """Return the seconds that all others took."""
        return self._seconds_spent - attempt.run.seconds_spent

    @property
    def _seconds_reserved(self) -> float:
        """Seconds of the budget that are left for a march in time, if one may follow."""
        budget = self._settings.limits.budget
        if budget is None or self._state_windows is None or self._march_seconds:
            return 0.0
        return THRESHOLDS.march_reserve * budget

    def _is_unsolved(self, solution: PDESolution) -> bool:
        """Return True if residuals are large after all steps.

        An ordinary differential equation may amplify small ones, and its slabs are cheap: there
        the estimated error counts as well.
        """
        if self._has_ended(solution):
            return False
        if self._state_windows is None:
            return solution.verdict.relative > THRESHOLDS.promising_residual
        if solution.verdict.name is Outcome.CONVERGED:
            solution.verdict = solution.judge_error()
        return solution.verdict.name is not Outcome.CONVERGED

    def _describe(self, solution: PDESolution, words: str) -> PDESolution:
        """Return the solution, with the words and the seconds of all attempts written into it."""
        if len(self._attempts) == 1 and not self._march_seconds:
            return solution
        seconds_elsewhere = self._seconds_spent - solution.history.spent
        solution.history.delay(max(0.0, seconds_elsewhere))
        others = [attempt.describe() for attempt in self._attempts if attempt.words != words]
        if self._march_seconds and words != _SLABS:
            others.append(_SLABS)
        stop = solution.verdict.stop.with_whole_budget(self._settings.limits.budget)
        solution.verdict = replace(solution.verdict, stop=stop, tried=(words, *others))
        return solution


def _choose_attempt(rivals: Sequence[Attempt], first: Attempt) -> Attempt:
    """Return the network with the smallest residual; the first one unless another is half."""
    best = min(rivals, key=lambda attempt: attempt.residual)
    if best.residual > THRESHOLDS.useful_ratio * first.residual:
        return first
    return best
