"""Networks that do not get on: others are tried, time is cut, and the verdict says so."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import pde
from pullback.pde.runs.perturbation import enlarge_outputs, reinitialize
from pullback.pde.runs.run import Run
from pullback.pde.runs.settings import Limits, MethodOptions, SamplingOptions, Settings
from pullback.pde.runs.strategy import CANDIDATES
from pullback.pde.runs.time_windows import OrdinaryWindows, can_march, find_time_windows

pi = math.pi


def at_start(domain: Any) -> Any:
    return domain.face("t", "low")


def poisson() -> pde.Problem:
    def equation(u: Any, x: Tensor) -> Tensor:
        return u.xx + pi**2 * torch.sin(pi * x)

    return pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(equation), pde.Dirichlet(0.0)],
        exact=lambda x: torch.sin(pi * x),
    )


def solve(problem: pde.Problem, network: nn.Module, **options: Any) -> pde.PDESolution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pde.solve(
            problem, network, **{"points": 40, "steps": 100, "progress": False, **options}
        )


def test_a_network_that_gets_on_is_solved_as_before() -> None:
    """Looks after some of the steps change no bit."""
    networks = [pde.mlp(1, 8, 1, seed=0) for _ in range(2)]
    watched = solve(poisson(), networks[0], steps=30)
    unwatched = solve(poisson(), networks[1], steps=30, callbacks=[lambda run, info: None])
    assert watched.verdict.tried == ()
    assert watched.error == unwatched.error < 1e-3
    assert len(watched.history) <= 30


def make_hopeless(network: nn.Sequential) -> nn.Sequential:
    """Put the steep parts of all neurons far outside of the domain."""
    with torch.no_grad():
        network[0].weight.fill_(1.0)  # pyright: ignore[reportCallIssue]
        network[0].bias.copy_(torch.tensor([9.0, 0.5, 11.0, -12.0]))  # pyright: ignore
    return network


def test_another_network_is_tried_if_the_first_one_creeps() -> None:
    network = make_hopeless(pde.mlp(1, 4, 1, seed=0))
    solution = solve(poisson(), network, steps=140, patience=100)
    tried = solution.verdict.tried
    assert len(tried) >= 2
    assert "the given network" in " ".join(tried)
    assert "beside" in solution.stopped
    assert solution.network is network
    others = [words.split(" (")[0] for words in tried]
    assert set(others) <= {"the given network", *(c.words for c in CANDIDATES)}
    assert solution.history.seconds[0] > 0


@pytest.mark.slow
def test_another_network_is_tried_above_the_tolerance() -> None:
    """Three neurons are stuck at an error that is more than was asked for."""
    network = pde.mlp(1, 3, 1, seed=0)
    options = {"points": 30, "patience": 8, "tol": 1e-12, "measure": 50}
    solution = solve(poisson(), network, steps=250, **options)
    assert len(solution.verdict.tried) == 2
    assert solution.network is network


@pytest.mark.slow
def test_looks_do_not_change_a_run_that_starts_anew() -> None:
    limits = Limits(steps=120, tol=None, patience=12, budget=None)
    settings = Settings(
        sampling=SamplingOptions(points=30, sampler=None, seed=0, resample=None, refine="auto"),
        method=MethodOptions(solver=None, step=None, gram="auto", memory=2**32, optimizer=None),
        limits=limits,
        causal=False,
        measure=10,
        callbacks=(),
        device=None,
        progress=False,
        group=None,
    )
    whole = Run(poisson(), pde.mlp(1, 3, 1, seed=0), settings)
    looked_at = Run(poisson(), pde.mlp(1, 3, 1, seed=0), settings)
    whole.advance()
    for look in range(1, 13):
        looked_at.advance(look / 12)
    assert whole.history.restarted
    assert looked_at.history.restarted == whole.history.restarted
    assert looked_at.history.loss == whole.history.loss


def test_without_patience_there_is_one_network_alone() -> None:
    network = make_hopeless(pde.mlp(1, 4, 1, seed=0))
    assert solve(poisson(), network, patience=None, steps=30).verdict.tried == ()


def test_other_initial_values_have_the_same_distribution() -> None:
    network = pde.mlp(2, 5, 1, seed=0)
    before = [p.detach().clone() for p in network.parameters()]
    reinitialize(network, torch.Generator().manual_seed(0), gain=2.0)
    after = [p.detach() for p in network.parameters()]
    assert not torch.equal(before[0], after[0])
    torch.testing.assert_close(2 * before[0].flatten().sort()[0], after[0].flatten().sort()[0])
    for old, new in zip(before[1:], after[1:], strict=True):
        torch.testing.assert_close(old.flatten().sort()[0], new.flatten().sort()[0])


def test_outputs_begin_as_large_as_the_data() -> None:
    network = pde.mlp(2, 5, 2, seed=0)
    output = network[-1]
    assert isinstance(output, nn.Linear)
    before = output.weight.detach().clone()
    enlarge_outputs(network, torch.tensor([1.0, 1e3], dtype=torch.float64))
    torch.testing.assert_close(output.weight[0], before[0])
    torch.testing.assert_close(output.weight[1], 1e3 * before[1])


def oscillator() -> pde.Problem:
    return pde.Problem(
        pde.Interval(0, 4, name="t"),
        [
            pde.Equation(lambda u: u.tt + u),
            pde.Dirichlet(1.0, on=at_start),
            pde.Equation(lambda u: u.t, on=at_start, name="at rest"),
        ],
        exact=lambda t: torch.cos(t),
    )


def test_the_state_of_an_ordinary_equation_is_handed_on() -> None:
    windows = find_time_windows(oscillator())
    assert isinstance(windows, OrdinaryWindows)

    def values(points: Tensor, order: int) -> Tensor:
        return torch.cos(points + order * pi / 2)

    restricted = windows.restrict(1.0, 2.0, values)
    assert [c.name for c in restricted.conditions] == ["equation", "initialstate"]
    assert (float(restricted.domain.low[0]), float(restricted.domain.high[0])) == (1.0, 2.0)
    solution = solve(restricted, pde.mlp(1, 10, 1, seed=0), steps=30)
    assert solution.error < 1e-3
    first = windows.restrict(0.0, 1.0, None)
    assert len(first.conditions) == 3


@pytest.mark.slow
def test_ordinary_equations_in_slabs() -> None:
    network = pde.Rescaled(pde.mlp(1, 8, 1, seed=0), oscillator().domain)
    solution = solve(oscillator(), network, slabs=3, steps=60)
    assert solution.error < 1e-5
    assert solution.verdict.estimated == pytest.approx(solution.error, rel=0.5, abs=1e-9)


@pytest.mark.parametrize(
    ("problem", "possible"),
    [(oscillator, True), (poisson, False), (lambda: pde.Heat(1), True)],
)
def test_what_can_be_cut_in_time(problem: Callable[[], pde.Problem], possible: bool) -> None:
    assert can_march(problem()) is possible


def test_high_derivatives_balance_the_boundary() -> None:
    def plate(weight: float | None) -> pde.Problem:
        return pde.Problem(
            pde.Box([(0, 1), (0, 1)]),
            [
                pde.Equation(lambda u: u.xxxx + 2 * u.xxyy + u.yyyy - 1),
                pde.Dirichlet(0.0, weight=weight),
                pde.Neumann(0.0, weight=weight),
            ],
        )

    options = {"steps": 1, "points": 36}
    chosen = solve(plate(None), pde.mlp(2, 4, 1, seed=0), **options).weights
    assert chosen == {"equation": 1.0, "dirichlet": 100.0, "neumann": 10.0}
    weights = solve(plate(3.0), pde.mlp(2, 4, 1, seed=0), **options).weights
    assert weights == {"equation": 1.0, "dirichlet": 3.0, "neumann": 3.0}


def test_a_loss_of_zero_ends_a_run_in_order() -> None:
    """u = 0 is represented without any round-off."""
    problem = pde.Problem(pde.Interval(0, 1), [pde.Equation(lambda u: u.x), pde.Dirichlet(0.0)])
    network = pde.mlp(1, 2, 1, seed=0)
    with torch.no_grad():
        for parameter in network[-1].parameters():
            parameter.zero_()
    solution = solve(problem, network)
    assert solution.loss == 0.0
    assert solution.verdict.name == "converged"


def test_a_residual_that_lies_in_one_place_is_located() -> None:
    """A source of width 0.01 at x = 0.3, which four neurons do not resolve."""

    def equation(u: Any, x: Tensor) -> Tensor:
        return u.xx + 1e3 * torch.exp(-(((x - 0.3) / 0.01) ** 2))

    problem = pde.Problem(pde.Interval(0, 1), [pde.Equation(equation), pde.Dirichlet(0.0)])
    solution = solve(problem, pde.mlp(1, 4, 1, seed=0), steps=20, points=200)
    assert "'equation' near x = 0.3" in solution.stopped
    assert "a field for each side of a jump" in solution.stopped
    smooth = solve(poisson(), pde.mlp(1, 8, 1, seed=0), steps=2)
    assert smooth.verdict.concentrated == ""
