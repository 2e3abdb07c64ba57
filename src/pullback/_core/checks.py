"""What arguments must be: tensors of finite real numbers, and numbers within a range."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .errors import PullbackError


def refuse_values(what: str, value: Any, shape: Sequence[int | str] | None = None) -> None:
    """Raise unless this is a tensor of finite numbers of a float type, and of this shape.

    A letter in the shape stands for any length; without a shape, any will do.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        known = isinstance(value, Tensor)
        got = f"{value.dtype} on {value.device}" if known else type(value).__name__
        raise PullbackError(f"{what} is not of a float type", f"got {got}", "Pass real numbers")
    want = tuple(value.shape if shape is None else shape)
    pairs = zip(value.shape, want, strict=False)
    if value.ndim != len(want) or any(have != n and not isinstance(n, str) for have, n in pairs):
        raise PullbackError(
            f"{what} does not fit",
            f"its shape is {tuple(value.shape)}",
            f"Pass a tensor of shape ({', '.join(map(str, want))})",
        )
    if not value.numel():
        raise PullbackError(f"{what} is empty", "it has no entries", "Pass at least one")
    if not bool(torch.isfinite(value).all()):
        raise PullbackError(
            f"{what} is not finite", "it contains NaN or infinity", "Check it for overflow"
        )


def refuse_number(
    name: str,
    value: Any,
    *,
    least: float = 0.0,
    below: float = inf,
    whole: bool = False,
    positive: bool = False,
) -> None:
    """Raise unless least ≤ value < below, and above 0 where it must be positive."""
    kind = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not kind or not least <= float(value) < below or (positive and value == 0):
        kinds = "whole number" if whole else "number"
        lower = "> 0" if positive else f"≥ {least:g}"
        upper = f" and below {below:g}" if below < inf else ""
        raise PullbackError(
            f"{name} is not usable", f"got {value!r}", f"Use a {kinds} {lower}{upper}"
        )
