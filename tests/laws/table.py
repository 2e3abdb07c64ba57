"""The law tables. A new part joins them with one line, and every law then runs on it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.likelihoods import MSE, Bernoulli, Categorical, Gaussian, Poisson
from pullback.metrics import Bregman, Euclidean, Fisher, FubiniStudy, Sobolev, Weighted
from pullback.solvers import Cholesky, ConjugateGradient, OrthogonalGreedy, PseudoInverse, Sketched
from tests.laws import models as m
from tests.laws.cases import MetricCase, ModelCase, SolverCase

rand = torch.randn
ints = torch.randint

FORMS = ("rows", "kernel", "dense", "matrix_free")

# --- models: one trap each ------------------------------------------------------------------

MODELS = [
    ModelCase("mlp", lambda: m.mlp(3, 5, 4, 2), lambda: (rand(4, 3),)),
    ModelCase("mlp few parameters", lambda: m.mlp(2, 2, 2), lambda: (rand(9, 2),)),
    ModelCase(
        "inplace relu", lambda: m.mlp(3, 6, 6, 2, activation=nn.ReLU(True)), lambda: (rand(5, 3),)
    ),
    ModelCase("conv2d", m.conv2d, lambda: (rand(3, 2, 6, 5),)),
    ModelCase("conv1d", m.conv1d, lambda: (rand(3, 2, 9),)),
    ModelCase("conv3d", m.conv3d, lambda: (rand(3, 2, 2, 3, 4),)),
    ModelCase("attention", lambda: m.Attention(4, 2), lambda: (rand(4, 3, 4),)),
    ModelCase("MultiheadAttention", lambda: m.TorchAttention(4, 2), lambda: (rand(4, 3, 4),)),
    ModelCase("embedding", lambda: m.Words(6, 4, 2), lambda: (ints(0, 6, (5, 4)),)),
    ModelCase(
        "tied embedding", lambda: m.TiedLanguageModel(4, 3, 3), lambda: (ints(0, 4, (3, 3)),)
    ),
    ModelCase("one module twice", lambda: m.Twice(3, 2), lambda: (rand(4, 3),)),
    ModelCase("one weight, two layers", lambda: m.SharedWeight(3, 2), lambda: (rand(4, 3),)),
    ModelCase("weight used by hand", lambda: m.Outside(3, 2), lambda: (rand(4, 3),)),
    ModelCase("weight used outside", lambda: m.Outside(3, 2, 2.0), lambda: (rand(4, 3),)),
    ModelCase("frozen", m.frozen, lambda: (rand(4, 3),)),
    ModelCase("batch norm eval", m.batch_norm, lambda: (rand(3, 2, 3, 3),)),
    ModelCase("norms and slopes", lambda: m.Norms(2), lambda: (rand(3, 4, 4, 4),)),
    ModelCase(
        "sequence first", lambda: m.SequenceFirst(3, 2), lambda: (rand(3, 3, 3),), batch_dim=1
    ),
    ModelCase(
        "several inputs",
        lambda: m.Several(3, 2),
        lambda: (rand(4, 3), rand(4, 3), True),
        lambda: {"gain": rand(3)},
    ),
    ModelCase("dropout", m.dropout, lambda: (rand(4, 3),)),
    ModelCase("buffers", lambda: m.Buffered(3, 2), lambda: (rand(4, 3),)),
    ModelCase("output (N,)", lambda: m.Squeezed(3), lambda: (rand(5, 3),)),
    ModelCase("output (N, T, m)", lambda: m.mlp(3, 3, 2), lambda: (rand(3, 4, 3),)),
    ModelCase("slope of (N,)", lambda: m.SlopeOfScalars(3), lambda: (rand(5, 3),)),
    ModelCase("coupled samples", lambda: m.Coupled(3, 2), lambda: (rand(4, 3),)),
    ModelCase("bare parameters", lambda: m.Functional(3, 2), lambda: (rand(4, 3),)),
]

# --- metrics: each beside its matrix in closed form, the mean taken -------------------------


def block(matrices: Tensor) -> Tensor:
    """One (n, n) matrix from (N, E, E)."""
    return torch.block_diag(*matrices)


def diagonal(entries: Tensor) -> Tensor:
    return torch.diag(entries.flatten())


def softmax_matrix(z: Tensor) -> Tensor:
    """diag(p) − ppᵀ at every position of (..., C)."""
    p = torch.softmax(z, -1).flatten(0, -2)
    return block(torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) / len(p)


def learned_variance_matrix(z: Tensor) -> Tensor:
    _, log_variance = z.chunk(2, -1)
    entries = torch.cat([1 / log_variance.exp(), 0.5 * torch.ones_like(log_variance)], -1)
    return diagonal(entries) / (z.numel() // z.shape[-1])


def sobolev_matrix(z: Tensor, x: Tensor, scale: float, jitter: float) -> Tensor:
    """(K + jitter)⁻¹ ⊗ I, entry by entry."""
    n = len(z)
    event = z[0].numel()
    k = torch.empty(n, n, dtype=z.dtype)
    for i in range(n):
        for j in range(n):
            d = torch.sqrt(((x[i] - x[j]) ** 2).sum()) / scale
            k[i, j] = torch.exp(-d) * (1 + d) + jitter * (i == j)
    return torch.kron(torch.linalg.inv(k).contiguous(), torch.eye(event, dtype=z.dtype)) / n


def centered_matrix(z: Tensor, weights: Tensor) -> Tensor:
    """(diag ω − ωωᵀ/N) ⊗ I for weights of mean 1, with the mean over samples taken."""
    omega = weights / weights.mean()
    n = len(z)
    over_samples = torch.diag(omega) - torch.outer(omega, omega) / n
    return torch.kron(over_samples, torch.eye(z[0].numel(), dtype=z.dtype)) / n


def potential(z: Tensor) -> Tensor:
    """Strictly convex: logsumexp + 0.1 |z|²."""
    return torch.logsumexp(z.flatten(), 0) + 0.1 * (z**2).sum()


def potential_matrix(z: Tensor) -> Tensor:
    p = torch.softmax(z.flatten(1), -1)
    eye = torch.eye(p.shape[1], dtype=z.dtype)
    return block(torch.diag_embed(p) - p[:, :, None] * p[:, None, :] + 0.2 * eye) / len(z)


def user_metric(z: Tensor) -> Tensor:
    """A metric as a plain function: I + t tᵀ with t = tanh z."""
    t = torch.tanh(z.flatten(1))
    return torch.eye(t.shape[1], dtype=z.dtype) + t[:, :, None] * t[:, None, :]


def weight(x: Tensor) -> Tensor:
    return 0.5 + x.double().flatten(1).abs().mean(1)


def weighted_matrix(z: Tensor, x: Tensor) -> Tensor:
    w = weight(x).view(-1, *[1] * (z.ndim - 1)).expand(z.shape)
    p = torch.sigmoid(z)
    return diagonal(w * p * (1 - p)) / z.numel()


def _target(z: Tensor) -> Tensor:
    """Some numbers between 0 and 1 in z's shape."""
    return torch.linspace(0, 1, z.numel(), dtype=z.dtype).reshape(z.shape).cos() ** 2


def _labels(z: Tensor) -> Tensor:
    return torch.arange(z[..., 0].numel()) % z.shape[-1]


def _squares(z: Tensor) -> Tensor:
    return 0.5 * ((z - _target(z)) ** 2).flatten(1).sum(1).mean()


def _cross_entropy(z: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), _labels(z))


def _gaussian_nll(z: Tensor) -> Tensor:
    mean, log_variance = z.chunk(2, -1)
    terms = F.gaussian_nll_loss(mean, _target(mean), log_variance.exp(), reduction="none", eps=0)
    return terms.sum(-1).mean()


def _divergence(z: Tensor) -> Tensor:
    """Σ F(z) − ⟨y, z⟩, whose Hessian is F's."""
    y = torch.softmax(_target(z).flatten(1), -1)
    return torch.stack([potential(a) - b @ a.flatten() for a, b in zip(z, y, strict=True)]).mean()


def _centered_squares(z: Tensor) -> Tensor:
    """A loss that does not change when a constant is added to z."""
    return _squares(z - z.mean(0) + _target(z).mean(0))


def _euclidean_matrix(z: Tensor, x: Tensor) -> Tensor:
    return torch.eye(z.numel(), dtype=z.dtype) / len(z)


METRICS = [
    MetricCase("Euclidean", Euclidean(), _euclidean_matrix, _squares),
    MetricCase(
        "Categorical",
        Fisher(Categorical()),
        lambda z, x: softmax_matrix(z),
        _cross_entropy,
        lambda z, x: z.shape[-1] > 1,
    ),
    MetricCase(
        "Bernoulli",
        Fisher(Bernoulli()),
        lambda z, x: diagonal(torch.sigmoid(z) * (1 - torch.sigmoid(z))) / z.numel(),
        lambda z: F.binary_cross_entropy_with_logits(z, _target(z)),
    ),
    MetricCase(
        "Gaussian",
        Fisher(Gaussian(variance=0.25)),
        lambda z, x: 4 * torch.eye(z.numel(), dtype=z.dtype) / (z.numel() // z.shape[-1]),
        lambda z: 2 * ((z - _target(z)) ** 2).sum(-1).mean(),
    ),
    MetricCase(
        "Gaussian learned",
        Fisher(Gaussian(variance="learned")),
        lambda z, x: learned_variance_matrix(z),
        _gaussian_nll,
        lambda z, x: z.shape[-1] % 2 == 0,
    ),
    MetricCase(
        "MSE",
        Fisher(MSE()),
        lambda z, x: 2 * torch.eye(z.numel(), dtype=z.dtype) / z.numel(),
        lambda z: F.mse_loss(z, _target(z)),
    ),
    MetricCase(
        "Poisson",
        Fisher(Poisson()),
        lambda z, x: diagonal(z.exp()) / z.numel(),
        lambda z: F.poisson_nll_loss(z, 3 * _target(z)),
    ),
    MetricCase("Bregman", Bregman(potential), lambda z, x: potential_matrix(z), _divergence),
    MetricCase("Weighted", Weighted(Fisher(Bernoulli()), weight), weighted_matrix, _squares),
    MetricCase(
        "Sobolev",
        Sobolev(scale=2.0, jitter=1e-6),
        lambda z, x: sobolev_matrix(z, x, 2.0, 1e-6),
        _squares,
        lambda z, x: x.is_floating_point(),
    ),
    MetricCase(
        "FubiniStudy",
        FubiniStudy(),
        lambda z, x: centered_matrix(z, torch.ones(len(z), dtype=z.dtype)),
        _centered_squares,
    ),
    MetricCase(
        "FubiniStudy weighted",
        FubiniStudy(weight),
        lambda z, x: centered_matrix(z, weight(x)),
        _centered_squares,
    ),
    MetricCase("user callable", user_metric, lambda z, x: block(user_metric(z)) / len(z), _squares),
]

# --- solvers: exact once damped -------------------------------------------------------------

FACTORED = ("rows", "kernel", "matrix_free")

SOLVERS = [
    SolverCase("Cholesky", Cholesky),
    SolverCase("PseudoInverse", lambda damping: PseudoInverse()),
    SolverCase("ConjugateGradient", lambda damping: ConjugateGradient(damping, tol=1e-14)),
    SolverCase("Sketched, complete", lambda damping: Sketched(damping=damping), FACTORED),
    SolverCase(
        "OrthogonalGreedy, all vectors", lambda damping: OrthogonalGreedy(10_000, damping=damping)
    ),
]
