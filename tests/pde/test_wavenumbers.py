"""How fast solutions oscillate, and the networks that are chosen for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError, pde
from pullback.pde.networks.wavenumbers import estimate_oscillation
from pullback_experiments.problems import Cavity

pi = math.pi
SQUARE = pde.Box([(0, 1), (0, 1)])


def helmholtz(k: float, exact: Any = None) -> pde.Problem:
    """Waves in three directions, or what is given."""

    def waves(x: Tensor, y: Tensor) -> Tensor:
        angles = (0.3, 1.1, 2.0)
        return sum(torch.sin(k * (math.cos(a) * x + math.sin(a) * y) + a) for a in angles)  # pyright: ignore[reportReturnType]

    u = exact or waves
    equation = pde.Equation(lambda u: u.laplacian + k**2 * u)
    return pde.Problem(SQUARE, [equation, pde.Dirichlet(u)], exact=u, name="Helmholtz")


def bessel(k: float) -> pde.Problem:
    """J₀(k|x − a|): no finite sum of plane waves."""
    return helmholtz(
        k, lambda x, y: torch.special.bessel_j0(k * torch.hypot(x - 0.3, y - 0.4)).detach()
    )


def scales(dim: int, fine: float) -> pde.Problem:
    """−Δu = f, u = Π sin 2πxᵢ + ⅒ Π sin κxᵢ."""

    def waves(points: Tensor, k: float) -> Tensor:
        return torch.sin(k * points).prod(-1)

    def source(points: Tensor) -> Tensor:
        return dim * ((2 * pi) ** 2 * waves(points, 2 * pi) + 0.1 * fine**2 * waves(points, fine))

    return pde.Problem(
        pde.Box([(0, 1)] * dim),
        [pde.Equation(lambda u, points: u.laplacian + source(points)), pde.Dirichlet(0.0)],
        exact=lambda points: waves(points, 2 * pi) + 0.1 * waves(points, fine),
        name=f"Scales {dim}D",
    )


def string(time: float) -> pde.Problem:
    """u_tt = u_xx, two modes."""

    def start(x: Any) -> Any:
        return torch.sin(pi * x) + 0.5 * torch.sin(3 * pi * x)

    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, time)),
        [
            pde.Equation(lambda u: u.tt - u.xx),
            pde.Dirichlet(0.0),
            pde.Initial(start, velocity=0.0),
        ],
        exact=lambda x, t: (
            torch.sin(pi * x) * torch.cos(pi * t)
            + 0.5 * torch.sin(3 * pi * x) * torch.cos(3 * pi * t)
        ),
        name="String",
    )


def fokker_planck() -> pde.Problem:
    """Ornstein–Uhlenbeck: u_t = (x u)_x + ½u_xx, a Gaussian of mean m and variance s."""

    def exact(x: Any, t: Any) -> Any:
        m = 1.5 * torch.exp(-t)
        s = 0.5 - 0.25 * torch.exp(-2 * t)
        return torch.exp((x - m) ** 2 * -0.5 / s) / torch.sqrt(2 * pi * s)

    return pde.Problem(
        pde.SpaceTime(pde.Interval(-4, 4), (0, 1)),
        [
            pde.Equation(lambda u, x: u.t - u - x * u.x - 0.5 * u.xx),
            pde.Dirichlet(0.0),
            pde.Initial(lambda x: exact(x, torch.zeros_like(x))),
        ],
        exact=exact,
        name="Fokker–Planck",
    )


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (helmholtz(4 * pi), (4 * pi, 4 * pi)),
        (helmholtz(8 * pi), (8 * pi, 8 * pi)),
        (scales(1, 50 * pi), (50 * pi,)),
        (scales(2, 16 * pi), (16 * pi, 16 * pi)),
        (pde.Convection(40.0), (1.0, 40.0)),
        (pde.Helmholtz(1, 4), (pi, 4 * pi)),
    ],
    ids=lambda x: x.name if isinstance(x, pde.Problem) else "",
)
def test_wave_numbers_of_data_and_operators(
    problem: pde.Problem, expected: tuple[float, ...]
) -> None:
    wavenumbers = estimate_oscillation(problem).wavenumbers
    want = torch.tensor(expected, dtype=torch.float64)
    off = (wavenumbers - want) * (problem.domain.high - problem.domain.low) / pi
    assert float(off.abs().max()) < 0.06 * float(want.max()) + 0.3  # in half waves


def test_a_bump_is_no_wave() -> None:
    """Its spectrum is broad, and has no peak; a sum of sines would be a poor network for it."""
    problem = fokker_planck()
    estimate = estimate_oscillation(problem)
    assert float(estimate.half_waves.max()) > 5
    assert not estimate.has_waves
    assert any(isinstance(m, nn.Tanh) for m in pde.network_for(problem).modules())


def test_waves_in_time_follow_those_in_space() -> None:
    space, time = estimate_oscillation(string(5.0)).wavenumbers.tolist()
    assert 3 * pi <= space < 5 * pi
    assert time == pytest.approx(space, rel=0.06)


def test_schroedinger_is_a_system_of_waves() -> None:
    problem = pde.Problem(
        pde.SpaceTime(pde.Interval(0, 2 * pi), (0, 1)),
        [
            pde.Equation(lambda u, v: u.t + v.xx, lambda u, v: v.t - u.xx),
            pde.Initial(lambda x: torch.cos(5 * x), field="u"),
            pde.Initial(0.0, field="v"),
        ],
        fields=("u", "v"),
    )
    space, time = estimate_oscillation(problem).wavenumbers.tolist()
    assert space == pytest.approx(5, rel=0.1)
    assert time == pytest.approx(space**2, rel=0.1)


@pytest.mark.parametrize(
    "problem", [pde.Poisson(2), pde.Heat(1), pde.Burgers(), Cavity(), pde.LogFokkerPlanck(2)]
)
def test_what_is_smooth_has_few_half_waves(problem: pde.Problem) -> None:
    estimate = estimate_oscillation(problem)
    assert float(estimate.half_waves.max()) < 3
    assert not estimate.has_waves
    inner = pde.network_for(problem).network
    assert isinstance(inner, nn.Sequential)
    assert any(isinstance(m, nn.Tanh) for m in inner)


def test_sources_from_numpy_on_a_disk_with_measured_points() -> None:
    disk = pde.Disk((0, 0), 1)
    points = disk.sample(5).x
    problem = pde.Problem(
        disk,
        [
            pde.Equation(lambda u, f: u.laplacian + f),
            pde.Neumann(1.0),
            pde.Data(points, torch.zeros(5)),
            pde.Integral(lambda u: u),
        ],
        sources={"f": lambda x: torch.from_numpy(np.sin(30 * x.numpy()))},
    )
    across, along = estimate_oscillation(problem).wavenumbers.tolist()
    assert across == pytest.approx(30, abs=2)
    assert along == 0


def test_a_periodic_network() -> None:
    domain = pde.SpaceTime(pde.Box([(0, 1), (-1, 3)]), (0, 1))
    problem = pde.Problem(
        domain,
        [
            pde.Equation(lambda u: u.t - u.laplacian),
            pde.Periodic("x"),
            pde.Periodic("y"),
            pde.Initial(0.0),
        ],
    )
    network = pde.network_for(problem)
    x = domain.sample(7).x
    for shift in ((1.0, 0.0, 0.0), (0.0, 4.0, 0.0)):
        moved = x + torch.tensor(shift, dtype=torch.float64)
        torch.testing.assert_close(network(moved), network(x), rtol=1e-12, atol=1e-12)
    later = x + torch.tensor((0.0, 0.0, 1.0), dtype=torch.float64)
    assert not torch.allclose(network(later), network(x))


def test_budgets_frequencies_and_seeds() -> None:
    for problem in (helmholtz(8 * pi), pde.Poisson(2), pde.Poisson(5)):
        for parameters in (300, 1500):
            network = pde.network_for(problem, parameters=parameters)
            count = sum(p.numel() for p in network.parameters())
            assert abs(count - parameters) < 0.1 * parameters
    first = pde.network_for(pde.Poisson(2), frequency=(20.0, 0.0)).network[0]  # pyright: ignore[reportIndexIssue]
    assert isinstance(first, nn.Linear)
    across, along = first.weight.abs().amax(0).tolist()
    assert 10 < across <= 1.25 * 10
    assert along < 2.0
    one, two = (pde.network_for(helmholtz(8 * pi), seed=s) for s in (0, 1))
    x = SQUARE.sample(3).x
    assert not torch.equal(one(x), two(x))
    wrong: list[dict[str, Any]] = [
        {"frequency": (1.0,)},
        {"frequency": -1.0},
        {"frequency": "high"},
        {"parameters": 0},
    ]
    for options in wrong:
        with pytest.raises(PullbackError):
            pde.network_for(pde.Poisson(2), **options)


def solve_problem(problem: pde.Problem, steps: int, tol: float) -> float:
    network = pde.network_for(problem)
    return pde.solve(problem, network, steps=steps, tol=tol, progress=False).error


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem",
    [helmholtz(8 * pi), bessel(4 * pi), scales(1, 50 * pi), scales(2, 16 * pi), string(5.0)],
    ids=["plane waves", "Bessel", "scales 1D", "scales 2D", "string"],
)
def test_oscillating_problems_by_defaults(problem: pde.Problem) -> None:
    """With tanh Helmholtz 4π is at 0.8 after 40 steps."""
    assert solve_problem(problem, 60, 1e-6) < 1e-4


@pytest.mark.slow
def test_fokker_planck_by_defaults() -> None:
    """A density in a wide interval; L-BFGS after Adam stays near 8e-4."""
    assert solve_problem(fokker_planck(), 120, 5e-5) < 1e-4
