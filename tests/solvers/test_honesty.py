"""Solutions that lost their digits say so, and empty Grams are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback._core.errors import Status


def ill(n: int = 12, p: int = 40) -> tuple[Tensor, Tensor]:
    """Rows with singular values from 1 to 1e-6, and a gradient in their span and beside it."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(k, n, dtype=torch.float64))[0] for k in (n, p))
    a = (u * torch.logspace(0, -6, n, dtype=torch.float64)) @ v.T
    return a, torch.randn(p, dtype=torch.float64)


@pytest.mark.parametrize("solver", [pb.solvers.Cholesky(), pb.solvers.PseudoInverse()], ids=repr)
@pytest.mark.parametrize("damping", [1e-4, 1e-10, 1e-13, 1e-15])
@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "operator"])
def test_sample_space_with_g_alone_reports_what_it_lost(
    solver: pb.solvers.Solver, has_kernel: bool, damping: float
) -> None:
    a, g = ill()
    gram = pb.grams.Operator(lambda v: a @ v, lambda c: a.T @ c, a.shape, a.dtype, a.device)
    if has_kernel:
        gram = pb.grams.Kernel(a @ a.T, lambda v: a @ v, lambda c: a.T @ c, a.shape[1])
    solution = solver.solve(solver.init(gram), g, damping)
    truth = ((a.T @ a) @ solution.x + solution.damping * solution.x - g).norm() / g.norm()
    if damping >= 1e-4:
        assert (solution.residual, solution.status) == (None, Status.OK)
        assert truth < 1e-6
        return
    assert solution.residual is not None
    assert abs(solution.residual - float(truth)) <= 1e-2 * float(truth) + 1e-12
    if truth > 1e-6:
        assert solution.status is Status.INACCURATE
        assert "damping" in solution.status.value


def test_an_eigenvalue_above_all_diagonal_entries_is_seen() -> None:
    n = 400
    p = 440
    torch.manual_seed(0)
    left = torch.randn(n, n, dtype=torch.float64)
    left[:, 0] = 1.0  # the top vector has all samples alike
    u = torch.linalg.qr(left)[0]
    v = torch.linalg.qr(torch.randn(p, n, dtype=torch.float64))[0]
    small = torch.logspace(-3, -7, n - 1, dtype=torch.float64)
    a = (u * torch.cat([torch.ones(1, dtype=torch.float64), small])) @ v.T
    gram = pb.grams.Kernel(a @ a.T, lambda v: a @ v, lambda c: a.T @ c, p)
    solver = pb.solvers.Cholesky()
    assert solver.solve(solver.init(gram), a.T @ u[:, 0], 3e-10).residual is not None


def test_with_r_nothing_is_lost_and_nothing_is_asked() -> None:
    a, _ = ill()
    r = torch.ones(len(a), dtype=torch.float64)
    gram = pb.grams.Kernel(a @ a.T, lambda v: a @ v, lambda c: a.T @ c, a.shape[1])
    solver = pb.solvers.Cholesky()
    solution = solver.solve(solver.init(gram), a.T @ r, 1e-10, whitened=r)
    assert solution.status is Status.OK


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)], ids=["parameters", "samples"])
@pytest.mark.parametrize("damping", [1e-16, 1e-15, 1e-14, 1e-10])
@pytest.mark.parametrize("known", [True, False], ids=["r", "g"])
def test_a_damping_below_the_round_off_of_a_singular_gram_is_named(
    shape: tuple[int, int], damping: float, known: bool
) -> None:
    """Where the factorization succeeds by luck, x may be anything: that is no solution."""
    for seed in range(8):
        torch.manual_seed(seed)
        one, two = (torch.randn(n, 6, dtype=torch.float64) for n in shape)
        a = one @ two.T
        r = torch.randn(shape[0], dtype=torch.float64)
        solver = pb.solvers.Cholesky(pb.solvers.Relative(damping))
        solution = solver.solve(
            solver.init(pb.grams.Rows(a)), a.T @ r, whitened=r if known else None
        )
        u, s, v = torch.linalg.svd(a, full_matrices=False)
        u = u[:, :6]
        s = s[:6]
        v = v[:6]
        want = v.T @ (s / (s * s + solution.damping) * (u.T @ r))
        off = float((solution.x - want).norm() / want.norm())
        if off > 0.1:
            assert solution.status is not Status.OK
        if solution.status is Status.INACCURATE:
            assert solution.residual is not None
        if damping == 1e-10 and known:
            assert solution.status is Status.OK


@pytest.mark.parametrize("small", [1e-6, 1e-9, 1e-11])
@pytest.mark.parametrize("damping", [1e-6, 1e-10, 1e-12, 1e-14, 1e-16])
@pytest.mark.parametrize("known", [True, False], ids=["r", "g"])
def test_conjugate_gradients_that_end_too_early_for_the_damping_say_so(
    small: float, damping: float, known: bool
) -> None:
    """Directions of small singular values are below the tolerance in g, and long in x."""
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(k, 20, dtype=torch.float64))[0] for k in (20, 60))
    s = torch.cat([torch.linspace(1, 0.5, 15), torch.full((5,), small)]).double()
    a = (u * s) @ v.T
    r = torch.randn(20, dtype=torch.float64)
    solver = pb.solvers.ConjugateGradient(damping)
    solution = solver.solve(solver.init(pb.grams.Rows(a)), a.T @ r, whitened=r if known else None)
    want = v @ (s * (u.T @ r) / (s * s + damping))
    off = float((solution.x - want).norm() / want.norm())
    assert solution.status is not Status.OK or off < 0.1
    if damping == 1e-6:
        assert solution.status is Status.OK
    truth = (a.T @ (a @ solution.x) + damping * solution.x - a.T @ r).norm() / (a.T @ r).norm()
    assert solution.residual is not None
    if solution.status is not Status.MAX_ITERATIONS:
        assert abs(solution.residual - float(truth)) <= 1e-3 * float(truth) + 1e-15


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_gram_is_refused(shape: tuple[int, int]) -> None:
    a = torch.zeros(shape)
    makers = [
        lambda: pb.grams.Rows(a),
        lambda: pb.grams.Kernel(a @ a.T, lambda v: a @ v, lambda c: a.T @ c, shape[1]),
        lambda: pb.grams.Operator(lambda v: a @ v, lambda c: a.T @ c, shape, a.dtype, a.device),
    ]
    for make in makers:
        with pytest.raises(pb.PullbackError, match="empty"):
            make()
    with pytest.raises(pb.PullbackError, match="empty"):
        pb.grams.Dense(torch.zeros(0, 0))
