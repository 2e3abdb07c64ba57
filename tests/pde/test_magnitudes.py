"""Problems in units in which values are tiny or huge: squares vanish or overflow in float64."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from pullback import PullbackError, pde
from pullback.pde.judgement.validation import root_mean_square

LINE = pde.Interval(0, 1)


def poisson(source: float) -> pde.Problem:
    conditions = [pde.Equation(lambda u: u.xx + source), pde.Dirichlet(0.0)]
    return pde.Problem(LINE, conditions, name="Line")


def scaled_network(scale: float) -> nn.Sequential:
    """The same network times a number."""
    network = pde.mlp(1, 6, 1, seed=0)
    with torch.no_grad():
        for parameter in network[-1].parameters():
            parameter.mul_(scale)
    return network


def judge(source: float, network: nn.Module) -> pde.PDESolution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pde.solve(poisson(source), network, steps=0, points=20, progress=False)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e-120, 1e150, 1e300])
def test_relative_residuals_do_not_depend_on_units(scale: float) -> None:
    usual = judge(1.0, scaled_network(1.0)).residual
    for name, residual in judge(scale, scaled_network(scale)).residual.items():
        assert residual.relative == pytest.approx(usual[name].relative, rel=1e-10)
        assert residual.concentration == pytest.approx(usual[name].concentration, rel=1e-10)


@pytest.mark.parametrize("scale", [0.0, 1e-200])
def test_a_loss_that_vanishes_by_its_squares_is_no_solution(scale: float) -> None:
    """It was "converged", with an estimated error of 0; the true one is at least 1."""
    with pytest.warns(UserWarning, match="unfinished.*squares of the residuals are too small"):
        solution = pde.solve(
            poisson(1e-200), scaled_network(scale), steps=3, points=20, progress=False
        )
    assert solution.loss == 0
    assert solution.verdict.relative >= 1
    assert "estimated error: unknown" in str(solution.check())


def test_a_network_in_the_units_of_tiny_data_is_refused() -> None:
    problem = poisson(1e-200)
    with pytest.raises(PullbackError, match=r"squares vanish.*State the problem in units"):
        pde.solve(problem, pde.network_for(problem), steps=3, points=20, progress=False)


def test_residuals_that_are_not_numbers_are_no_solution() -> None:
    network = pde.mlp(1, 6, 1, seed=0)
    solution = judge(1.0, network)
    with torch.no_grad():
        next(network.parameters()).fill_(math.nan)
    judged = judge(1.0, network)
    assert judged.verdict.relative == math.inf
    assert judged.verdict.alarming
    assert "inf of their terms" in judged.stopped
    assert "estimated error: unknown" in str(solution.check())


def test_root_mean_squares() -> None:
    values = torch.tensor([[3.0, 0.0], [4.0, 0.0]], dtype=torch.float64)
    for scale in (1.0, 1e-320, 1e307):
        size = root_mean_square(scale * values, 0)
        assert float(size[0]) == pytest.approx(scale * 12.5**0.5, rel=1e-3, abs=0)
        assert size[1] == 0
    assert root_mean_square(torch.tensor([1.0, math.inf]), 0) == math.inf
    assert root_mean_square(torch.tensor([1.0, math.nan]), 0).isnan()
