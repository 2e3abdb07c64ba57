"""Seeds as people write them."""

from __future__ import annotations

from ..._core.errors import PullbackError


def seed_range(text: str) -> list[int]:
    """The seeds of a line.

    >>> seed_range("0-3"), seed_range("1,4,7-8")
    ([0, 1, 2, 3], [1, 4, 7, 8])
    """
    seeds: list[int] = []
    for part in text.split(","):
        ends = part.split("-")
        if not 1 <= len(ends) <= 2 or not all(end.strip().isdecimal() for end in ends):
            raise PullbackError(
                f"The seeds {text!r} cannot be read", f"{part!r} is no range", "Write 0-9 or 0,3,5"
            )
        seeds += range(int(ends[0]), int(ends[-1]) + 1)
    if not seeds:
        raise PullbackError("There are no seeds", f"got {text!r}", "Write 0-9 or 0,3,5")
    return seeds
