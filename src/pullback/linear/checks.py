"""What the closed forms ask of their inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.errors import PullbackError


def refuse_shape(name: str, got: Tensor, want: Sequence[int | str]) -> None:
    """Raise unless the tensor has this shape; a letter stands for any length."""
    if not isinstance(got, Tensor):
        raise PullbackError(f"{name} is no tensor", f"got {type(got).__name__}", "Pass a tensor")
    if got.is_complex() or got.is_meta:
        kind = "it is on the meta device" if got.is_meta else f"it is of {got.dtype}"
        raise PullbackError(f"{name} has no real entries", kind, "Pass real numbers")
    fits = got.ndim == len(want) and all(
        isinstance(w, str) or w == g for g, w in zip(got.shape, want, strict=True)
    )
    if not fits:
        shape = ", ".join(map(str, want)) + ("," if len(want) == 1 else "")
        raise PullbackError(
            f"{name} does not fit the model",
            f"it has shape {tuple(got.shape)}",
            f"Pass a tensor of shape ({shape})",
        )


def refuse_nonfinite(name: str, value: Tensor) -> None:
    """Raise where an entry is infinite or not a number."""
    if not bool(torch.isfinite(value).all()):
        raise PullbackError(
            f"{name} is not finite",
            "it contains infinite entries or entries that are not numbers",
            "Check the data and the parameters for overflow",
        )


def refuse_data(x: Tensor, y: Tensor, dim: int | None = None) -> None:
    """Raise unless x is (N, D) and y is (N,), real, finite and not empty."""
    refuse_shape("The data matrix x", x, ("N", "D" if dim is None else dim))
    refuse_shape("The labels y", y, (x.shape[0],))
    if 0 in x.shape:
        raise PullbackError(
            "The data is empty", f"x has shape {tuple(x.shape)}", "Pass at least one sample"
        )
    refuse_kind("The data matrix x", x)
    refuse_nonfinite("The data matrix x", x)
    refuse_nonfinite("The labels y", y)


def refuse_kind(name: str, value: Tensor) -> None:
    """Raise unless the tensor is of a real float type."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise PullbackError(f"{name} is not of a float type", f"got {got}", "Call .double() on it")


def refuse_rcond(rcond: float | None) -> None:
    """Raise unless it is None or a share of the largest singular value."""
    if rcond is not None and not 0 <= rcond < 1:
        raise PullbackError("rcond is not usable", f"got {rcond}", "Use a number from 0 to 1")


def signs(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Labels as ±1 in the given dtype; labels of any other kind are refused."""
    if not bool((y.to(dtype).abs() == 1).all()):
        raise PullbackError(
            "The labels are not signs",
            f"found values such as {float(y.flatten()[0]):g}",
            "Encode the two classes as −1 and +1 (2·y − 1 for labels 0 and 1)",
        )
    return y.to(dtype)


def refuse_zero_tangent(size: Tensor) -> None:
    """Raise where J = 0, so that no move of the parameters moves β."""
    if not bool(size > 0):
        raise PullbackError(
            "The tangent is zero",
            "the factors vanish so that no small change of one of them changes their product",
            "Start from factors of which at most one is zero",
        )
