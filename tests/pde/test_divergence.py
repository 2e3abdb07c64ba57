"""A diverging optimizer of the caller: the network is that of the lowest loss, and a warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import pullback as pb
from pullback import pde
from pullback.optim.kfac import Natural

LINE = pde.Interval(0, 1)
POISSON = pde.Problem(LINE, [pde.Equation(lambda u: u.xx + 1), pde.Dirichlet(0.0)], name="Line")
ENERGY = pde.Problem(
    LINE, [pde.Energy(lambda u: u.x**2 / 2 - u), pde.Dirichlet(0.0)], name="Energy"
)

MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "to infinity": lambda m: SGD(m.parameters(), lr=1e200),
    "to large numbers": lambda m: SGD(m.parameters(), lr=1.0),
    "Adam": lambda m: Adam(m.parameters(), lr=1e300),
    "K-FAC": lambda m: pb.KFAC(m, 1e8, rule=Natural(kl_clip=None, damping=1e-8)),
}


def solve(problem: pde.Problem, network: nn.Module, **options: Any) -> pde.PDESolution:
    return pde.solve(problem, network, points=20, progress=False, patience=None, **options)


@pytest.mark.parametrize("name", MAKERS)
def test_the_network_has_its_lowest_loss_again(name: str) -> None:
    network = pde.mlp(1, 4, 1, seed=0)
    with pytest.warns(UserWarning, match="Line: stalled: the optimizer diverged within") as shown:
        solution = solve(POISSON, network, steps=40, optimizer=MAKERS[name])
    assert "smaller learning rate" in str(shown[-1].message)
    losses = [loss for loss in solution.history.loss if loss == loss]
    assert max(losses) > 100 * min(losses)
    assert solution.loss == pytest.approx(min(losses), rel=1e-12)
    assert all(bool(p.isfinite().all()) for p in network.parameters())
    assert solution.verdict.alarming


def test_parameters_that_overflow_in_the_last_step() -> None:
    network = pde.mlp(1, 4, 1, seed=0)
    before = [p.detach().clone() for p in network.parameters()]
    with pytest.warns(UserWarning, match="diverged within 1 step"):
        solution = solve(POISSON, network, steps=1, optimizer=MAKERS["to infinity"])
    assert solution.history.loss == [solution.loss]
    assert all(map(torch.equal, before, network.parameters()))


def test_an_energy_that_diverges_is_warned_of() -> None:
    """An energy has no residuals to judge it by, so that nothing else would say it."""
    network = pde.mlp(1, 4, 1, seed=0)
    with pytest.warns(UserWarning, match=r"Energy: the optimizer diverged.*smaller learning rate"):
        solution = solve(ENERGY, network, steps=4, optimizer=MAKERS["to infinity"])
    assert solution.loss == solution.loss


def test_a_run_that_diverged_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "run.pt"}
    first_network = pde.mlp(1, 4, 1, seed=0)
    with pytest.warns(UserWarning, match="diverged"):
        first = solve(POISSON, first_network, steps=4, optimizer=MAKERS["to infinity"], **options)
    second_network = pde.mlp(1, 4, 1, seed=1)
    with pytest.warns(UserWarning, match="diverged"):
        second = solve(POISSON, second_network, steps=6, optimizer=MAKERS["to infinity"], **options)
    assert second.loss == first.loss
    assert len(second.history) > len(first.history)


def test_an_optimizer_that_does_not_diverge_keeps_its_last_parameters() -> None:
    network = pde.mlp(1, 4, 1, seed=0)
    with pytest.warns(UserWarning, match="unfinished"):
        solution = solve(
            POISSON, network, steps=3, optimizer=lambda m: SGD(m.parameters(), lr=0.05)
        )
    assert "diverged" not in solution.stopped
