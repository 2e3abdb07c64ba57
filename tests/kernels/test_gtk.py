"""GTKs of any basis, in every form the basis comes in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pullback.kernels import GTK, Tangent, gtk, ntk
from pullback.testing import assert_close
from tests.kernels.nets import blocks, build, dense, draw, inputs
from tests.pairs import each_once

NETS = ["mlp", "relu", "conv2d", "attention", "scalars", "embedding", "tied", "bare"]


def size(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("net", "k"), each_once(NETS, [1, 3, 30]))
def test_the_kernel_is_j_c_ct_jt(net: str, k: int) -> None:
    model = build(net)
    x = inputs(net, 5)
    x2 = inputs(net, 4, seed=1)
    j = dense(model, x)
    j2 = dense(model, x2)
    c = draw(size(model), k)
    want = blocks(j @ c @ c.T @ j2.T, 5, 4)
    assert_close(gtk(model, x, x2, basis=c), want, 1e-12, "full")
    diagonal = torch.diagonal(want, dim1=2, dim2=3)
    assert_close(gtk(model, x, x2, basis=c, layout="diagonal"), diagonal, 1e-12, "diagonal")
    assert_close(gtk(model, x, x2, basis=c, layout="trace"), diagonal.sum(-1), 1e-12, "trace")
    expected = blocks(j @ c @ c.T @ j.T, 5, 5)
    assert_close(gtk(model, x, basis=c), expected, 1e-12, "x2 is x")
    assert_close(gtk(model, x, basis=c, chunk=2), expected, 1e-12, "by blocks")
    assert_close(gtk(model, x, basis=c, memory=1), expected, 1e-12, "sample by sample")


class Implicit:
    def __init__(self, c: Tensor) -> None:
        self.c = c

    def matvec(self, v: Tensor) -> Tensor:
        return self.c @ v

    def rmatvec(self, v: Tensor) -> Tensor:
        return self.c.T @ v


@pytest.mark.parametrize("k", [2, 40])
@pytest.mark.parametrize("net", ["mlp", "scalars"])
def test_every_form_of_a_basis(net: str, k: int) -> None:
    model = build(net)
    x = inputs(net, 5)
    c = draw(size(model), k)
    c[c.abs() < 1] = 0
    want = gtk(model, x, basis=c)
    tangent = Tangent(model)
    vectors = [tangent.space.split(column) for column in c.T]
    forms = {
        "COO": c.to_sparse_coo(),
        "CSR": c.to_sparse_csr(),
        "CSC": c.to_sparse_csc(),
        "object": Implicit(c),
        "dicts": vectors,
        "flat vectors": list(c.T),
        "float32": c.float().double(),
    }
    for name, basis in forms.items():
        assert_close(gtk(model, x, basis=basis), want, 1e-6 if name == "float32" else 1e-12, name)


def test_a_tangent_vector_may_name_some_parameters() -> None:
    model = build("mlp")
    x = inputs("mlp", 4)
    v = {"0.weight": draw(6, 3)}
    flat = torch.cat([(v.get(n, 0 * p)).flatten() for n, p in model.named_parameters()]).detach()
    assert_close(gtk(model, x, basis=[v]), gtk(model, x, basis=flat[:, None]), 1e-14, "one name")


def test_without_a_basis_it_is_the_ntk() -> None:
    model = build("mlp")
    x = inputs("mlp", 4)
    assert torch.equal(gtk(model, x), ntk(model, x))
    eye = torch.eye(size(model), dtype=torch.float64)
    assert_close(gtk(model, x, basis=eye), ntk(model, x), 1e-12, "C = I")
    rotation, _ = torch.linalg.qr(draw(size(model), size(model)))
    assert_close(gtk(model, x, basis=rotation), ntk(model, x), 1e-12, "C orthogonal")


def test_products_and_gradients() -> None:
    """K_GTK ∇L = J·C Cᵀ Jᵀ∇L (Corollary 4.3), by a matrix and by products."""
    model = build("mlp")
    x = inputs("mlp", 5)
    x2 = inputs("mlp", 4, seed=1)
    j = dense(model, x)
    j2 = dense(model, x2)
    c = draw(size(model), 7)
    g = draw(5, 2, seed=4)
    kernel = GTK(Tangent(model), c)
    want = j2 @ c @ (c.T @ (j.T @ g.flatten()))
    assert_close(kernel.operator(x2, x).matvec(g).flatten(), want, 1e-12, "matvec")
    assert_close(kernel.expand(x, g)(x2).flatten(), want, 1e-12, "expand")
    assert_close(kernel.expand(x, g).direction, c @ (c.T @ (j.T @ g.flatten())), 1e-12, "C CᵀJᵀg")
