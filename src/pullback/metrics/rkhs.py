"""Reproducing kernels on inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def distances(x: Tensor, y: Tensor) -> Tensor:
    """‖x_i − y_j‖ of samples (N, ...) and (M, ...), without cancellation between near points."""
    return torch.cdist(x.flatten(1), y.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")


def sobolev_kernel(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """K = e^(−d)(1 + d), d = ‖x − x'‖/scale: the kernel of H^s with s = (n + 3)/2 in Rⁿ.

    The paper prints s = n + 3; the Fourier transform decays as (1 + |ξ|²)^(−(n+3)/2).

    >>> points = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    >>> print(sobolev_kernel(points, points, 1.0)[0])
    tensor([1.0000, 0.7358, 0.1991], dtype=torch.float64)
    """
    d = distances(x, y) / scale
    return torch.exp(-d) * (1 + d)
