"""The table of experiments: a new one is a file with a `Problem`, and a line here."""

from __future__ import annotations

from collections.abc import Callable

from .digits import Digits
from .least_squares import LeastSquares
from .poisson import Poisson
from .problem import Problem

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "least_squares": LeastSquares,
    "poisson": Poisson,
    "digits": Digits,
}
