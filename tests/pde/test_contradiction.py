"""Conditions that cannot hold together are named; fronts, layers and corners are not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import pde
from pullback.pde.judgement.contradiction import find_contradiction, find_differing_values

LINE = pde.Interval(0, 1)
SQUARE = pde.Box([(0, 1), (0, 1)])
TIME = pde.SpaceTime(LINE, (0, 1))


class Slope(nn.Module):
    """x/2 for every field: solves none of these problems."""

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.fields = fields
        self.shift = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return torch.cat([0.5 * x[:, :1] + self.shift] * self.fields, -1)


def search(problem: pde.Problem) -> tuple[str, ...]:
    network = Slope(len(problem.fields))
    residuals = pde.PDESolution(problem, network, pde.History()).residual
    return find_contradiction(problem, network, {n: r.size for n, r in residuals.items()})


def without_potential(u: Any, x: Tensor, y: Tensor) -> tuple[Any, Any]:
    """(y, −x) is no gradient."""
    return u.x - y, u.y + x


CONTRADICTIONS = {
    "flux": (
        [pde.Equation(lambda u: u.laplacian - 1), pde.Neumann(0.0)],
        SQUARE,
        ("equation", "neumann"),
    ),
    "mass": (
        [pde.Equation(lambda u: u.xx), pde.Dirichlet(0.0), pde.Integral(lambda u: u, 1.0)],
        LINE,
        ("equation", "dirichlet", "integral"),
    ),
    "resonance": (
        [
            pde.Equation(lambda u, x: u.xx + math.pi**2 * u - torch.sin(math.pi * x)),
            pde.Dirichlet(0.0),
        ],
        LINE,
        ("equation", "dirichlet"),
    ),
    "gradient": ([pde.Equation(without_potential)], SQUARE, ("equation",)),
    "outflow": (
        [
            pde.Equation(lambda u: u.t + u.x),
            pde.Dirichlet(0.0, on=lambda d: d.face("x", "low"), name="in"),
            pde.Dirichlet(1.0, on=lambda d: d.face("x", "high"), name="out"),
            pde.Initial(0.0),
        ],
        TIME,
        ("equation", "in", "out", "initial"),
    ),
    "two values": (
        [
            pde.Equation(lambda u: u.xx),
            pde.Dirichlet(0.0),
            pde.Dirichlet(1.0, on=LINE.face("x", "low"), name="one"),
        ],
        LINE,
        ("dirichlet", "one"),
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradicting_conditions_are_named(name: str) -> None:
    """Those without which the others could hold, and no others."""
    conditions, domain, names = CONTRADICTIONS[name]
    assert search(pde.Problem(domain, conditions)) == names


def layer(width: float, domain: pde.Domain) -> pde.Problem:
    """Without its small term, u.x = 1 contradicts u = 0 at both ends."""

    def equation(u: Any) -> Any:
        return u.x - 1 - width * u.laplacian

    return pde.Problem(domain, [pde.Equation(equation), pde.Dirichlet(0.0)])


SOLVABLE = {
    "layer on a line": layer(1e-5, LINE),
    "layer on a square": layer(1e-3, SQUARE),
    "moderate layer": layer(1e-2, LINE),
    "front": pde.Problem(
        TIME,
        [
            pde.Equation(lambda u: u.t + u.x),
            pde.Dirichlet(1.0, on=lambda d: d.face("x", "low")),
            pde.Initial(lambda x: torch.where(x > 0.23, 0.0, 1.0).to(x)),
        ],
    ),
    "corner": pde.Problem(
        TIME,
        [pde.Equation(lambda u: u.t - u.xx), pde.Dirichlet(0.0), pde.Initial(1.0)],
    ),
    "hole": pde.Problem(
        pde.Disk() - pde.Disk(radius=0.1),
        [
            pde.Equation(lambda u: u.laplacian),
            pde.Dirichlet(lambda x, y: torch.log(torch.hypot(x, y))),
        ],
    ),
    "heat": pde.Problem(
        TIME,
        [pde.Equation(lambda u: u.t - u.xx), pde.Dirichlet(0.0), pde.Initial(lambda x: x - x**2)],
    ),
}


@pytest.mark.parametrize("name", SOLVABLE)
def test_what_is_hard_to_resolve_is_no_contradiction(name: str) -> None:
    assert search(SOLVABLE[name]) == ()


def test_values_that_differ_at_a_shared_point_are_named() -> None:
    words = find_differing_values(SOLVABLE["corner"])
    assert words == "at x = 0, t = 0 'dirichlet' asks for 0 and 'initial' for 1"
    lid = [
        pde.Equation(lambda u: u.laplacian),
        pde.Dirichlet(1.0, on=SQUARE.face("y", "high"), name="lid"),
        pde.Dirichlet(0.0, on=SQUARE.face("x", "low"), name="wall"),
    ]
    assert "at x = 0, y = 1 'lid' asks for 1" in find_differing_values(pde.Problem(SQUARE, lid))
    sine = pde.Initial(lambda x: torch.sin(math.pi * x))  # 1e-16 at 1
    heat = pde.Problem(TIME, [pde.Equation(lambda u: u.t - u.xx), pde.Dirichlet(0.0), sine])
    assert find_differing_values(heat) == ""


def test_a_verdict_does_not_advise_more_steps_for_contradictions() -> None:
    conditions, _, _ = CONTRADICTIONS["mass"]
    with pytest.warns(UserWarning, match="'equation', 'dirichlet' and 'integral' contradict"):
        solution = pde.solve(
            pde.Problem(LINE, conditions),
            pde.mlp(1, 6, 1, seed=0),
            points=40,
            steps=10,
            progress=False,
        )
    assert solution.verdict.name == "stalled"
    assert "Give more steps" not in solution.stopped
