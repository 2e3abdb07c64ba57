"""Short windows of ordinary problems: exact states, fields in their own units, few steps."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import pde
from pullback.pde.discretization.homogeneity import (
    find_constant_state,
    has_ground_state_without_nodes,
    has_many_states,
    is_solved_by_zero,
)
from pullback.pde.judgement.stop import Stop, StopReason
from pullback.pde.judgement.verdict import PDEVerdict
from pullback.pde.networks.state import StateLift
from pullback.pde.runs.settings import Limits, MethodOptions, SamplingOptions, Settings
from pullback.pde.runs.slabs import SlabMarch
from pullback.pde.runs.state_windows import StateWindows, find_state_windows


def at_start(domain: Any) -> Any:
    return domain.face("t", "low")


def oscillators(small: float = 1e-8, end: float = 6.0) -> pde.Problem:
    """u'' = −u and a system of first order whose fields are 1e-8 times as large."""
    return pde.Problem(
        pde.Interval(0, end, name="t"),
        [
            pde.Equation(lambda u, p, q: [u.tt + u, p.t - 2 * q, q.t + 2 * p]),
            pde.Dirichlet(1.0, field="u", on=at_start),
            pde.Equation(lambda u: u.t, on=at_start, name="at rest"),
            pde.Dirichlet(small, field="p", on=at_start),
            pde.Dirichlet(0.0, field="q", on=at_start),
        ],
        fields=("u", "p", "q"),
        exact=lambda t: (torch.cos(t), small * torch.cos(2 * t), -small * torch.sin(2 * t)),
    )


def logistic() -> pde.Problem:
    """u' = u(1 − u) from 1e-6: what is off at the start is multiplied by a million."""

    def exact(t: Tensor) -> Tensor:
        return 1 / (1 + (1e6 - 1) * torch.exp(-t))

    return pde.Problem(
        pde.Interval(0, 40, name="t"),
        [pde.Equation(lambda u: u.t - u * (1 - u)), pde.Dirichlet(1e-6, on=at_start)],
        exact=exact,
    )


def make_settings(budget: float | None = None) -> Settings:
    return Settings(
        sampling=SamplingOptions(points=None, sampler=None, seed=0, resample=None, refine="auto"),
        method=MethodOptions(solver=None, step=None, gram="auto", memory=2**32, optimizer=None),
        limits=Limits(steps=100, tol=None, patience=50, budget=budget),
        causal=False,
        measure=10,
        callbacks=(),
        device=None,
        progress=False,
        group=None,
    )


def find_windows(problem: pde.Problem) -> StateWindows:
    windows = find_state_windows(problem)
    assert windows is not None
    return windows


def march(problem: pde.Problem, budget: float | None = None) -> pde.PDESolution:
    network = pde.mlp(1, 4, len(problem.fields), seed=0)
    windows = find_windows(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        slabs = SlabMarch(problem, network, None, make_settings(budget), windows)
        return slabs.solve("auto", is_whole_hopeless=True)


def test_all_fields_are_solved(tmp_path: Path) -> None:
    solution = march(oscillators())
    assert solution.verdict.name == "converged"
    assert max(solution.errors.values()) < 1e-8
    judged = solution.judge_error()
    assert judged.estimated is not None
    assert judged.estimated < 1e-7
    assert "slabs of time were solved" in judged.text
    solution.save(tmp_path / "solution.pt")
    network = pde.mlp(1, 4, 3, seed=0)
    loaded = pde.PDESolution.load(tmp_path / "solution.pt", oscillators(), network)
    assert loaded.errors == solution.errors


def test_the_state_is_exact_at_the_start_of_a_window() -> None:
    network = pde.mlp(1, 3, 2, seed=0)
    lifted = StateLift(network, 2.0, 0.5, [[1.0, 3.0], [7.0]])
    points = torch.tensor([[2.0], [2.2]], dtype=torch.float64, requires_grad=True)
    values = lifted(points)
    torch.testing.assert_close(values[0], values.new_tensor([1.0, 7.0]))
    (slope,) = torch.autograd.grad(values[0, 0], points)
    assert float(slope[0]) == pytest.approx(6.0)  # 3 in units of a window of length 1/2
    twin = StateLift(pde.mlp(1, 3, 2, seed=5), 0.0, 1.0, [[0.0, 0.0], [0.0]])
    twin.load_state_dict(lifted.state_dict())
    torch.testing.assert_close(twin(points), values)


def test_windows_have_units_of_their_own() -> None:
    problem = oscillators()
    window = find_windows(problem).open(0.0, 0.5, pde.mlp(1, 2, 3, seed=0), None)
    assert window.units is not None
    torch.testing.assert_close(window.units, torch.tensor([1.0, 1e-8, 1e-8]).double())
    x = torch.zeros(1, 1, dtype=torch.float64)
    torch.testing.assert_close(window.network(x), torch.tensor([[1.0, 1.0, 0.0]]).double())
    restored = window.restore_units()
    torch.testing.assert_close(restored(x), torch.tensor([[1.0, 1e-8, 0.0]]).double())
    (equation,) = window.problem.conditions
    assert equation.is_equation
    later = find_windows(problem).open(1.0, 1.5, pde.mlp(1, 2, 3, seed=0), restored)
    assert isinstance(later.network, StateLift)
    assert later.network.start == 1.0


def test_a_spent_budget_ends_the_march() -> None:
    solution = march(logistic(), budget=1e-9)
    assert isinstance(solution.network, nn.Module)
    assert solution.verdict.name == "unfinished"


def test_other_problems_have_no_such_windows() -> None:
    assert find_state_windows(pde.Heat(1)) is None
    boundary = pde.Problem(
        pde.Interval(0, 1, name="t"), [pde.Equation(lambda u: u.tt + 1), pde.Dirichlet(0.0)]
    )
    assert find_state_windows(boundary) is None


def test_a_creeping_network_gives_way_to_windows() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = pde.solve(
            logistic(), pde.mlp(1, 4, 1, seed=0), points=60, steps=100, progress=False
        )
    assert solution.verdict.name == "converged"
    assert solution.error < 1e-8
    assert solution.verdict.tried[0] == "slabs of time"
    assert "the given network" in solution.verdict.tried[1]


def growth(size: float) -> pde.Problem:
    """A boundary value problem whose solution has a size."""
    return pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, x: u.xx + size * math.pi**2 * torch.sin(math.pi * x)),
            pde.Dirichlet(0.0),
        ],
        exact=lambda x: size * torch.sin(math.pi * x),
    )


def test_a_tiny_solution_is_not_called_converged_because_the_start_was_large() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solution = pde.solve(
            growth(1e-11), pde.mlp(1, 3, 1, seed=0), points=40, steps=60, progress=False
        )
    assert solution.error > 0.1
    assert solution.verdict.name == "stalled"
    assert "tiny beside the initial network" in solution.stopped


def judge(noise: float, *, stuck: bool = True, **options: Any) -> PDEVerdict:
    stop = Stop(StopReason.LOSS_LEVEL, 50)
    return PDEVerdict(stop, stuck, 1e-5, 1e-5, relative=2e-3, noise=noise, **options)


def test_equations_hold_as_well_as_the_noise_of_data_lets_them() -> None:
    assert judge(0.0).name == "stalled"
    assert judge(0.003).name == "stalled"
    assert judge(0.02, stuck=False).name == "unfinished"
    assert "misfit" not in replace(judge(0.0), relative=0.0).text
    fitted = judge(0.02)
    assert fitted.name == "converged"
    assert not fitted.alarming
    assert "well below the misfit of the data, 0.02; the error is unknown" in fitted.text
    torn = judge(0.004)
    assert "and measurements are missed by 0.004. Equations and measurements pull" in torn.text
    assert "pull" not in judge(0.001).text


def condensate(start: float) -> pde.Problem:
    return pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, mu: u.xx + mu * u),
            pde.Dirichlet(start),
            pde.Integral(lambda u: u**2, 1.0),
        ],
        unknowns={"mu": 1.0},
    )


def test_an_eigenvalue_problem_has_many_states() -> None:
    assert has_many_states(condensate(0.0))
    assert not has_many_states(condensate(1.0))
    assert not has_many_states(growth(1.0))
    assert not is_solved_by_zero(growth(1e-13))
    assert is_solved_by_zero(growth(0.0))
    stop = Stop(StopReason.ALL_STEPS, 9)
    verdict = PDEVerdict(stop, False, 1e-20, 1e-20, 1e-9, estimated=1e-8, has_many_states=True)
    assert "other states too" in verdict.text
    assert not verdict.alarming


def solve_quietly(problem: pde.Problem, network: nn.Module, steps: int) -> pde.PDESolution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pde.solve(problem, network, points=40, steps=steps, progress=False)


def test_networks_for_eigenvalue_problems_begin_and_end_without_nodes() -> None:
    problem = condensate(0.0)
    assert find_constant_state(problem) == pytest.approx(1.0)
    network = pde.network_for(problem, parameters=40)
    x = torch.linspace(0, 1, 50, dtype=torch.float64)[:, None]
    assert float(network(x).detach().min()) > 0
    solution = solve_quietly(problem, network, steps=30)
    assert solution.unknowns["mu"] == pytest.approx(math.pi**2, rel=1e-4)
    assert solution.verdict.name == "converged"


def test_an_excited_state_is_doubtful() -> None:
    problem = condensate(0.0)
    problem.unknowns["mu"] = 4 * math.pi**2
    odd = pde.Symmetric(pde.mlp(1, 10, 1, seed=0), 0, -1)
    network = pde.Rescaled(odd, problem.domain)
    solution = solve_quietly(problem, network, steps=80)
    assert solution.unknowns["mu"] == pytest.approx(4 * math.pi**2, rel=1e-4)
    assert solution.verdict.name == "doubtful"
    assert "no nodes" in solution.stopped
    assert solution.verdict.alarming


def test_states_that_are_kept_from_others_may_have_nodes() -> None:
    problem = condensate(0.0)
    assert has_ground_state_without_nodes(problem)
    orthogonal = pde.Integral(lambda u, x: u * torch.sin(math.pi * x), 0.0, name="orthogonal")
    conditions = [*problem.conditions, orthogonal]
    assert not has_ground_state_without_nodes(problem.restrict(problem.domain, conditions))
    assert not has_ground_state_without_nodes(growth(1.0))
