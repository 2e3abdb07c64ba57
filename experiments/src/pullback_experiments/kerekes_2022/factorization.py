r"""Euclidean gradient descent of β = W₁⋯W_L on observed entries, many problems at once.

The loss is ½Σ_Ω(β − b)², so ∇_{W_i} = A_iᵀ R B_iᵀ with R = (β − b) on Ω, zero elsewhere. Along the
way the curvature changes by orders of magnitude: from small factors, where it is ‖R‖ at saddles, to
Σ_i ‖A_i‖²‖B_i‖² ≤ Σ_i ∏_{m≠i}‖W_m‖² at the end. Steps are a fixed share
of the inverse of both together,

    η = c / (Σ_i ∏_{m≠i}‖W_m‖² + (L − 1) ‖R‖ max_i ‖W_i‖^{L−2})

which follows the flow closely at any scale and takes thousands of steps instead of millions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pullback import PullbackError
from pullback.linear import DeepMatrix
from pullback.linear.tangents import products_around

from ..framework.experiment import Context
from ..framework.records import Record
from .common import generator, normal


@dataclass(frozen=True)
class Observed:
    """B matrices with their observed entries, (B, d, d) each."""

    truth: Tensor
    mask: Tensor

    @classmethod
    def of(cls, truth: Tensor, counts: Sequence[int], source: torch.Generator) -> Observed:
        """Return problems with the first n entries of one random order, for every n."""
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
        before, after = products_around(factors)
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
            self.v = v.to(a)
            times = 20
        sigma = a.new_zeros(len(a))
        for _ in range(times):
            u = a @ self.v
            self.v = a.mT @ (u / u.norm(dim=1, keepdim=True).clamp(min=1e-300))
            sigma = self.v.norm(dim=1)[:, 0]
            self.v = self.v / sigma[:, None, None].clamp(min=1e-300)
        return sigma


@dataclass(frozen=True)
class SearchProblem:
    """The small completion problem on which settings of NGD are searched.

    Attributes:
        size: of the square matrix.
        rank: of the matrix to find.
        observed: entries, about twice the degrees of freedom of the rank.
        steps: of NGD, at most.
    """

    size: int = 16
    rank: int = 2
    observed: int = 130
    steps: int = 80

    def draw_truth(self, source: torch.Generator) -> Observed:
        """Return a random matrix of the rank and of norm `size`, with its observed entries."""
        cpu = torch.device("cpu")  # tiny decompositions
        left = normal((self.size, self.rank), source, cpu)
        truth = left @ normal((self.rank, self.size), source, cpu)
        return Observed.of(truth * (self.size / truth.norm()), [self.observed], source)

    def draw_factors(
        self, depth: int, start: float, source: torch.Generator, device: torch.device
    ) -> list[Tensor]:
        """Return random square factors whose product has entries of about the size `start`."""
        gain = start ** (1 / depth)
        shape = (self.size, self.size)
        return [gain * normal(shape, source, device) / self.size**0.5 for _ in range(depth)]


PROBLEM = SearchProblem()

#: Fisher matrices: of all entries, as in the paper, and of the observed ones
FISHERS = ("all entries", "observed entries")


def search(trials: int, steps: int, context: Context) -> Record:
    """Try random depths, rates, starts and dampings with NGD, and EGD with L = 2 and 3."""
    source = generator(20_000 + context.seed)
    data = PROBLEM.draw_truth(source)
    out = []
    for i in range(trials):
        out.append(_trial(i, data, source))
        context.watch(i / trials, "trials")
    return {
        "trials": out,
        "euclidean": [_euclidean(d, data, context.seed, min(steps, 4000)) for d in (2, 3)],
    }


def _euclidean(depth: int, data: Observed, seed: int, steps: int) -> float:
    source = generator(30_000 + seed)
    factors = PROBLEM.draw_factors(depth, 1e-3, source, data.truth.device)
    descent = descend([w[None] for w in factors], data, steps=steps)
    return float(data.error(product(descent))[0])


def _trial(number: int, data: Observed, source: torch.Generator) -> Record:
    """Run one setting; half of the trials have no damping, and half of each either Fisher."""
    draw = torch.rand(4, generator=source, dtype=torch.float64).tolist()
    damping = 0.0
    if number % 2 == 0:
        damping = 10 ** (-6 + 8 * draw[3])
    setting: dict[str, Any] = {
        "depth": 2 + round(draw[0]),
        "lr": 10 ** (-2 + 2 * draw[1]),
        "start": 10 ** (-3 + 3 * draw[2]),
        "damping": damping,
        "fisher": FISHERS[(number // 2) % 2],
    }
    if setting["damping"] > 1:  # far damping shortens steps in proportion
        setting["lr"] *= setting["damping"]
    device = data.truth.device
    factors = PROBLEM.draw_factors(setting["depth"], setting["start"], source, device)
    try:
        beta = _natural(factors, data, setting)
        error = float(data.error(beta[None])[0])
        training = float(data.training(beta[None])[0])
    except (PullbackError, RuntimeError):  # lost: factors that are no longer numbers
        error = training = math.inf
    fine = math.isfinite(error) and math.isfinite(training)
    if fine:
        ends = {"error": error, "training": training}
    else:
        ends = {"error": None, "training": None}
    return setting | ends


def _natural(factors: list[Tensor], data: Observed, setting: dict[str, Any]) -> Tensor:
    model = DeepMatrix.of(factors)
    truth = data.truth[0]
    mask = data.mask[0]
    rows, columns = mask.nonzero().T
    if setting["fisher"] == FISHERS[1]:
        entries = (rows, columns)
    else:
        entries = None
    for _ in range(PROBLEM.steps):
        gap = (model.beta.detach() - truth).masked_fill(~mask, 0.0)
        if not bool(torch.isfinite(gap).all()) or float(gap.abs().max()) > 1e6:
            return torch.full_like(truth, math.nan)
        if float(gap.norm()) < 1e-5 * float(truth.norm()):
            break
        if entries is None:
            pull = gap
        else:
            pull = gap[rows, columns]
        moves = model.natural_gradient(pull, entries=entries, damping=setting["damping"])
        with torch.no_grad():
            for w, move in zip(model.factors, moves, strict=True):
                w -= setting["lr"] * move
    return model.beta.detach()
