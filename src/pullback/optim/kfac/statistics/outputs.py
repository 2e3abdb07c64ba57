"""The model's output as a metric sees it: samples first, with at least one axis of an event."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ...._core.space import compute_dtype


def refuse_output(z: Tensor) -> None:
    """Raise for tensors that no metric of the library is of."""
    odd = "complex" if z.is_complex() else "nested" if z.is_nested else ""
    if not odd and z.layout is not torch.strided:
        odd = str(z.layout).removeprefix("torch.")
    if odd:
        raise PullbackError(
            f"The model's output is a {odd} tensor",
            "metrics are those of dense real ones",
            "Return a dense real tensor: torch.view_as_real(z), z.to_dense() or z.to_padded_tensor",
        )


def arranged(z: Tensor, batch_dim: int, *, cast: bool = True) -> Tensor:
    """Samples first, at least one event axis, in the dtype of linear algebra."""
    if z.ndim <= max(batch_dim, 0) or z.numel() == 0:
        raise PullbackError(
            "The model's output has no samples",
            f"its shape is {tuple(z.shape)}, and samples are counted by axis {batch_dim}",
            "Return one value per sample, skip empty batches, and set batch_dim=",
        )
    z = z.movedim(batch_dim, 0)
    z = z.to(compute_dtype(z.dtype)) if cast else z
    return z[:, None] if z.ndim == 1 else z


def placed(covector: Tensor, ndim: int, dtype: torch.dtype, batch_dim: int) -> Tensor:
    """Back to the layout and the dtype of the output."""
    covector = covector.view(len(covector)) if ndim == 1 else covector
    return covector.movedim(0, batch_dim).to(dtype)


def places(mask: Tensor | None, z: Tensor, batch_dim: int) -> Tensor | None:
    """Which of the output's places count: the mask without the one axis it is constant along."""
    if mask is None or mask.ndim != z.ndim or z.ndim < 2:
        return None
    mask = mask.movedim(0, batch_dim)
    event = [i for i in range(z.ndim) if mask.shape[i] == 1 and z.shape[i] > 1]
    return mask.squeeze(event[0]) if len(event) == 1 else None


def first(inputs: Any, samples: int, batch_dim: int) -> Any:
    """The model's input in the same arrangement, where it has it."""
    if not isinstance(inputs, Tensor) or inputs.ndim <= batch_dim:
        return inputs
    return inputs.detach().movedim(batch_dim, 0) if inputs.shape[batch_dim] == samples else inputs
