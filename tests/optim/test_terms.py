"""Losses made of terms: squares and energies against dense oracles."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev

import pullback as pb
from pullback.maps import ObjectiveMap, OperatorMap, Scheme
from pullback.optim import EnergyTerm, Objective, Squares
from pullback.optim.objective import ObjectiveProblem

N = 9
X = torch.linspace(-1, 1, N).double()[None, :, None]
Q = torch.linspace(0.5, 1.5, N).double()
SCHEME = Scheme.of([(0, 0)])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def apply(net: nn.Module) -> Any:
    return lambda params, x: functional_call(net, params, (x,))


def squares(net: nn.Module, q: Tensor = Q) -> Squares:
    def operator(channels: Tensor, params: dict[str, Tensor]) -> Tensor:
        u = channels[:, 0, :, 0]
        return torch.stack([u[2] + u[0] ** 2, u[1] - 1], -1)

    return Squares(OperatorMap(apply(net), X, SCHEME, operator, q))


def density(z: Tensor) -> Tensor:
    """Strictly convex in u', linear in u."""
    return 0.5 * z[:, 1] ** 2 + 0.1 * torch.exp(z[:, 1]) - 3 * z[:, 0]


def energy(net: nn.Module, e: Any = density) -> EnergyTerm:
    def operator(channels: Tensor, params: dict[str, Tensor]) -> Tensor:
        return channels[:2, 0, :, 0].T

    map = OperatorMap(apply(net), X, Scheme.of([(0,)]), operator, torch.ones_like(Q))
    return EnergyTerm(map, e, Q)


def derivatives(net: nn.Module, p: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """u, u', u'' by nested reverse mode."""

    def u(x: Tensor) -> Tensor:
        return functional_call(net, p, (x[:, None],))[:, 0]

    def first(x: Tensor) -> Tensor:
        return grad(lambda y: u(y).sum())(x)

    x = X[0, :, 0]
    return u(x), first(x), grad(lambda y: first(y).sum())(x)


def flat_of(net: nn.Module) -> tuple[Tensor, Any]:
    params = dict(net.named_parameters())

    def unflatten(v: Tensor) -> dict[str, Tensor]:
        pieces = v.split([p.numel() for p in params.values()])
        return {n: w.view(p.shape) for (n, p), w in zip(params.items(), pieces, strict=True)}

    return torch.cat([p.detach().flatten() for p in params.values()]), unflatten


def dense_squares(net: nn.Module, q: Tensor = Q) -> tuple[Tensor, Tensor]:
    """Residuals and their Jacobian."""
    w, unflatten = flat_of(net)

    def residuals(v: Tensor) -> Tensor:
        u, first, second = derivatives(net, unflatten(v))
        return (q.sqrt()[:, None] * torch.stack([second + u**2, first - 1], -1)).flatten()

    return residuals(w), jacrev(residuals)(w)


def dense_energy(net: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient, and the Gram Σ q Jᵀ∇²e J."""
    w, unflatten = flat_of(net)

    def both(v: Tensor) -> Tensor:
        u, first, _ = derivatives(net, unflatten(v))
        return torch.stack([u, first], -1)

    z = both(w)
    j = jacrev(both)(w)
    each = [hessian(lambda y: density(y[None])[0])(row) for row in z]
    gram = sum(
        (q * a.T @ h @ a for q, a, h in zip(Q, j, each, strict=True)),
        torch.zeros(len(w), len(w)).double(),
    )
    loss = (Q * density(z)).sum()
    gradient = grad(lambda v: (Q * density(both(v))).sum())(w)
    return loss, gradient, gram


def close(actual: Tensor, want: Tensor, tol: float) -> None:
    assert float((actual - want).norm() / want.norm()) <= tol


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_squares(form: str) -> None:
    net = network()
    z, j = dense_squares(net)
    solver = pb.solvers.ConjugateGradient if form == "matrix_free" else pb.solvers.Cholesky
    opt = pb.NaturalGradient(net, solver=solver(damping=1e-2), gram=form)
    direction = opt.direction(objective=Objective([squares(net)])).x
    want = torch.linalg.solve(j.T @ j + 1e-2 * torch.eye(j.shape[1]).double(), j.T @ z)
    close(direction, want, 1e-4 if form == "matrix_free" else 1e-9)


def test_pseudo_inverse_of_squares() -> None:
    net = network()
    z, j = dense_squares(net)
    opt = pb.NaturalGradient(net, solver=pb.solvers.PseudoInverse(1e-8))
    direction = opt.direction(objective=Objective([squares(net)])).x
    close(direction, torch.linalg.pinv(j, rtol=1e-8) @ z, 1e-6)


def test_loss_slope_and_factor_of_an_energy() -> None:
    net = network()
    term = energy(net)
    linear = term.map.linearize(dict(net.named_parameters()))
    loss, gradient, gram = dense_energy(net)
    close(term.loss(linear.value), loss, 1e-12)
    close(linear.vjp(term.slope(linear.value)), gradient, 1e-11)
    rows = term.factor(linear.value).transpose(linear.rows().T.unflatten(1, (N, 2))).flatten(1).T
    close(rows.T @ rows, gram, 1e-10)


@pytest.mark.parametrize("form", ["rows", "kernel", "dense"])
def test_an_energy_with_a_linear_part_is_solved_from_its_gradient(form: str) -> None:
    """g is outside the range of S, so there is no r; (G + λ)x = g is well posed all the same."""
    net = network()
    loss, gradient, gram = dense_energy(net)
    opt = pb.NaturalGradient(net, solver=pb.solvers.Cholesky(1e-2), gram=form)
    direction = opt.direction(objective=Objective([energy(net)])).x
    want = torch.linalg.solve(gram + 1e-2 * torch.eye(len(gram)).double(), gradient)
    close(direction, want, 1e-8)
    info = opt.step(objective=Objective([energy(net)]))
    assert info.loss == pytest.approx(float(loss), rel=1e-12)
    assert not info.whitened


@pytest.mark.parametrize("form", ["rows", "kernel", "dense"])
@pytest.mark.parametrize("damping", [1e-2, 1e-5])
def test_energies_and_squares_together(form: str, damping: float) -> None:
    net = network()
    loss, gradient, gram = dense_energy(net)
    z, j = dense_squares(net)
    whole = Objective([energy(net), squares(net)])
    opt = pb.NaturalGradient(net, solver=pb.solvers.Cholesky(damping), gram=form)
    direction = opt.direction(objective=whole).x
    total_gram = gram + j.T @ j
    want = torch.linalg.solve(
        total_gram + damping * torch.eye(len(gram)).double(), gradient + j.T @ z
    )
    close(direction, want, 1e-6)
    assert opt.step(objective=whole).loss == pytest.approx(float(loss + 0.5 * z @ z), rel=1e-12)


def test_structured_terms_beside_plain_residuals() -> None:
    net = network()
    z, j = dense_squares(net)
    w, _ = flat_of(net)

    def plain(p: dict[str, Tensor]) -> Tensor:
        return torch.cat([v.flatten() for v in p.values()]) * 0.3

    whole = Objective([squares(net), Squares(ObjectiveMap(plain, "sum"))])
    a = torch.cat([j, 0.3 * torch.eye(len(w)).double()])
    r = torch.cat([z, 0.3 * w])
    for form in ("rows", "kernel", "dense"):
        opt = pb.NaturalGradient(net, solver=pb.solvers.PseudoInverse(), gram=form)
        direction = opt.direction(objective=whole).x
        close(direction, torch.linalg.lstsq(a, r).solution, 1e-7)


@pytest.mark.parametrize("step", [pb.steps.TargetRatio(), pb.steps.LevenbergMarquardt()])
def test_steps_lower_the_loss(step: Any) -> None:
    net = network()
    opt = pb.NaturalGradient(net, solver=pb.solvers.PseudoInverse(), step=step)
    whole = Objective([squares(net)])
    losses = [opt.step(objective=whole).loss for _ in range(15)]
    assert losses[-1] < 0.2 * losses[0]  # the two equations contradict each other
    assert all(b <= a for a, b in pairwise(losses))


def test_trial_losses_are_those_of_the_trials() -> None:
    """The vectorized evaluation at many moves agrees with one at a time."""
    net = network()
    whole = Objective([energy(net), squares(net)])
    problem = ObjectiveProblem(dict(net.named_parameters()), whole, "mean")
    problem.evaluate()
    w, unflatten = flat_of(net)
    moves = 0.1 * torch.randn(5, len(w)).double()
    losses = problem.losses(moves, lambda p, m: unflatten(w - m))
    want = torch.stack(
        [
            torch.stack([t.loss(t.map(unflatten(w - m))) for t in whole.terms]).sum().detach()
            for m in moves
        ]
    )
    close(losses, want, 1e-12)


def test_a_density_that_is_not_convex_is_refused() -> None:
    net = network()
    opt = pb.NaturalGradient(net, solver=pb.solvers.Cholesky(1e-3))
    with pytest.raises(pb.PullbackError, match="not positive semidefinite"):
        opt.step(objective=Objective([energy(net, lambda z: -(z[:, 1] ** 2))]))


def test_terms_that_ignore_the_parameters_are_refused() -> None:
    net = network()

    def constant(channels: Tensor, params: dict[str, Tensor]) -> Tensor:
        return torch.ones(N, 1).double()

    term = Squares(OperatorMap(apply(net), X, SCHEME, constant, Q))
    opt = pb.NaturalGradient(net)
    with pytest.raises(pb.PullbackError, match="does not depend on the parameters"):
        opt.step(objective=Objective([term]))
