"""Losses with derivatives of the network under K-FAC."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pullback as pb
from pullback.optim.kfac import Adaptive
from pullback.pde.discretize import Trial, term
from pullback.pde.plan import Plan


def poisson(width: int = 5):
    """Network, objective and a dense Jacobian of its residuals."""
    problem = pb.pde.Poisson(2)
    network = pb.pde.mlp(2, width, 1, seed=0)
    trial = Trial(network, {}, next(network.parameters()))
    plan = Plan(problem, 21, points=9, sampler=None, seed=0, resample=None, refine=None)
    sites = plan.draw(0)
    terms = [term(problem, c, trial, sites[c.name]) for c in problem.conditions]
    return trial, pb.optim.Objective(terms), sites


def test_factors_of_a_laplacian_are_those_of_its_jets() -> None:
    r"""At the last layer z = W·a + b the residual is Δz: places are the channels of the jet.

    The cotangent is √q at the Laplacian's channel and 0 at the value's.
    """
    trial, objective, sites = poisson()
    opt = pb.KFAC(trial, lr=0.0, fisher="exact", statistics_every=1, invert_every=1)
    opt.step(objective=objective)
    held = opt.curvature.averages
    assert {n for key in held for n in key.names} == {n for n, _ in trial.named_parameters()}
    assert all(key.joint for key in held)
    w, b = (p.detach() for p in trial.network[0].parameters())
    points = sites["equation"][0]
    q = points.weights / points.weights.sum()
    t = torch.tanh(points.x @ w.T + b)
    laplacian = -2 * t * (1 - t**2) * (w**2).sum(1)
    key = next(k for k in held if "network.2.weight" in k.names)
    found = held[key].corrected()
    left, right = found["term 0.last.outputs"][0], found["term 0.last.inputs"][0]
    assert torch.allclose(left, q.sum().view(1, 1))  # Σ √q√q
    # value and Laplacian are carried to the last layer: two places, the bias at the first alone
    channels = (
        torch.cat([t, torch.ones_like(t[:, :1])], 1),
        torch.nn.functional.pad(laplacian, (0, 1)),
    )
    want = sum(c.T @ c for c in channels) / (2 * len(t))
    assert torch.allclose(right, want, rtol=1e-10)


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_pde_solve_runs_on_kfac(fisher: str) -> None:
    solution = pb.pde.solve(
        pb.pde.Poisson(2), pb.pde.mlp(2, 16, 1, seed=0), steps=40, progress=False, points=225,
        optimizer=lambda module: pb.KFAC(
            module, 1.0, fisher=fisher, damping=Adaptive(1e-3), ema=0.9,
            step=pb.steps.QuadraticModel(), statistics_every=1, invert_every=1,
        ),
    )  # fmt: skip
    assert solution.history.loss[-1] < 1e-2 * solution.history.loss[0]


def test_sobolev_training_by_residuals() -> None:
    """A plain function of residuals has no layers to be seen: its blocks are diagonals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]

    def objective(params: dict[str, Tensor]) -> dict[str, Tensor]:
        def u(t: Tensor) -> Tensor:
            return functional_call(model, params, (t[None],))[0, 0]

        slopes = torch.func.vmap(torch.func.grad(u))(x)
        values = functional_call(model, params, (x,))
        return {"value": values - torch.sin(3 * x), "slope": slopes - 3 * torch.cos(3 * x)}

    opt = pb.KFAC(model, lr=1.0, damping=Adaptive(1e-2), step=pb.steps.QuadraticModel(),
                  fisher="exact", statistics_every=1, invert_every=1)  # fmt: skip
    losses = [opt.step(objective=objective) for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    assert all("diagonal" in row.block for row in opt.coverage())


def test_an_objective_and_a_closure_are_refused() -> None:
    trial, objective, _ = poisson()
    opt = pb.KFAC(trial, lr=0.1)
    with pytest.raises(pb.PullbackError, match="a closure and an objective"):
        opt.step(lambda: 0.0, objective=objective)
