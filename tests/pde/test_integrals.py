"""Conditions with one value for the whole domain, against quadrature and solutions by hand."""

from __future__ import annotations

from math import pi
from typing import Any

import pytest
import torch
from scipy.integrate import quad

from pullback import pde
from pullback._core.errors import PullbackError
from pullback._core.space import ParameterSpace
from pullback.pde.discretization.sites import draw_sites
from pullback.pde.discretization.term import build_term
from pullback.pde.discretization.trial import Trial

LINE = pde.Interval(0, 1)


def eigenproblem(**options: Any) -> pde.Problem:
    """−u'' = λu, u(0) = u(1) = 0, ∫u² = 1."""
    return pde.Problem(
        LINE,
        [
            pde.Equation(lambda u, lam: u.xx + lam * u),
            pde.Dirichlet(0.0),
            pde.Integral(lambda u: u**2, 1.0, **options),
        ],
        unknowns={"lam": 8.0},
    )


def test_the_row_is_the_gradient_of_the_integral() -> None:
    """Value and row against autograd through the quadrature's sum, with an unknown in it."""
    integral = pde.Integral(lambda u, x, k: k * u.x**2 + x * u, 0.3, weight=4.0)
    problem = pde.Problem(LINE, [pde.Equation(lambda u: u.xx), integral], unknowns={"k": 0.7})
    network = pde.mlp(1, 5, 1, seed=3)
    trial = Trial(network, problem.unknowns, torch.zeros(1).double())
    sites = draw_sites(problem, integral, 40, "grid", 0)
    params = dict(trial.named_parameters())
    linearization = build_term(problem, integral, trial, sites).map.linearize(params)

    x = sites[0].x.clone().requires_grad_()
    u = network(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    k = params["unknowns.k"]
    total = (sites[0].weights * (k * slope[:, 0] ** 2 + x[:, 0] * u[:, 0])).sum()
    want = 2.0 * (total - 0.3)
    grads = torch.autograd.grad(want, list(params.values()), allow_unused=True)
    row = ParameterSpace(params).flatten(
        {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(params.items(), grads, strict=True)
        }
    )
    torch.testing.assert_close(linearization.value, want.detach().reshape(1, 1))
    torch.testing.assert_close(linearization.rows(), row[None])
    torch.testing.assert_close(
        linearization.vjp(torch.full_like(linearization.value, 1.5)), 1.5 * row
    )
    v = torch.linspace(-1, 1, len(row), dtype=torch.float64)
    torch.testing.assert_close(linearization.jvp(v), (row @ v).reshape(1, 1))

    def density(t: float) -> float:
        at = torch.tensor([[t]], dtype=torch.float64, requires_grad=True)
        value = network(at)
        (first,) = torch.autograd.grad(value.sum(), at)
        return (0.7 * first**2 + t * value).item()

    assert total.item() == pytest.approx(quad(density, 0, 1, epsabs=1e-13)[0], abs=1e-12)


def test_eigenvalue_problem() -> None:
    solution = pde.solve(
        eigenproblem(), pde.mlp(1, 10, 1, seed=0), points=40, steps=45, progress=False
    )
    assert abs(solution.unknowns["lam"] - pi**2) < 1e-8
    x = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None]
    want = 2**0.5 * torch.sin(pi * x)
    u = solution(x)
    assert (u * u.sign().sum().sign() - want).abs().max() < 1e-2
    assert solution.residual["integral"].relative < 1e-2
    assert "integral" in str(solution.check())


@pytest.mark.slow
def test_neumann_problem_with_mean_zero() -> None:
    """−u'' = π² cos πx with u' = 0 at both ends: cos πx and any constant."""
    problem = pde.Problem(
        LINE,
        [
            pde.Equation(lambda u, x: u.xx + pi**2 * torch.cos(pi * x)),
            pde.Neumann(0.0),
            pde.Integral(lambda u: u),
        ],
        exact=lambda x: torch.cos(pi * x),
    )
    solution = pde.solve(problem, pde.mlp(1, 10, 1, seed=0), points=60, steps=100, progress=False)
    assert solution.error < 1e-4
    assert solution.residual["integral"].rms < 1e-4


def test_residual_of_an_integral_by_hand() -> None:
    """∫ sin πx = 2/π where 1 is wanted."""

    class Sines(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.size = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            return self.size * torch.sin(pi * x)

    problem = pde.Problem(LINE, [pde.Equation(lambda u: u.xx), pde.Integral(lambda u: u, 1.0)])
    solution = pde.PDESolution(problem, Sines(), pde.History())
    residual = solution.residual["integral"]
    assert residual.rms == pytest.approx(1 - 2 / pi, abs=1e-12)
    assert residual.size == pytest.approx((1 + (2 / pi) ** 2) ** 0.5, abs=1e-12)
    assert residual.affine


def test_integral_over_a_part() -> None:
    """The flux through one side, ∫ ∂u/∂n = 1 on x = 1."""
    square = pde.Box([(0, 1), (0, 1)])
    flux = pde.Integral(lambda u: u.normal, 1.0, on=square.face("x", "high"))
    problem = pde.Problem(square, [pde.Equation(lambda u: u.xx), flux])
    solution = pde.PDESolution(problem, pde.mlp(2, 6, 1, seed=0), pde.History())
    x = torch.stack([torch.ones(200), (torch.arange(200) + 0.5) / 200], 1).double()
    want = abs(float(solution.d("x")(x).mean()) - 1)
    assert solution.residual["integral"].rms == pytest.approx(want, rel=1e-4)


def test_refusals() -> None:
    cases = {
        "balanced": lambda: pde.Integral(lambda u: u, weight="balanced"),
        "integrand": lambda: pde.Integral(3.0),  # pyright: ignore[reportArgumentType]
        "value": lambda: pde.Integral(lambda u: u, lambda x: x),  # pyright: ignore[reportArgumentType]
    }
    for word, make in cases.items():
        with pytest.raises(PullbackError, match=word):
            make()
    domain = pde.SpaceTime(LINE, (0, 1))
    moving = pde.Problem(
        domain,
        [pde.Equation(lambda u: u.t - u.xx), pde.Initial(1.0), pde.Integral(lambda u: u, 1.0)],
    )
    with pytest.raises(PullbackError, match="integral over all time"):
        pde.solve(moving, pde.mlp(2, 4, 1), slabs=2, progress=False)


def test_means_in_residuals_are_sent_to_integrals() -> None:
    def solve(residual: Any, **options: Any) -> None:
        problem = pde.Problem(LINE, [pde.Equation(residual)], **options)
        pde.solve(problem, pde.mlp(1, 4, 1), points=20, steps=1, progress=False)

    with pytest.raises(PullbackError, match=r"other points.*\n?.*Integral"):
        solve(lambda u: u.xx - torch.mean(u))
    with pytest.raises(PullbackError, match="Integral"):
        solve(lambda u: torch.mean(u))
    with pytest.raises(PullbackError, match="'k' is in no residual"):
        solve(lambda u: u.xx, unknowns={"k": 1.0})
