"""How a solve ended, judged by its residuals at fresh points, and what to try next."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf, isnan
from typing import Any

from .stop import Stop, StopReason


class Outcome(StrEnum):
    """A verdict in a word, from good to bad; `docs/pdes.md` explains them."""

    UNJUDGED = ""  # an energy has no residuals to judge it by
    CONVERGED = "converged"
    INACCURATE = "inaccurate"
    DOUBTFUL = "doubtful"
    UNFINISHED = "unfinished"
    STALLED = "stalled"
    OVERFITTED = "overfitted"


@dataclass(frozen=True)
class VerdictThresholds:
    """Where one verdict ends and the next begins; relative residuals are shares of their terms."""

    #: loss at fresh points over that at training points, beyond which a run has overfitted: one
    #: order of magnitude
    overfitting_ratio: float = 10.0
    #: relative residuals that count as solved: four digits
    solved: float = 1e-4
    #: share of the data's relative misfit below which equations hold as well as noise lets them
    below_noise: float = 0.3
    #: relative residuals below which the two losses may differ: the answer is good all the same
    negligible: float = 1e-6
    #: relative residuals in float64 that no further step improves much
    exact: float = 1e-8
    #: the same in lower precisions, in units of the machine epsilon
    exact_in_epsilons: float = 16.0
    #: estimated relative errors above which small residuals are not enough: four digits as well
    accurate_error: float = 1e-4
    #: estimated relative errors that small residuals do not outweigh: two digits
    doubtful_error: float = 1e-2
    #: fall of the loss in a step that is worth telling: 1 %, as in `patience`
    reported_fall: float = 0.01


THRESHOLDS = VerdictThresholds()

_REMEDIES = {
    Outcome.OVERFITTED: "Use more points=, sampler='sobol' or a smaller network",
    Outcome.INACCURATE: "More steps= or budget=, a wider network or another weight= lowers it",
    Outcome.DOUBTFUL: (
        "More steps= or budget= or a wider network may lower the residuals; else compare another "
        "seed by check(against=)"
    ),
    Outcome.STALLED: (
        "Try another seed, a wider or deeper network, slabs= or another weight= first. If check() "
        "shows that one condition alone is missed, another may contradict it"
    ),
    Outcome.UNFINISHED: "Give more steps= or a larger budget=",
}
_CONCENTRATED_REMEDY = (
    "Put more points= there by Refine(...), or build in what happens there: a field for each side "
    "of a jump, a singular function at a corner, Hard(...) at a layer"
)
_JUMP_REMEDY = (
    "The solution has a kink there, which one smooth field cannot have: give each side a field and "
    "an equation of its own, and state both jump conditions where they meet"
)
_CONTRADICTION_REMEDY = (
    "No steps and no network lower that: correct or drop a condition. Nonlinear equations may have "
    "a solution elsewhere, which other initial values find"
)
_DIFFERENCE_REMEDY = (
    "No continuous solution does both: make the values agree. A jump that is meant needs a "
    "singular function beside the network, or stays outside the domain"
)
_TINY_RESIDUALS = (
    "The squares of the residuals are too small for the network's precision: state the problem in "
    "units in which its values are about 1"
)
#: what to do about runs that are stuck, where the reason of their end says it
_REMEDIES_BY_REASON = {
    StopReason.ROUNDOFF_REACHED: (
        "The solution is tiny beside the initial network: state the problem in units in which its "
        "values are about 1"
    ),
    StopReason.DIVERGED: (
        "Give the optimizer a smaller learning rate, or leave optimizer= out: the natural gradient "
        "takes no step that raises the loss"
    ),
}
_DISAGREEMENT = (
    "Equations and measurements pull against each other. Give noisy Data(...) a smaller weight=; "
    "if the measurements are accurate, the equations do not describe them"
)
_EXCITED = "the field changes sign: an excited state, since the ground state has no nodes"
_EXCITED_REMEDY = (
    "For the ground state begin with a field of one sign, as network_for(problem) does, or with a "
    "smaller unknown; if this one is meant, add Integral(..., 0.0) of its product with lower states"
)
_ISOLATED = "a second discretization finds no solution nearby: the error is unknown"
_UNBOUNDED = (
    "a second discretization does not resolve how the equation amplifies them: the error is unknown"
)
_UNBOUNDED_REMEDY = (
    "If time is a coordinate of a Box, use SpaceTime(...) and Initial(...): these are judged "
    "window by window. Else compare another seed by check(against=)"
)
_MISSING_CONDITION = (
    "Is a boundary or initial condition missing, an Integral that normalizes, or a measurement? "
    "A field that is known up to a constant, such as a pressure, is listed in free=. "
    "Another seed will give another answer. If none is missing, such residuals leave it open, and "
    "symmetry or a known position must be built into the network"
)


@dataclass(frozen=True)
class PDEVerdict:
    """What a run came to.

    Attributes:
        stop: why it ended.
        stuck: whether it ended because the loss fell no further.
        training_loss, fresh_loss: the loss at the points of the run, and at fresh ones.
        relative: the largest residual at fresh points, as a share of its terms; NaN for energies.
        estimated: the relative error that such residuals allow, where it was estimated; infinite
            where the conditions do not determine the solution.
        falling: the share by which the loss fell in each of the last steps.
        exact: relative residuals that no step improves much in the precision of the solve.
        loose: unknowns that the conditions do not determine.
        lost_fields: those that are as large as their errors, and may be zero.
        lost_from: the time from which on the error is as large as the solution, None if it is not.
        concentrated: where most of the largest residual lies, in words; empty if it is spread.
        is_isolated: whether a second discretization found no solution near this one.
        is_unbounded: whether residuals are amplified more than a second discretization resolves.
        contradicting: conditions that cannot hold together near this solution.
        differing: where two conditions ask for different values at a point, in words.
        jump: where a coefficient of the highest derivatives jumps, in words; empty if none does.
        noise: relative misfit of measured data, 0 without data; equations cannot hold much better
            than these where both are in the loss.
        has_many_states: whether it is an eigenvalue problem, which other states solve as well.
        is_excited: whether its field changes sign although that of the ground state does not.
        tried: what was tried where the given network did not get on, the best first.
    """

    stop: Stop
    stuck: bool
    training_loss: float
    fresh_loss: float
    relative: float
    estimated: float | None = None
    falling: float = 0.0
    exact: float = THRESHOLDS.exact
    loose: tuple[str, ...] = ()
    lost_fields: tuple[str, ...] = ()
    lost_from: float | None = None
    is_isolated: bool = False
    is_unbounded: bool = False
    concentrated: str = ""
    contradicting: tuple[str, ...] = ()
    differing: str = ""
    jump: str = ""
    noise: float = 0.0
    has_many_states: bool = False
    is_excited: bool = False
    tried: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Why the run ended, in words."""
        return self.stop.sentence

    @property
    def name(self) -> Outcome:
        """The verdict in a word."""
        if isnan(self.relative):
            return Outcome.UNJUDGED
        if self._is_overfitted:
            return Outcome.OVERFITTED
        if self.relative <= THRESHOLDS.solved or self._is_below_noise:
            return self._judge_error()
        if self.stuck or self.contradicting:
            return Outcome.STALLED
        return Outcome.UNFINISHED

    @property
    def _is_overfitted(self) -> bool:
        is_negligible = self.relative <= THRESHOLDS.negligible
        return not is_negligible and is_overfitted(self.training_loss, self.fresh_loss)

    @property
    def _is_below_noise(self) -> bool:
        """Return True if a run ended where the noise of its data lets equations hold no better."""
        is_below = self.relative <= THRESHOLDS.below_noise * self.noise
        return self.stuck and self.noise > 0 and is_below

    @property
    def _is_torn_by_data(self) -> bool:
        """Return True if a run is stuck between equations and measurements that do not agree."""
        return self.name is Outcome.STALLED and self.noise >= self.relative

    def _judge_error(self) -> Outcome:
        """Return the verdict on an error, where residuals are small."""
        error = self.estimated or 0.0
        is_unknown = self.jump or self.is_isolated or self.is_unbounded
        is_open = self.loose or self.is_excited or is_unknown
        if is_open or error > THRESHOLDS.doubtful_error:
            return Outcome.DOUBTFUL
        if error > THRESHOLDS.accurate_error:
            return Outcome.INACCURATE
        return Outcome.CONVERGED

    @property
    def text(self) -> str:
        """The verdict in a sentence or two."""
        if self.name is Outcome.UNJUDGED:
            if not self.reason:
                return ""
            advice = "Compare two solutions by check(against=)"
            if self.stop.reason is StopReason.DIVERGED:
                advice = _REMEDIES_BY_REASON[self.stop.reason]
            return f"{self.reason}; no residual says how good it is. {advice}"
        pace = ""
        if self.ended_early and self.relative > self.exact:
            pace = f" while the loss fell by {self.falling:.0%} a step"
        return f"{self.name}: {self.reason}{pace}; {self._numbers}{self._attempts}{self._remedy}"

    @property
    def _attempts(self) -> str:
        """Return the other networks that were tried, or ""."""
        if not self.tried:
            return ""
        best, *others = self.tried
        return f"; the best was {best}, beside {', '.join(others)}"

    @property
    def _numbers(self) -> str:
        """The numbers that the verdict rests on."""
        residuals = f"residuals at fresh points are {self.relative:.1g} of their terms"
        name = self.name
        if self.jump:
            coefficient = f"the coefficient of the highest derivative jumps in {self.jump}"
            return f"{residuals}, but {coefficient}: the error is unknown"
        if name is Outcome.OVERFITTED:
            losses = f"{self.training_loss:.1e} at its points and {self.fresh_loss:.1e}"
            return f"the loss is {losses} at fresh ones"
        if name is Outcome.CONVERGED:
            return f"{residuals}{self._accuracy}"
        if name is Outcome.INACCURATE:
            return (
                f"{residuals}, but the error is estimated as {self.estimated:.1g}{self._lost_parts}"
            )
        if name is Outcome.DOUBTFUL:
            return f"{residuals}, {self._doubt}"
        residuals += self._conflict
        if self.concentrated and not self._conflict:
            residuals += f", most of it in {self.concentrated}"
        if self._is_torn_by_data:
            residuals += f", and measurements are missed by {self.noise:.1g}"
        if name is Outcome.STALLED:
            return f"at a loss of {self.fresh_loss:.1e} {residuals}"
        return residuals

    @property
    def _conflict(self) -> str:
        """Return which conditions cannot hold together, or ""."""
        if self.differing:
            return f", and {self.differing}"
        if len(self.contradicting) == 1:
            return f", and no change nearby lowers those of {self.contradicting[0]!r}"
        if self.contradicting:
            *others, last = map(repr, self.contradicting)
            return f", and {', '.join(others)} and {last} contradict each other"
        return ""

    @property
    def _conflict_remedy(self) -> str:
        """Return what to do about conditions that cannot hold together."""
        if self.differing:
            return _DIFFERENCE_REMEDY
        return _CONTRADICTION_REMEDY

    @property
    def _doubt(self) -> str:
        """Why small residuals are not enough."""
        if self._open_quantities:
            return f"but the conditions do not determine {self._open_quantities}"
        if self.is_excited:
            return f"but {_EXCITED}"
        if self.is_isolated:
            return f"but {_ISOLATED}"
        if self.is_unbounded:
            return f"but {_UNBOUNDED}"
        return (
            f"and the error that these allow is estimated as {self.estimated:.1g}{self._lost_parts}"
        )

    @property
    def _accuracy(self) -> str:
        """Return what is known of the error of a run that converged."""
        if self._is_below_noise:
            misfit = f", well below the misfit of the data, {self.noise:.1g}"
            return f"{misfit}; the error is unknown"
        if self.estimated is None:
            return f"; the error is unknown{self._other_states}"
        remarks = f"{self._lost_parts}{self._other_states}"
        return f" (the error is estimated as {self.estimated:.1g}{remarks})"

    @property
    def _lost_parts(self) -> str:
        """Return which small fields and late times the error leaves open, or ""."""
        losses = ""
        if self.lost_fields:
            names = " and ".join(self.lost_fields)
            losses += f"; {names} may be zero as far as that tells"
        if self.lost_from is not None:
            losses += f"; from t = {self.lost_from:.4g} on it is as large as the solution"
        return losses

    @property
    def _other_states(self) -> str:
        """Return which other states solve an eigenvalue problem, or ""."""
        if not self.has_many_states:
            return ""
        return "; an eigenvalue problem has other states too, and this may be any of them"

    @property
    def _open_quantities(self) -> str:
        """Return the names of quantities that the conditions do not determine, or ""."""
        if self.estimated == inf:
            return "the solution"
        return " and ".join(self.loose)

    @property
    def _remedy(self) -> str:
        """Return what to try next, or ""."""
        if self.jump:
            return f". {_JUMP_REMEDY}"
        if self.name is Outcome.DOUBTFUL and self._doubt_remedy:
            return f". {self._doubt_remedy}"
        if self.relative <= self.exact:
            return self._precision_remedy
        if self.name is Outcome.CONVERGED:
            return self._improvement
        if self._remedy_of_end:
            return f". {self._remedy_of_end}"
        if self._is_torn_by_data:
            return f". {_DISAGREEMENT}"
        if self._conflict and self.name is not Outcome.OVERFITTED:
            return f". {self._conflict_remedy}"
        if self.concentrated and not self.ended_early:
            return f". {_CONCENTRATED_REMEDY}"
        return f". {_REMEDIES[self.name]}"

    @property
    def _remedy_of_end(self) -> str:
        """Return what to do where a run ended far from a solution for a known reason, or ""."""
        if self.name not in {Outcome.STALLED, Outcome.UNFINISHED}:
            return ""
        if self.training_loss == 0:  # and residuals are not
            return _TINY_RESIDUALS
        if self.name is Outcome.STALLED:
            return _REMEDIES_BY_REASON.get(self.stop.reason, "")
        return ""

    @property
    def _precision_remedy(self) -> str:
        """Return that float64 gets further, where residuals are round-off of less; else ""."""
        if self.name is Outcome.CONVERGED and self.exact > THRESHOLDS.exact:
            return ". That is round-off in the network's precision: network.double() gets further"
        return ""

    @property
    def _doubt_remedy(self) -> str:
        """Return what to do about a doubt that smaller residuals would not lift, or ""."""
        if self._open_quantities:
            return _MISSING_CONDITION
        if self.is_excited:
            return _EXCITED_REMEDY
        if self.is_unbounded:
            return _UNBOUNDED_REMEDY
        return ""

    @property
    def _improvement(self) -> str:
        """Return what would lower the residuals of a run that converged, or ""."""
        if self._is_below_noise:
            return ""
        change = "More steps= or budget=, or a wider"
        if self.stuck:
            change = "A wider"
        precision = ""
        if self.exact > THRESHOLDS.exact:
            precision = " in float64"
        return f". {change} or deeper network{precision} would lower them"

    @property
    def ended_early(self) -> bool:
        """Return True if steps or budget ended a run that was still getting better."""
        is_falling = self.falling > THRESHOLDS.reported_fall
        return is_falling and not self.stuck and not self.stop.is_requested

    @property
    def alarming(self) -> bool:
        """Return True if the answer must not be used without a look, or could be much better.

        A run that stalls, or that steps or budget end, says so unless its residuals are exact.
        """
        if self.stop.reason is StopReason.DIVERGED:
            return True
        if self.name in {Outcome.OVERFITTED, Outcome.STALLED, Outcome.DOUBTFUL} or self._lost_parts:
            return True
        if self._is_below_noise:
            return False
        return self.relative > self.exact and not self.stop.is_requested

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, to save."""
        return {**vars(self), "stop": self.stop.as_dict()}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> PDEVerdict:
        """Return the verdict that `as_dict` described."""
        return cls(**{**state, "stop": Stop.from_dict(state["stop"])})


def is_overfitted(training_loss: float, fresh_loss: float) -> bool:
    """Return True if the loss at fresh points is more than ten times that at training points."""
    return fresh_loss > THRESHOLDS.overfitting_ratio * training_loss


def find_exact_level(epsilon: float) -> float:
    """Return the relative residuals that no step improves much, in a precision of this epsilon."""
    return max(THRESHOLDS.exact, THRESHOLDS.exact_in_epsilons * epsilon)
