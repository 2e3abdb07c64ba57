"""Seeds as people write them."""

from __future__ import annotations

from collections.abc import Sequence

from pullback import PullbackError

_MOST = 10_000  # more are a slip of the pen
_LARGEST = 2**63 - 1  # that torch takes
_REMEDY = "Write 0-9 or 0,3,5"


def seed_range(text: str) -> list[int]:
    """The seeds of a line.

    >>> seed_range("0-3"), seed_range("1,4,7-8")
    ([0, 1, 2, 3], [1, 4, 7, 8])
    """
    seeds: list[int] = []
    for part in text.split(","):
        ends = part.split("-")
        if len(ends) > 2 or not all(end.strip().isdecimal() for end in ends):
            raise _refusal(text, f"{part!r} is no range")
        first, last = int(ends[0]), int(ends[-1])
        if last > _LARGEST:
            raise _refusal(text, f"{last} is larger than {_LARGEST}")
        if last < first:
            raise _refusal(text, f"{part!r} ends before it begins")
        if last - first + len(seeds) >= _MOST:
            raise _refusal(text, f"there are more than {_MOST:,}")
        seeds += range(first, last + 1)
    return seeds


def ranges(seeds: Sequence[int]) -> str:
    """Seeds as people write them.

    >>> ranges([0, 1, 2, 5])
    '0-2,5'
    """
    out: list[list[int]] = []
    for seed in sorted(seeds):
        if out and seed == out[-1][-1] + 1:
            out[-1][1:] = [seed]
        else:
            out.append([seed])
    return ",".join("-".join(map(str, ends)) for ends in out)


def _refusal(text: str, why: str) -> PullbackError:
    return PullbackError(f"The seeds {text!r} cannot be read", why, _REMEDY)
