r"""Self-scaled Broyden (SSBroyden) as a torch optimizer, for comparisons.

With s = x₊ − x, y = g₊ − g, H the inverse Hessian so far and n parameters:

    H₊ = (H − H y yᵀH / yᵀHy + φ v vᵀ)/τ + s sᵀ/yᵀs,   v = √(yᵀHy) (s/yᵀs − H y/yᵀHy)

    b = −α sᵀg/yᵀs,  h = yᵀHy/yᵀs,  a = h b − 1,  c = √(a/(1 + a))
    ρ⁻ = min(1, h (1 − c)),  θ⁻ = (ρ⁻ − 1)/a,  θ⁺ = 1/ρ⁻,  θ = max(θ⁻, min(θ⁺, (1 − b)/b))
    σ = 1 + a θ,  φ = (1 − θ)/σ,  ρ⁺ = min(1, 1/b)
    τ = min(ρ⁺ σ^(−1/(n−1)), σ) where θ ≤ 0, else ρ⁺ min(σ^(−1/(n−1)), 1/θ)

α is the length of the step along −H g. φ = 1 and τ = 1 are BFGS.

J. F. Urbán, P. Stefanou, J. A. Pons, Unveiling the optimization process of physics informed neural
networks, J. Comput. Phys. 523 (2025); the choice of θ and τ is that of M. Al-Baali and H. Khalfan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from scipy.optimize import line_search
from torch import Tensor, nn


class SSBroyden(torch.optim.Optimizer):
    """One quasi-Newton iteration per step, with scipy's search for strong Wolfe conditions.

    Args:
        params: all of them at once; the inverse Hessian is dense.
        scaled: False is plain BFGS.
    """

    def __init__(self, params: Iterable[nn.Parameter], scaled: bool = True) -> None:
        super().__init__(list(params), {})
        self.scaled = scaled
        self._params: list[nn.Parameter] = self.param_groups[0]["params"]
        self.inverse = torch.eye(sum(p.numel() for p in self._params), dtype=torch.float64)
        self._before: float | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move along −H g and update H; where no step length is found, H starts over."""
        assert closure is not None
        evaluations: dict[bytes, tuple[float, np.ndarray]] = {}

        def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
            key = x.tobytes()
            if key not in evaluations:
                self._put(torch.from_numpy(x))
                with torch.enable_grad():
                    loss = float(torch.as_tensor(closure()).detach())
                evaluations[key] = loss, self._gradient().numpy()
            return evaluations[key]

        x = nn.utils.parameters_to_vector(self._params).double().numpy().copy()
        value, slope = evaluate(x)
        if self._before is None:
            self._before = value + float(np.linalg.norm(slope)) / 2  # first tries a length of 1
        direction = -(self.inverse @ torch.from_numpy(slope)).numpy()
        length = line_search(
            lambda z: evaluate(z)[0], lambda z: evaluate(z)[1], x, direction, slope, value,
            self._before, c2=0.9, maxiter=20,
        )[0]  # fmt: skip
        if length is None:
            self.inverse = torch.eye(len(x), dtype=torch.float64)
            self._before = None
            self._put(torch.from_numpy(x))
            return value
        self._before = value
        trial = x + length * direction
        after = evaluate(trial)[1]
        self._put(torch.from_numpy(trial))
        s, y = (torch.from_numpy(a - b) for a, b in ((trial, x), (after, slope)))
        self.inverse = update_inverse(
            self.inverse, s, y, torch.from_numpy(slope), length, self.scaled
        )
        return value

    def _put(self, x: Tensor) -> None:
        nn.utils.vector_to_parameters(x.to(self._params[0]), self._params)

    def _gradient(self) -> Tensor:
        gradients = []
        for p in self._params:
            if p.grad is None:
                gradients.append(torch.zeros_like(p).flatten())
            else:
                gradients.append(p.grad.flatten())
        return torch.cat(gradients).double().clone()


def update_inverse(
    inverse: Tensor, s: Tensor, y: Tensor, gradient: Tensor, length: float, scaled: bool = True
) -> Tensor:
    """H₊ from H, the step s, the gradient's change y, and the gradient before."""
    ys = float(y @ s)
    hy = inverse @ y
    yhy = float(y @ hy)
    if not (ys > 0 and yhy > 0):
        return inverse
    phi = 1.0
    tau = 1.0
    if scaled:
        phi, tau = _factors(-length * float(s @ gradient) / ys, yhy / ys, len(s))
    v = math.sqrt(yhy) * (s / ys - hy / yhy)
    scaled_inverse = inverse - torch.outer(hy, hy) / yhy + phi * torch.outer(v, v)
    return scaled_inverse / tau + torch.outer(s, s) / ys


def _factors(b: float, h: float, n: int) -> tuple[float, float]:
    """φ and τ."""
    a = max(h * b - 1, 0.0)  # not below 0 but for round-off
    c = math.sqrt(a / (1 + a))
    low = min(1.0, h * (1 - c))
    if a > 0:
        smallest = (low - 1) / a
    else:
        smallest = -math.inf
    theta = max(smallest, min(1 / low, (1 - b) / b))
    sigma = 1 + a * theta
    phi = (1 - theta) / sigma
    high = min(1.0, 1 / b)
    if n > 1:
        root = sigma ** (-1 / (n - 1))
    else:
        root = 1.0
    if theta <= 0:
        tau = min(high * root, sigma)
    else:
        tau = high * min(root, 1 / theta)
    return phi, tau
