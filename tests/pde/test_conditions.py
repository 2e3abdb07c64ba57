"""Every kind of condition against its formula written out with autograd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor, nn

from pullback import PullbackError, pde
from pullback.optim import Squares
from pullback.pde.discretization.sites import Sites, draw_sites
from pullback.pde.discretization.term import build_term
from pullback.pde.discretization.trial import Trial

pi = math.pi


def net(inputs: int, outputs: int = 1) -> nn.Module:
    return pde.mlp(inputs, 6, outputs, seed=2)


class D:
    """Derivatives of a network's output i at points, by nested autograd."""

    def __init__(self, network: nn.Module, x: Tensor, i: int = 0) -> None:
        self.x = x.clone().requires_grad_()
        self.u = network(self.x)[:, i]

    def __call__(self, *axes: int) -> Tensor:
        u = self.u
        for axis in axes:
            (g,) = torch.autograd.grad(u.sum(), self.x, create_graph=True)
            u = g[:, axis]
        return u.detach()


def residual(problem: pde.Problem, network: nn.Module, at: int = -1) -> tuple[Tensor, Sites]:
    """Unweighted residuals (N, R) of one condition, and its points."""
    condition = problem.conditions[at]
    sites = draw_sites(problem, condition, 20, "sobol", 3)
    trial = Trial(network, problem.unknowns, next(network.parameters()))
    term = build_term(problem, condition, trial, sites)
    assert isinstance(term, Squares)
    z = term.map(dict(trial.named_parameters())).detach()
    w = sites[0].weights
    q = (condition.weight or 1.0) * w / w.sum()
    return z / q.sqrt()[:, None], sites


def check(values: Tensor, *want: Tensor) -> None:
    torch.testing.assert_close(values, torch.stack(want, -1), rtol=1e-10, atol=1e-11)


LAPLACE = pde.Equation(lambda u: u.laplacian)
DOMAINS = {
    "box": pde.Box([(0, 1), (0, 2)]),
    "disk": pde.Disk((0.5, 0.0), 2.0),
    "cut": pde.Box([(0, 1), (0, 1)]) - pde.Disk((0.5, 0.5), 0.2),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_conditions_on_boundaries(name: str) -> None:
    domain = DOMAINS[name]
    network = net(2)
    cases: dict[str, tuple[pde.Condition, Any]] = {
        "dirichlet": (
            pde.Dirichlet(lambda x, y: x * y, weight=3.0),
            lambda d, n, x: d() - x[:, 0] * x[:, 1],
        ),
        "number": (pde.Dirichlet(0.1), lambda d, n, x: d() - 0.1),
        "neumann": (
            pde.Neumann(lambda x: x),
            lambda d, n, x: n[:, 0] * d(0) + n[:, 1] * d(1) - x[:, 0],
        ),
        "robin": (
            pde.Robin(2.0, -3.0, lambda points, normals: (points * normals).sum(1)),
            lambda d, n, x: (
                2 * d() - 3 * (n[:, 0] * d(0) + n[:, 1] * d(1)) - (x * n).sum(1)
            ),
        ),
        "equation": (
            pde.Equation(lambda u, normals: u.normal * u + normals[:, 0], on=lambda d: d.boundary),
            lambda d, n, x: (n[:, 0] * d(0) + n[:, 1] * d(1)) * d() + n[:, 0],
        ),
    }  # fmt: skip
    for condition, formula in cases.values():
        values, sites = residual(pde.Problem(domain, [LAPLACE, condition]), network)
        normals = sites[0].normals
        assert normals is not None
        torch.testing.assert_close(normals.norm(dim=1), torch.ones(len(normals)).double())
        check(values, formula(D(network, sites[0].x), normals, sites[0].x))


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("time", [False, True])
def test_periodic(order: int, time: bool) -> None:
    space = pde.Box([(-1, 1), (0, 2)])
    if time:
        domain = pde.SpaceTime(space, (0, 1))
    else:
        domain = space
    network = net(3 if time else 2)
    values, (one, two) = residual(pde.Problem(domain, [LAPLACE, pde.Periodic("y", order)]), network)
    assert bool((one.x[:, 1] == 0).all())
    assert bool((two.x[:, 1] == 2).all())
    d = D(network, one.x)
    e = D(network, two.x)
    check(values, *(d(*[1] * k) - e(*[1] * k) for k in range(order + 1)))


def test_initial_conditions() -> None:
    domain = pde.SpaceTime(pde.Interval(-1, 1), (0.5, 2))
    network = net(2)
    wave = pde.Equation(lambda u: u.tt - u.xx)
    plain = pde.Problem(domain, [wave, pde.Initial(lambda x: x**2)])
    moving = pde.Problem(domain, [wave, pde.Initial(1.0, velocity=lambda x: torch.sin(x))])
    values, (points,) = residual(plain, network)
    assert bool((points.x[:, 1] == 0.5).all())
    x = points.x[:, 0]
    d = D(network, points.x)
    check(values, d() - x**2)
    check(residual(moving, network)[0], d() - 1, d(1) - x.sin())


def test_data_of_two_fields() -> None:
    network = net(2, 2)
    x = torch.rand(7, 2).double()
    y = torch.rand(7)
    problem = pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [pde.Equation(lambda u, v: u.x + v.y), pde.Data(x, y, field="v")],
        fields=("u", "v"),
    )
    condition = problem.conditions[-1]
    sites = draw_sites(problem, condition, 7, "sobol", 0)
    trial = Trial(network, {}, next(network.parameters()))
    z = build_term(problem, condition, trial, sites).map(dict(trial.named_parameters())).detach()
    check(z * 7**0.5, D(network, x, 1)() - y.double())


def test_stokes_like_system_with_unknown_viscosity() -> None:
    network = net(2, 3)
    domain = pde.Box([(0, 1), (0, 1)])
    stokes = pde.Equation(
        lambda u, p, nu: p.x - nu * u.laplacian,
        lambda v, p, nu, y: p.y - nu * v.laplacian + y,
        lambda u, v: u.x + v.y,
    )
    pair = pde.Equation(lambda u, v: (u, v * 2), on=lambda d: d.face("x", "low"), name="pair")
    equation = pde.Equation(lambda u, v: torch.stack([u.xy, v.grad[:, 1]], -1), name="both")
    problem = pde.Problem(
        domain, [stokes, pair, equation], fields=("u", "v", "p"), unknowns={"nu": 0.3}
    )
    values, (points,) = residual(problem, network, 0)
    u, v, p = (D(network, points.x, i) for i in range(3))
    check(
        values,
        p(0) - 0.3 * (u(0, 0) + u(1, 1)),
        p(1) - 0.3 * (v(0, 0) + v(1, 1)) + points.x[:, 1],
        u(0) + v(1),
    )
    values, (points,) = residual(problem, network, 1)
    assert bool((points.x[:, 0] == 0).all())
    check(values, D(network, points.x)(), 2 * D(network, points.x, 1)())
    values, (points,) = residual(problem, network, 2)
    check(values, D(network, points.x)(0, 1), D(network, points.x, 1)(1))


def test_a_laplacian_of_one_axis_and_of_space_alone() -> None:
    network = net(2)
    domain = pde.SpaceTime(pde.Interval(0, 1), (0, 1))
    heat = pde.Equation(lambda u: u.t - u.laplacian + u.grad[:, 0] * u.xt)
    values, (points,) = residual(pde.Problem(domain, [heat]), network)
    d = D(network, points.x)
    check(values, d(1) - d(0, 0) + d(0) * d(0, 1))
    network = net(3)
    plane = pde.SpaceTime(pde.Box([(0, 1), (0, 1)]), (0, 1))
    values, (points,) = residual(pde.Problem(plane, [heat_two()]), network)
    d = D(network, points.x)
    check(values, d(2, 2) - d(0, 0) - d(1, 1) + d(0, 1, 2))


def heat_two() -> pde.Equation:
    return pde.Equation(lambda u: u.tt - u.laplacian + u.xyt)


def test_energy_is_the_weighted_mean_of_its_density() -> None:
    network = net(2, 2)
    domain = pde.Box([(0, 1), (0, 1)])
    energy = pde.Energy(
        lambda u, v, x: 0.5 * (u.grad**2).sum(1) + v**2 + x * u + torch.exp(v.x), weight=2.0
    )
    problem = pde.Problem(domain, [energy], fields=("u", "v"))
    condition = problem.conditions[0]
    sites = draw_sites(problem, condition, 20, "gauss", 0)
    trial = Trial(network, {}, next(network.parameters()))
    term = build_term(problem, condition, trial, sites)
    params = dict(trial.named_parameters())
    z = term.map(params).detach()
    x = sites[0].x
    w = sites[0].weights
    u = D(network, x)
    v = D(network, x, 1)
    density = 0.5 * (u(0) ** 2 + u(1) ** 2) + v() ** 2 + x[:, 0] * u() + v(0).exp()
    torch.testing.assert_close(term.loss(z), 2 * (w * density).sum() / w.sum())


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "1"])
def test_unusable_weights(weight: Any) -> None:
    with pytest.raises(PullbackError, match="weight"):
        pde.Dirichlet(0.0, weight=weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pde.Equation(),
        lambda: pde.Equation(3),  # pyright: ignore[reportArgumentType]
        lambda: pde.Energy(0.5),  # pyright: ignore[reportArgumentType]
        lambda: pde.Periodic("x", -1),
        lambda: pde.Periodic("x", 1.5),  # pyright: ignore[reportArgumentType]
        lambda: pde.Data(torch.zeros(3, 1), torch.zeros(2)),
        lambda: pde.Data(torch.zeros(3, 1), torch.tensor([0.0, float("nan"), 1.0])),
    ],
)
def test_unusable_conditions(make: Any) -> None:
    with pytest.raises(PullbackError):
        make()


def test_values_by_numpy_and_by_autograd() -> None:
    """What does not depend on the network is evaluated outside of all transformations."""
    spline = CubicSpline(np.linspace(0, 1, 30), np.sin(math.pi * np.linspace(0, 1, 30)))

    def force(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(torch.sin(math.pi * x).sum(), x, create_graph=True)
        return -torch.autograd.grad(slope.sum(), x)[0]

    problem = pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, f: u.xx + f),
            pde.Dirichlet(lambda x: spline(x.numpy())),
        ],
        sources={"f": force},
        exact=lambda x: torch.sin(math.pi * x),
    )
    solution = pde.solve(
        problem, pde.mlp(1, 6, 1, seed=1), points=30, steps=80, tol=1e-3, measure=5, progress=False
    )
    assert solution.error < 1e-3
    with pytest.raises(PullbackError, match="source 'f'"):
        pde.Problem(pde.Interval(0, 1), [pde.Equation(lambda u: u.x)], sources={"f": 3})  # pyright: ignore[reportArgumentType]
    twice = {"x": force}
    with pytest.raises(PullbackError, match="stands for two things"):
        pde.Problem(pde.Interval(0, 1), [pde.Equation(lambda u: u.x)], sources=twice)
