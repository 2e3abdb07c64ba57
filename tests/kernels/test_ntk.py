"""The NTK in each layout, by blocks and by products, against J Jᵀ from autograd's rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pullback.kernels import NTK, Tangent, ntk, ntk_operator
from pullback.maps import ModuleMap
from pullback.testing import assert_close
from tests.kernels.nets import NETS, blocks, build, dense, draw, inputs
from tests.laws.models import mlp
from tests.pairs import all_pairs, each_once

LAYOUTS = {
    "full": lambda k: k,
    "diagonal": lambda k: torch.diagonal(k, dim1=2, dim2=3),
    "trace": lambda k: torch.diagonal(k, dim1=2, dim2=3).sum(-1),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("net", "layout"), each_once(NETS, LAYOUTS))
def test_the_kernel_is_j_jt(net: str, layout: str) -> None:
    model = build(net)
    x = inputs(net, 5)
    x2 = inputs(net, 4, seed=1)
    j = dense(model, x)
    j2 = dense(model, x2)
    want = blocks(j @ j.T, 5, 5)
    across = blocks(j @ j2.T, 5, 4)
    pick = LAYOUTS[layout]
    assert_close(ntk(model, x, layout=layout), pick(want), 1e-12, "Θ(x, x)")
    assert_close(ntk(model, x, x2, layout=layout), pick(across), 1e-12, "Θ(x, x2)")
    assert_close(ntk(model, x, x, layout=layout), pick(want), 1e-12, "x2 is x")


@pytest.mark.parametrize(
    ("net", "chunk", "layout"),
    all_pairs(["mlp", "scalars", "embedding", "bare"], [1, 2, 3, 5, 9], LAYOUTS),
)
def test_blocks_of_samples_change_nothing(net: str, chunk: int, layout: str) -> None:
    model = build(net)
    x = inputs(net, 5)
    x2 = inputs(net, 3, seed=1)
    for other in (None, x2):
        whole = ntk(model, x, other, layout=layout)
        pieces = ntk(model, x, other, layout=layout, chunk=chunk)
        assert whole.shape == pieces.shape
        assert_close(pieces, whole, 1e-13, "by blocks")


def test_little_memory_means_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mlp")
    x = inputs("mlp", 30)
    sizes: list[int] = []
    linearize = ModuleMap.linearize

    def count_and_linearize(self, params):
        linear = linearize(self, params)
        sizes.append(len(linear.value))
        return linear

    monkeypatch.setattr(ModuleMap, "linearize", count_and_linearize)
    j = dense(model, x)
    assert_close(ntk(model, x, memory=2000), blocks(j @ j.T, 30, 30), 1e-12, "Θ")
    assert max(sizes) < 9


def test_the_symmetric_half_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from pullback.maps import Pulled

    pairs: list[tuple[int, int]] = []
    kernel = Pulled.kernel

    def count_and_multiply(self, other=None, *, budget=2**30):
        pairs.append((self.shape[0], (other or self).shape[0]))
        return kernel(self, other, budget=budget)

    monkeypatch.setattr(Pulled, "kernel", count_and_multiply)
    model = build("mlp")
    x = inputs("mlp", 8)
    k = ntk(model, x, chunk=2)
    assert len(pairs) == 4 * 5 // 2
    matrix = k.transpose(1, 2).reshape(16, 16)
    assert_close(matrix, matrix.T, 1e-14, "symmetric")


def test_no_jacobian_is_formed_for_wide_layers() -> None:
    """Θ of a layer of 2 million weights, whose 1000 rows a sample would take 16 GB."""
    model = nn.Linear(2000, 1000, bias=False)
    x = torch.randn(2, 2000)
    k = ntk(model, x, layout="trace")
    assert_close(k, 1000 * x @ x.T, 1e-5, "m x·x'")


@pytest.mark.parametrize("net", ["mlp", "grid", "scalars", "conv2d", "torch attention", "tied"])
def test_products_without_a_matrix(net: str) -> None:
    model = build(net)
    x = inputs(net, 5)
    x2 = inputs(net, 4, seed=1)
    j = dense(model, x)
    j2 = dense(model, x2)
    operator = ntk_operator(model, x, x2, chunk=3)
    assert operator.shape == (len(j), len(j2))
    u = draw(len(j2))
    v = draw(len(j), seed=2)
    assert_close(operator.matvec(u), j @ (j2.T @ u), 1e-12, "K u")
    shaped = operator.matvec(u.view(4, *operator.event))
    assert shaped.shape == (5, *operator.event)
    assert_close(shaped.flatten(), j @ (j2.T @ u), 1e-12, "in the outputs' shape")
    assert_close(ntk_operator(model, x).matvec(v), j @ (j.T @ v), 1e-12, "symmetric")


def test_some_parameters_at_another_point() -> None:
    model = build("mlp")
    x = inputs("mlp", 4)
    other = build("mlp", seed=3)
    weights = {"2.weight": other.get_parameter("2.weight").detach()}
    k = ntk(model, x, params=weights)
    model.get_parameter("2.weight").data.copy_(weights["2.weight"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "2.weight")
    j = dense(model, x)
    assert_close(k, blocks(j @ j.T, 4, 4), 1e-12, "by one weight")


def test_frozen_parameters_do_not_count() -> None:
    model = build("mlp")
    x = inputs("mlp", 4)
    model.get_parameter("0.weight").requires_grad_(False)
    j = dense(model, x)
    assert_close(ntk(model, x), blocks(j @ j.T, 4, 4), 1e-12, "free ones only")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    model = build("conv2d")
    x = inputs("conv2d", 4)
    j = dense(model, x)
    k = ntk(model.to(dtype), x.to(dtype))
    assert k.dtype == torch.float32
    assert_close(k.double(), blocks(j @ j.T, 4, 4), 1e-5 if dtype == torch.float32 else 0.1, "Θ")


def test_the_model_is_left_alone() -> None:
    model = build("norms")
    x = inputs("norms", 3)
    random = torch.get_rng_state()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    k = ntk(model, x)
    assert not k.requires_grad
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_under_no_grad_and_with_inference_tensors() -> None:
    model = build("mlp")
    x = inputs("mlp", 4)
    want = ntk(model, x)
    with torch.no_grad():
        assert torch.equal(ntk(model, x), want)
    with torch.inference_mode():
        copied = x + 0
    assert torch.equal(ntk(model, copied), want)


def test_one_sample_and_one_weight() -> None:
    model = mlp(1, 1).double()
    x = torch.tensor([[2.0]], dtype=torch.float64)
    assert ntk(model, x).tolist() == [[[[5.0]]]]  # 2² + 1


def test_a_kernel_object_serves_many_batches() -> None:
    model = build("mlp")
    x = inputs("mlp", 4)
    x2 = inputs("mlp", 3, seed=1)
    kernel = NTK(Tangent(model))
    assert torch.equal(kernel(x, x2), ntk(model, x, x2))
    assert torch.equal(kernel(x), ntk(model, x))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("net", ["wide", "conv2d", "attention"])
def test_cuda(net: str, layout: str) -> None:
    model = build(net)
    x = inputs(net, 5)
    want = ntk(model, x, layout=layout)
    kernel = ntk(model.float().cuda(), x.float().cuda(), layout=layout, chunk=2)
    assert_close(kernel.double().cpu(), want, 1e-5, layout)
