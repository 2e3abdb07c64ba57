"""How well scores of samples predict what retraining does, and what other methods score."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pullback.curvature import margin
from pullback.curvature.measures import Measure, measure_gradient
from pullback.maps import Call, ModuleMap


def rank(values: Tensor) -> Tensor:
    """Return the ranks along the last axis, centered, ties by order."""
    ranks = values.argsort(-1).argsort(-1).to(torch.float64)
    return ranks - ranks.mean(-1, keepdim=True)


def datamodeling_score(scores: Tensor, subsets: Tensor, measured: Tensor) -> Tensor:
    """Return the linear datamodeling score of every query, (Q,).

    It is Spearman's correlation, over the subsets S, of the sum of scores over S with what networks
    trained on S say.

    Args:
        scores: (Q, N), larger for samples that raise the measure when they are trained on.
        subsets: (M, size), indices.
        measured: the measure of every query by the network of every subset, (M, Q).
    """
    masks = torch.zeros(len(subsets), scores.shape[1], dtype=scores.dtype, device=scores.device)
    masks.scatter_(1, subsets.to(scores.device), 1.0)
    predicted = rank(scores @ masks.T)
    actual = rank(measured.to(scores.device).T)
    norms = predicted.norm(dim=1) * actual.norm(dim=1)
    return (predicted * actual).sum(1) / norms.clamp(min=1e-12)


def sample_gradients(model: nn.Module, measure: Measure, x: Tensor, y: Tensor) -> Tensor:
    """Return ∇f of every sample as flat rows, (N, p)."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    linear = ModuleMap(model, Call.of(x)).linearize(parameters)
    return linear.pullback(measure_gradient(measure, linear.value, y)).rows()


def compute_doubts(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return 1 − p_y of every sample, (N,); of a sequence the mean over its positions."""
    with torch.no_grad():
        p = torch.softmax(model(x), -1).gather(-1, y.unsqueeze(-1))
    return (1 - p).flatten(1).mean(1)


def trak(
    models: Sequence[nn.Module],
    queries: tuple[Tensor, Tensor],
    training: tuple[Tensor, Tensor],
    dimension: int,
    seed: int,
    batch: int = 500,
    measure: Measure = margin,
) -> Tensor:
    r"""Return TRAK's scores (Park et al. 2023), averaged over models: (Q, N).

    With randomly projected gradients φ of the margin, τ = φ(q) (ΦᵀΦ)⁻¹ Φᵀ times 1 − p_y. The mean
    over models is taken of both factors before they are multiplied, as the authors do. Where
    queries have another measure than the margin, φ(q) is its gradient.
    """
    kernels = []
    doubts = []
    for number, model in enumerate(models):
        size = sum(p.numel() for p in model.parameters())
        dtype = next(model.parameters()).dtype
        device = training[0].device
        generator = torch.Generator(device).manual_seed(seed + number)
        signs = torch.randint(
            0, 2, (size, dimension), generator=generator, device=device, dtype=torch.int8
        )
        projection = signs.to(dtype).mul_(2).sub_(1).mul_(dimension**-0.5)

        def project(
            data: tuple[Tensor, Tensor],
            function: Measure,
            model: nn.Module = model,
            by: Tensor = projection,
        ) -> Tensor:
            batches = zip(data[0].split(batch), data[1].split(batch), strict=True)
            return torch.cat([sample_gradients(model, function, x, y) @ by for x, y in batches])

        features = project(training, margin)
        gram = features.T @ features
        solved = torch.linalg.solve(gram, features.T)
        kernels.append(project(queries, measure) @ solved)
        doubts.append(compute_doubts(model, *training))
    return torch.stack(kernels).mean(0) * torch.stack(doubts).mean(0)
