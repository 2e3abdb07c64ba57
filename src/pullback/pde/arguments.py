"""What counts as a number, a name, a point; what does not is refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from .._core.errors import PullbackError, require


def is_number(value: object) -> bool:
    """A finite real number; True is none.

    >>> is_number(2), is_number(0.5), is_number(float("nan")), is_number("2"), is_number(True)
    (True, True, False, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object, least: int) -> bool:
    """An integer ≥ least; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def require_problem(problem: object, function: str) -> None:
    """Refuse what is no problem: a name, a class, or the network in its place."""
    usable = all(hasattr(problem, part) for part in ("domain", "conditions", "fields"))
    require(usable, f"The problem of {function}", problem, "Pass a Problem, such as Poisson(dim=2)")


def check_positive(what: str, value: float) -> float:
    """A finite number > 0."""
    require(is_number(value) and value > 0, what, value, "Use a positive number")
    return float(value)


def check_count(n: object, what: str = "n") -> int:
    """A number of points: an integer ≥ 1."""
    require(is_integer(n, 1), f"The number of points {what}", n, "Use an integer ≥ 1")
    return int(n)  # pyright: ignore[reportArgumentType]


def check_seed(seed: object) -> int:
    """A seed: an integer in the range torch's generators take."""
    usable = is_integer(seed, -(2**63)) and seed < 2**64  # pyright: ignore[reportOperatorIssue]
    require(usable, "seed=", seed, "Use an integer of 64 bits, such as 0")
    return int(seed)  # pyright: ignore[reportArgumentType]


def check_bounds(pair: object, what: str) -> tuple[float, float]:
    """Finite numbers a < b."""
    try:
        a, b = pair  # pyright: ignore[reportGeneralTypeIssues]
        a, b = float(a), float(b)
    except (TypeError, ValueError) as error:
        raise PullbackError(
            f"{what} needs two ends", f"got {pair!r}", "Pass a pair of numbers (a, b)"
        ) from error
    if not (math.isfinite(a) and math.isfinite(b)):
        raise PullbackError(f"{what} is not bounded", f"got ({a}, {b})", "Use finite ends")
    if not a < b:
        raise PullbackError(f"{what} is empty", f"got ({a}, {b})", "Use a < b")
    return a, b


def check_names(names: Sequence[str] | None, dim: int) -> tuple[str, ...]:
    """`dim` different coordinate names; x, y, z or x1, ..., xd unless given."""
    if names is None:
        return ("x", "y", "z")[:dim] if dim <= 3 else tuple(f"x{i + 1}" for i in range(dim))
    found = (names,) if isinstance(names, str) else tuple(names)
    if len(found) != dim or not all(isinstance(name, str) and name for name in found):
        raise PullbackError(
            "The coordinate names do not fit",
            f"got {found!r} for {dim} coordinates",
            "Give one name (a string) for each coordinate",
        )
    if len(set(found)) != dim:
        raise PullbackError(
            "Two coordinates have the same name", f"got {found!r}", "Give each its own name"
        )
    return found


def index_of(name: object, names: Iterable[str]) -> int:
    """The position of a coordinate."""
    names = tuple(names)
    if name not in names:
        raise PullbackError(
            f"There is no coordinate {name!r}",
            f"the coordinates are {', '.join(names)}",
            "Use one of these names",
        )
    return names.index(name)  # pyright: ignore[reportArgumentType]


def check_points(x: object, dim: int, what: str = "x") -> Tensor:
    """Real points of shape (N, dim), in float64 on the CPU, without their graph."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != dim or x.is_complex():
        got = f"shape {tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise PullbackError(
            f"{what} is not a list of points",
            f"got {got} in {dim} dimension{'s' * (dim > 1)}",
            f"Pass a real tensor of shape (N, {dim})",
        )
    return x.detach().to("cpu", torch.float64)
