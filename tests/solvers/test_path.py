"""The damping path: x(λ), its norm, its predicted reduction, and the secular equation."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from pullback.solvers import Path, PseudoInverse, Sketched
from pullback.testing import assert_close
from tests.solvers.helpers import FORMS, hold, random, vector, with_spectrum

DAMPINGS = torch.tensor([1e-8, 1e-3, 0.1, 1.0, 50.0], dtype=torch.float64)


def path_of(
    form: str, *, white: bool, outside: bool = False
) -> tuple[Path, torch.Tensor, torch.Tensor]:
    a = random(5, 8)
    r = vector(5)
    g = a.T @ r + (0.1 * vector(8, 3) if outside else 0)
    solver = PseudoInverse()
    path = solver.path(solver.init(hold(a, form)), g, r if white else None)
    return path, a, g


CHOICES = ((True, False), (False, False), (False, True))
CASES = [(form, *choice) for form, choice in product(FORMS, CHOICES)]


@pytest.mark.parametrize(("form", "white", "outside"), CASES)
def test_the_path_is_every_damped_solution(form: str, white: bool, outside: bool) -> None:
    path, a, g = path_of(form, white=white, outside=outside)
    if outside:
        dampings = DAMPINGS[1:]
    else:
        dampings = DAMPINGS
    eye = torch.eye(8).double()
    want = torch.stack([torch.linalg.solve(a.T @ a + d * eye, g) for d in dampings])
    if not outside:  # g in the range: at tiny λ the dense solve itself loses digits
        want[0] = torch.linalg.pinv(a.T @ a, rtol=1e-10) @ g
    assert_close(path.at(dampings), want, 1e-6, "x(λ), one row per damping")
    assert_close(path.norm(dampings), want.norm(dim=1), 1e-6, "‖x(λ)‖")
    for scale in (1.0, 0.3):
        m = scale * want
        reduction = m @ g - 0.5 * (m @ (a.T @ a) * m).sum(1)
        assert_close(path.predict_reduction(dampings, scale), reduction, 1e-6, "gᵀm − ½mᵀGm")


def test_the_secular_equation_is_solved_for_many_radii() -> None:
    """Over sixteen decades of spectrum and radius: ‖x(λ)‖ = radius to round-off."""
    sigma = torch.logspace(2, -6, 40, dtype=torch.float64)
    a = with_spectrum(sigma, 40, 60)
    r = vector(40)
    solver = PseudoInverse()
    path = solver.path(solver.init(hold(a, "rows")), a.T @ r, r)
    longest = float(path.norm(torch.zeros(1).double()))
    radii = longest * torch.logspace(-10, -0.001, 200, dtype=torch.float64)
    dampings = path.damping_for(radii)
    assert bool((dampings > 0).all())
    assert bool((dampings.diff() < 0).all()), "a longer radius has less damping"
    error = float((path.norm(dampings) / radii - 1).abs().max())
    assert error < 1e-9, f"‖x(λ)‖/radius − 1 = {error:.1e}"


@pytest.mark.parametrize("outside", [0.0, 1e-3])
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_secular_equation_over_the_whole_range_of_a_dtype(
    dtype: torch.dtype, power: float, outside: float
) -> None:
    """Eigenvalues over 28 (float32: 14) decades, radii up to the full step itself."""
    double = dtype is torch.float64
    values = torch.logspace(0, -28 if double else -14, 300, dtype=torch.float64)
    gamma = vector(300) * values**power
    if outside:
        beyond = outside * vector(5).to(dtype)
    else:
        beyond = None
    path = Path(values.to(dtype), gamma.to(dtype), lambda c: c, beyond)
    longest = path.norm(torch.tensor([1e-15 if outside else 0.0], dtype=dtype))
    steps = torch.logspace(-12 if double else -6, -0.001, 100, dtype=dtype)
    near = 1 - torch.tensor([1e-3, 1e-9, 1e-12] if double else [1e-2, 1e-4, 1e-5], dtype=dtype)
    radii = longest * torch.cat([steps, near])
    dampings = path.damping_for(radii)
    assert bool((dampings > 0).all())
    error = float((path.norm(dampings) / radii - 1).abs().max())
    assert error < 10 * torch.finfo(dtype).eps, f"‖x(λ)‖/radius − 1 = {error:.1e}"


@pytest.mark.parametrize("scale", [1e-18, 1e-9, 1e9, 1e18])
def test_a_path_in_float32_neither_overflows_nor_vanishes(scale: float) -> None:
    path = Path(torch.logspace(0, -12, 50), scale * vector(50).float(), lambda c: c)
    exact = Path(path.eigenvalues.double(), path.gamma.double(), lambda c: c)
    dampings = torch.tensor([1e-6, 1e-3, 1.0, 1e3])
    assert_close(path.norm(dampings).double(), exact.norm(dampings.double()), 1e-6, "‖x(λ)‖")
    recovered = path.damping_for(path.norm(dampings))
    assert float((recovered / dampings - 1).abs().max()) < 1e-5


def test_beyond_the_full_step_there_is_no_damping() -> None:
    for form in FORMS:
        for white in (True, False):
            path, a, g = path_of(form, white=white)
            full = torch.linalg.pinv(a.T @ a, rtol=1e-10) @ g
            radii = full.norm() * torch.tensor([0.5, 1 + 1e-9, 2, 1e6], dtype=torch.float64)
            dampings = path.damping_for(radii)
            assert dampings[1:].tolist() == [0.0, 0.0, 0.0], f"{form}: {dampings}"
            assert float(dampings[0]) > 0
            assert_close(path.at(dampings[2:3])[0], full, 1e-9, f"{form}: x(0) = G⁺g")


def test_with_g_outside_the_range_every_radius_is_reached() -> None:
    """g⊥/λ grows without bound."""
    path, _, _ = path_of("rows", white=False, outside=True)
    radii = torch.logspace(-3, 4, 30, dtype=torch.float64)
    dampings = path.damping_for(radii)
    assert bool((dampings > 0).all())
    assert_close(path.norm(dampings), radii, 1e-9, "‖x(λ)‖ = radius")


def test_a_zero_gradient_has_a_zero_path() -> None:
    a = random(5, 8)
    solver = PseudoInverse()
    state = solver.init(hold(a, "rows"))
    for white in (None, torch.zeros(5).double()):
        path = solver.path(state, torch.zeros(8).double(), white)
        dampings = path.damping_for(torch.ones(3).double())
        assert torch.equal(dampings, torch.zeros(3).double())
        assert torch.equal(path.at(dampings), torch.zeros(3, 8).double())


@pytest.mark.parametrize("columns", [None, 4])
@pytest.mark.parametrize("white", [True, False])
def test_a_sketch_has_its_own_path(columns: int | None, white: bool) -> None:
    a = random(12, 8)
    r = vector(12)
    solver = Sketched(6, columns)
    state = solver.init(hold(a, "rows"))
    path = solver.path(state, a.T @ r, r if white else None)
    actual = path.at(DAMPINGS[1:])
    for x, damping in zip(actual, DAMPINGS[1:], strict=True):
        solution = solver.solve(state, a.T @ r, float(damping), whitened=r if white else None)
        assert_close(x, solution.x, 1e-10, f"x({float(damping):g})")
    radii = 0.5 * path.norm(DAMPINGS[2:3])
    assert_close(path.at(path.damping_for(radii)).norm(dim=1), radii, 1e-9, "secular equation")
