"""PrimeSpring against its formulas, from dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback import vmc
from pullback.solvers import Cholesky
from pullback.steps import Local, Spring
from pullback.testing import assert_close

DAMPING = 0.3


def make_local(rows: Tensor, white: Tensor, state: dict[str, object]) -> Local:
    """The local picture of ‖A x − r‖² + λ‖x − center‖²."""
    gram = pb.grams.Rows(rows)
    solver = Cholesky(DAMPING)
    factored = solver.init(gram)

    def solve(damping: object, center: Tensor | None) -> pb.solvers.Solution:
        shift = torch.zeros(rows.shape[1], dtype=rows.dtype) if center is None else center
        solution = solver.solve(factored, rows.T @ (white - rows @ shift), DAMPING)
        return pb.solvers.Solution(solution.x + shift, DAMPING)

    return Local(
        loss=0.0, gradient=rows.T @ white, solve=solve, path=lambda: None,
        inner_products=lambda v: v @ gram.dense() @ v.T,
        losses=lambda moves: torch.zeros(len(moves)), lr=1.0, scaled=lambda v: v, state=state,
    )  # fmt: skip


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_momentum_follows_from_the_overlap() -> None:
    rows = draw(8, 40, seed=0)
    white = draw(8, seed=1)
    previous = draw(40, seed=2)
    step = vmc.PrimeSpring()
    move = step.take(make_local(rows, white, {"previous": previous, "count": 3}))
    gram = rows.T @ rows
    measured = torch.linalg.solve(gram + DAMPING * torch.eye(40, dtype=torch.float64), gram)
    overlap = float((measured @ previous).square().sum() / previous.square().sum())
    chance = float(measured.trace()) / 40
    # one vector of signs estimates the trace to √(2/d)
    assert step.momentum == pytest.approx(1 - max(overlap, chance), abs=0.1)
    fresh = torch.linalg.solve(gram + DAMPING * torch.eye(40, dtype=torch.float64), rows.T @ white)
    want = fresh + step.momentum * (previous - measured @ previous)
    assert_close(move.direction, want, 1e-9, "x")


def test_with_its_momentum_it_is_spring() -> None:
    rows = draw(8, 40, seed=0)
    white = draw(8, seed=1)
    state = {"previous": draw(40, seed=2), "count": 3}
    prime = vmc.PrimeSpring()
    move = prime.take(make_local(rows, white, dict(state)))
    plain = Spring(prime.momentum).take(make_local(rows, white, dict(state)))
    assert_close(move.direction, plain.direction, 1e-10, "SPRING at the same momentum")


def test_where_a_batch_measures_everything_there_is_no_momentum() -> None:
    rows = 100 * draw(60, 10, seed=0)
    step = vmc.PrimeSpring()
    step.take(make_local(rows, draw(60, seed=1), {"previous": draw(10, seed=2), "count": 1}))
    assert step.momentum < 1e-3


def test_directions_that_are_never_measured_decay() -> None:
    """The momentum stays below 1, and a kept direction shrinks."""
    rows = draw(4, 1000, seed=0)
    rows[:, 500:] = 0
    previous = torch.zeros(1000, dtype=torch.float64)
    previous[500:] = 1
    step = vmc.PrimeSpring()
    move = step.take(make_local(rows, draw(4, seed=1), {"previous": previous, "count": 1}))
    assert step.momentum <= 0.99 + 1e-12
    assert float(move.direction[500:].max()) <= 0.99 + 1e-12


def test_the_first_step_has_none() -> None:
    step = vmc.PrimeSpring()
    rows = draw(8, 40, seed=0)
    move = step.take(make_local(rows, draw(8, seed=1), {}))
    assert step.momentum == 0.0
    assert move.accepted


def test_a_rate_that_falls_along_a_cosine() -> None:
    rate = vmc.cosine_decay(2.0, 5)
    assert [rate(step) for step in (0, 2, 4, 9)] == pytest.approx([2.0, 1.1, 0.2, 0.2])
