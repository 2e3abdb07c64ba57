"""What theory says, as yes or no, with the numbers that decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..framework.check import Check, recorded
from .methods import GROUPS, INVARIANT, UNDAMPED
from .nets import NETS
from .run import Record

#: a claim, whether it holds, and the numbers
Verdict = tuple[str, bool, str]

SAME, SOUND, APART = 1e-9, 1e6, 1e-3

#: records by network, method's group, and seed or variant
Found = Mapping[tuple[str, str], Sequence[Record]]

#: the verdicts over seeds 0–9, in the order of the claims
RECORDED = (True, True, True, True, False, False, False, True, False, True, True, True, False)

#: places of the claims that are not the paper's: damping, other methods, what lies outside
OURS = {1, 2, 3, 6, 8, 10, 12}

_KFAC = (UNDAMPED, INVARIANT)


def claims(found: Found) -> list[Check]:
    """The theorems on pairs of networks, and what lies just outside of them."""
    verdicts = [
        _all_same("K-FAC without damping, KL clip", _of(found, UNDAMPED)),
        _all_same("K-FAC with invariant damping", _of(found, INVARIANT)),
        _dead(found),
        _others(found),
        _start(found, "zero padding with a shift", "Theorem 4.2 holds with zero padding and γ ≠ 0"),
        _start(found, "RNN, a₀ kept", "Theorem 5.2 holds with a₀ as it was"),
        _same(found, "RNN, inputs shifted", "a recurrent net may shift its inputs"),
        _same(found, "Gauss–Newton, inside", "Gauss–Newton K-FAC is invariant inside the net"),
        _same(found, "Gauss–Newton, output", "Gauss–Newton K-FAC is invariant at the output"),
        _same(found, "metric carried over", "it is if the metric is carried over"),
        _softmax(found),
        _same(found, "softmax", "with softmax the probabilities agree"),
        _same(found, "softmax, logits", "with softmax the logits agree"),
    ]
    return recorded(verdicts, RECORDED, OURS)


def sound(records: Iterable[Record]) -> list[Record]:
    """Those whose factors are conditioned well enough to ask for nine digits."""
    return [r for r in records if r.condition is not None and r.condition <= SOUND]


def _of(found: Found, group: str) -> list[Record]:
    return [r for net in NETS for r in found[net.name, group]]


def _all_same(what: str, records: Sequence[Record]) -> Verdict:
    kept = sound(records)
    worst = max(r.worst for r in kept)
    claim = f"{what}: the same function to {SAME:.0e} where conditions are at most {SOUND:.0e}"
    return claim, worst <= SAME, f"{worst:.0e} at most in {len(kept)} of {len(records)} runs"


def _dead(found: Found) -> Verdict:
    records = [*found["dead inputs", UNDAMPED], *found["dead inputs", INVARIANT]]
    told = sum(any("input side is singular" in note for note in r.notes) for r in records)
    worst = max(r.worst for r in records)
    holds = told == len(records) and worst <= SAME
    claim = "directions that never occur are left out, reported, and change nothing"
    return claim, holds, f"{told} of {len(records)} runs report, mismatch {worst:.0e}"


def _others(found: Found) -> Verdict:
    others = [group for group in GROUPS if group not in _KFAC]
    least = {group: min(r.worst for r in _of(found, group)) for group in others}
    numbers = ", ".join(f"{group} at least {value:.0e}" for group, value in least.items())
    return "the other methods tell the two apart", min(least.values()) > APART, numbers


def _start(found: Found, net: str, claim: str) -> Verdict:
    worst = max(r.mismatch[0] for r in found[net, UNDAMPED])
    return claim, worst <= SAME, f"before any step {worst:.0e}"


def _same(found: Found, net: str, claim: str) -> Verdict:
    records = [r for (n, g), rs in found.items() if n == net and g in _KFAC for r in rs]
    worst = max(r.worst for r in records)
    return claim, worst <= SAME, f"mismatch {worst:.0e}"


def _softmax(found: Found) -> Verdict:
    records = found["softmax", UNDAMPED]
    told = sum(any("softmax" in d for d in r.degenerate) for r in records)
    claim = "the metric of softmax logits is degenerate, and `degenerate()` says so"
    return claim, told == len(records), f"{told} of {len(records)} runs"
