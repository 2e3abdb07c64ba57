"""Gradients and projections as functions: one function in three forms, callable anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.kernels import (
    GTK,
    NTK,
    Expansion,
    FunctionChange,
    Projected,
    Tangent,
    functional_gradient,
    ntk,
    project,
    rkhs_inner,
    surject,
)
from pullback.metrics import Euclidean, Fisher, Metric, Sobolev
from pullback.testing import assert_close, oracle
from tests.kernels.nets import build, dense, draw, inputs
from tests.laws.models import mlp

METRICS: dict[str, Metric] = {
    "euclidean": Euclidean(),
    "fisher": Fisher(pb.likelihoods.Categorical()),
    "sobolev": Sobolev(1.0),
}


def gradient_of(model: nn.Module, x: Tensor) -> Tensor:
    """∂ℓ/∂f of the cross-entropy, summed."""
    z = model(x).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(z, torch.arange(len(x)) % z.shape[1], reduction="sum")
    return torch.autograd.grad(loss, z)[0]


@pytest.mark.parametrize("widths", [(2, 3, 3), (2, 30, 3)], ids=["narrow", "wide"])
@pytest.mark.parametrize("metric", METRICS)
def test_the_forms_of_the_projection_agree(metric: str, widths: tuple[int, ...]) -> None:
    """(14) = (15) = (16), and all are J(x*) G⁺ Jᵀ c."""
    torch.manual_seed(1)
    model = mlp(*widths).double()
    x = draw(8, 2)
    new = draw(5, 2, seed=3)
    c = gradient_of(model, x)
    j = dense(model, x)
    j2 = dense(model, new)
    inverse = torch.linalg.pinv(oracle(model, x, METRICS[metric], count=1).rows, rtol=1e-6)
    v = inverse @ (inverse.T @ (j.T @ c.flatten()))
    for form in ("pushforward", "orthonormal", "kernel"):
        projection = project(model, x, gradient=c, metric=METRICS[metric], form=form, rcond=1e-6)
        assert_close(projection(new).flatten(), j2 @ v, 1e-8, f"{form} at new points")
        assert_close(projection(x).flatten(), j @ v, 1e-8, f"{form} on the support")
    chosen = project(model, x, gradient=c, metric=METRICS[metric], rcond=1e-6)
    assert isinstance(chosen, FunctionChange)
    assert_close(chosen.direction, v, 1e-7, "the natural gradient")


def test_the_direction_is_the_optimizers() -> None:
    torch.manual_seed(1)
    model = mlp(2, 30, 3).double()
    x = draw(8, 2)
    y = torch.arange(8) % 3
    metric = Fisher(pb.likelihoods.Categorical())
    opt = pb.NaturalGradient(model, metric, pb.solvers.PseudoInverse(1e-6))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    want = opt.direction(closure).x
    kernel = Projected(Tangent(model), x, metric, rcond=1e-6)
    assert_close(kernel.direction(gradient_of(model, x)), want, 1e-8, "G⁺∇L")


@pytest.mark.parametrize("metric", METRICS)
def test_p_is_a_projection_and_s_is_not(metric: str) -> None:
    torch.manual_seed(1)
    model = mlp(2, 3, 3).double()
    x = draw(12, 2)
    h = draw(12, 3, seed=5)
    j = dense(model, x)
    m = oracle(model, x, METRICS[metric], count=1).metric

    def p(h: Tensor) -> Tensor:
        return project(model, x, values=h, metric=METRICS[metric], rcond=1e-7)(x)

    def s(h: Tensor) -> Tensor:
        return surject(model, x, values=h, metric=METRICS[metric])(x)

    once = p(h)
    assert_close(m @ p(once).flatten(), m @ once.flatten(), 1e-7, "P² = P")
    others = (h - once).flatten()
    assert float((j.T @ (m @ others)).norm()) < 1e-6 * float(h.norm() * j.norm() * m.norm())
    assert_close(s(h).flatten(), j @ (j.T @ (m @ h.flatten())), 1e-11, "S = J JᵀM")
    assert float((s(s(h)) - s(h)).norm()) > 0.1 * float(s(h).norm())
    assert float(s(h - once).norm()) < 1e-6 * float(s(h).norm())  # S vanishes where P does


def test_s_is_a_projection_when_the_coordinates_are_orthonormal() -> None:
    torch.manual_seed(1)
    q, _ = torch.linalg.qr(draw(10, 3))
    model = nn.Linear(3, 1, bias=False).double()
    h = draw(10, 1, seed=2)
    once = surject(model, q, values=h)(q)
    assert_close(surject(model, q, values=once)(q), once, 1e-13, "S² = S")
    assert_close(once, project(model, q, values=h)(q), 1e-13, "S = P")


@pytest.mark.parametrize("net", ["mlp", "conv2d", "embedding", "scalars"])
def test_kernel_forms_of_gradients(net: str) -> None:
    """(16), (19) and (22): Σ K(x_i, ·) c_i for K_f, Θ and K_GTK, and the move they predict."""
    model = build(net)
    x = inputs(net, 5)
    new = inputs(net, 3, seed=1)
    j = dense(model, x)
    j2 = dense(model, new)
    tangent = Tangent(model)
    c = draw(len(j), seed=3).view(tangent.at(x).value.shape)
    basis = draw(j.shape[1], 9)
    kernels = {
        "Θ": (NTK(tangent), torch.eye(j.shape[1]).double()),
        "GTK": (GTK(tangent, basis), basis @ basis.T),
        "K_f": (Projected(tangent, x, rcond=1e-7), torch.linalg.pinv(j.T @ j, rtol=1e-13)),
    }
    for name, (kernel, b) in kernels.items():
        v = b @ (j.T @ c.flatten())
        change = functional_gradient(kernel, x, c)
        assert_close(change(new).flatten(), j2 @ v, 1e-7, f"{name} as a tangent vector")
        kernel_form = Expansion(kernel, x, c)
        assert_close(kernel_form(new).flatten(), j2 @ v, 1e-7, f"{name} as an expansion")
        energy = float(c.flatten() @ (j @ v))
        assert abs(float(kernel_form.norm()) ** 2 - energy) <= 1e-7 * energy


def test_the_rkhs_gradient_is_the_gradient() -> None:
    """(13): dℓ(h) = ⟨∇ℓ, h⟩ for every h of the space."""
    x = draw(4, 2)
    c = draw(4, 3, seed=1)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-torch.cdist(a, b))

    gradient = functional_gradient(kernel, x, c)
    assert isinstance(gradient, Expansion)
    h = Expansion(kernel, draw(5, 2, seed=2), draw(5, 3, seed=3))
    assert_close(gradient.inner(h), (c * h(x)).sum(), 1e-12, "⟨∇ℓ, h⟩ = Σ c·h(x)")
    assert_close(gradient.inner(h), h.inner(gradient), 1e-12, "symmetric")
    assert gradient(draw(7, 2, seed=4)).shape == (7, 3)


def test_predicted_and_actual_moves_agree_to_first_order() -> None:
    model = build("mlp")
    x = inputs("mlp", 5)
    new = inputs("mlp", 6, seed=1)
    change = NTK(Tangent(model)).expand(x, draw(5, 2))
    errors = []
    for scale in (1e-2, 1e-3, 1e-4):
        step = -scale * change
        errors.append(float((step.actual(new) - step(new)).norm()))
    assert 60 < errors[0] / errors[1] < 140
    assert 60 < errors[1] / errors[2] < 140


def test_a_move_is_of_the_function_as_it_was() -> None:
    """What was predicted before a step stays predicted after it."""
    model = build("mlp")
    x = inputs("mlp", 5)
    new = inputs("mlp", 6, seed=1)
    change = NTK(Tangent(model)).expand(x, draw(5, 2))
    before = change(new)
    actual = (-1e-3 * change).actual(new)
    start = model(new).detach()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p -= 1e-3 * change.parameters()[name]
    assert torch.equal(change(new), before)
    assert_close(model(new).detach() - start, actual, 1e-12, "the step's own move")


def test_pushforward_metric() -> None:
    """(φ_*g_E)(J u, J v) = u·v where dφ is injective; there the standard gradient is natural."""
    torch.manual_seed(2)
    model = mlp(2, 3, 2).double()
    x = draw(40, 2)
    j = dense(model, x)
    u = draw(j.shape[1], seed=3)
    v = draw(j.shape[1], seed=4)
    f = (j @ u).view(40, 2)
    g = (j @ v).view(40, 2)
    theta = ntk(model, x)
    inner_product = rkhs_inner(f, g, kernel=theta)
    assert abs(float(inner_product - u @ v)) < 1e-6 * float(u.norm() * v.norm())
    c = draw(40, 2, seed=5)
    standard = surject(model, x, gradient=c)(x)
    inner_product = rkhs_inner(standard, f, kernel=theta)
    assert abs(float(inner_product - (c * f).sum())) < 1e-6 * float(c.norm() * f.norm())


def test_pushforward_metric_of_a_quotient() -> None:
    model = build("relu")
    x = inputs("relu", 30)
    j = dense(model, x)
    u = draw(j.shape[1], seed=3)
    shortest = torch.linalg.pinv(j, rtol=1e-9) @ (j @ u)
    inner_product = rkhs_inner((j @ u).view(30, 2), kernel=ntk(model, x), rcond=1e-12)
    assert abs(float(inner_product - shortest @ shortest)) < 1e-6 * float(u @ u)
