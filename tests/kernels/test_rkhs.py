"""Theorem 4.2 and Corollary 4.3 as laws over random bases and networks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pullback import PullbackError
from pullback.kernels import GTK, Tangent, gtk, ntk, rkhs_inner
from pullback.testing import assert_close
from tests.kernels.nets import NETS, build, dense, draw, inputs
from tests.pairs import each_once


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(0, 12))
def test_any_basis_is_orthonormal_for_its_kernel(seed: int, k: int, more: int) -> None:
    """Theorem 4.2: BᵀK⁺B = I with K = BBᵀ, by the matrix K and from B itself."""
    b = draw(k + more, k, seed=seed)
    condition = float(torch.linalg.cond(b))
    eye = torch.eye(k).double()
    assert_close(rkhs_inner(b.T, basis=b), eye, 1e-13 * condition * k, "from B")
    if condition < 1e4:
        want = rkhs_inner(b.T, kernel=b @ b.T)
        assert_close(want, eye, 1e-14 * condition**2 * (k + more), "BᵀK⁺B = I")


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("net", "seed"), each_once(NETS, range(3)))
def test_bases_of_tangent_spaces_are_orthonormal(net: str, seed: int) -> None:
    """The same for b_i = dφ·c_i of random c_i, as many as are independent on the points."""
    model = build(net, seed)
    x = inputs(net, 6, seed)
    j = dense(model, x)
    k = max(1, int(torch.linalg.matrix_rank(j)) // 2)
    c = draw(j.shape[1], k, seed=seed)
    b = GTK(Tangent(model), c).features_at(x).flatten(0, 1)
    assert_close(b, j @ c, 1e-11, "b_i = dφ·c_i")
    matrix = gtk(model, x, basis=c)
    assert_close(rkhs_inner(b.T, kernel=matrix), torch.eye(k).double(), 1e-9, "⟨b_i, b_j⟩ = δ_ij")


@pytest.mark.parametrize("net", ["mlp", "relu", "conv2d", "embedding"])
def test_dependent_directions_have_a_projection_for_a_gram(net: str) -> None:
    """More directions than dimensions: BᵀK⁺B is the projection onto the row space of B."""
    model = build(net)
    x = inputs(net, 3)
    j = dense(model, x)
    inner_product = rkhs_inner(j.T, kernel=ntk(model, x))
    assert_close(inner_product, torch.linalg.pinv(j) @ j, 1e-8, "J⁺J")
    assert_close(inner_product @ inner_product, inner_product, 1e-8, "idempotent")


@pytest.mark.parametrize("seed", range(3))
def test_any_basis_gives_a_natural_gradient(seed: int) -> None:
    """Corollary 4.3: in the GTK's own metric the kernel form is the gradient on T_fΦ."""
    model = build("mlp", seed)
    x = inputs("mlp", 8, seed)
    j = dense(model, x)
    c = draw(j.shape[1], 10, seed=seed)
    g = draw(8, 2, seed=seed + 1)
    b = j @ c
    gradient = GTK(Tangent(model), c).expand(x, g)(x).flatten()
    for h in b.T:  # dℓ(h) = ⟨∇ℓ, h⟩ for every tangent h
        inner = rkhs_inner(gradient, h, basis=b)
        assert abs(float(inner - g.flatten() @ h)) < 1e-9 * float(g.norm() * h.norm())


def test_shapes() -> None:
    b = draw(6, 3)
    k = b @ b.T
    f = b @ draw(3)
    g = b @ draw(3, seed=1)
    want = f @ torch.linalg.pinv(k, rtol=1e-12) @ g
    assert rkhs_inner(f, g, kernel=k).shape == ()
    assert_close(rkhs_inner(f, g, kernel=k), want, 1e-9, "two functions")
    assert rkhs_inner(b.T, g, kernel=k).shape == (3,)
    assert rkhs_inner(f, b.T, kernel=k).shape == (3,)
    assert rkhs_inner(b.T, kernel=k).shape == (3, 3)
    assert_close(rkhs_inner(f.view(3, 2), g.view(3, 2), kernel=k), want, 1e-9, "as (N, m)")


def test_tiny_numbers() -> None:
    b = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    one = torch.tensor([1.0, 0.0], dtype=torch.float64)  # b_1 − b_2
    assert_close(rkhs_inner(one, kernel=b @ b.T), torch.tensor(2.0).double(), 1e-13, "‖b_1 − b_2‖²")


def test_refusals() -> None:
    b = draw(4, 2)
    with pytest.raises(PullbackError, match="outside the space"):
        rkhs_inner(draw(4, seed=1), basis=b)
    with pytest.raises(PullbackError, match="outside the space"):
        rkhs_inner(draw(4, seed=1), kernel=b @ b.T)
    with pytest.raises(PullbackError, match="not determined"):
        rkhs_inner(b.T)
    with pytest.raises(PullbackError, match="not determined"):
        rkhs_inner(b.T, basis=b, kernel=b @ b.T)
    with pytest.raises(PullbackError, match="does not fit the points"):
        rkhs_inner(draw(5), basis=b)
    with pytest.raises(PullbackError, match="not symmetric"):
        rkhs_inner(draw(4), kernel=draw(4, 4))
    with pytest.raises(PullbackError, match="not symmetric"):
        rkhs_inner(draw(4), kernel=draw(4, 3))
    with pytest.raises(PullbackError, match="not finite"):
        rkhs_inner(draw(4), basis=b * torch.nan)


def test_kernels_and_functions_that_are_not_usable() -> None:
    with pytest.raises(PullbackError, match="not positive"):
        rkhs_inner(torch.tensor([1.0, 0.0]), kernel=torch.diag(torch.tensor([1.0, -1.0])))
    with pytest.raises(PullbackError, match="not finite"):
        rkhs_inner(torch.tensor([1.0, torch.nan]), kernel=torch.eye(2))
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(PullbackError, match="does not fit the points"):
        rkhs_inner(torch.ones(3, 2, dtype=torch.float64), kernel=ntk(model, x))
