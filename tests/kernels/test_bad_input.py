"""Each bad input is refused with what broke, why, and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.kernels import (
    GTK,
    NTK,
    Expansion,
    Projected,
    Tangent,
    functional_gradient,
    gtk,
    natural_ntk,
    ntk,
    ntk_operator,
    project,
    projected_kernel,
    rkhs_inner,
    surject,
)
from pullback.metrics import Euclidean, Sobolev
from tests.kernels.nets import build, draw, inputs
from tests.laws.models import Coupled, batch_norm, mlp


def refused(match: str) -> Any:
    return pytest.raises(pb.PullbackError, match=match)


@pytest.fixture
def model() -> nn.Module:
    return build("mlp")


@pytest.fixture
def x() -> Tensor:
    return inputs("mlp", 4)


def test_inputs_that_do_not_match(model: nn.Module, x: Tensor) -> None:
    with refused("cannot be run on these inputs"):
        ntk(model, x, draw(4, 5))
    with refused("cannot be run on these inputs"):
        ntk(model, x.float())

    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(1, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x[..., None])[..., 0]

    with refused("outputs of different shapes"):
        ntk(Lengths(), draw(3, 4), draw(3, 5))
    with refused("outputs of different shapes"):
        gtk(Lengths(), draw(3, 4), draw(3, 5), basis=draw(2, 2))
    with refused("no common samples"):
        ntk(build("pair"), (draw(3, 3), draw(4, 2)))


def test_no_inputs(model: nn.Module, x: Tensor) -> None:
    for call in (ntk, ntk_operator, natural_ntk):
        with refused("no common samples"):
            call(model, x[:0])
        with refused("inputs are not usable"):
            call(model, None)
        with refused("inputs are not usable"):
            call(model, torch.tensor(1.0))
    with refused("no common samples"):
        ntk(model, x, x[:0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite(model: nn.Module, x: Tensor, value: float) -> None:
    broken = x.clone()
    broken[2, 1] = value
    with refused("not finite"):
        ntk(model, broken)
    with refused("not finite"):
        ntk(model, x, broken)
    model.get_parameter("0.weight").data[0, 0] = value
    with refused("not finite"):
        ntk(model, x)


def test_models_without_parameters(x: Tensor) -> None:
    for empty in (nn.Tanh(), mlp(3, 2).double().requires_grad_(False)):
        with refused("no tangent space"):
            ntk(empty, x)
    with refused("model is not usable"):
        ntk(torch.tanh, x)  # type: ignore[arg-type]
    with refused("model is not usable"):
        ntk(3, x, params={})  # type: ignore[arg-type]


def test_parameters_that_are_not_the_models(model: nn.Module, x: Tensor) -> None:
    with refused("unknown or of another shape"):
        ntk(model, x, params={"nothing": draw(2)})
    with refused("unknown or of another shape"):
        ntk(model, x, params={"0.weight": draw(2)})


def test_models_that_couple_samples() -> None:
    with refused("couples the samples"):
        ntk(batch_norm().double().train(), draw(4, 2, 3, 3))
    with refused("couples the samples"):
        ntk(Coupled(3, 2).double(), draw(6, 3))
    assert ntk(batch_norm().double().eval(), draw(4, 2, 3, 3)).shape == (4, 4, 2, 2)


def test_models_that_draw_random_numbers(x: Tensor) -> None:
    noisy = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    before = torch.get_rng_state()
    with refused("random numbers"):
        ntk(noisy, x)
    assert torch.equal(before, torch.get_rng_state())
    assert ntk(noisy.eval(), x).shape == (4, 4, 2, 2)


def test_outputs_that_are_no_function_values(x: Tensor) -> None:
    class Loss(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).sum()

    with refused("single number"):
        ntk(Loss(3, 2).double(), x)

    class Folded(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).reshape(-1, 1)

    with refused("does not count the samples"):
        ntk(Folded(3, 2).double(), x)

    class Both(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input), input

    with refused("not one tensor"):
        ntk(Both(3, 2).double(), x)
    assert ntk(Tangent(Both(3, 2).double(), output=0), x).shape == (4, 4, 2, 2)


def test_options(model: nn.Module, x: Tensor) -> None:
    with refused("Unknown layout"):
        ntk(model, x, layout="upper")
    with refused("chunk, .* is not usable"):
        ntk_operator(model, x, chunk=0)
    with refused("does not fit the kernel"):
        ntk_operator(model, x).matvec(draw(3))
    sizes: list[dict[str, Any]] = [{"chunk": 0}, {"chunk": 1.5}, {"memory": 0}]
    for wrong in sizes:
        with refused("(chunk|memory), .* is not usable"):
            ntk(model, x, **wrong)
        with refused("(chunk|memory), .* is not usable"):
            gtk(model, x, basis=draw(Tangent(model).space.size, 2), **wrong)


def test_where_there_are_no_derivatives(model: nn.Module, x: Tensor) -> None:
    with torch.inference_mode(), refused("inference mode"):
        ntk(model, x)
    with torch.no_grad():
        assert ntk(model, x).shape == (4, 4, 2, 2)
    with refused("parameters are not usable"):
        ntk(nn.Linear(3, 2, device="meta"), x)


class Implicit:
    """A basis by its products, which are to be transposes of each other."""

    def __init__(self, forward: Tensor, backward: Tensor) -> None:
        self.matvec = forward.matmul
        self.rmatvec = backward.matmul


def test_bases(model: nn.Module, x: Tensor) -> None:
    p = Tangent(model).space.size
    for wrong in (draw(p - 1, 2), draw(p), draw(p, 0), [draw(p - 1)]):
        with refused("does not fit the parameters"):
            gtk(model, x, basis=wrong)
    with refused("not finite"):
        gtk(model, x, basis=draw(p, 2) * torch.nan)
    with refused("not finite"):
        gtk(model, x, basis=(draw(p, 2) * torch.nan).to_sparse_coo())
    for wrong in ([{"0.weight": draw(2)}], [{"none": draw(2)}]):
        with refused("tangent vector does not fit"):
            gtk(model, x, basis=wrong)
    with refused("tangent vector is not of a float"):
        gtk(model, x, basis=["0.weight"])
    with refused("tangent vector does not fit"):
        gtk(model, x, basis=[{"0.bias": [1.0]}])
    with refused("complex"):
        gtk(model, x, basis=draw(p, 2) * 1j)
    for wrong in ([], 3, "C"):
        with refused("basis is not usable|tangent vector is not of a float"):
            gtk(model, x, basis=wrong)
    c = draw(p, 3)
    with refused("contradicts itself"):
        gtk(model, x, basis=Implicit(c, 2 * c.T))
    with refused("its products fail"):
        gtk(model, x, basis=Implicit(c[1:], c[1:].T))


def test_metrics(model: nn.Module, x: Tensor) -> None:
    with refused("metric is not usable"):
        projected_kernel(model, x, metric="euclidean")  # type: ignore[arg-type]
    with refused("does not fit the memory"):
        projected_kernel(model, x, metric=Euclidean(), memory=8)
    with refused("Sobolev"):
        projected_kernel(build("embedding"), inputs("embedding", 3), metric=Sobolev(1.0))


def test_gradients(model: nn.Module, x: Tensor) -> None:
    kernel = NTK(Tangent(model))
    with refused("cotangents do not fit"):
        functional_gradient(kernel, x, draw(3, 2))
    with refused("cotangents is not finite"):
        functional_gradient(kernel, x, draw(4, 2) * torch.nan)
    with refused("cotangents do not fit"):
        functional_gradient(lambda a, b: a @ b.T, x, draw(3, 2))
    with refused("kernel is not usable"):
        functional_gradient(draw(4, 4), x, draw(4, 2))  # type: ignore[arg-type]
    with refused("kernel does not fit its coefficients"):
        Expansion(lambda a, b: draw(4, 3), x, draw(4, 2))(x)
    for call in (project, surject):
        with refused("no one thing"):
            call(model, x)
        with refused("no one thing"):
            call(model, x, gradient=draw(4, 2), values=draw(4, 2))
        with refused("not finite"):
            call(model, x, values=draw(4, 2) * torch.nan)
        with refused("cotangents do not fit"):
            call(model, x, gradient=draw(4, 3))
    with refused("Unknown form"):
        project(model, x, gradient=draw(4, 2), form="dense")


def test_degenerate_tangent_spaces_are_no_error(x: Tensor) -> None:
    """A dead network: J = 0, and every kernel is zero."""
    dead = mlp(3, 4, 2, activation=nn.ReLU()).double()
    for p in dead.parameters():
        p.data.zero_()
    dead.get_parameter("0.bias").data.fill_(-1)
    free = {"0.weight": dead.get_parameter("0.weight")}
    tangent = Tangent(dead, free)
    for kernel in (NTK(tangent), GTK(tangent, draw(12, 2)), Projected(tangent, x)):
        assert torch.equal(kernel(x), torch.zeros(4, 4, 2, 2).double())


def test_integer_inputs_are_fine() -> None:
    assert ntk(build("embedding"), inputs("embedding", 3)).shape == (3, 3, 2, 2)


def test_no_tensors(model: nn.Module, x: Tensor) -> None:
    cotangents: Any = [1.0]
    with refused("float type"):
        functional_gradient(NTK(Tangent(model)), x, cotangents)
    with refused("float type"):
        functional_gradient(lambda a, b: a @ b.T, x, cotangents)
    with refused("float type"):
        rkhs_inner(torch.ones(3), kernel=torch.eye(3, dtype=torch.long))
    with refused("cut-off"):
        project(model, x, gradient=model(x), rcond=-1.0)
