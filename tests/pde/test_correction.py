"""Errors by a second discretization: estimates beside true ones, where violations are amplified."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import pde
from pullback.pde.judgement import correction
from pullback.pde.judgement.chebyshev import ChebyshevBasis, differentiate_chebyshev
from pullback.pde.judgement.correction import (
    CorrectionFailed,
    Reaches,
    correct_solution,
    is_resolved,
)
from pullback.pde.judgement.error_profile import ErrorProfile
from pullback.pde.judgement.growth import measure_growth
from pullback.pde.judgement.jumps import find_jump
from pullback.pde.judgement.stop import Stop, StopReason
from pullback.pde.judgement.verdict import PDEVerdict

pi = math.pi


class Given(nn.Module):
    """A function of points (N, d) that gives (N, m), with a parameter that does nothing."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x) * self.one


def correct(problem: pde.Problem, function: Callable[[Any], Any]) -> tuple[ErrorProfile, float]:
    """Return the estimated error of a function, and the true one."""
    network = Given(function)
    profile = correct_solution(problem, network, {})
    assert profile is not None
    return profile, pde.PDESolution(problem, network, pde.History()).error


def test_derivatives_of_chebyshev_polynomials() -> None:
    s = torch.linspace(-0.9, 0.9, 7, dtype=torch.float64)
    angle = torch.arccos(s)
    for order in range(4):
        table = differentiate_chebyshev(s, 6, order)
        for n in range(6):
            x = s.clone().requires_grad_()
            value = torch.cos(n * torch.arccos(x))
            for _ in range(order):
                if not value.requires_grad:
                    value = torch.zeros_like(x)
                    break
                (value,) = torch.autograd.grad(
                    value.sum(), x, create_graph=True, materialize_grads=True
                )
            torch.testing.assert_close(table[:, n], value.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(differentiate_chebyshev(s, 6, 0)[:, 5], torch.cos(5 * angle))


def test_mixed_derivatives_of_products() -> None:
    basis = ChebyshevBasis(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 4.0]), [3, 4])
    x = torch.tensor([[0.3, 1.7], [1.9, 3.2]], dtype=torch.float64)
    first = differentiate_chebyshev(x[:, 0] - 1, 3, 1)
    second = differentiate_chebyshev((x[:, 1] - 1) * 2 / 3 - 1, 4, 2) * (2 / 3) ** 2
    products = (first[:, :, None] * second[:, None, :]).flatten(1)
    torch.testing.assert_close(basis.derivative(x, (0, 1, 1)), products)
    assert basis.size == 12


def grow(rate: float) -> pde.Problem:
    """u_t + u_x = rate·u, from the left."""
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 2)),
        [
            pde.Equation(lambda u: u.t + u.x - rate * u),
            pde.Dirichlet(
                lambda t: torch.exp(rate * t) * torch.cos(t), on=lambda d: d.face("x", "low")
            ),
            pde.Initial(lambda x: torch.cos(x)),
        ],
        exact=lambda x, t: torch.exp(rate * t) * torch.cos(x - t),
    )


def test_a_small_violation_is_amplified() -> None:
    """u = e^(5t) cos(x − t) + 1e-6 e^(5t) sin(x − t): its violations are 1e-6 at the start."""

    def add_error(x: Any) -> Any:
        phase = x[:, :1] - x[:, 1:]
        return torch.exp(5 * x[:, 1:]) * (torch.cos(phase) + 1e-6 * torch.sin(phase))

    profile, true = correct(grow(5.0), add_error)
    assert true == pytest.approx(profile.error, rel=0.05)
    assert len(profile.windows) > 1
    assert is_resolved(profile)


def test_backward_heat() -> None:
    """A second wave of 1e-7 grows by exp(4π²t), and the solution by exp(π²t)."""
    problem = pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 0.2)),
        [
            pde.Equation(lambda u: u.t + u.xx),
            pde.Dirichlet(0.0),
            pde.Initial(lambda x: torch.sin(pi * x)),
        ],
        exact=lambda x, t: torch.exp(pi**2 * t) * torch.sin(pi * x),
    )

    def add_error(x: Any) -> Any:
        wave = torch.exp(pi**2 * x[:, 1:]) * torch.sin(pi * x[:, :1])
        return wave + 1e-7 * torch.exp(4 * pi**2 * x[:, 1:]) * torch.sin(2 * pi * x[:, :1])

    profile, true = correct(problem, add_error)
    assert true / 3 < profile.error < 3 * true


def test_a_nonlinear_equation_and_a_large_error() -> None:
    """u_t = u(1 − u) is solved from 1e-3, and the answer is that from 2e-3."""

    def logistic(t: Any, start: float) -> Any:
        return 1 / (1 + (1 / start - 1) * torch.exp(-t))

    problem = pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 8)),
        [pde.Equation(lambda u: u.t - u * (1 - u)), pde.Initial(1e-3)],
        exact=lambda t: logistic(t, 1e-3),
    )
    profile, true = correct(problem, lambda x: logistic(x[:, 1:], 2e-3))
    assert true > 0.3
    assert profile.error == pytest.approx(true, rel=0.1)


def test_tiny_errors_of_a_nonlinear_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's second step is round-off, which lowers the residuals or does not by chance."""
    limits = replace(correction.LIMITS, levels=correction.LIMITS.levels[:1])
    monkeypatch.setattr(correction, "LIMITS", limits)
    problem = pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 4)),
        [pde.Equation(lambda u: u.t - u * (1 - u)), pde.Initial(0.5)],
        exact=lambda t: torch.sigmoid(t),
    )

    def add_error(x: Any, size: float) -> Any:
        return torch.sigmoid(x[:, 1:]) + size * torch.tanh(3 * (x[:, 1:] - 0.9))

    for size in (1e-8, 1e-9, 1e-10, 1e-11, 1e-12):
        profile, true = correct(problem, lambda x, size=size: add_error(x, size))
        assert profile.error == pytest.approx(true, rel=0.1)


def test_a_wrong_share_of_mass_in_two_wells() -> None:
    """(u' + V'u)' = 0 with V = 6(x² − 1)²: little flux moves all mass to the right well."""

    def density(x: Any) -> Any:
        return torch.exp(-6 * (x**2 - 1) ** 2)

    def drift(x: Tensor) -> Tensor:
        return 24 * x * (x**2 - 1)

    interval = pde.Interval(-1.6, 1.6)
    points = interval.quadrature()
    mass = float(points.weights @ density(points.x[:, 0]))
    problem = pde.Problem(
        interval,
        [
            pde.Equation(lambda u, x: u.xx + drift(x) * u.x + (72 * x**2 - 24) * u),
            pde.Equation(lambda u, x: u.x + drift(x) * u, on=interval.boundary, name="flux"),
            pde.Integral(lambda u: u, mass),
        ],
        exact=density,
    )
    profile, true = correct(problem, lambda x: density(x) * (1 + torch.erf(12**0.5 * x)))
    assert is_resolved(profile)
    assert true == pytest.approx(1.0, rel=0.02)
    assert profile.error == pytest.approx(true, rel=0.02)


def test_what_polynomials_do_not_resolve_may_be_amplified() -> None:
    """A source of width 0.003, which the answer u = x(1 − x) knows nothing of."""

    def source(x: Tensor) -> Tensor:
        return 200 * torch.exp(-(((x - 0.3) / 0.003) ** 2))

    problem = pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u, x: u.xx + 2 + source(x)), pde.Dirichlet(0.0)],
    )
    profile = correct_solution(problem, Given(lambda x: x * (1 - x)), {})
    assert profile is not None
    assert not is_resolved(profile)
    slope = 200 * 0.003 * math.sqrt(pi) * 0.7  # at 0, of the Green's function of the source
    x = torch.linspace(0, 1, 1001, dtype=torch.float64)
    missing = torch.where(x < 0.3, slope * x, slope * 0.3 / 0.7 * (1 - x))
    true = float(missing.norm() / (missing + x * (1 - x)).norm())
    assert profile.error + profile.unexplained > true / 2


JUMPING = {
    "rod": lambda u, x: torch.where(x < 0.5, 1.0, 10.0) * u.laplacian + 1,
    "inclusion": lambda u, x, y: torch.where(x**2 + y**2 < 0.3, 1.0, 5.0) * u.laplacian + 1,
    "narrow step": lambda u, x: (1 + torch.sigmoid(1e6 * (x - 0.3))) * u.laplacian + 1,
}
SMOOTH = {
    "source": lambda u, x: u.laplacian + torch.where(x < 0.5, 1.0, 10.0),
    "obstacle": lambda u, x: torch.minimum(u.value, -u.laplacian - torch.sin(7 * x)),
    "steep": lambda u, x: (1 + torch.sigmoid(1e4 * (x - 0.3))) * u.laplacian + 1,
    "first order": lambda u, x: torch.where(x < 0.5, 1.0, 10.0) * u.x + 1,
}


@pytest.mark.parametrize("name", [*JUMPING, *SMOOTH])
def test_coefficients_that_jump_are_found(name: str) -> None:
    equation = {**JUMPING, **SMOOTH}[name]
    square = pde.Box([(0, 1), (0, 1)])
    problem = pde.Problem(square, [pde.Equation(equation), pde.Dirichlet(0.0)])
    assert bool(find_jump(problem)) is (name in JUMPING)


def test_an_error_is_unknown_where_a_coefficient_jumps() -> None:
    """a u'' = −1 in one field holds for a smooth u, whose flux jumps."""
    problem = pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, x: torch.where(x < 0.5, 1.0, 10.0) * u.xx + 1),
            pde.Dirichlet(0.0),
        ],
    )
    with pytest.warns(UserWarning, match="'equation' near x = 0.5"):
        solution = pde.solve(problem, pde.mlp(1, 4, 1, seed=0), steps=3, progress=False)
    assert "give each side a field" in solution.stopped
    estimate = solution.check().estimate
    assert estimate is not None
    assert math.isnan(estimate.error)


def test_hard_conditions_are_kept() -> None:
    """The error of a network with zeros built in has them too."""
    problem = pde.Poisson(2, hard=True)

    def add_error(x: Any) -> Any:
        waves = torch.sin(pi * x[:, :1]) * torch.sin(pi * x[:, 1:])
        bump = x[:, :1] * (1 - x[:, :1]) * x[:, 1:] * (1 - x[:, 1:])
        return waves / bump + 1e-3 * x[:, :1]

    def bump(x: Any, y: Any) -> Any:
        return x * (1 - x) * y * (1 - y)

    network = pde.Hard(Given(add_error), problem.domain, distance=bump)
    profile = correct_solution(problem, network, {})
    assert profile is not None
    true = pde.PDESolution(problem, network, pde.History()).error
    assert profile.error == pytest.approx(true, rel=0.05)


def small_field(start: float) -> pde.Problem:
    """A field of size 1 beside another one."""
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 1)),
        [
            pde.Equation(lambda u, v: (u.t + u, v.t + v)),
            pde.Initial(1.0, field="u"),
            pde.Initial(start, field="v"),
        ],
        fields=("u", "v"),
        exact=lambda t: (torch.exp(-t), start * torch.exp(-t)),
    )


@pytest.mark.parametrize("start", [1e-8, 0.0])
def test_a_small_field_is_judged_by_itself_unless_it_may_be_zero(start: float) -> None:
    def add_error(x: Any) -> Any:
        u = torch.exp(-x[:, 1:])
        return torch.cat([u, (start + 1e-8) * u], -1)

    problem = small_field(start)
    profile, true = correct(problem, add_error)
    assert true < 2e-8
    assert profile.total < 2e-8
    if start:
        assert profile.error == pytest.approx(1.0, rel=0.05)
        assert profile.lost_fields == ()
    else:
        assert profile.error < 2e-8
        assert profile.lost_fields == ("v",)
    solution = pde.PDESolution(problem, Given(add_error), pde.History())
    verdict = solution.judge_error()
    assert verdict.lost_fields == profile.lost_fields


def test_late_times_that_are_lost_are_said() -> None:
    """e^(−20t) is 2e-9 at last, and an error of 1e-6 larger than it from t = 0.7 on."""
    problem = pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 1)),
        [pde.Equation(lambda u: u.t + 20 * u), pde.Initial(1.0)],
        exact=lambda t: torch.exp(-20 * t),
    )
    profile, true = correct(problem, lambda x: torch.exp(-20 * x[:, 1:]) + 1e-6)
    assert true == pytest.approx(profile.error, rel=0.1)
    assert profile.lost_from is not None
    assert 0.5 < profile.lost_from < 0.8


def test_a_steady_solution_is_lost_at_no_time() -> None:
    conditions = [pde.Equation(lambda u: u.xx), pde.Dirichlet(0.0)]
    problem = pde.Problem(pde.Interval(0, 1), conditions, exact=lambda x: 0 * x)
    profile, _ = correct(problem, lambda x: 1e-9 * x)
    assert profile.error > 1.0
    assert profile.lost_from is None


def test_where_there_is_no_solution_nearby_the_error_is_unknown() -> None:
    """u² + 1 = 0 has none."""
    problem = pde.Problem(
        pde.Interval(0, 1), [pde.Equation(lambda u: u.x + u**2 + 50), pde.Dirichlet(0.0)]
    )
    with pytest.raises(CorrectionFailed):
        correct_solution(problem, Given(lambda x: 0 * x), {})
    small = PDEVerdict(Stop(StopReason.ALL_STEPS, 9), False, 1e-9, 1e-9, relative=1e-6)
    solution = pde.PDESolution(problem, Given(lambda x: 0 * x), pde.History(), verdict=small)
    check = solution.check()
    assert check.estimate is not None
    assert math.isnan(check.estimate.error)
    assert "unknown" in str(check)
    verdict = solution.judge_error()
    assert verdict.name == "doubtful"
    assert "no solution nearby: the error is unknown. More steps=" in verdict.text


def test_data_and_many_dimensions_are_left_to_the_tangents() -> None:
    points = torch.linspace(0, 1, 5, dtype=torch.float64)
    measured = pde.Problem(
        pde.Interval(0, 1), [pde.Equation(lambda u: u.xx), pde.Data(points, points)]
    )
    assert correct_solution(measured, pde.mlp(1, 4, 1, seed=0), {}) is None
    assert correct_solution(pde.Poisson(4), pde.mlp(4, 4, 1, seed=0), {}) is None


def test_a_value_at_a_point_takes_part() -> None:
    """u'' = 0 with u = 0 on the left and 1 in the middle, and x is the answer to 2x."""
    middle = pde.PointSet(torch.tensor([[0.5]], dtype=torch.float64), names=("x",))
    problem = pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u: u.xx),
            pde.Dirichlet(0.0, on=lambda domain: domain.face("x", "low")),
            pde.Dirichlet(1.0, on=middle, name="middle"),
        ],
        exact=lambda x: 2 * x,
    )
    profile, true = correct(problem, lambda x: x)
    assert true == pytest.approx(0.5)
    assert profile.error == pytest.approx(0.5, rel=1e-3)


def test_the_mass_is_known_by_an_integral() -> None:
    def equation(u: Any, x: Tensor) -> Tensor:
        return u.xx + pi**2 * torch.cos(pi * x)

    problem = pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(equation), pde.Neumann(0.0), pde.Integral(lambda u: u, 2.0)],
        exact=lambda x: torch.cos(pi * x) + 2.0,
    )
    profile, true = correct(problem, lambda x: torch.cos(pi * x) + 2.001)
    assert profile.error == pytest.approx(true, rel=0.01)


@pytest.mark.parametrize(("reaction", "is_known"), [(0.0, True), (4.0, True), (8.0, False)])
def test_beyond_three_dimensions_errors_that_grow_are_unknown(
    reaction: float, is_known: bool
) -> None:
    rate = reaction - 0.3 * pi**2
    cube = pde.Box([(0, 1)] * 3, names=("x", "y", "z"))
    problem = pde.Problem(
        pde.SpaceTime(cube, (0, 1)),
        [
            pde.Equation(lambda u: u.t - 0.1 * u.laplacian - reaction * u),
            pde.Dirichlet(0.0),
            pde.Initial(lambda x, y, z: x * y * z),
        ],
    )
    solution = pde.PDESolution(problem, pde.mlp(4, 4, 1, seed=0), pde.History())
    growth = measure_growth(problem, solution._trial, {})
    assert growth == pytest.approx(max(1.0, math.exp(rate)), rel=1e-6)
    estimate = solution.check().estimate
    assert estimate is not None
    assert math.isnan(estimate.error) is not is_known


def test_growth_of_systems() -> None:
    """u_t = u_xx + 3v, v_t = v_xx + 3u without prescribed values: a constant grows by e^(3t)."""
    square = pde.SpaceTime(pde.Interval(0, 1), (0, 2))
    equation = pde.Equation(lambda u, v: [u.t - u.xx - 3 * v, v.t - v.xx - 3 * u])
    problem = pde.Problem(square, [equation, pde.Neumann(0.0, field="u")], fields=("u", "v"))
    trial = pde.PDESolution(problem, pde.mlp(2, 3, 2, seed=0), pde.History())._trial
    assert measure_growth(problem, trial, {}) == pytest.approx(math.exp(6))
    wave = pde.Problem(square, [pde.Equation(lambda u: u.tt - u.xx), pde.Dirichlet(0.0)])
    trial = pde.PDESolution(wave, pde.mlp(2, 3, 1, seed=0), pde.History())._trial
    assert measure_growth(wave, trial, {}) == 1.0


def laplace_without_a_side() -> pde.Problem:
    """Values are given on three sides: sin(πy) sinh(πx) can be added."""
    square = pde.Box([(0, 1), (0, 1)])
    return pde.Problem(
        square,
        [
            pde.Equation(lambda u: u.laplacian),
            pde.Dirichlet(lambda y: torch.sin(pi * y), on=square.face("x", "low"), name="left"),
            pde.Dirichlet(0.0, on=square.face("y", "low"), name="low"),
            pde.Dirichlet(0.0, on=square.face("y", "high"), name="high"),
        ],
        exact=lambda x, y: torch.cosh(pi * x) * torch.sin(pi * y),
    )


def heat_without_initial_values() -> pde.Problem:
    """The wave sin(πx) exp(−π²t) can be added."""
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 1)),
        [
            pde.Equation(lambda u: u.t - u.xx),
            pde.Dirichlet(lambda x, t: torch.sin(x) * torch.exp(-t)),
        ],
        exact=lambda x, t: torch.sin(x) * torch.exp(-t),
    )


def resonance(share: float) -> pde.Problem:
    """u'' + k²u = f on [0, 1] with k = π(1 + share): a well-posed problem unless the share is 0."""
    k = pi * (1 + share)
    return pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, x: u.xx + k**2 * u - (k**2 - 4 * pi**2) * torch.sin(2 * pi * x)),
            pde.Dirichlet(0.0),
        ],
        exact=lambda x: torch.sin(2 * pi * x),
    )


@pytest.mark.parametrize(
    ("problem", "is_determined"),
    [
        (laplace_without_a_side(), False),
        (heat_without_initial_values(), False),
        (resonance(0.0), False),
        (resonance(1e-4), True),
    ],
    ids=["side", "initial", "resonance", "near-resonance"],
)
def test_what_conditions_leave_open(problem: pde.Problem, is_determined: bool) -> None:
    """The error is infinite, however small the residuals are; near a resonance it is not."""

    def add_error(x: Any) -> Any:
        columns = [x[:, i : i + 1] for i in range(problem.domain.dim)]
        return problem.exact(*columns) + 1e-9 * torch.sin(3 * columns[0])

    profile, true = correct(problem, add_error)
    assert profile.is_determined == is_determined
    if is_determined:
        assert profile.error == pytest.approx(true, rel=0.1)
    else:
        assert profile.error == math.inf


def test_polynomials_where_an_integrator_cannot_begin() -> None:
    """(x²u')' = −x², in the center of a ball, has the solution 1 − x²/6."""
    interval = pde.Interval(0, 2)
    center = interval.face("x", "low")
    problem = pde.Problem(
        interval,
        [
            pde.Equation(lambda u, x: x * u.xx + 2 * u.x + x),
            pde.Dirichlet(1.0, on=center),
            pde.Neumann(0.0, on=center),
        ],
        exact=lambda x: 1 - x**2 / 6,
    )
    solution = pde.PDESolution(problem, Given(lambda x: 1 - x**2 / 6 + 1e-6 * x**4), pde.History())
    estimate = solution.check().estimate
    assert estimate is not None
    assert estimate.error == pytest.approx(solution.error, rel=0.1)


def test_missing_conditions_in_four_dimensions() -> None:
    """Zero on one face determines no harmonic function, and residuals of zero no error."""
    box = pde.Box([(0, 1)] * 4)
    laplace = pde.Equation(lambda u: u.laplacian)
    for face, is_known in ((box.face("x1", "low"), False), (None, True)):
        problem = pde.Problem(box, [laplace, pde.Dirichlet(0.0, on=face)])
        network = pde.mlp(4, 30, 1, seed=0)
        estimate = pde.PDESolution(problem, network, pde.History()).check().estimate
        assert estimate is not None
        assert math.isfinite(estimate.error) == is_known


@pytest.mark.parametrize("face", [None, "low"])
def test_an_exact_zero_in_four_dimensions(face: str | None) -> None:
    """Zero is exact, unless conditions leave more than it."""
    box = pde.Box([(0, 1)] * 4)
    edge = box.boundary if face is None else box.face("x1", face)
    problem = pde.Problem(box, [pde.Equation(lambda u: u.laplacian), pde.Dirichlet(0.0, on=edge)])
    network = pde.mlp(4, 30, 1, seed=0)
    for parameter in network[2].parameters():
        parameter.data.zero_()
    estimate = pde.PDESolution(problem, network, pde.History()).check().estimate
    assert estimate is not None
    if face is None:
        assert estimate.error == 0.0
    else:
        assert not math.isfinite(estimate.error)


def test_a_reach_that_grows_bounds_nothing() -> None:
    """Numbers of logistic growth by 1e4 on a box, of an advection and of a wave."""
    assert not Reaches(31.0, 370.0).is_settled
    assert Reaches(31.0, 370.0).is_limited
    assert Reaches(11.0, 11.0).is_settled
    assert Reaches(1.0, 9.0).is_settled
    stop = Stop(StopReason.ALL_STEPS, 9)
    verdict = PDEVerdict(stop, False, 1e-9, 1e-9, relative=1e-6, is_unbounded=True)
    assert verdict.name == "doubtful"
    assert "amplifies them: the error is unknown. If time is a coordinate of a Box" in verdict.text


@pytest.mark.slow
def test_growth_that_polynomials_on_a_box_do_not_resolve() -> None:
    """Logistic growth from 1e-5, and the answer from 1.02e-5: its residuals are 2e-7."""
    box = pde.Box([(0, 1), (0, 20)], names=("x", "t"))
    sides = box.face("x", "low") | box.face("x", "high")
    problem = pde.Problem(
        box,
        [
            pde.Equation(lambda u: u.t - 0.01 * u.xx - u * (1 - u)),
            pde.Neumann(0.0, on=sides),
            pde.Dirichlet(1e-5, on=box.face("t", "low")),
        ],
        exact=lambda t: torch.sigmoid(t + math.log(1e-5 / (1 - 1e-5))),
    )
    shift = math.log(1.02e-5 / (1 - 1.02e-5))
    profile, true = correct(problem, lambda x: torch.sigmoid(x[:, 1:] + shift))
    assert true > 1e-3
    assert profile.error > true / 3 or not profile.is_bounded
