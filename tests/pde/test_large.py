"""Many parameters: the default moves in a random subspace, and says so before it starts."""

from __future__ import annotations

import pytest
import torch

import pullback as pb
from pullback import pde


def test_many_parameters_are_announced(capfd: pytest.CaptureFixture[str]) -> None:
    """2,751 parameters and as many residuals, in panels; a step lowers the loss."""
    network = pde.mlp(2, 50, 50, 1, seed=0)
    options = {"points": 2020, "steps": 1, "memory": 2**22, "sampler": "sobol"}
    solution = pde.solve(pde.Poisson(dim=2), network, **options)  # pyright: ignore[reportArgumentType]
    said = capfd.readouterr().err
    assert "2,751 parameters and 2,525 residuals" in said
    assert "random subspace of 1,000 directions" in said
    assert "GiB a step" in said
    assert solution.loss < 0.9 * solution.history.loss[0]


def test_few_residuals_are_solved_exactly(capfd: pytest.CaptureFixture[str]) -> None:
    network = pde.mlp(2, 50, 50, 1, seed=0)
    pde.solve(pde.Poisson(dim=2), network, points=40, steps=1)
    assert "subspace" not in capfd.readouterr().err


@pytest.mark.slow
def test_subspaces_converge() -> None:
    """A quarter of the parameters in every step still solves Poisson's equation."""
    network = pde.mlp(1, 13, 1, seed=0)
    solver = pb.solvers.Sketched(columns=10, rcond=5e-14)
    torch.manual_seed(0)
    solution = pde.solve(
        pde.Poisson(dim=1), network, points=80, steps=40, solver=solver, progress=False
    )
    assert solution.error < 1e-2
