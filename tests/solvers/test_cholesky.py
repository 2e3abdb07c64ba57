"""Cholesky: the small side, growing damping, and one factorization per damping."""

from __future__ import annotations

import pytest
import torch

import pullback as pb
from pullback.solvers import Cholesky
from pullback.testing import assert_close
from tests.solvers.helpers import FORMS, hold, random, vector, with_spectrum


@pytest.mark.parametrize("form", FORMS)
def test_damping_grows_on_a_singular_matrix_and_is_reported(form: str) -> None:
    """Rank below both sides. Round-off may hide it from the factorization: never with an OK."""
    for seed in range(30):
        for n, p in ((4, 6), (6, 4), (12, 15)):
            a = with_spectrum(torch.tensor([2.0, 1.0]).double(), n, p, seed)
            r = vector(n, seed)
            want = torch.linalg.pinv(a, rtol=1e-8) @ r
            solver = Cholesky(damping=0.0)
            state = solver.init(hold(a, form))
            for white in (None, r):
                solution = solver.solve(state, a.T @ r, whitened=white)
                assert solution.status is pb.Status.GREW_DAMPING, f"rank 2 of {(n, p)}, seed {seed}"
                assert solution.status.ok
                assert solution.damping > 0
                assert "damping" in solution.status.value
                assert_close(solution.x, want, 1e-5, "the grown damping does not drown x in noise")


def test_damping_grows_until_an_indefinite_matrix_is_definite() -> None:
    g = torch.diag(torch.tensor([1.0, -0.5]).double())
    solver = Cholesky(damping=1e-3)
    rhs = torch.ones(2).double()
    solution = solver.solve(solver.init(pb.grams.Dense(g)), rhs)
    assert solution.status is pb.Status.GREW_DAMPING
    assert solution.damping == pytest.approx(1.0)  # 1e-3 · 10³, the first above ½
    want = rhs / (g.diagonal() + solution.damping)
    assert_close(solution.x, want, 1e-12, "the damping that is reported is the one used")


def test_no_growth_is_reported_where_none_happened() -> None:
    solver = Cholesky(0.1)
    solution = solver.solve(solver.init(hold(random(3, 5), "rows")), vector(5))
    assert solution.status is pb.Status.OK
    assert solution.damping == 0.1


@pytest.mark.parametrize("form", ["rows", "kernel", "matrix_free"])
@pytest.mark.parametrize("shape", [(4, 9), (9, 4)], ids=str)
def test_the_small_side_is_factorized(form: str, shape: tuple[int, int]) -> None:
    state = Cholesky().init(hold(random(*shape), form))
    if form == "kernel":
        want = shape[0]
    else:
        want = min(shape)
    assert state.matrix.shape == (want, want)


@pytest.mark.parametrize("form", ["rows", "kernel", "matrix_free"])
def test_undamped_sample_space_from_g_and_from_r(form: str) -> None:
    """n < p and A of full row rank: both give A⁺r."""
    a = with_spectrum(torch.linspace(1, 3, 4, dtype=torch.float64), 4, 9)
    r = vector(4)
    solver = Cholesky(0.0)
    state = solver.init(hold(a, form))
    want = torch.linalg.pinv(a) @ r
    assert_close(solver.solve(state, a.T @ r).x, want, 1e-11, "from g")
    assert_close(solver.solve(state, a.T @ r, whitened=r).x, want, 1e-12, "from r")


def test_a_damping_is_factorized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many right-hand sides at one damping cost one factorization; a new damping one more."""
    calls = []
    original = torch.linalg.cholesky_ex

    def count_and_call(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", count_and_call)
    solver = Cholesky(0.1)
    state = solver.init(hold(random(4, 6), "rows"))
    for seed in range(3):
        solver.solve(state, vector(6, seed))
    assert len(calls) == 1
    solver.solve(state, vector(6), 1.0)
    assert len(calls) == 2
