"""Metrics beside Fisher: Euclidean, Weighted, Bregman, user functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback.likelihoods import Bernoulli, Categorical
from pullback.metrics import (
    Blocks,
    Bregman,
    Diagonal,
    Euclidean,
    Factor,
    Fisher,
    Metric,
    MetricFunction,
    Scaled,
    Weighted,
    Whitened,
    as_metric,
)
from pullback.testing import assert_close, check_factor, check_metric


def values(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


METRICS = {
    "Euclidean": Euclidean(),
    "Weighted number": Weighted(Euclidean(), 3.0),
    "Weighted samples": Weighted(Fisher(Categorical()), torch.tensor([1.0, 0.0, 2.0, 5.0])),
    "Weighted entries": Weighted(Euclidean(), values(4, 3).abs()),
    "Bregman": Bregman(lambda z: torch.cosh(z).sum()),
    "MetricFunction": MetricFunction(lambda z: z[:, :, None] * z[:, None, :]),  # rank one
}


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_laws(metric: Metric, dtype: torch.dtype) -> None:
    check_metric(metric, values(4, 3).to(dtype))


def test_bregman_of_logsumexp_is_the_fisher_metric() -> None:
    z = values(4, 3)
    v = values(4, 3, seed=1)
    bregman = Bregman(lambda z: torch.logsumexp(z, 0)).factor(z)
    fisher = Fisher(Categorical()).factor(z)
    assert_close(bregman.matvec(v), fisher.matvec(v), 1e-13, "Bregman(logsumexp) = Categorical")
    g = fisher.apply(values(4, 3, seed=2))
    r = bregman.whiten(g).value
    assert r is not None
    assert_close(bregman.apply(r), g, 1e-7, "S r = g on the range")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bregman_is_finite_at_extreme_outputs(dtype: torch.dtype) -> None:
    z = torch.tensor([[1e4, -1e4, 0.0], [1e4, 1e4, 1e4]], dtype=dtype)
    factor = Bregman(lambda z: torch.logsumexp(z, 0)).factor(z)
    check_factor(factor, z)
    want = torch.eye(3).double() / 3 - 1 / 9
    columns = torch.stack([factor.matvec(e.expand(2, 3)) for e in torch.eye(3).to(z)], -1)
    tol = 1e-3 if dtype == torch.float32 else 1e-10  # autograd forms e^{z − lse}, lse ≈ 1e4
    assert_close(columns[0], torch.zeros(3, 3), tol, "certain")
    assert_close(columns[1].double(), want.double(), tol, "uniform")


def test_bregman_over_several_axes() -> None:
    z = values(2, 3, 2)
    v = values(2, 3, 2, seed=1)
    product = Bregman(lambda z: torch.logsumexp(z.flatten(), 0)).factor(z).matvec(v)
    flat = Fisher(Categorical()).factor(z.flatten(1)).matvec(v.flatten(1))
    assert_close(product.flatten(1), flat, 1e-13, "event of shape (3, 2)")


def test_weights_multiply_m() -> None:
    z = values(3, 2)
    v = values(3, 2, seed=1)
    w = torch.tensor([1.0, 4.0, 0.0]).double()
    product = Weighted(Fisher(Bernoulli()), w).factor(z).matvec(v)
    assert_close(product, w[:, None] * Fisher(Bernoulli()).factor(z).matvec(v), 1e-14, "w M v")
    by_input = Weighted(Euclidean(), lambda x: x[:, 0] ** 2).factor(z, inputs=v)
    assert_close(by_input.matvec(z), v[:, :1] ** 2 * z, 1e-14, "weights from inputs")


def test_a_weight_of_zero_forgets_the_gradient_only_if_it_is_zero() -> None:
    factor = Weighted(Euclidean(), torch.tensor([1.0, 0.0]).double()).factor(values(2, 2))
    inside = torch.tensor([[1.0, 2.0], [0.0, 0.0]]).double()
    assert_close(factor.whiten(inside).value, inside, 0.0, "r = g/√w")
    outside = factor.whiten(torch.ones(2, 2).double())
    assert outside.status is pb.Status.NOT_REPRESENTABLE
    assert "damping" in outside.status.value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda z: Weighted(Euclidean(), torch.ones(5)).factor(z), "do not fit"),
        (lambda z: Weighted(Euclidean(), -1.0).factor(z), "negative"),
        (lambda z: Weighted(Euclidean(), lambda x: x).factor(z), "inputs"),
        (lambda z: MetricFunction(lambda z: torch.eye(2)).factor(z), "does not fit"),
        (
            lambda z: MetricFunction(lambda z: -torch.eye(2).expand(3, 2, 2)).factor(z),
            "semidefinite",
        ),
        (lambda z: Bregman(lambda z: torch.sin(3 * z).sum()).factor(z), "convex"),
        (lambda z: Bregman(lambda z: torch.exp(z).sum()).factor(z + 1e4), "not finite"),
        (lambda z: as_metric(3), "not usable"),
    ],
    ids=["shape", "negative", "no inputs", "matrix", "indefinite", "not convex", "inf", "type"],
)
def test_what_does_not_fit_is_refused_with_a_remedy(make, message: str) -> None:
    with pytest.raises(pb.PullbackError, match=message):
        make(values(3, 2))


def test_blocks_of_a_metric_drop_round_off() -> None:
    """Directions of M below round-off are null, not √ε long."""
    u = values(3, 4, 2)
    factor = Blocks.of_metric(u @ u.mT, (4,))
    columns = factor.covectors(values(3, 4))  # (4, 3, 4)
    assert int((columns.norm(dim=(1, 2)) > 0).sum()) == 2


def test_the_laws_catch_wrong_factors() -> None:
    """A law that nothing can fail is no law."""

    class Lopsided(Diagonal):
        def transpose(self, v: Tensor) -> Tensor:
            return 2 * self.scale * v

    class Leaky(Diagonal):
        def apply(self, r: Tensor) -> Tensor:
            return self.scale * r.roll(1, dims=r.ndim - 2)

        def transpose(self, v: Tensor) -> Tensor:
            return self.scale * v.roll(-1, dims=v.ndim - 2)

    class Wrong(Diagonal):
        def whiten(self, g: Tensor) -> Whitened:
            return Whitened(g * self.scale)

    class Infinite(Diagonal):
        def matvec(self, v: Tensor) -> Tensor:
            return v / 0

    z = values(4, 3)
    scale = 2 * torch.ones_like(z)
    cases: dict[str, Factor] = {
        "Sᵀv": Lopsided(scale),
        "couples": Leaky(scale),
        "whiten": Wrong(scale),
        "not finite": Infinite(scale),
    }
    for message, factor in cases.items():
        with pytest.raises(AssertionError, match=message):
            check_factor(factor, z)
    check_factor(Scaled(Diagonal(scale), 0.5, (3,)), z)
