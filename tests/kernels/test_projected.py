"""K_f of any metric: J (JᵀMJ)⁺ J'ᵀ on and off the support."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.kernels import Projected, Tangent, natural_ntk, ntk, projected_kernel
from pullback.metrics import Bregman, Euclidean, Fisher, Metric, Sobolev, Weighted
from pullback.testing import assert_close, oracle
from tests.kernels.nets import blocks, build, dense, draw, inputs
from tests.laws.models import mlp

METRICS = {
    "euclidean": Euclidean(),
    "fisher": Fisher(pb.likelihoods.Categorical()),
    "bregman": Bregman(lambda z: torch.logsumexp(z, -1) + 0.5 * z.square().sum()),
    "sobolev": Sobolev(1.0),
    "weighted": Weighted(Euclidean(), 3.0),
}
#: bytes for A: rows, and the kernel A Aᵀ
MEMORIES = {"rows": 2**30, "kernel": 4000}


def small(p_small: bool) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    if p_small:
        model = mlp(2, 3, 2)
    else:
        model = mlp(2, 25, 2)
    return model.double(), draw(10, 2), draw(4, 2, seed=1)


@pytest.mark.parametrize("p_small", [True, False])
@pytest.mark.parametrize("metric", METRICS)
def test_it_is_j_g_pinv_jt(metric: str, p_small: bool) -> None:
    model, x, x2 = small(p_small)
    j = dense(model, x)
    j2 = dense(model, x2)
    inverse = torch.linalg.pinv(oracle(model, x, METRICS[metric], count=1).rows, rtol=1e-6)
    g = inverse @ inverse.T
    scale = (j @ g @ j.T).norm()
    for other, jo, n in ((None, j, 10), (x2, j2, 4)):
        kernel = projected_kernel(model, x, other, metric=METRICS[metric], support=x, rcond=1e-6)
        want = blocks(j @ g @ jo.T, 10, n)
        assert float((kernel - want).norm()) <= 1e-9 * float(scale + want.norm())


@pytest.mark.parametrize("layout", ["full", "diagonal", "trace"])
@pytest.mark.parametrize("metric", ["euclidean", "sobolev", "fisher"])
def test_from_the_sample_space_kernel(metric: str, layout: str) -> None:
    torch.manual_seed(0)
    model = mlp(3, 60, 2).double()
    x = draw(6, 3)
    x2 = draw(3, 3, seed=1)
    kernels = [
        projected_kernel(
            model, x2, metric=METRICS[metric], support=x, layout=layout, memory=memory, rcond=1e-6
        )
        for memory in MEMORIES.values()
    ]
    assert_close(kernels[1], kernels[0], 1e-8, "A Aᵀ and A agree")


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_sobolev_with_full_row_rank_is_the_sobolev_kernel(memory: int) -> None:
    """J (Jᵀ(K⁻¹⊗I)J)⁺Jᵀ = K ⊗ I, so that a step moves the function by −ηK∇L."""
    torch.manual_seed(0)
    model = mlp(3, 60, 2).double()
    x = draw(6, 3)
    metric = Sobolev(1.0)
    d = torch.cdist(x, x)
    k = torch.exp(-d) * (1 + d)
    kernel = projected_kernel(model, x, metric=metric, memory=memory)
    assert_close(kernel, blocks(torch.kron(k, torch.eye(2).double()), 6, 6), 1e-7, "K ⊗ I")


def test_natural_ntk_of_an_overparametrized_model_is_the_identity() -> None:
    """Whatever the parametrization; the NTK is not."""
    torch.manual_seed(0)
    x = draw(4, 3)
    for model in (mlp(3, 40, 2).double(), mlp(3, 20, 20, 2).double()):
        kernel = natural_ntk(model, x)
        assert_close(kernel, blocks(torch.eye(8).double(), 4, 4), 1e-9, "J F⁺Jᵀ = I")
        assert float((ntk(model, x) - kernel).norm()) > 1


def test_natural_ntk_of_a_likelihood() -> None:
    model, x, _ = small(True)
    likelihood = pb.likelihoods.Categorical()
    j = dense(model, x)
    prob = torch.softmax(model(x).detach(), -1)
    m = torch.block_diag(*(torch.diag_embed(prob) - prob[:, :, None] * prob[:, None, :]))
    g = torch.linalg.pinv(j.T @ m @ j, rtol=1e-14)
    want = blocks(j @ g @ j.T, 10, 10)
    assert_close(natural_ntk(model, x, likelihood=likelihood, rcond=1e-7), want, 1e-7, "J F⁺Jᵀ")


class Squared(nn.Module):
    """The same functions as a linear model, by other coordinates: w = v³ + v."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        v = torch.linspace(-5, 5, 200001).double()
        self.v = nn.Parameter(v[torch.argmin((v**3 + v - w[:, None]).abs(), 1)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.v**3 + self.v)


def test_k_f_does_not_depend_on_coordinates() -> None:
    x = draw(6, 3)
    curved = Squared(draw(3, seed=2))
    straight = nn.Linear(3, 1, bias=False).double()
    metric: Metric = Sobolev(2.0)
    one = projected_kernel(curved, x, metric=metric)
    two = projected_kernel(straight, x, metric=metric)
    assert_close(one, two, 1e-9, "K_f in two charts")
    assert float((ntk(curved, x) - ntk(straight, x)).norm()) > 0.1


@pytest.mark.parametrize("net", ["conv2d", "attention", "embedding", "tied"])
def test_orthonormal_features(net: str) -> None:
    """⟨h_i, h_j⟩_M = δ_ij on the support, and K_f = Σ h_i ⊗ h_i reproduces tangent functions."""
    model = build(net)
    x = inputs(net, 4)
    kernel = Projected(Tangent(model), x, Euclidean(), rcond=1e-8)
    h = kernel.features_at(x).flatten(0, 1)
    assert_close(h.T @ h, torch.eye(kernel.rank).double(), 1e-9, "orthonormal")
    j = dense(model, x)
    k = kernel(x).transpose(1, 2).reshape(len(j), len(j))
    assert_close(k @ j, j, 1e-7, "K_f reproduces")
