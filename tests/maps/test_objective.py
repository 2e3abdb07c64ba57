"""Objectives: named, weighted residuals as one map."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback.maps import ObjectiveMap
from pullback.testing import assert_close


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(3, 2, generator=generator, dtype=torch.float64),
        "c": torch.randn((), generator=generator, dtype=torch.float64),
    }


X = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)


def residual(p: dict[str, Tensor]) -> Tensor:
    return torch.tanh(X @ p["w"]) * p["c"]  # (5, 2)


FEW = {"few": lambda p: residual(p)[:2, 0], "many": residual}


@pytest.mark.parametrize("name", FEW)
def test_products_and_rows_are_the_jacobian(name: str) -> None:
    """n < p goes by reverse mode, n ≥ p by forward mode."""
    source = ObjectiveMap(FEW[name], "sum")
    linear = source.linearize(params())
    flat = torch.cat([p.flatten() for p in params().values()])

    def function(v: Tensor) -> Tensor:
        return FEW[name]({"w": v[:6].view(3, 2), "c": v[6]}).flatten()

    j = torch.func.jacrev(function)(flat)
    v = torch.randn(7).double()
    u = torch.randn(len(j)).double()
    assert_close(linear.value.flatten(), function(flat), 1e-15, "value")
    assert_close(linear.rows(), j, 1e-13, "rows")
    assert_close(linear.jvp(v).flatten(), j @ v, 1e-13, "jvp")
    assert_close(linear.vjp(u[:, None]), j.T @ u, 1e-13, "vjp")


def test_weights_and_reductions() -> None:
    """½‖z‖² = ½ Σ_k weight_k mean_i |r_ki|², or sums."""
    p = params()
    r = residual(p)
    weights = torch.linspace(0, 1, 5, dtype=torch.float64)

    def objective(p: dict[str, Tensor]):
        r = residual(p)
        return {
            "plain": r,
            "pair": (r[:, 0], 3.0),
            "each": (r, weights),
            "number": p["c"],
        }

    squares = r.square().sum(1)
    for reduction, how in (("mean", Tensor.mean), ("sum", Tensor.sum)):
        z = ObjectiveMap(objective, reduction)(p)
        assert z.shape == (10 + 5 + 10 + 1, 1)
        want = how(squares) + 3 * how(r[:, 0].square()) + how(weights * squares) + p["c"] ** 2
        assert_close(z.square().sum(), want, 1e-13, reduction)


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_every_form_serves_an_objective(form: str) -> None:
    model = torch.nn.ParameterDict({k: torch.nn.Parameter(v) for k, v in params().items()})
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(0.1), gram=form)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    names = [n for n, _ in model.named_parameters()]

    def function(v: Tensor) -> Tensor:
        pieces = {}
        start = 0
        for n in names:
            p = params()[n]
            pieces[n] = v[start : start + p.numel()].view(p.shape)
            start += p.numel()
        return residual(pieces).flatten() / 5**0.5

    j = torch.func.jacrev(function)(before)
    z = function(before)
    info = opt.step(objective=residual)
    want = torch.linalg.solve(j.T @ j + 0.1 * torch.eye(7).double(), j.T @ z)
    moved = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_close(moved, want, 1e-9, "the step")
    assert info.loss == pytest.approx(float(0.5 * z.square().sum()))
    assert info.gram == form


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p: {}, "empty"),
        (lambda p: residual(p)[:0], "empty"),
        (lambda p: "residual", "not a residual"),
        (lambda p: {"a": 3}, "not a residual"),
        (lambda p: (residual(p), torch.ones(4)), "does not fit"),
    ],
    ids=["no entries", "no points", "text", "number", "weights"],
)
def test_what_is_not_a_residual_is_refused(wrong, message: str) -> None:
    with pytest.raises(pb.PullbackError, match=message):
        ObjectiveMap(wrong)(params())
