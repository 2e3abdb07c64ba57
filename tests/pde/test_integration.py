"""Ordinary initial value problems beside an integrator: errors that residuals do not show."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import pde
from pullback.pde.judgement import integration
from pullback.pde.judgement.history import History
from pullback.pde.judgement.integration import (
    InitialValueProblem,
    IntegrationFailed,
    compare_with_integration,
)


def at_start(domain: pde.Interval) -> pde.domains.Region:
    return domain.face("t", "low")


def epidemic(end: float = 80.0) -> pde.Problem:
    """SIR: susceptible s and infected i, of which there are few at first."""
    return pde.Problem(
        pde.Interval(0, end, name="t"),
        [
            pde.Equation(lambda s, i: (s.t + 0.3 * s * i, i.t - 0.3 * s * i + 0.1 * i)),
            pde.Dirichlet(0.999, field="s", on=at_start),
            pde.Dirichlet(0.001, field="i", on=at_start),
        ],
        fields=("s", "i"),
    )


class NoEpidemic(nn.Module):
    """s = 1, i = 0: it violates the initial values by 0.1 %, and the equations not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.healthy = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        zero = 0.0 * x[:, :1]
        return torch.cat([self.healthy + zero, zero], 1)


def test_a_tiny_violation_that_the_equation_amplifies_is_seen() -> None:
    problem = epidemic()
    solution = pde.PDESolution(problem, NoEpidemic(), History())
    difference = compare_with_integration(problem, {}, solution)
    assert difference is not None
    assert difference.error > 0.5


def test_the_estimate_is_the_integrators() -> None:
    problem = epidemic(5.0)
    solution = pde.solve(problem, pde.mlp(1, 8, 2, seed=0), points=100, steps=5, progress=False)
    estimate = solution.check().estimate
    assert estimate is not None
    difference = compare_with_integration(problem, {}, solution)
    assert difference is not None
    assert estimate.error == difference.error


@pytest.mark.parametrize("frequency", [1.0, 3.0])
def test_second_order_and_unknowns(frequency: float) -> None:
    problem = pde.Problem(
        pde.Interval(0, 3, name="t"),
        [
            pde.Equation(lambda u, k: u.tt + k**2 * u),
            pde.Dirichlet(1.0, on=at_start),
            pde.Equation(lambda u: u.t, on=at_start, name="at rest"),
        ],
        unknowns={"k": 1.0},
    )
    difference = compare_with_integration(
        problem, {"k": frequency}, lambda x: torch.cos(frequency * x)
    )
    assert difference is not None
    assert difference.error < 1e-8


def test_stiff_equations_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = integration.IntegrationLimits(relative_tolerance=1e-8)  # a third of the evaluations
    monkeypatch.setattr(integration, "LIMITS", limits)
    problem = pde.Problem(
        pde.Interval(0, 0.5, name="t"),
        [
            pde.Equation(lambda u, f: u.t + 1e4 * (u - f)),
            pde.Dirichlet(0.0, on=at_start),
        ],
        sources={"f": lambda t: torch.sin(t)},
    )

    def solve_exactly(t: Tensor) -> Tensor:
        """u = Re a·eᶦᵗ with the transient e^(−λt), for λ = 1e4."""
        share = 1 / (1 + 1e-8)
        return share * (torch.sin(t) - 1e-4 * (torch.cos(t) - torch.exp(-1e4 * t)))

    difference = compare_with_integration(problem, {}, solve_exactly)
    assert difference is not None
    assert difference.error < 1e-6


def test_an_implicit_equation() -> None:
    """u'³ = u, from 1: u = (1 + 2t/3)^(3/2)."""
    problem = pde.Problem(
        pde.Interval(0, 1, name="t"),
        [pde.Equation(lambda u: u.t**3 - u), pde.Dirichlet(1.0, on=at_start)],
    )
    initial_value_problem = InitialValueProblem.from_problem(problem, {})
    assert initial_value_problem is not None
    initial_value_problem._highest += 1.0  # a root of u'³ = 1 that is not at its turning point
    trajectory = initial_value_problem.integrate(lambda times: torch.ones(len(times), 1))
    assert trajectory is not None
    end = trajectory(torch.ones(1, dtype=torch.float64))
    assert math.isclose(float(end), (5 / 3) ** 1.5, rel_tol=1e-8)


@pytest.mark.parametrize("names", [("t", "r"), ("r", "t")])
def test_parameters_beside_time(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """u_t = r(u − cos t) − sin t with u = cos t, and an answer that is off by δe^(rt)."""
    monkeypatch.setattr(
        integration, "LIMITS", integration.IntegrationLimits(relative_tolerance=1e-7, base_points=4)
    )
    bounds = {"t": (0, 3), "r": (1, 2)}
    domain = pde.Box([bounds[name] for name in names], names=names)
    problem = pde.Problem(
        domain,
        [
            pde.Equation(lambda u, t, r: u.t - r * (u - torch.cos(t)) + torch.sin(t)),
            pde.Dirichlet(1.0, on=domain.face("t", "low")),
        ],
    )

    def answer(x: Tensor) -> Tensor:
        t = x[:, names.index("t")]
        r = x[:, names.index("r")]
        return (torch.cos(t) + 1e-3 * torch.exp(r * t))[:, None]

    profile = compare_with_integration(problem, {}, answer)
    assert profile is not None
    x = domain.quadrature().x
    true = (answer(x)[:, 0] - torch.cos(x[:, names.index("t")])).norm() / math.sqrt(len(x) / 2)
    assert float(true) / 2 < profile.error < 2 * float(true)


def test_algebraic_fields_and_starts_at_a_point() -> None:
    """u' = v, v = −u from 1: both are ±e^(−t), and the answer for v is zero."""
    start = pde.PointSet(torch.zeros(1, 1, dtype=torch.float64), names=("t",))
    problem = pde.Problem(
        pde.Interval(0, 1, name="t"),
        [
            pde.Equation(lambda u, v: (u.t - v, v + u)),
            pde.Dirichlet(1.0, field="u", on=start),
        ],
        fields=("u", "v"),
    )
    profile = compare_with_integration(problem, {}, lambda x: torch.cat([torch.exp(-x), 0 * x], 1))
    assert profile is not None
    assert profile.by_field["u"] < 1e-8
    assert math.isclose(profile.by_field["v"], 1.0)


BOUNDARY_VALUES = pde.Problem(
    pde.Interval(0, 1, name="t"), [pde.Equation(lambda u: u.tt - u), pde.Dirichlet(1.0)]
)
ALGEBRAIC = pde.Problem(
    pde.Interval(0, 1, name="t"),
    [pde.Equation(lambda u, v: (u.t - v, v - u)), pde.Dirichlet(1.0, field="u", on=at_start)],
    fields=("u", "v"),
)
TOO_FEW = pde.Problem(
    pde.Interval(0, 1, name="t"),
    [pde.Equation(lambda u: u.tt + u), pde.Dirichlet(1.0, on=at_start)],
)


@pytest.mark.parametrize(
    "problem", [BOUNDARY_VALUES, ALGEBRAIC, TOO_FEW, pde.Heat(1)], ids=lambda problem: problem.name
)
def test_everything_else_is_left_to_the_tangents(problem: pde.Problem) -> None:
    assert InitialValueProblem.from_problem(problem, {}) is None


def test_an_integration_that_blows_up_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "LIMITS", integration.IntegrationLimits(evaluations=300))
    problem = pde.Problem(
        pde.Interval(0, 2, name="t"),
        [pde.Equation(lambda u: u.t - u**2), pde.Dirichlet(1.0, on=at_start)],
    )
    with pytest.raises(IntegrationFailed):
        compare_with_integration(problem, {}, torch.ones_like)


def test_an_integration_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """u' = u² from 2 ends at t = 1/2, where LSODA would go on with steps of length 0."""
    limits = integration.IntegrationLimits(relative_tolerance=1e-4, standing_evaluations=50)
    monkeypatch.setattr(integration, "LIMITS", limits)
    times = []

    def equation(u: Any, t: Tensor) -> Tensor:
        times.append(float(t))
        return u.t - u**2

    problem = pde.Problem(
        pde.Interval(0, 1, name="t"), [pde.Equation(equation), pde.Dirichlet(2.0, on=at_start)]
    )
    initial_value_problem = InitialValueProblem.from_problem(problem, {})
    assert initial_value_problem is not None
    assert initial_value_problem.integrate(lambda t: 2 + 0 * t[:, None]) is None
    assert max(times) == pytest.approx(0.5, abs=1e-3)
    assert len(times) < 10_000


def test_an_equation_without_initial_values_is_no_initial_value_problem() -> None:
    problem = pde.Problem(pde.Interval(0, 1), [pde.Equation(lambda u: u.x + u)])
    assert InitialValueProblem.from_problem(problem, {}) is None
