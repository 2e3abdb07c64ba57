"""Laws of solvers: one `init` serves every right-hand side and damping, and r agrees with g."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..grams import FactoredGram, Gram
from ..solvers import Relative, Solution, Solver
from .assertions import assert_close


def check_solver(
    solver: Solver, gram: Gram, *, dampings: Sequence[float] = (1e-2, 1.0), tol: float = 1e-8
) -> None:
    """(G + λ)⁻¹g for each damping from one `init`, from g and from r, against a dense solve.

    Args:
        solver: what to check; it must be exact (a truncated or sketched solver is not).
        gram: the system, well conditioned once damped, preferably in float64.
        dampings: absolute values λ > 0.
        tol: relative error allowed.

    >>> from pullback.grams import Rows
    >>> from pullback.solvers import Cholesky
    >>> check_solver(Cholesky(), Rows(torch.randn(3, 5, dtype=torch.float64)))
    """
    generator = torch.Generator().manual_seed(0)
    factored = isinstance(gram, FactoredGram)
    noise = torch.randn(gram.count if factored else gram.size, generator=generator)
    c = noise.to(gram.device, gram.dtype)
    g, r = (gram.lift(c), c) if isinstance(gram, FactoredGram) else (gram.matvec(c), None)
    state = solver.init(gram)
    first = _solved(solver, state, g, None, dampings[0])
    for damping in dampings:
        want = _dense(gram, g, damping)
        for white in (None, r) if factored else (None,):
            found = _solved(solver, state, g, white, damping)
            origin = "g" if white is None else "r"
            assert_close(found.x, want, tol, f"(G + {damping:g})⁻¹g from {origin}")
            if found.damping != damping:
                raise AssertionError(f"the damping used was {found.damping}, not {damping}")
    again = _solved(solver, state, g, None, dampings[0])
    assert_close(again.x, first.x, 0.0, "solving does not change the state")
    _check_relative(solver, state, gram, g, tol)


def _solved(
    solver: Solver, state: object, g: Tensor, white: Tensor | None, damping: float
) -> Solution:
    found = solver.solve(state, g, damping, whitened=white)
    if not found.status.ok:
        raise AssertionError(f"the solve failed: {found.status.value}")
    return found


def _dense(gram: Gram, g: Tensor, damping: float) -> Tensor:
    eye = torch.eye(gram.size, dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve(gram.dense() + damping * eye, g)


def _check_relative(solver: Solver, state: object, gram: Gram, g: Tensor, tol: float) -> None:
    """Relative(c) is c·tr(G)/p."""
    absolute = 0.1 * float(gram.trace()) / gram.size
    if absolute > 0:
        found = solver.solve(state, g, Relative(0.1))
        assert_close(found.x, _dense(gram, g, absolute), tol, "Relative(c) means c·tr(G)/p")
