"""The Sobolev metric: functions are measured in an RKHS norm, which couples the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Factor, Mixed
from .base import Metric
from .rkhs import sobolev_kernel

_JITTER = {torch.float64: 1e-10, torch.float32: 1e-5}


class Sobolev(Metric):
    """M = (K + jitter·I)⁻¹ ⊗ I over the batch, K = e^(−d)(1 + d), d = ‖x − x'‖/scale.

    With J of full row rank a natural-gradient step moves the function by −ηK∇L on the batch.

    Args:
        scale: the length in input space beyond which two samples are unrelated.
        jitter: added to K's unit diagonal, since equal inputs make K singular; 1e-10 in
            float64 and 1e-5 in float32 unless given.
    """

    def __init__(self, scale: float = 1.0, jitter: float | None = None) -> None:
        if not scale > 0:
            raise PullbackError("Sobolev's scale is not positive", f"got {scale}", "Use scale > 0")
        self.scale, self.jitter = scale, jitter

    def kernel(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """K + jitter·I on the batch."""
        k = sobolev_kernel(inputs.to(dtype), inputs.to(dtype), self.scale)
        jitter = _JITTER.get(dtype, 1e-5) if self.jitter is None else self.jitter
        return k + jitter * torch.eye(len(k), dtype=dtype, device=k.device)

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        if inputs is None or not inputs.is_floating_point() or inputs.shape[0] != z.shape[0]:
            got = "none" if inputs is None else f"{tuple(inputs.shape)} of {inputs.dtype}"
            raise PullbackError(
                "Sobolev needs the model's inputs as points of a vector space",
                f"got {got} for {z.shape[0]} samples",
                "Give the model a float tensor with one entry per sample as its first argument",
            )
        lower, info = torch.linalg.cholesky_ex(self.kernel(inputs, z.dtype))
        if bool(info > 0):
            raise PullbackError(
                "The Sobolev kernel is singular on this batch",
                "some inputs coincide or lie within round-off of each other",
                "Raise jitter, or lower scale",
            )
        return Mixed(lower, tuple(z.shape[1:]))
