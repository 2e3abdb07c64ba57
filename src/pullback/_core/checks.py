"""Checks of arguments: tensors of finite real numbers, and numbers within a range."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from .errors import PullbackError, describe_value


def require_finite_tensor(what: str, value: Any, shape: Sequence[int | str] | None = None) -> None:
    """Raise unless this is a tensor of finite numbers of a float type, and of this shape.

    A letter in the shape stands for any length; without a shape, any will do.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        description = type(value).__name__
        if isinstance(value, Tensor):
            description = f"{value.dtype} on {value.device}"
        raise PullbackError(
            f"{what} is not of a float type", f"got {description}", "Pass real numbers"
        )
    if shape is not None and not _has_shape(value, shape):
        raise PullbackError(
            f"{what} does not fit",
            f"its shape is {tuple(value.shape)}",
            f"Pass a tensor of shape ({', '.join(map(str, shape))})",
        )
    if not value.numel():
        raise PullbackError(f"{what} is empty", "it has no entries", "Pass at least one")
    if not bool(torch.isfinite(value).all()):
        raise PullbackError(
            f"{what} is not finite", "it contains NaN or infinity", "Check it for overflow"
        )


def _has_shape(value: Tensor, shape: Sequence[int | str]) -> bool:
    """Return True if the tensor has these lengths; a letter stands for any length."""
    if value.ndim != len(shape):
        return False
    lengths = zip(value.shape, shape, strict=True)
    return all(isinstance(expected, str) or length == expected for length, expected in lengths)


def convert_to_float(value: Any) -> float:
    """Return a number as a float; integers above all floats are infinite."""
    try:
        return float(value)
    except OverflowError:
        return inf


def require_number(
    name: str,
    value: Any,
    *,
    least: float = 0.0,
    below: float = inf,
    whole: bool = False,
    positive: bool = False,
) -> None:
    """Raise unless value is a real number with least ≤ value < below.

    With `whole` it must be an integer, with `positive` above 0.
    """
    number_type = Integral if whole else Real
    has_type = isinstance(value, number_type) and not isinstance(value, bool)
    if has_type and least <= convert_to_float(value) < below and not (positive and value == 0):
        return
    noun = "whole number" if whole else "number"
    lower = "> 0" if positive else f"≥ {least:g}"
    upper = f" and below {below:g}" if below < inf else ""
    remedy = f"Use a {noun} {lower}{upper}"
    if hasattr(value, "item"):
        remedy += ", such as value.item()"
    raise PullbackError(f"{name} is not usable", f"got {describe_value(value)}", remedy)
