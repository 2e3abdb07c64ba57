"""Laws of all solvers, over forms and shapes, and on random matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pullback as pb
from pullback.solvers import Cholesky, PseudoInverse, Relative, Solution, Solver
from pullback.testing import check_solver
from tests.laws.cases import SolverCase
from tests.laws.table import SOLVERS
from tests.solvers.helpers import FORMS, hold, random, vector, with_spectrum

PAIRS = [
    pytest.param(case, form, id=f"{case.name}-{form}") for case in SOLVERS for form in case.forms
]


@pytest.mark.parametrize(("case", "form"), PAIRS)
@pytest.mark.parametrize("shape", [(4, 9), (20, 5), (6, 6)], ids=str)
def test_laws(case: SolverCase, form: str, shape: tuple[int, int]) -> None:
    check_solver(case.make(1e-2), hold(random(*shape), form))


@pytest.mark.parametrize(("case", "form"), PAIRS)
def test_laws_of_a_deficient_system(case: SolverCase, form: str) -> None:
    sigma = torch.tensor([3.0, 1.0, 0.5]).double()
    check_solver(case.make(1e-2), hold(with_spectrum(sigma, 7, 6), form))


@pytest.mark.parametrize(("case", "form"), PAIRS)
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_a_gram_that_is_zero_or_broken_is_a_failure_value(
    case: SolverCase, form: str, bad: float
) -> None:
    """No exception, no NaN: a status whose sentence has the remedy."""
    solver = case.make(0.0)
    gram = hold(torch.full((3, 5), bad, dtype=torch.float64), form)
    solution = solver.solve(solver.init(gram), torch.ones(5).double(), 0.0)
    assert solution.status is pb.Status.SINGULAR
    assert bool(torch.isfinite(solution.x).all())
    assert "damping" in solution.status.value


@pytest.mark.parametrize(("case", "form"), PAIRS)
def test_a_zero_right_hand_side_gives_zero(case: SolverCase, form: str) -> None:
    solver = case.make(1e-2)
    state = solver.init(hold(random(4, 9), form))
    solution = solver.solve(state, torch.zeros(9).double())
    assert torch.equal(solution.x, torch.zeros(9).double())
    assert solution.status.ok


@pytest.mark.parametrize("damping", [-1.0, float("nan"), float("inf")])
def test_unusable_dampings_are_refused(damping: float) -> None:
    gram = hold(random(3, 4), "rows")
    for solver in (Cholesky(), PseudoInverse()):
        with pytest.raises(pb.PullbackError, match="damping"):
            solver.solve(solver.init(gram), vector(4), damping)
    with pytest.raises(pb.PullbackError, match="damping"):
        Relative(damping)


@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(0, 10_000),
    st.floats(-3, 1),
    st.sampled_from([Cholesky, PseudoInverse]),
)
@settings(max_examples=60, deadline=None)
def test_forms_agree_on_random_matrices(
    n: int, p: int, seed: int, exponent: float, solver_type: type[Solver]
) -> None:
    a = random(n, p, seed)
    damping = 10.0**exponent
    r = vector(n, seed + 1)
    g = a.T @ r
    want = torch.linalg.solve(a.T @ a + damping * torch.eye(p).double(), g)
    for form in FORMS:
        solver = solver_type()
        state = solver.init(hold(a, form))
        for white in (None, r):
            x = solver.solve(state, g, damping, whitened=white).x
            error = float((x - want).norm())
            assert error <= 1e-8 * float(g.norm()) / damping, f"{form}: {error:.1e}"


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_pseudo_inverse_is_moore_penrose_on_random_ranks(n: int, p: int, k: int, seed: int) -> None:
    rank = min(n, p, k)
    sigma = torch.linspace(1, 2, rank, dtype=torch.float64)
    a = with_spectrum(sigma, n, p, seed)
    r = vector(n, seed + 1)
    want = torch.linalg.pinv(a, rtol=1e-8) @ r
    for form in FORMS:
        solver = PseudoInverse()
        solution = solver.solve(solver.init(hold(a, form)), a.T @ r, whitened=r)
        assert solution.rank == rank
        assert float((solution.x - want).norm()) <= 1e-9 * float(r.norm()), form


def test_the_laws_catch_wrong_solvers() -> None:
    class Deaf(Cholesky):
        """Ignores the damping it is given."""

        def solve(self, state, rhs, damping=None, *, whitened=None) -> Solution:
            return super().solve(state, rhs, None, whitened=whitened)

    class Careless(Cholesky):
        """Takes r for g."""

        def solve(self, state, rhs, damping=None, *, whitened=None) -> Solution:
            solution = super().solve(state, rhs, damping)
            if whitened is None:
                return solution
            return Solution(2 * solution.x, solution.damping)

    class Forgetful(Cholesky):
        """Changes its state."""

        def solve(self, state, rhs, damping=None, *, whitened=None) -> Solution:
            solution = super().solve(state, rhs, damping, whitened=whitened)
            state.matrix = state.matrix + 1e-13 * torch.ones_like(state.matrix)
            state.factors = {}
            return solution

    gram = hold(random(4, 6), "rows")
    for message, solver in (("0.01", Deaf(1.0)), ("from r", Careless()), ("state", Forgetful())):
        with pytest.raises(AssertionError, match=message):
            check_solver(solver, gram)


def test_relative_damping_follows_the_gram() -> None:
    a: Tensor = random(4, 6)
    for scale in (1.0, 10.0):
        solver = Cholesky(Relative(0.1))
        solution = solver.solve(solver.init(hold(scale * a, "rows")), vector(6))
        want = 0.1 * scale**2 * float(a.square().sum()) / 6
        assert solution.damping == pytest.approx(want, rel=1e-12)
