"""Losses with derivatives of the network under K-FAC."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pullback as pb
from pullback.optim.kfac import Adaptive
from pullback.pde.discretization.plan import SamplingPlan
from pullback.pde.discretization.term import build_term
from pullback.pde.discretization.trial import Trial
from tests.kfac_options import kfac_of

RULE: dict[str, Any] = {"step": pb.steps.QuadraticModel(), "statistics_every": 1, "invert_every": 1}


def test_factors_of_a_laplacian_are_those_of_its_jets() -> None:
    """At the last layer the residual is Δz: places are the channels, with cotangents 0 and √q."""
    problem = pb.pde.Poisson(2)
    network = pb.pde.mlp(2, 5, 1, seed=0)
    trial = Trial(network, {}, next(network.parameters()))
    sites = SamplingPlan(problem, 21, points=9).draw(0)
    (equation,) = (c for c in problem.conditions if c.name == "equation")
    objective = pb.optim.Objective([build_term(problem, equation, trial, sites["equation"])])
    opt = kfac_of(trial, lr=0.0, fisher="exact")
    opt.step(objective=objective)
    blocks = ["kronecker (5 ⊗ 3)"] * 2 + ["kronecker (1 ⊗ 6)"] * 2
    assert [r.block for r in opt.coverage()] == blocks
    w, b = (p.detach() for p in trial.network[0].parameters())
    points = sites["equation"][0]
    q = points.weights / points.weights.sum()
    t = torch.tanh(points.x @ w.T + b)
    laplacian = -2 * t * (1 - t**2) * (w**2).sum(1)
    # value and Laplacian are carried to the last layer: two places, the bias at the first alone
    value = nn.functional.pad(t, (0, 1), value=1.0)
    second = nn.functional.pad(laplacian, (0, 1))
    want = q.sum() * (value.T @ value + second.T @ second) / (2 * len(t))
    torch.testing.assert_close(opt.gram().dense()[-6:, -6:], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fisher", [pytest.param("exact", marks=pytest.mark.slow), "mc"])
def test_pde_solve_runs_on_kfac(fisher: str) -> None:
    solution = pb.pde.solve(
        pb.pde.Poisson(2), pb.pde.mlp(2, 8, 1, seed=0), steps=20, progress=False, points=100,
        optimizer=lambda module: kfac_of(
            module, 1.0, fisher=fisher, damping=Adaptive(1e-3), ema=0.9, **RULE
        ),
    )  # fmt: skip
    assert solution.history.loss[-1] < 0.05 * solution.history.loss[0]


def test_a_plain_function_of_residuals_has_diagonal_blocks() -> None:
    """Sobolev training: there are no layers to be seen."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]

    def objective(params: dict[str, Tensor]) -> dict[str, Tensor]:
        def u(t: Tensor) -> Tensor:
            return functional_call(model, params, (t[None],))[0, 0]

        slopes = torch.func.vmap(torch.func.grad(u))(x)
        values = functional_call(model, params, (x,))
        return {"value": values - torch.sin(3 * x), "slope": slopes - 3 * torch.cos(3 * x)}

    opt = kfac_of(model, lr=1.0, damping=Adaptive(1e-2), fisher="exact", **RULE)
    losses = [opt.step(objective=objective) for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    assert all("diagonal" in row.block for row in opt.coverage())


@pytest.mark.parametrize("options", [{}, RULE], ids=["plain", "controlled"])
def test_an_objective_that_is_not_finite_rejects_the_step(options: dict[str, Any]) -> None:
    """It has no gradient; a step used to end in an AttributeError."""
    model = nn.Linear(2, 1).double()
    x = torch.ones(3, 2, dtype=torch.float64)
    opt = kfac_of(model, lr=1.0, damping=1e-2, **options)

    def objective(params: dict[str, Tensor]) -> Tensor:
        return scale * functional_call(model, params, (x,))

    scale = 1.0
    opt.step(objective=objective)
    before = [p.detach().clone() for p in model.parameters()]
    scale = float("inf")
    opt.step(objective=objective)
    assert not opt.info.accepted
    assert "the loss is inf" in opt.info.reason
    assert all(map(torch.equal, before, model.parameters()))
    scale = 1.0
    opt.step(objective=objective)
    assert opt.info.accepted
