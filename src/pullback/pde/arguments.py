"""Checks of arguments: what counts as a number, a name, a point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from .._core.errors import PullbackError, require


def is_number(value: object) -> bool:
    """Return True for a finite real number; True itself is none.

    >>> is_number(2), is_number(0.5), is_number(float("nan")), is_number("2"), is_number(True)
    (True, True, False, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_integer(value: object, least: int) -> bool:
    """Return True for an integer ≥ least; True itself is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def require_problem(problem: object, function: str) -> None:
    """Raise for what is no problem: a name, a class, or the network in its place."""
    usable = all(hasattr(problem, name) for name in ("domain", "conditions", "fields"))
    require(usable, f"The problem of {function}", problem, "Pass a Problem, such as Poisson(dim=2)")


def check_positive(what: str, value: float) -> float:
    """Return a finite number > 0; raise for anything else."""
    require(is_number(value) and value > 0, what, value, "Use a positive number")
    return float(value)


def check_count(n: object, what: str = "n") -> int:
    """Return a number of points, an integer ≥ 1; raise for anything else."""
    require(is_integer(n, 1), f"The number of points {what}", n, "Use an integer ≥ 1")
    return int(n)  # pyright: ignore[reportArgumentType]


def check_seed(seed: object) -> int:
    """Return a seed, an integer that torch's generators take; raise for anything else."""
    usable = is_integer(seed, -(2**63)) and seed < 2**64  # pyright: ignore[reportOperatorIssue]
    require(usable, "seed=", seed, "Use an integer of 64 bits, such as 0")
    return int(seed)  # pyright: ignore[reportArgumentType]


def check_bounds(pair: object, what: str) -> tuple[float, float]:
    """Return finite numbers a < b; raise for anything else."""
    try:
        a, b = pair  # pyright: ignore[reportGeneralTypeIssues]
        a = float(a)
        b = float(b)
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
    """Return `dim` different coordinate names: x, y, z or x1, ..., xd by default."""
    if names is None:
        if dim <= 3:
            return ("x", "y", "z")[:dim]
        return tuple(f"x{i + 1}" for i in range(dim))
    if isinstance(names, str):
        names = [names]
    checked = tuple(names)
    if len(checked) != dim or not all(isinstance(name, str) and name for name in checked):
        raise PullbackError(
            "The coordinate names do not fit",
            f"got {checked!r} for {dim} coordinates",
            "Give one name (a string) for each coordinate",
        )
    if len(set(checked)) != dim:
        raise PullbackError(
            "Two coordinates have the same name", f"got {checked!r}", "Give each its own name"
        )
    return checked


def index_of(name: object, names: Iterable[str]) -> int:
    """Return the position of a coordinate; raise if there is none of this name."""
    names = tuple(names)
    if name not in names:
        raise PullbackError(
            f"There is no coordinate {name!r}",
            f"the coordinates are {', '.join(names)}",
            "Use one of these names",
        )
    return names.index(name)  # pyright: ignore[reportArgumentType]


def check_points(x: object, dim: int, what: str = "x") -> Tensor:
    """Return real points of shape (N, dim), in float64 on the CPU, without their graph."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != dim or x.is_complex():
        description = type(x).__name__
        if isinstance(x, Tensor):
            description = f"shape {tuple(x.shape)} of {x.dtype}"
        raise PullbackError(
            f"{what} is not a list of points",
            f"got {description} in {dim} dimension{'s' * (dim > 1)}",
            f"Pass a real tensor of shape (N, {dim})",
        )
    return x.detach().to("cpu", torch.float64)
