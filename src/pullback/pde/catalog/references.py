"""Burgers' equation by the Cole–Hopf formula, to compare with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..arguments import check_points, check_positive, require

Array = NDArray[Any]

#: quadrature values that are computed at once
_CHUNK = 2**21
#: e^{−40} of the largest value of the integrand is left out: 4e-18
_DIGITS = 40.0


class Burgers:
    r"""u_t + u u_x = ν u_xx on [−1, 1] × [0, ∞), u(x, 0) = −sin πx, u(±1, t) = 0.

    A function of points (x, t), (N, 2) ↦ (N, 1). With f(y) = exp(−cos(πy)/2πν),

        u(x, t) = −∫ sin π(x−η) f(x−η) e^{−η²/4νt} dη / ∫ f(x−η) e^{−η²/4νt} dη.

    The integrands are entire and decay like Gaussians, so the trapezoidal rule converges
    faster than any power. Basdevant et al., Computers & Fluids 14 (1986) 23–41.

    >>> Burgers(nu=0.01 / torch.pi)(torch.tensor([[0.5, 0.25]], dtype=torch.float64))
    tensor([[-0.8032]], dtype=torch.float64)
    """

    def __init__(self, nu: float) -> None:
        self.nu = check_positive("nu", nu)
        self.half_nodes = self._count_nodes(1.0)

    def _count_nodes(self, t: float) -> int:
        """Return half the nodes up to a time.

        A step is a quarter of the narrowest Gaussian's width.
        """
        width = math.sqrt(2 * self.nu * t / (1 + math.pi * t))
        reach = math.sqrt(4 * _DIGITS * self.nu * t + 4 / math.pi)
        return math.ceil(reach / min(0.25 * width, 0.1))

    def __call__(self, x: Tensor) -> Tensor:
        points = check_points(x, 2).numpy()
        require(x.is_floating_point(), "The points' dtype", x.dtype, "Pass floating-point points")
        negative_times = points[~(points[:, 1] >= 0), 1]
        require(
            not len(negative_times),
            "A point's time",
            negative_times,
            "Use points (x, t) with t ≥ 0",
        )
        last = float(points[:, 1].max(initial=1.0))
        require(math.isfinite(last), "A point's time", last, "Use finite times")
        return torch.from_numpy(self.quadrature(points, self._count_nodes(last))).to(x)

    def quadrature(self, points: Array, half_nodes: int, shift: float = 0.0) -> Array:
        """Return the formula with 2·half_nodes + 1 nodes, moved by `shift` of their distance."""
        nodes = (np.arange(-half_nodes, half_nodes + 1) + shift) / half_nodes  # in [−1, 1]
        size = max(1, _CHUNK // len(nodes))
        starts = range(0, len(points), size)
        chunks = [self._compute_ratio(points[i : i + size], nodes) for i in starts]
        return np.concatenate([np.zeros(0), *chunks])[:, None]

    def _compute_ratio(self, points: Array, nodes: Array) -> Array:
        """Return u at points from the ratio of the two integrals, (N,)."""
        x = points[:, :1]
        t = points[:, 1:]
        # beyond |η| = 2√(νt)·reach the integrand is below e^{−40} of its largest value:
        # that is at least its value at the peak of f next to x, and at least that at η = 0
        gap = 1 / np.maximum(self.nu * t, self.nu * math.pi / 4)
        z = 0.5 * np.sqrt(4 * _DIGITS + gap) * nodes  # η = 2√(νt) z
        half_angle = 0.5 * math.pi * (x - 2 * np.sqrt(self.nu * t) * z)
        cos = np.cos(half_angle)
        sin = np.sin(half_angle)
        # −cos 2a = 1 − 2cos²a: the peaks of f, at cos a = 0, lose no digits, and the 1 cancels
        exponent = -(cos * cos) / (math.pi * self.nu) - z * z
        weight = np.exp(exponent - exponent.max(axis=1, keepdims=True))
        u = -(weight * (2 * sin * cos)).sum(axis=1) / weight.sum(axis=1)
        x = x[:, 0]
        t = t[:, 0]
        u = np.where(t == 0, -np.sin(math.pi * x), u)
        return np.where(np.abs(x) == 1, 0.0, u)
