r"""From mismatches to a verdict.

    m(η) = ‖ψ(θ₁) − φ(w₁)‖ / ‖φ(w₁) − φ(w₀)‖       after one step of size η in both coordinates
    m(0) = ‖dψ Δθ − dφ Δw‖ / ‖dφ Δw‖                of the steps' directions, by differentials

are mismatches of the *update*. An exactly invariant method has both at the level of round-off, at
every size and along several steps; one that is invariant to first order only m(0), and then
m(η) ∝ η for small η; for one that depends on coordinates m(0) does not vanish.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

#: how far above the measured round-off a mismatch still counts as none
SLACK = 100.0
#: a round-off, with its slack, above which agreement cannot be claimed
BLIND = 0.05


class Verdict(Enum):
    """What an audit found; the value is what tables show."""

    EXACT = "exact"
    FIRST_ORDER = "first order"
    NOT = "not invariant"
    UNDECIDED = "undecided"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Seen:
    """A relative mismatch, and how much of it round-off alone would explain."""

    mismatch: float
    roundoff: float


@dataclass(frozen=True)
class Measure:
    """Mismatch seen in one place: on the batch, on probes, or among the parameters.

    Attributes:
        sizes: η, as multiples of the optimizer's own lr, largest first.
        steps: m(η) after one step, for each size.
        direction: m(0).
        finite: the mismatch after 1, 2, … steps of full size.
        slack: times round-off that still counts as none.

    >>> steps = (Seen(0.3, 1e-15), Seen(0.03, 1e-15))
    >>> found = Measure((1.0, 0.1), steps, Seen(1e-14, 1e-15), ())
    >>> found.verdict, found.order
    (<Verdict.FIRST_ORDER: 'first order'>, 1.0)
    """

    sizes: tuple[float, ...]
    steps: tuple[Seen, ...]
    direction: Seen
    finite: tuple[Seen, ...]
    slack: float = SLACK

    @property
    def verdict(self) -> Verdict:
        """Exact, first order, not invariant; undecided where round-off hides it."""
        if not self._none(self.direction):
            return Verdict.NOT
        if not self.decides(self.direction):
            return Verdict.UNDECIDED
        same = all(map(self._none, (*self.steps, *self.finite)))
        return Verdict.EXACT if same else Verdict.FIRST_ORDER

    @property
    def order(self) -> float | None:
        """d log m / d log η at the two smallest sizes that show it; None where none do."""
        clear = [
            (size, s.mismatch)
            for size, s in zip(self.sizes, self.steps, strict=True)
            if not self._none(s) and math.isfinite(s.mismatch)
        ]
        if len(clear) < 2:
            return None
        (one, high), (two, low) = clear[-2:]
        return round(math.log(high / low) / math.log(one / two), 3)

    def decides(self, seen: Seen) -> bool:
        """Whether round-off is small enough to claim agreement."""
        return self.slack * seen.roundoff <= BLIND

    def _none(self, seen: Seen) -> bool:
        return seen.mismatch <= self.slack * seen.roundoff
