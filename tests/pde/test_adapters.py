"""Models of other packages: residuals that call autograd, DeepXDE and PINA."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from pullback import PullbackError, pde
from pullback.pde.adapters import (
    AutogradMap,
    deepxde_objective,
    pina_objective,
    train_deepxde,
    train_pina,
)

pi = math.pi


def second_derivative(u: Tensor, x: Tensor) -> Tensor:
    """Return u'' as users of autograd write it."""
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x, create_graph=True)[0]


class Data:
    """−u'' = π² sin πx with zeros at both ends, as DeepXDE's `data` has it: two boundary points."""

    def __init__(self) -> None:
        inner = np.linspace(0, 1, 32)[1:-1, None]
        self.train_x = np.vstack([[[0.0], [1.0]], inner])

    def losses(
        self, targets: Any, outputs: Tensor, loss_fn: Any, inputs: Tensor, model: Any
    ) -> list[Tensor]:
        residual = second_derivative(outputs, inputs) + pi**2 * torch.sin(pi * inputs)
        return [loss_fn(None, residual[2:]), loss_fn(None, outputs[:2])]


class Model:
    """What the adapter reads of a `dde.Model`."""

    def __init__(self, net: nn.Module, loss_weights: list[float] | None = None) -> None:
        self.net = net
        self.data = Data()
        self.loss_weights = loss_weights
        self.external_trainable_variables: list[Any] = []


def test_rows_are_those_of_a_dense_jacobian() -> None:
    net = pde.mlp(1, 5, 1, seed=0)
    x = torch.linspace(0, 1, 7, dtype=torch.float64)[:, None]

    def residuals(params: dict[str, Tensor]) -> Tensor:
        points = x.clone().requires_grad_()
        return second_derivative(functional_call(net, params, (points,)), points).flatten()

    def by_torch_func(params: dict[str, Tensor]) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return functional_call(net, params, (point.reshape(1, 1),)).squeeze()

        return torch.func.vmap(torch.func.grad(torch.func.grad(u)))(x[:, 0])

    params = {name: p.detach() for name, p in net.named_parameters()}
    linearization = AutogradMap(residuals).linearize(params)
    jacobian = jacrev(by_torch_func)(params)
    dense = torch.cat([jacobian[name].flatten(1) for name in params], 1)
    torch.testing.assert_close(linearization.rows(), dense)
    torch.testing.assert_close(linearization.value, by_torch_func(params))
    v = torch.randn(dense.shape[1], dtype=torch.float64)
    u = torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(linearization.jvp(v), dense @ v)
    torch.testing.assert_close(linearization.vjp(u), dense.T @ u)
    covectors = torch.randn(2, 7, dtype=torch.float64)
    pulled = linearization.pullback(covectors).rows().view(7, 2, -1)
    torch.testing.assert_close(pulled, torch.einsum("rn,np->nrp", covectors, dense))


@pytest.mark.slow
def test_a_model_is_trained_to_many_digits() -> None:
    net = pde.mlp(1, 10, 1, seed=0)
    losses = train_deepxde(Model(net, [1.0, 100.0]), steps=80)
    assert losses[-1] < 1e-9 * losses[0]
    x = torch.linspace(0, 1, 100, dtype=torch.float64)[:, None]
    assert float((net(x) - torch.sin(pi * x)).abs().max()) < 1e-4


def test_weights_are_those_of_the_model() -> None:
    net = pde.mlp(1, 4, 1, seed=0)
    params = dict(net.named_parameters())
    plain = deepxde_objective(Model(net))
    heavy = deepxde_objective(Model(net, [1.0, 9.0]))
    boundary = net(torch.tensor([[0.0], [1.0]], dtype=torch.float64)).square().mean()
    difference = heavy.loss(params) - plain.loss(params)
    torch.testing.assert_close(difference, 4 * boundary.detach())


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(PullbackError, match="no network of PyTorch"):
        deepxde_objective(object())
    model = Model(pde.mlp(1, 4, 1, seed=0))
    model.external_trainable_variables = [torch.ones(1)]
    with pytest.raises(PullbackError, match="beside its network"):
        deepxde_objective(model)
    with pytest.raises(PullbackError, match="not usable"):
        AutogradMap(lambda params: torch.ones(3)).linearize({"w": torch.ones(1)})
    with pytest.raises(PullbackError, match="not usable"):
        AutogradMap(lambda params: 2 * params["w"][:0]).linearize({"w": torch.ones(1)})
    with pytest.raises(PullbackError, match="they are list"):
        AutogradMap(lambda params: [params["w"]]).linearize(  # pyright: ignore[reportArgumentType]
            {"w": torch.ones(1)}
        )


def test_the_real_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDE_BACKEND", "pytorch")
    dde = pytest.importorskip("deepxde")
    dde.config.set_default_float("float64")

    def equation(x: Tensor, y: Tensor) -> Tensor:
        return -dde.grad.hessian(y, x) - pi**2 * torch.sin(pi * x)

    geometry = dde.geometry.Interval(0, 1)
    boundary = dde.icbc.DirichletBC(geometry, lambda x: 0, lambda x, on_boundary: on_boundary)
    data = dde.data.PDE(geometry, equation, boundary, num_domain=30, num_boundary=2)
    model = dde.Model(data, dde.nn.FNN([1, 10, 1], "tanh", "Glorot uniform"))
    model.compile("adam", lr=1e-3, loss_weights=[1, 100])
    train_deepxde(model, steps=80)
    x = np.linspace(0, 1, 100)[:, None]
    assert np.abs(model.predict(x) - np.sin(pi * x)).max() < 1e-4


class Residual:
    """An equation of PINA: −u'' = π² sin πx."""

    def residual(self, inputs: Tensor, outputs: Tensor, params: None) -> Tensor:
        return second_derivative(outputs, inputs) + pi**2 * torch.sin(pi * inputs)


class Solver(nn.Module):
    """What the adapter reads of a solver of PINA: an equation on a domain, and two targets."""

    def __init__(self, model: nn.Module, weights: dict[str, float] | None = None) -> None:
        super().__init__()
        self.models = nn.ModuleList([model])
        self.loss = nn.MSELoss(reduction="none")
        self.weighting = SimpleNamespace(values=weights or {}, default_value_weights=1)
        ends = torch.tensor([[0.0], [1.0]])
        self.problem = SimpleNamespace(
            conditions={
                "inside": SimpleNamespace(domain="interval", equation=Residual()),
                "ends": SimpleNamespace(input=ends, target=torch.zeros(2, 1)),
            },
            discretised_domains={"interval": torch.linspace(0, 1, 32)[1:-1, None]},
        )

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def test_residuals_of_pina_are_those_of_deepxde() -> None:
    """The same equation, ends and weights give the same loss, though in another order."""
    net = pde.mlp(1, 4, 1, seed=0)
    params = dict(net.named_parameters())
    actual = pina_objective(Solver(net, {"ends": 9.0})).loss(params)
    expected = deepxde_objective(Model(net, [1.0, 9.0])).loss(params)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)  # points of float32


def test_steps_for_pina_lower_its_loss() -> None:
    losses = train_pina(Solver(pde.mlp(1, 6, 1, seed=0), {"ends": 100.0}), steps=40)
    assert losses[-1] < 1e-2 * losses[0]


def test_what_pina_cannot_give_is_refused() -> None:
    with pytest.raises(PullbackError, match="no problem with one model"):
        pina_objective(object())
    solver = Solver(pde.mlp(1, 4, 1, seed=0))
    solver.loss = nn.L1Loss()
    with pytest.raises(PullbackError, match="no mean square"):
        pina_objective(solver)
    solver = Solver(pde.mlp(1, 4, 1, seed=0))
    solver.weighting = SimpleNamespace()
    with pytest.raises(PullbackError, match="weights change"):
        pina_objective(solver)
    solver = Solver(pde.mlp(1, 4, 1, seed=0))
    solver.problem.discretised_domains = {}
    with pytest.raises(PullbackError, match="has no points"):
        pina_objective(solver)
    solver.problem.unknown_parameters = {"k": torch.ones(1)}
    solver.problem.discretised_domains = {"interval": torch.ones(2, 1)}
    with pytest.raises(PullbackError, match="unknown parameters"):
        pina_objective(solver)


def measure(x: Tensor) -> Tensor:
    """Data: half of sin πx, so that −k u'' = π² sin πx has k = 2."""
    return 0.5 * torch.sin(pi * x)


def test_variables_of_deepxde_are_trained() -> None:
    conductivity = torch.tensor(1.0, requires_grad=True)

    class InverseData(Data):
        def losses(
            self, targets: Any, outputs: Tensor, loss_fn: Any, inputs: Tensor, model: Any
        ) -> list[Tensor]:
            flux = conductivity * second_derivative(outputs, inputs)
            residual = flux + pi**2 * torch.sin(pi * inputs)
            return [loss_fn(None, residual), loss_fn(None, outputs - measure(inputs))]

    model = Model(pde.mlp(1, 8, 1, seed=0), [1.0, 100.0])
    model.data = InverseData()
    model.external_trainable_variables = [conductivity]
    train_deepxde(model, steps=60)
    assert abs(conductivity.item() - 2.0) < 1e-4
    assert conductivity.is_leaf
    assert conductivity.requires_grad


def test_unknown_parameters_of_pina_are_trained() -> None:
    class Scaled:
        def residual(self, inputs: Tensor, outputs: Tensor, params: Any) -> Tensor:
            flux = params["k"] * second_derivative(outputs, inputs)
            return flux + pi**2 * torch.sin(pi * inputs)

    solver = Solver(pde.mlp(1, 8, 1, seed=0), {"ends": 100.0})
    x = torch.linspace(0, 1, 12)[:, None]
    data = SimpleNamespace(input=x, target=measure(x))
    inside = SimpleNamespace(domain="interval", equation=Scaled())
    solver.problem.conditions = {"inside": inside, "ends": data}
    conductivity = nn.Parameter(torch.ones(1))
    solver.problem.unknown_parameters = {"k": conductivity}
    train_pina(solver, steps=60)
    assert abs(conductivity.item() - 2.0) < 1e-4
