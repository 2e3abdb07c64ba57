"""What was once answered silently and wrongly, or broke the user's network."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError, pde

LINE = pde.Interval(0, 1)
OPTIONS: dict[str, Any] = {"points": 40, "progress": False}


def sines(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x)


def poisson(factor: float = math.pi**2) -> pde.Problem:
    equation = pde.Equation(lambda u, x: u.xx + factor * sines(x))
    return pde.Problem(LINE, [equation, pde.Dirichlet(0.0)], exact=sines)


class Overwriting(nn.Module):
    """Its frequency is doubled in place after every use."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        w = torch.full((1,), math.pi, dtype=torch.float64)
        waves = []
        for _ in range(3):
            waves.append(torch.sin(w * x))
            w *= 2
        return self.out(torch.cat(waves, -1))


def test_constants_that_change_after_their_use() -> None:
    assert pde.solve(poisson(), Overwriting(), steps=20, **OPTIONS).error < 1e-10


def test_indices_that_change_after_their_use() -> None:
    class Reversing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.out = (nn.Linear(a, b).double() for a, b in ((1, 8), (4, 1)))

        def forward(self, x: Any) -> Any:
            chosen = [0, 1, 2, 3]
            h = torch.tanh(self.one(x))[:, chosen]
            chosen[:] = [7, 6, 5, 4]
            return self.out(h)

    torch.manual_seed(0)
    assert pde.solve(poisson(), Reversing(), steps=40, **OPTIONS).error < 1e-2


def test_a_module_that_is_used_twice_stays_whole() -> None:
    torch.manual_seed(0)
    shared_layer = nn.Linear(6, 6)
    layers = [
        nn.Linear(1, 6),
        nn.Tanh(),
        shared_layer,
        nn.Tanh(),
        shared_layer,
        nn.Tanh(),
        nn.Linear(6, 1),
    ]
    network = nn.Sequential(*layers).double()
    assert pde.solve(poisson(), network, steps=60, **OPTIONS).error < 1e-6
    assert isinstance(shared_layer.weight, nn.Parameter)


def test_a_builtin_function_is_not_given_the_field() -> None:
    domain = pde.SpaceTime(LINE, (0, 1))
    heat = pde.Problem(domain, [pde.Equation(lambda u: u.t - u.xx), pde.Initial(torch.sin)])
    with pytest.raises(PullbackError, match="does not name its arguments"):
        pde.solve(heat, pde.mlp(2, 4, 1), steps=1, **OPTIONS)


def test_a_checkpoint_of_another_equation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    pde.solve(poisson(1.0), pde.mlp(1, 4, 1, seed=0), steps=2, checkpoint=path, **OPTIONS)
    with pytest.raises(PullbackError, match="another run"):
        pde.solve(poisson(5.0), pde.mlp(1, 4, 1, seed=0), steps=4, checkpoint=path, **OPTIONS)
    resumed = pde.solve(poisson(1.0), pde.mlp(1, 4, 1, seed=0), steps=4, checkpoint=path, **OPTIONS)
    assert len(resumed.history) == 4


def test_space_derivatives_need_space() -> None:
    time = pde.Interval(0, 1, "t")
    for residual in (lambda u: u.laplacian + 1, lambda u: u.grad[:, 0]):
        with pytest.raises(PullbackError, match="derivative in space"):
            pde.solve(
                pde.Problem(time, [pde.Equation(residual)]), pde.mlp(1, 4, 1), steps=1, **OPTIONS
            )
    box = pde.Box([(0, 1), (0, 1)], names=("x", "t"))
    edge = pde.Neumann(0.0, on=box.face("t", "low"))
    with pytest.raises(PullbackError, match="along time"):
        pde.solve(
            pde.Problem(box, [pde.Equation(lambda u: u.t), edge]),
            pde.mlp(2, 4, 1),
            steps=1,
            **OPTIONS,
        )


def test_slabs_repeat_nothing() -> None:
    domain = pde.SpaceTime(LINE, (0, 1))
    equation = pde.Equation(lambda u: u.t - u.xx)
    first = pde.Dirichlet(lambda x: x, on=lambda d: d.initial)
    for conditions, words in (
        ([equation], "need an initial condition"),
        ([equation, first, pde.Initial(0.0)], "holds at the first time"),
    ):
        problem = pde.Problem(domain, conditions)
        with pytest.raises(PullbackError, match=words):
            pde.solve(problem, pde.mlp(2, 4, 1), steps=1, slabs=2, **OPTIONS)


@pytest.mark.parametrize(
    ("residual", "words"),
    [
        (lambda u: torch.sign(u.xx), "gradient vanishes"),
        (lambda u: u.xx.detach() + 1, "gradient vanishes"),
        (lambda u: u.xx > 0, "not a real number"),
        (lambda u: [], "is empty"),
        (lambda u, points: u.xx + points, "every pair of points"),
    ],
)
def test_residuals_that_cannot_be_solved(residual: Any, words: str) -> None:
    problem = pde.Problem(LINE, [pde.Equation(residual), pde.Dirichlet(0.0)])
    with pytest.raises(PullbackError, match=words):
        pde.solve(problem, pde.mlp(1, 4, 1), steps=1, **OPTIONS)


def test_the_loss_is_that_of_the_network_returned() -> None:
    solution = pde.solve(poisson(), pde.mlp(1, 6, 1, seed=0), steps=1, **OPTIONS)
    continued = pde.solve(poisson(), solution.network, steps=1, **OPTIONS)
    assert continued.history.loss[0] == pytest.approx(solution.loss, rel=1e-12)


def test_a_solution_in_slabs_is_saved_and_loaded(tmp_path: Path) -> None:
    network = pde.mlp(2, 6, 1, seed=0)
    solution = pde.solve(pde.Heat(1), network, steps=3, slabs=2, points=100, progress=False)
    solution.save(tmp_path / "heat.pt")
    loaded = pde.PDESolution.load(tmp_path / "heat.pt", pde.Heat(1), pde.mlp(2, 6, 1))
    x = torch.rand(9, 2, dtype=torch.float64)
    assert torch.equal(solution(x), loaded(x))
    assert loaded.loss == solution.loss


def test_hard_conditions_that_nobody_keeps() -> None:
    """u = 0 solves the equation, and nothing else is in the loss."""
    burgers = pde.Burgers(0.1, hard=True)
    with pytest.warns(UserWarning, match=r"not in the loss.*problem\.wrap\(network\)"):
        pde.solve(burgers, pde.mlp(2, 4, 1, seed=0), steps=1, **OPTIONS)
    wrapped = pde.Symmetric(burgers.wrap(pde.mlp(2, 4, 1, seed=0)), 0, -1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not in the loss")
        pde.solve(burgers, wrapped, steps=1, **OPTIONS)
