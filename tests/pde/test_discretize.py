"""A problem at chosen points: losses, gradients and steps against dense algebra."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap

import pullback as pb
from pullback import PullbackError, pde
from pullback.optim import Objective
from pullback.pde.discretization.sites import draw_sites
from pullback.pde.discretization.term import build_term, find_nesting_reason
from pullback.pde.discretization.trial import Trial, select_unknowns

pi = math.pi


def objective(
    problem: pde.Problem, trial: Trial, n: int = 12
) -> tuple[Objective, list[tuple[pde.Points, ...]]]:
    sites = [draw_sites(problem, c, n, "sobol", i) for i, c in enumerate(problem.conditions)]
    terms = [
        build_term(problem, c, trial, s) for c, s in zip(problem.conditions, sites, strict=True)
    ]
    return Objective(terms), sites


def test_the_step_is_gauss_newton_of_all_conditions() -> None:
    """Equation and boundary by hand from torch.func.hessian, in one dense least-squares problem."""
    problem = pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [
            pde.Equation(lambda u, x, k: k * u.laplacian + u**2 - x),
            pde.Dirichlet(lambda y: y, weight=5.0),
        ],
        unknowns={"k": 1.5},
    )
    network = pde.mlp(2, 8, 1, seed=0)
    trial = Trial(network, problem.unknowns, next(network.parameters()))
    whole, (inside, edge) = objective(problem, trial)
    names = [n for n, _ in trial.named_parameters()]
    point = {n: p.detach().clone() for n, p in trial.named_parameters()}

    def residuals(p: dict[str, Tensor]) -> Tensor:
        def u(x: Tensor) -> Tensor:
            return functional_call(trial, p, (x[None],))[0, 0]

        x = inside[0].x
        w = inside[0].weights
        laplacian = vmap(lambda y: torch.trace(hessian(u)(y)))(x)
        r = p["unknowns.k"] * laplacian + vmap(u)(x) ** 2 - x[:, 0]
        y = edge[0].x
        v = edge[0].weights
        b = vmap(u)(y) - y[:, 1]
        return torch.cat([(w / w.sum()).sqrt() * r, (5 * v / v.sum()).sqrt() * b])

    jacobians = jacrev(residuals)(point)
    j = torch.cat([jacobians[n].reshape(24, -1) for n in names], 1)
    z = residuals(point)
    for form in ("rows", "kernel", "dense"):
        solver = pb.solvers.Cholesky(1e-3)
        opt = pb.NaturalGradient(trial, solver=solver, gram=form)
        direction = opt.direction(objective=whole).x
        eye = torch.eye(j.shape[1]).double()
        want = torch.linalg.solve(j.T @ j + 1e-3 * eye, j.T @ z)
        torch.testing.assert_close(direction, want, rtol=1e-7, atol=1e-8)
    opt = pb.NaturalGradient(trial, solver=pb.solvers.PseudoInverse(1e-10))
    direction = opt.direction(objective=whole).x
    torch.testing.assert_close(
        j @ direction, j @ (torch.linalg.pinv(j, rtol=1e-10) @ z), rtol=1e-6, atol=1e-7
    )
    info = opt.step(objective=whole)
    assert info.loss == pytest.approx(float(0.5 * z.square().sum()), rel=1e-12)


def test_unknowns_are_parameters_beside_the_network() -> None:
    network = pde.mlp(1, 3, 1, seed=0)
    trial = Trial(network, {"a": 1, "b": 2.5}, next(network.parameters()))
    unknowns = select_unknowns(dict(trial.named_parameters()))
    assert {n: float(p.detach()) for n, p in unknowns.items()} == {"a": 1.0, "b": 2.5}
    x = torch.rand(4, 1).double()
    assert torch.equal(trial(x), network(x))


def test_points_outside_the_domain_are_refused() -> None:
    box = pde.Box([(0, 1), (0, 1)])
    other = pde.Box([(0, 2), (0, 1)])
    line = pde.Interval(0, 1)
    wave = pde.Equation(lambda u: u.laplacian)
    regions: list[tuple[Any, str]] = [
        (other.face("x", "high"), "outside the domain"),
        (line.boundary, "does not fit the domain"),
        (lambda domain: None, "are needed, got None"),
        (3, "are needed, got 3"),
    ]
    for region, message in regions:
        problem = pde.Problem(box, [wave, pde.Dirichlet(0.0, on=region)])
        with pytest.raises(PullbackError, match=message):
            draw_sites(problem, problem.conditions[1], 10, "sobol", 0)


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (lambda x: x, "does not depend on the network"),
        (lambda u: 1.0, "not one number per point"),
        (lambda u: u.x.sum(), "not one number per point"),
        (lambda u: u.grad.T, "not one number per point"),
        (lambda u: None, "not one number per point"),
        (lambda u, z: u, "asks for 'z'"),
        (lambda u: u.z, "no derivative 'z'"),
        (lambda u: u.normal, "no outward normal"),
    ],
)
def test_unusable_residuals(residual: Any, message: str) -> None:
    problem = pde.Problem(pde.Box([(0, 1), (0, 1)]), [pde.Equation(residual)])
    network = pde.mlp(2, 3, 1, seed=0)
    trial = Trial(network, {}, next(network.parameters()))
    with pytest.raises(PullbackError, match=message):
        objective(problem, trial)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (pde.Dirichlet(0.0, field="w"), "no field 'w'"),
        (pde.Dirichlet(0.0), "which field"),
        (pde.Dirichlet(torch.zeros(5), field="u"), "not one number per point"),
        (pde.Dirichlet(lambda x: torch.stack([x, x], -1), field="u"), "not one number per point"),
        (pde.Dirichlet(lambda x: "one", field="u"), "no number"),
        (pde.Dirichlet(lambda t: t, field="u"), "asks for 't'"),
        (pde.Periodic("z"), "z"),
        (pde.Initial(0.0), "needs time"),
        (pde.Data(torch.ones(2, 2) * 3, torch.ones(2), field="u"), "outside the domain"),
        (pde.Data(torch.ones(2, 1), torch.ones(2), field="u"), "coordinates"),
        (pde.Energy(lambda u, x: x), "does not depend on the network"),
        (pde.Energy(lambda u: u.grad), "not one number per point"),
    ],
)
def test_unusable_values(condition: pde.Condition, message: str) -> None:
    problem = pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [pde.Equation(lambda u, v: u.x + v), condition],
        fields=("u", "v"),
    )
    network = pde.mlp(2, 3, 2, seed=0)
    trial = Trial(network, {}, next(network.parameters()))
    c = problem.conditions[1]
    with pytest.raises(PullbackError, match=message):
        build_term(problem, c, trial, draw_sites(problem, c, c.points or 20, "sobol", 0))


def test_energies_have_no_unknowns() -> None:
    problem = pde.Problem(
        pde.Interval(0, 1), [pde.Energy(lambda u, k: k * u.x**2)], unknowns={"k": 1.0}
    )
    network = pde.mlp(1, 3, 1, seed=0)
    with pytest.raises(PullbackError, match="unknown coefficients"):
        objective(problem, Trial(network, {"k": 1.0}, next(network.parameters())))


def test_nested_says_why() -> None:
    problem = pde.Problem(pde.Interval(0, 1), [pde.Equation(lambda u: u.xx - 1)])
    for activation, reason in ((nn.Tanh, ""), (nn.ELU, "elu")):
        network = pde.mlp(1, 3, 1, seed=0, activation=activation)
        trial = Trial(network, {}, next(network.parameters()))
        whole, _ = objective(problem, trial)
        whole.terms[0].map.linearize(dict(trial.named_parameters()))
        assert reason in find_nesting_reason(whole.terms)
        assert bool(reason) == bool(find_nesting_reason(whole.terms))


def test_parameters_are_put_back_wherever_they_are_held() -> None:
    """Also where the network fails; modules and tensors that are used twice have them once."""
    inner = nn.Linear(2, 2).double()
    net = nn.Sequential(inner, nn.Tanh(), inner, nn.Linear(2, 2).double())
    net[3].weight = inner.weight
    trial = Trial(net, {}, inner.weight)
    parameters = {n: p for n, p in trial.named_parameters()}
    other = {n: p.detach() + 1 for n, p in parameters.items()}
    x = torch.rand(5, 2).double()
    copied = copy.deepcopy(net)  # torch leaves its replacements in a module that is used twice
    want = functional_call(copied, {n.removeprefix("network."): p for n, p in other.items()}, (x,))
    assert torch.equal(trial.apply_to(other, x), want)
    with pytest.raises(RuntimeError):
        trial.apply_to(other, torch.rand(5, 3).double())
    assert all(p is parameters[n] for n, p in trial.named_parameters())
    assert net[3].weight is inner.weight
    bias_alone = {"network.0.bias": other["network.0.bias"]}
    want = functional_call(copy.deepcopy(net), {"0.bias": bias_alone["network.0.bias"]}, (x,))
    assert torch.equal(trial.apply_to(bias_alone, x), want)
