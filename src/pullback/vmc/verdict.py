"""How a minimization ended, judged by its samples, and what to try next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from .history import History
from .statistics import EnergyStatistics


class StopReason(Enum):
    """Why the steps ended; the value is the sentence that a user reads."""

    ALL_STEPS = "all steps were taken"
    BUDGET_SPENT = "the budget is spent"
    TOLERANCE_REACHED = "the tolerance was reached"
    NO_PROGRESS = "the energy fell no further"
    CALLBACK = "a callback asked for it"
    NO_STEP = "no step followed its linearization at any damping"
    NOT_FINITE = "the network or the energy became infinite or NaN"


class Outcome(Enum):
    """The verdict in a word."""

    CONVERGED = "converged"
    EIGENSTATE = "eigenstate"
    UNFINISHED = "unfinished"
    STALLED = "stalled"
    UNRELIABLE = "unreliable"
    DIVERGED = "diverged"


class ChainProblem(Enum):
    """Why the samples cannot be trusted; the value is the sentence and the remedy."""

    FROZEN = (
        "the chains are frozen: most of them accepted no proposal. Use more moves=, the other kind "
        "of proposal, or a network with smaller log-amplitudes"
    )
    UNMIXED = (
        "the chains have not mixed: they stay in different parts of the configurations. Use more "
        "moves= and thermalization=, or symmetrize the network"
    )
    DISAGREE = (
        "fresh chains, from random configurations, give another energy than those of the steps: "
        "one of the two stays in a part of the configurations. Use more moves=, chains= and "
        "thermalization="
    )
    TOO_FEW = "there are too few samples for an error bar. Use more samples= or chains="


@dataclass(frozen=True)
class VerdictLimits:
    """Bounds of the verdict."""

    #: N·variance/(energy − mean energy)², below which a state counts as an eigenstate: good
    #: variational states of hard problems are between 1e-5 and 1e-3
    v_score: float = 1e-3
    #: share of the energy with other signs than those of a lowest state, above which an eigenstate
    #: may be an excited one: as far below as `v_score` is, the energy is right to that share
    frustration: float = 1e-3
    #: R̂ of the energy above which chains have not mixed; 1.1 is Gelman and Rubin's own
    rhat: float = 1.1
    #: R̂ of the energy above which short fresh chains are in different parts of the configurations:
    #: with 8 samples 1.5 means that chains scatter more than the samples of each
    fresh_rhat: float = 1.5
    #: R̂ of a spin above which chains are stuck: 1.5 means an autocorrelation time of 0.6 chains
    spin_rhat: float = 1.5
    #: share of chains without an accepted proposal above which they are frozen
    frozen: float = 0.5
    #: standard errors by which fresh chains may differ from those of the steps
    disagreement: float = 6.0
    #: share of the energy by which they may differ beside that: round-off, for states whose local
    #: energies are all the same
    round_off: float = 1e-6
    #: standard errors by which the energy may fall in the last quarter of the steps
    falling: float = 3.0
    #: least angle, in radians, by which the state may turn over all steps: below it the initial
    #: state is judged, and not the network
    least_turn: float = 1.0
    #: least number of steps before the last quarter says anything
    least_steps: int = 20


_MORE_STEPS = "Give more steps=, a larger budget=, or a larger lr= where it is small"


@dataclass(frozen=True)
class VMCVerdict:
    """What a minimization came to.

    Attributes:
        stop_reason: why the steps ended.
        outcome: converged, eigenstate, unfinished, stalled, unreliable or diverged.
        chain_problem: why the samples cannot be trusted, where they cannot.
        v_score: sites·variance/(energy − mean)², zero for an eigenstate. The mean is that of all
            energies, tr H over the number of states: a constant added to H changes nothing.
            Infinite for a level energy above the mean, which is no ground state.
        falling: energy that the last quarter of the steps gained.
        sector: Σ s of all samples, where it is conserved.
        frustration: energy that terms H(s, s') ψ(s')/ψ(s) with s' ≠ s miss by not being negative,
            over |energy − mean|. An eigenstate without any is the lowest of its sector
            (Perron–Frobenius); with it, an excited state cannot be told from the lowest.
    """

    stop_reason: StopReason
    outcome: Outcome
    chain_problem: ChainProblem | None
    v_score: float
    falling: float
    sector: int | None
    frustration: float = 0.0

    @property
    def name(self) -> str:
        """The outcome in a word."""
        return self.outcome.value

    @property
    def is_alarming(self) -> bool:
        """Return True if the energy must not be used without a look."""
        return self.outcome in (Outcome.STALLED, Outcome.UNRELIABLE, Outcome.DIVERGED)

    @property
    def text(self) -> str:
        """Return the verdict in a sentence or two, with a remedy."""
        sentence = f"{self.name}: {self.stop_reason.value}"
        if self.sector is not None:
            sentence += f", in the sector Σ s = {self.sector}"
        if self.chain_problem is not None:
            return f"{sentence}; {self.chain_problem.value}"
        if self.outcome is Outcome.DIVERGED:
            return f"{sentence}. Lower lr=, or raise the solver's damping"
        if self.v_score == math.inf:
            remedy = "Use other initial parameters, or a network with a phase"
            return f"{sentence}; the energy is above the mean of all, no ground state. {remedy}"
        sentence += f"; the variance is {self.v_score:.1e} of (energy − mean)²/sites"
        if self.outcome is Outcome.UNFINISHED:
            return f"{sentence}, and more steps would lower the energy. {_MORE_STEPS}"
        if self.outcome is Outcome.STALLED:
            remedy = "Use a larger network, one with a phase, or symmetrize it"
            return (
                f"{sentence}, too large for an eigenstate, and the energy falls no more. {remedy}"
            )
        if self.outcome is Outcome.EIGENSTATE:
            return (
                f"{sentence}, as of an eigenstate. It may be an excited one: terms with other "
                f"signs than those of a lowest state make {self.frustration:.1%} of the energy. "
                "Compare other seeds, sectors and symmetries"
            )
        return sentence


@dataclass(frozen=True)
class Evidence:
    """What a verdict is made from.

    Attributes:
        stop_reason: why the steps ended.
        history: the steps.
        final: the energy from chains that go on from those of the steps.
        fresh: that from chains that start at random configurations; None leaves it out.
        frozen_share: chains of the final energy that accepted no proposal.
        sites: number of spins.
        sector: Σ s of all samples, where it is conserved.
        mean_energy: tr H over the number of states.
        frustration: mean of Σ |t| + Re t over the terms t = H(s, s') ψ(s')/ψ(s) with s' ≠ s.
    """

    stop_reason: StopReason
    history: History
    final: EnergyStatistics | None
    fresh: EnergyStatistics | None
    frozen_share: float
    sites: int
    sector: int | None
    mean_energy: float = 0.0
    frustration: float = 0.0


def compute_v_score(sites: int, energy: float, variance: float, mean_energy: float) -> float:
    """Return sites·variance/(energy − mean energy)², the V-score of arXiv:2302.04919."""
    round_off = 1e-6 * abs(energy)  # all energies of a sector of one state are their mean
    gap = max(abs(energy - mean_energy), round_off, 1e-150)
    return sites * variance / gap**2


def judge(evidence: Evidence, limits: VerdictLimits | None = None) -> VMCVerdict:
    """Return the verdict on a minimization that has ended."""
    limits = limits or VerdictLimits()
    final = evidence.final
    if final is None or not math.isfinite(final.energy):
        return VMCVerdict(
            StopReason.NOT_FINITE,
            Outcome.DIVERGED,
            None,
            math.nan,
            math.nan,
            evidence.sector,
            math.nan,
        )
    v_score = compute_v_score(evidence.sites, final.energy, final.variance, evidence.mean_energy)
    frustration = evidence.frustration / max(abs(final.energy - evidence.mean_energy), 1e-150)
    falling = _compute_fall(evidence.history, limits)
    problem = _find_chain_problem(evidence, final, limits)
    if problem is not None:
        outcome = Outcome.UNRELIABLE
    elif evidence.stop_reason in (StopReason.NOT_FINITE, StopReason.NO_STEP):
        outcome = Outcome.DIVERGED
    elif _needs_more_steps(evidence, final, falling, v_score, limits):
        outcome = Outcome.UNFINISHED
    elif _is_above_mean(final, evidence.mean_energy, limits):
        outcome = Outcome.STALLED
        v_score = math.inf
    elif v_score > limits.v_score:
        outcome = Outcome.STALLED
    elif frustration > limits.frustration:
        outcome = Outcome.EIGENSTATE
    else:
        outcome = Outcome.CONVERGED
    return VMCVerdict(
        evidence.stop_reason,
        outcome,
        problem,
        v_score,
        falling,
        evidence.sector,
        frustration,
    )


def _find_chain_problem(
    evidence: Evidence, final: EnergyStatistics, limits: VerdictLimits
) -> ChainProblem | None:
    """Return why the samples cannot be trusted; None if they can."""
    if evidence.frozen_share > limits.frozen:
        return ChainProblem.FROZEN
    if final.rhat > limits.rhat or final.spin_rhat > limits.spin_rhat:
        return ChainProblem.UNMIXED
    if not math.isfinite(final.error):
        return ChainProblem.TOO_FEW
    if evidence.fresh is not None and _have_other_energies(final, evidence.fresh, limits):
        return ChainProblem.DISAGREE
    return None


def _have_other_energies(
    final: EnergyStatistics, fresh: EnergyStatistics, limits: VerdictLimits
) -> bool:
    """Return True if the fresh energy differs by more than the errors, or between fresh chains."""
    if fresh.rhat > limits.fresh_rhat:
        return True
    # few samples may lack the rare ones that make the variance
    error_of_few = math.sqrt(final.variance / max(1, fresh.samples))
    error = math.hypot(final.error, fresh.error, error_of_few)
    bound = limits.disagreement * error + limits.round_off * abs(final.energy)
    return abs(final.energy - fresh.energy) > bound


def _is_above_mean(final: EnergyStatistics, mean_energy: float, limits: VerdictLimits) -> bool:
    """Return True for an energy that the ground state cannot have, such as a highest state's."""
    bound = limits.disagreement * final.error + limits.round_off * abs(final.energy)
    return final.energy - mean_energy > bound


def _compute_fall(history: History, limits: VerdictLimits) -> float:
    """Return by how much the energy fell from the third to the last quarter of the steps.

    It is NaN if there are too few steps.
    """
    steps = len(history)
    if steps < limits.least_steps:
        return math.nan
    quarter = steps // 4
    before = math.fsum(history.energy[-2 * quarter : -quarter]) / quarter
    after = math.fsum(history.energy[-quarter:]) / quarter
    return before - after


def _needs_more_steps(
    evidence: Evidence,
    final: EnergyStatistics,
    falling: float,
    v_score: float,
    limits: VerdictLimits,
) -> bool:
    """Return True if the energy still falls, or a state with variance had no time to change."""
    if _is_falling(evidence, falling, v_score, limits):
        return True
    return v_score > limits.v_score and _has_hardly_moved(evidence.history, final, limits)


def _has_hardly_moved(history: History, final: EnergyStatistics, limits: VerdictLimits) -> bool:
    """Return True if the steps were too short, all together, for any network to reach a state.

    Steps are imaginary time, 2·lr each. In the time t a state turns by at most t·√variance.
    """
    turn = 2 * math.fsum(history.lr) * math.sqrt(final.variance)
    return turn < limits.least_turn


def _is_falling(evidence: Evidence, falling: float, v_score: float, limits: VerdictLimits) -> bool:
    """Return True if more steps would lower the energy further than its error bar."""
    if evidence.stop_reason is StopReason.NO_PROGRESS:
        return False
    # a tolerance above that of an eigenstate is reached while the energy falls
    if evidence.stop_reason is StopReason.TOLERANCE_REACHED and v_score <= limits.v_score:
        return False
    history = evidence.history
    if math.isnan(falling):
        return True
    quarter = len(history) // 4
    noise = math.fsum(history.error[-quarter:]) / quarter / math.sqrt(quarter)
    return falling > limits.falling * math.sqrt(2) * noise
