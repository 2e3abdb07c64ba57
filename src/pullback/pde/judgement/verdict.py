"""How a solve ended, judged by its residuals at fresh points, and what to try next."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_GAP = 10.0  # of losses at fresh and own points beyond which a run has overfitted
_SOLVED = 1e-4  # of their terms: residuals that count as solved
_TINY = 1e-6  # residuals whose gap does not matter any more
_EXACT = 1e-8  # residuals that leave nothing to be wished for in float64
_ROUNDING = 16  # times a lower precision's ε: its own such residuals
_DOUBT = 1e-2  # estimated relative errors that small residuals do not outweigh
_REMEDIES = {
    "overfitted": "Use more points=, sampler='sobol' or a smaller network",
    "doubtful": "Compare another seed or width by check(against=), or lower the residuals",
    "stalled": "Try another seed, a wider or deeper network, slabs= or another weight= first",
    "unfinished": "Give more steps= or a larger budget=",
}
_MISSING = (
    "Is a boundary or initial condition missing, an Integral that normalizes, or a measurement? "
    "Another seed will give another answer"
)
_FALLING = 0.01  # of the loss in a step: what is worth telling


@dataclass(frozen=True)
class PDEVerdict:
    """What a run came to.

    Attributes:
        reason: why it ended.
        stuck: whether it ended because the loss fell no further.
        own, fresh: the loss at its own points, and at fresh ones.
        relative: the largest residual at fresh points, as a share of its terms; NaN for energies.
        estimated: the relative error that such residuals allow, where it was estimated; infinite
            where the conditions do not determine the solution.
        loose: unknowns that the conditions do not determine.
        falling: the share by which the loss fell in each of the last steps.
        exact: residuals of the solve's precision that leave nothing to be wished for.
    """

    reason: str
    stuck: bool
    own: float
    fresh: float
    relative: float
    estimated: float | None = None
    falling: float = 0.0
    exact: float = _EXACT
    loose: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The verdict in a word, empty for energies; `docs/pdes.md` explains them."""
        if self.relative != self.relative:  # NaN
            return ""
        if self.relative > _TINY and overfitted(self.own, self.fresh):
            return "overfitted"
        if self.relative <= _SOLVED:
            doubtful = self.estimated is not None and self.estimated > _DOUBT
            return "doubtful" if doubtful or self.loose else "converged"
        return "stalled" if self.stuck else "unfinished"

    @property
    def text(self) -> str:
        """The verdict in a sentence or two."""
        if not self.name:
            said = f"{self.reason}; no residual says how good it is"
            return f"{said}. Compare two solutions by check(against=)" if self.reason else ""
        numbers = f"residuals at fresh points are {self.relative:.1g} of their terms"
        if self.name == "converged" and self.estimated is not None:
            numbers += f" (the error is estimated as {self.estimated:.1g})"
        elif self.name == "overfitted":
            numbers = f"the loss is {self.own:.1e} at its points and {self.fresh:.1e} at fresh ones"
        elif self._undetermined:
            numbers += f", but the conditions do not determine {self._undetermined}"
        elif self.name == "doubtful":
            numbers += f", and the error that these allow is estimated as {self.estimated:.1g}"
        elif self.name == "stalled":
            numbers = f"at a loss of {self.fresh:.1e} {numbers}"
        pace = f" while the loss fell by {self.falling:.0%} a step" if self.early else ""
        return f"{self.name}: {self.reason}{pace}; {numbers}{self._remedy}"

    @property
    def _undetermined(self) -> str:
        """What can take other values at the same residuals."""
        return "the solution" if self.estimated == inf else " and ".join(self.loose)

    @property
    def _remedy(self) -> str:
        if self.name == "doubtful" and self._undetermined:
            return f". {_MISSING}"
        if self.relative <= self.exact:
            return ""
        if self.name != "converged":
            return f". {_REMEDIES[self.name]}"
        more = "A wider" if self.stuck else "More steps= or budget=, or a wider"
        double = " in float64" if self.exact > _EXACT else ""
        return f". {more} or deeper network{double} would lower them"

    @property
    def early(self) -> bool:
        """Whether steps or budget ended a run that was still getting better."""
        return self.falling > _FALLING and not self.stuck and not self.wanted

    @property
    def wanted(self) -> bool:
        """Whether the answer is as good as was asked for, or the caller ended the run."""
        return self.reason.startswith(("the tolerance", "a callback"))

    @property
    def alarming(self) -> bool:
        """Whether the answer must not be used without a look, or could be much better.

        A run that stalls, or that steps or budget end, says so unless its residuals are exact.
        """
        if self.name in ("overfitted", "stalled", "doubtful"):
            return True
        return self.relative > self.exact and not self.wanted


def overfitted(own: float, fresh: float) -> bool:
    """Whether the loss at fresh points is ten times that at the run's own."""
    return fresh > _GAP * own


def exact_level(eps: float) -> float:
    """Relative residuals that leave nothing to be wished for, in a precision of this ε."""
    return max(_EXACT, _ROUNDING * eps)
