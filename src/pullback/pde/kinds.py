"""What counts as a number, and how what does not is refused."""

from __future__ import annotations

import math
from numbers import Integral, Real

from .._core.errors import PullbackError


def is_number(value: object) -> bool:
    """A finite real number; True is none.

    >>> is_number(2), is_number(0.5), is_number(float("nan")), is_number("2"), is_number(True)
    (True, True, False, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object, least: int) -> bool:
    """An integer ≥ least; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def require(usable: bool, what: str, got: object, remedy: str) -> None:
    """Refuse what is not usable."""
    if not usable:
        raise PullbackError(f"{what} is not usable", f"got {got!r}", remedy)
