"""Conjugate gradients: stopping rules, both spaces, preconditioning."""

from __future__ import annotations

import pytest
import torch

import pullback as pb
from pullback.grams import Operator
from pullback.solvers import ConjugateGradient
from pullback.testing import assert_close
from tests.solvers.helpers import hold, random, vector, with_spectrum


def counting_gram(a: torch.Tensor) -> tuple[Operator, list[str]]:
    """A matrix-free Gram that writes down its products."""
    observed: list[str] = []

    def project(v: torch.Tensor) -> torch.Tensor:
        observed.append("A")
        return a @ v

    def lift(c: torch.Tensor) -> torch.Tensor:
        observed.append("Aᵀ")
        return a.T @ c

    return Operator(project, lift, (a.shape[0], a.shape[1]), a.dtype, a.device), observed


def test_the_iteration_limit_is_reported_with_a_remedy() -> None:
    a = with_spectrum(torch.logspace(0, -3, 30, dtype=torch.float64), 30, 30)
    solver = ConjugateGradient(1e-8, max_iterations=3)
    solution = solver.solve(solver.init(hold(a, "rows")), vector(30))
    assert solution.status is pb.Status.MAX_ITERATIONS
    assert solution.status.ok, "an unfinished iterate can still be used"
    assert "max_iterations" in solution.status.value
    assert solution.residual is not None
    assert solution.residual > solver.tol


def test_the_residual_is_measured() -> None:
    a = random(20, 8)
    g = vector(8)
    for limit in (2, 4, None):
        solver = ConjugateGradient(0.1, max_iterations=limit)
        solution = solver.solve(solver.init(hold(a, "dense")), g)
        true = a.T @ (a @ solution.x) + 0.1 * solution.x - g
        assert solution.residual == pytest.approx(
            float(true.norm() / g.norm()), rel=1e-6, abs=1e-12
        )


def test_it_stops_on_the_tolerance() -> None:
    a = random(50, 20)
    g = vector(20)
    steps = []
    for tol in (1e-1, 1e-4, 1e-10):
        gram, products = counting_gram(a)
        solver = ConjugateGradient(0.1, tol=tol)
        solution = solver.solve(solver.init(gram), g)
        assert solution.status is pb.Status.OK
        assert solution.residual is not None
        assert solution.residual <= tol
        steps.append(products.count("A"))
    assert steps[0] < steps[1] < steps[2] <= 40


def test_it_stops_on_progress() -> None:
    """A long tail of tiny curvatures: the quadratic model stops gaining, the residual does not."""
    sigma = torch.cat([torch.linspace(1, 2, 5), torch.logspace(-1, -5, 195)]).double()
    a = with_spectrum(sigma, 200, 200)
    u, s, _ = torch.linalg.svd(a)
    g = a.T @ (u @ torch.where(s > 0.5, 1.0, 1e-3).double())
    counts = {}
    for progress in (0.0, 5e-4):
        gram, products = counting_gram(a)
        solver = ConjugateGradient(1e-12, tol=1e-14, progress=progress, max_iterations=150)
        solution = solver.solve(solver.init(gram), g)
        counts[progress] = products.count("A")
    assert counts[0.0] == 150
    assert 10 < counts[5e-4] < 75
    assert solution.status is pb.Status.OK


def test_sample_space_is_used_where_it_is_smaller() -> None:
    """From r with n < p the vectors of the iteration have length n."""
    a = random(4, 50)
    r = vector(4)
    gram, products = counting_gram(a)
    solver = ConjugateGradient(0.1, tol=1e-13)
    solution = solver.solve(solver.init(gram), a.T @ r, whitened=r)
    assert products[0] == "Aᵀ", "the first product is AAᵀ's"
    assert len(products) <= 2 * 8 + 1, "at most 2n iterations"
    want = torch.linalg.solve(a.T @ a + 0.1 * torch.eye(50).double(), a.T @ r)
    assert_close(solution.x, want, 1e-10, "x = Aᵀ(AAᵀ + λ)⁻¹r")
    kernel = solver.solve(solver.init(hold(a, "kernel")), a.T @ r, whitened=r).x
    assert_close(kernel, want, 1e-10, "the kernel's matrix serves")


def test_a_good_preconditioner_saves_iterations() -> None:
    a = with_spectrum(torch.logspace(0, -3, 40, dtype=torch.float64), 60, 40)
    g = vector(40)
    damping = 1e-5
    inverse = torch.linalg.inv(a.T @ a + damping * torch.eye(40).double())
    counts = []
    for preconditioner in (None, inverse.matmul):
        gram, products = counting_gram(a)
        solver = ConjugateGradient(
            damping, tol=1e-10, max_iterations=400, preconditioner=preconditioner
        )
        solution = solver.solve(solver.init(gram), g)
        assert_close(solution.x, inverse @ g, 1e-4, "x")
        counts.append(products.count("A"))
    assert counts[1] <= 3 < 20 < counts[0]
