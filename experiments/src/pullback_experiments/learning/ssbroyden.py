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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import line_search
from torch import Tensor, nn


@dataclass(frozen=True)
class Evaluation:
    """The loss and its gradient at a point."""

    loss: float
    gradient: np.ndarray


class SSBroyden(torch.optim.Optimizer):
    """One quasi-Newton iteration per step, with scipy's search for strong Wolfe conditions.

    The closure must compute the same function in all steps: the gradient of the accepted point is
    kept for the next step.

    Args:
        params: all of them at once; the inverse Hessian is dense.
        scaled: False is plain BFGS.
    """

    def __init__(self, params: Iterable[nn.Parameter], scaled: bool = True) -> None:
        super().__init__(list(params), {})
        self.scaled = scaled
        self._params: list[nn.Parameter] = self.param_groups[0]["params"]
        self.inverse = self._identity()
        self._previous_loss: float | None = None
        self._evaluations: dict[bytes, Evaluation] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move along −H g and update H; where no step length is found, H starts over."""
        assert closure is not None
        x = nn.utils.parameters_to_vector(self._params).double().numpy().copy()

        def loss_at(z: np.ndarray) -> float:
            return self._evaluate(closure, z).loss

        def gradient_at(z: np.ndarray) -> np.ndarray:
            return self._evaluate(closure, z).gradient

        current = self._evaluate(closure, x)
        if self._previous_loss is None:  # as scipy: the first trial step has length 1
            self._previous_loss = current.loss + float(np.linalg.norm(current.gradient)) / 2
        direction = -(self.inverse @ torch.from_numpy(current.gradient)).numpy()
        length = line_search(
            loss_at, gradient_at, x, direction, current.gradient, current.loss,
            self._previous_loss, c2=0.9, maxiter=20,
        )[0]  # fmt: skip
        if length is None:
            self.inverse = self._identity()
            self._previous_loss = None
            self._put(x)
            return current.loss
        accepted = x + length * direction
        following = self._evaluate(closure, accepted)
        self._put(accepted)
        self.inverse = update_inverse(
            self.inverse,
            torch.from_numpy(accepted - x),
            torch.from_numpy(following.gradient - current.gradient),
            torch.from_numpy(current.gradient),
            length,
            self.scaled,
        )
        self._previous_loss = current.loss
        self._evaluations = {accepted.tobytes(): following}
        return current.loss

    def _evaluate(self, closure: Callable[[], Any], x: np.ndarray) -> Evaluation:
        """Return loss and gradient at x, from memory if they were computed before."""
        key = x.tobytes()
        if key not in self._evaluations:
            self._put(x)
            with torch.enable_grad():
                loss = float(torch.as_tensor(closure()).detach())
            self._evaluations[key] = Evaluation(loss, self._gradient().numpy())
        return self._evaluations[key]

    def _identity(self) -> Tensor:
        return torch.eye(sum(p.numel() for p in self._params), dtype=torch.float64)

    def _put(self, x: np.ndarray) -> None:
        nn.utils.vector_to_parameters(torch.from_numpy(x).to(self._params[0]), self._params)

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
    # H/τ plus three terms of rank one, in one pass over H
    vectors = torch.stack([hy, v, s])
    weights = vectors.new_tensor([-1 / (yhy * tau), phi / tau, 1 / ys])
    return torch.addmm(inverse, vectors.T * weights, vectors, beta=1 / tau)


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
