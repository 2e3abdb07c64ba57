"""Causal weights against dense algebra, and what they do to a run."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import pullback as pb
from pullback import PullbackError, pde
from pullback.pde.discretization.causal import Causal
from pullback.pde.discretization.plan import SamplingPlan
from pullback_experiments.problems import AllenCahn

_TIMES = (0.5, 1.5)
_COUNTS = {"equation": 40, "initial": 10}


def _problem() -> pde.Problem:
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), _TIMES),
        [
            pde.Equation(lambda u: u.t - 0.1 * u.xx + u**2, weight=2.0),
            pde.Initial(lambda x: torch.sin(3 * x), weight=5.0),
        ],
        name="reaction",
    )


def _network() -> nn.Sequential:
    return pde.mlp(2, 6, 1, seed=0)


def _solve(network: nn.Module, **options: Any) -> pde.PDESolution:
    defaults = {"points": _COUNTS, "refine": None, "patience": None, "progress": False}
    return pde.solve(_problem(), network, **{**defaults, **options})


class Oracle:
    """The same loss by nested automatic differentiation at one set of points."""

    def __init__(self, network: nn.Module) -> None:
        drawn = {"sampler": None, "seed": 0, "resample": None, "refine": None}
        self.sites = SamplingPlan(_problem(), 25, points=_COUNTS, **drawn).draw(0)
        self._network = network

    def _u(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self._network, params, (x[None],))[0, 0]

    def equation(self, params: dict[str, Tensor]) -> Tensor:
        def residual(x: Tensor) -> Tensor:
            def u(y: Tensor) -> Tensor:
                return self._u(params, y)

            return torch.func.grad(u)(x)[1] - 0.1 * torch.func.hessian(u)(x)[0, 0] + u(x) ** 2

        return torch.func.vmap(residual)(self.sites["equation"][0].x)

    def initial(self, params: dict[str, Tensor]) -> Tensor:
        x = self.sites["initial"][0].x
        return torch.func.vmap(lambda y: self._u(params, y))(x) - torch.sin(3 * x[:, 0])

    def weights(self, params: dict[str, Tensor], sharpness: float = 320.0) -> Tensor:
        """exp(−ε · the share of the loss in earlier sixteenths of the time)."""
        r = self.equation(params)
        t = self.sites["equation"][0].x[:, 1]
        bin = ((t - _TIMES[0]) * 16).floor().clamp(max=15)
        before = torch.stack([r[bin < i].square().sum() for i in bin])
        return torch.exp(-sharpness * before / r.square().sum()).clamp(min=1e-8).detach()

    def residuals(self, params: dict[str, Tensor], w: Tensor) -> Tensor:
        equation = (2.0 * w / 40).sqrt() * self.equation(params)
        return torch.cat([equation, math.sqrt(5.0 / 10) * self.initial(params)])


def _parameters(network: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in network.named_parameters()}


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def test_gauss_newton_step_takes_the_weights_as_constants():
    damping = 1e-3
    network = _network()
    before = _parameters(network)
    oracle = Oracle(copy.deepcopy(network))
    w = oracle.weights(before)
    assert w.max() == 1
    assert w.min() < 1e-3
    _solve(
        network,
        steps=1,
        causal=True,
        solver=pb.solvers.Cholesky(damping=damping),
        step=pb.steps.Constant(1.0),
    )
    rows = jacrev(lambda p: oracle.residuals(p, w))(before)
    a = torch.cat([rows[n].flatten(1) for n in before], 1)
    gram = a.T @ a + damping * torch.eye(a.shape[1], dtype=a.dtype)
    want = torch.linalg.solve(gram, a.T @ oracle.residuals(before, w))
    move = _flat(before) - _flat(_parameters(network))
    torch.testing.assert_close(move, want, rtol=1e-8, atol=1e-10)


def test_loss_of_a_solution_counts_all_times_alike():
    network = _network()
    solution = _solve(network, steps=2, causal=True)
    oracle = Oracle(copy.deepcopy(network))
    r = oracle.residuals(_parameters(network), torch.ones(40, dtype=torch.float64))
    assert solution.loss == pytest.approx(float(0.5 * r @ r), rel=1e-10)


def test_weights_open_and_sharpen_as_losses_fall():
    causal = Causal(_problem())
    flat = torch.ones(16, dtype=torch.float64)
    causal.update(flat, 0)
    want = torch.exp(-320 * torch.arange(16, dtype=torch.float64) / 16).clamp(min=1e-8)
    torch.testing.assert_close(causal.weights, want)
    assert causal.is_open
    causal.update(flat * 1e-5, 3)
    assert causal.weights[-1] > 0.9
    assert not causal.is_open
    causal.update(flat * 1e-5, 6)  # three times as sharp from here on
    torch.testing.assert_close(causal.weights[-1].log(), torch.tensor(-960e-5 * 15 / 16).double())


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path):
    whole = _network()
    network = _network()
    _solve(whole, steps=9, causal=True)
    path = tmp_path / "run.pt"
    _solve(
        network,
        steps=9,
        causal=True,
        checkpoint=path,
        callbacks=[lambda run, _: len(run.history) == 4],
    )
    resumed = _solve(_network(), steps=9, causal=True, checkpoint=path)
    assert torch.equal(_flat(_parameters(whole)), _flat(_parameters(resumed.network)))
    with pytest.raises(PullbackError, match="another run"):
        _solve(_network(), steps=9, checkpoint=path)


def test_refuses_what_has_no_time_and_what_is_no_switch():
    with pytest.raises(PullbackError, match="need time"):
        pde.solve(pde.Poisson(1), pde.mlp(1, 4, 1, seed=0), causal=True, progress=False)
    with pytest.raises(PullbackError, match="causal="):
        _solve(_network(), causal=3.0)


def test_goes_with_slabs():
    solution = _solve(_network(), steps=4, causal=True, slabs=2)
    assert len(solution.history) == 8


@pytest.mark.slow
def test_stiff_fronts_are_found():
    """Without the weights Allen–Cahn ends at an error of 0.5 with a small loss."""
    ready = AllenCahn()
    equation, periodic, _ = ready.conditions
    first = pde.Initial(lambda x: x**2 * torch.cos(torch.pi * x), weight=100.0)
    problem = pde.Problem(ready.domain, [equation, periodic, first], reference=ready.reference)
    network = nn.Sequential(
        pde.PeriodicEmbedding(2, 0, 2.0, harmonics=4), *pde.mlp(9, 16, 16, 1, seed=0)
    )
    solution = pde.solve(
        problem,
        network,
        points={"equation": 1200, "initial": 200, "periodic": 8},
        steps=75,
        causal=True,
        solver=pb.solvers.Cholesky(),
        step=pb.steps.LevenbergMarquardt(1e-2),
        gram="dense",
        refine=None,
        progress=False,
    )
    assert solution.error < 0.2
