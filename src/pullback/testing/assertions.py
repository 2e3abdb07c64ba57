"""How the laws compare: one relative error, always reported."""

from __future__ import annotations

from torch import Tensor


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖/‖want‖, or ‖got‖ where want vanishes.

    >>> import torch
    >>> relative_error(torch.tensor([1.5]), torch.tensor([1.0]))
    0.5
    """
    if got.shape != want.shape:
        raise AssertionError(f"shapes differ: {tuple(got.shape)} and {tuple(want.shape)}")
    size = float(want.detach().double().norm())
    error = float((got.detach().double() - want.detach().double()).norm())
    return error / size if size > 0 else error


def assert_close(got: Tensor, want: Tensor, tol: float, law: str) -> None:
    """Raise unless the relative error is at most `tol`; NaN never passes."""
    error = relative_error(got, want)
    if not error <= tol:
        raise AssertionError(f"{law}: relative error {error:.3e}, allowed {tol:.1e}")
