r"""Euclidean gradient descent of β = W₁⋯W_L on observed entries, many problems at once.

The loss is ½Σ_Ω(β − b)², so ∇_{W_i} = A_iᵀ R B_iᵀ with R = (β − b) on Ω, zero elsewhere. Along the
way the curvature changes by orders of magnitude: from small factors, where it is ‖R‖ at saddles, to
Σ_i ‖A_i‖²‖B_i‖² ≤ Σ_i ∏_{m≠i}‖W_m‖² at the end. Steps are a fixed share
of the inverse of both together,

    η = c / (Σ_i ∏_{m≠i}‖W_m‖² + (L − 1) ‖R‖ max_i ‖W_i‖^{L−2})

which follows the flow closely at any scale and takes thousands of steps instead of millions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pullback.linear.tangents import around


@dataclass(frozen=True)
class Observed:
    """B matrices with their observed entries, (B, d, d) each."""

    truth: Tensor
    mask: Tensor

    @classmethod
    def of(cls, truth: Tensor, counts: Sequence[int], source: torch.Generator) -> Observed:
        """The first n entries of one random order, for every n."""
        order = torch.randperm(truth.numel(), generator=source).to(truth.device)
        mask = torch.zeros(len(counts), truth.numel(), dtype=torch.bool, device=truth.device)
        for one, n in zip(mask, counts, strict=True):
            one[order[:n]] = True
        return cls(truth.expand(len(counts), *truth.shape), mask.view(-1, *truth.shape))

    def error(self, beta: Tensor) -> Tensor:
        """‖β − truth‖/‖truth‖ over the entries that are not observed, (B,)."""
        off = (beta - self.truth).masked_fill(self.mask, 0.0)
        return off.flatten(1).norm(dim=1) / self.truth.masked_fill(self.mask, 0).flatten(1).norm(
            dim=1
        )

    def training(self, beta: Tensor) -> Tensor:
        """The same over those that are, (B,)."""
        off = (beta - self.truth).masked_fill(~self.mask, 0.0)
        size = self.truth.masked_fill(~self.mask, 0).flatten(1).norm(dim=1)
        return off.flatten(1).norm(dim=1) / size


def product(factors: Sequence[Tensor]) -> Tensor:
    """W₁⋯W_L."""
    beta = factors[0]
    for w in factors[1:]:
        beta = beta @ w
    return beta


def effective_rank(beta: Tensor) -> Tensor:
    """exp of the entropy of the normalized singular values, (B,)."""
    sigma = torch.linalg.svdvals(beta)
    p = sigma / sigma.sum(-1, keepdim=True)
    return torch.special.entr(p).sum(-1).exp()


def descend(
    factors: list[Tensor],
    data: Observed,
    *,
    steps: int,
    tol: float = 1e-6,
    share: float = 0.5,
    watch: Callable[[int], None] = lambda step: None,
) -> list[Tensor]:
    """Factors (B, d, d) after so many steps, or when every training error is below tol."""
    norms = [Norm() for _ in factors] + [Norm()]
    for step in range(steps):
        before, after = around(factors)
        gap = (product(factors) - data.truth).masked_fill(~data.mask, 0.0)
        if step % 20 == 0:
            watch(step)
            if float(data.training(product(factors)).max()) < tol:
                break
        sizes = [norm(w) for norm, w in zip(norms, [*factors, gap], strict=True)]
        eta = (share / _curvature(torch.stack(sizes[:-1]), sizes[-1]))[:, None, None]
        factors = [
            w - eta * (a.mT @ gap @ b.mT) for w, a, b in zip(factors, before, after, strict=True)
        ]
    return factors


def _curvature(sizes: Tensor, gap: Tensor) -> Tensor:
    """Σ_i ∏_{m≠i} ‖W_m‖² + (L − 1)‖R‖ max_i ‖W_i‖^{L−2} from norms (L, B) and (B,)."""
    depth = len(sizes)
    if depth == 1:
        return torch.ones_like(gap)
    others = [torch.cat([sizes[:i], sizes[i + 1 :]]).prod(0) for i in range(depth)]
    return torch.stack(others).square().sum(0) + (depth - 1) * gap * sizes.amax(0) ** (depth - 2)


class Norm:
    """‖a‖₂ of matrices that change slowly, by power iteration from the last singular vectors."""

    def __init__(self) -> None:
        self.v: Tensor | None = None

    def __call__(self, a: Tensor) -> Tensor:
        """For a (B, d, d), as (B,)."""
        times = 2
        if self.v is None:
            source = torch.Generator().manual_seed(0)
            v = torch.randn(a.shape[0], a.shape[-1], 1, generator=source, dtype=torch.float64)
            self.v, times = v.to(a), 20
        sigma = a.new_zeros(len(a))
        for _ in range(times):
            u = a @ self.v
            self.v = a.mT @ (u / u.norm(dim=1, keepdim=True).clamp(min=1e-300))
            sigma = self.v.norm(dim=1)[:, 0]
            self.v = self.v / sigma[:, None, None].clamp(min=1e-300)
        return sigma
