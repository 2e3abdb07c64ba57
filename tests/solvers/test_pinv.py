"""PseudoInverse: accuracy from r against g, the cut-off, and many dampings from one spectrum."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from pullback._core.svd import svd
from pullback.grams import Kernel, Rows
from pullback.solvers import Cholesky, PseudoInverse, Spectrum, pinv
from pullback.testing import assert_close
from tests.solvers.helpers import FORMS, factored_gram, hold, random, vector, with_spectrum


@pytest.mark.parametrize("polar", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_at_condition_1e8_r_keeps_the_digits_that_g_has_lost(
    seed: int, polar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x = A⁺r with every singular direction alike: below 1e-8 from r, percents off from g."""
    n = 40
    monkeypatch.setattr(pinv, "svd", partial(svd, polar=polar))
    a = with_spectrum(torch.logspace(0, -8, n, dtype=torch.float64), n, n, seed)
    u, s, vt = torch.linalg.svd(a)
    want = vt.T @ torch.ones(n).double()
    r = u @ s  # = A want
    solver = PseudoInverse()
    state = solver.init(hold(a, "rows"))
    from_r = solver.solve(state, a.T @ r, whitened=r)
    from_g = solver.solve(state, a.T @ r)
    assert from_r.rank == n
    assert_close(from_r.x, want, 1e-8, "x from r at condition 1e8")
    error = float((from_g.x - want).norm() / want.norm())
    assert error > 1e-3, f"from g the error is only {error:.1e}: the comparison is void"


def test_cholesky_refines_with_r_where_it_has_rows() -> None:
    """Parameter space: one corrected step takes most of the lost digits back."""
    sigma = torch.logspace(0, -4, 10, dtype=torch.float64)
    a = with_spectrum(sigma, 30, 10)
    r = vector(30)
    want = torch.linalg.lstsq(a, r[:, None]).solution[:, 0]
    solver = Cholesky(0.0)
    state = solver.init(hold(a, "rows"))
    errors = [
        float((solver.solve(state, a.T @ r, whitened=w).x - want).norm() / want.norm())
        for w in (None, r)
    ]
    assert errors[1] < 1e-10
    assert errors[1] < 0.1 * errors[0]


@pytest.mark.parametrize("form", FORMS)
def test_rcond_cuts_singular_values_of_a(form: str) -> None:
    """At 1e-2 of σ_max a value of 5e-3 goes and one of 2e-2 stays: of A, not of G."""
    a = with_spectrum(torch.tensor([1.0, 2e-2, 5e-3]).double(), 5, 4)
    r = vector(5)
    solver = PseudoInverse(rcond=1e-2)
    solution = solver.solve(solver.init(hold(a, form)), a.T @ r, whitened=r)
    assert solution.rank == 2
    assert_close(solution.x, torch.linalg.pinv(a, rtol=1e-2) @ r, 1e-8, "truncated A⁺r")


def test_squared_forms_do_not_trust_what_they_cannot_see() -> None:
    """σ = 1e-9 σ_max is round-off of K and G; rows see it."""
    a = with_spectrum(torch.tensor([1.0, 0.5, 1e-9]).double(), 6, 8)
    ranks = {f: PseudoInverse(1e-12).init(hold(a, f)).rank for f in FORMS}
    assert ranks == {"rows": 3, "kernel": 2, "dense": 2, "matrix_free": 2}


@pytest.mark.parametrize("form", FORMS)
def test_many_dampings_from_one_factorization(form: str) -> None:
    a = random(5, 8)
    solver = PseudoInverse()
    state = solver.init(hold(a, form))
    g = a.T @ vector(5)
    for damping in (0.0, 1e-6, 1e-2, 1.0, 1e4):
        eye = torch.eye(8).double()
        if damping == 0:
            dense = torch.linalg.pinv(a.T @ a)
        else:
            dense = torch.linalg.inv(a.T @ a + damping * eye)
        assert_close(solver.solve(state, g, damping).x, dense @ g, 1e-8, f"λ = {damping:g}")


@pytest.mark.parametrize("form", FORMS)
def test_what_g_has_outside_the_range_is_damped_like_the_rest(form: str) -> None:
    """A regularizer's gradient: (G + λ)⁻¹g keeps g⊥/λ; the undamped G⁺g drops it."""
    a = random(3, 7)
    g = vector(7)
    solver = PseudoInverse()
    state = solver.init(hold(a, form))
    want = torch.linalg.solve(a.T @ a + 0.1 * torch.eye(7).double(), g)
    assert_close(solver.solve(state, g, 0.1).x, want, 1e-10, "damped, g outside the range")
    assert_close(solver.solve(state, g).x, torch.linalg.pinv(a.T @ a) @ g, 1e-9, "undamped")


@pytest.mark.parametrize("form", ["rows", "kernel", "matrix_free"])
def test_init_is_where_the_work_is(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After init no further decomposition happens, whatever the damping."""
    gram = factored_gram(random(4, 6), form)
    solver = PseudoInverse()
    state = solver.init(gram)

    def refuse(*args, **kwargs):
        raise AssertionError("factorized again")

    for name in ("svd", "eigh", "cholesky", "cholesky_ex", "qr", "lstsq", "inv", "pinv"):
        monkeypatch.setattr(torch.linalg, name, refuse)
    for damping in (0.0, 1e-3, 1.0):
        assert solver.solve(state, vector(6), damping).status.ok
    path = solver.path(state, vector(6))
    assert path.at(torch.tensor([0.1, 1.0]).double()).shape == (2, 6)


@pytest.mark.parametrize("p", [10_000_000])
def test_many_parameters_in_float32(p: int) -> None:
    """Neither the rank nor the part of g outside the rows depends on how long the rows are."""
    index = torch.arange(4)

    def project(v):
        return v[index]

    def lift(c):
        return torch.zeros(p).index_copy_(0, index, c)

    gram = Kernel(torch.eye(4), project, lift, p)
    solver = PseudoInverse()
    g = torch.zeros(p)
    g[:8] = 1.0
    solution = solver.solve(solver.init(gram), g, 0.5)
    assert solution.rank == 4
    assert torch.allclose(solution.x[:4], torch.full((4,), 1 / 1.5))
    assert torch.allclose(solution.x[4:8], torch.full((4,), 1 / 0.5))


@pytest.mark.parametrize("shape", [(90, 40), (40, 90), (40, 40)])
def test_the_route_of_cuda_has_the_same_path(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, predicted reductions and dampings of both routes, at condition 1e10."""
    sigma = torch.logspace(0, -10, 40, dtype=torch.float64)
    a = with_spectrum(sigma, *shape)
    r = vector(shape[0])
    solver = PseudoInverse()
    paths = []
    for polar in (False, True):
        monkeypatch.setattr(pinv, "svd", partial(svd, polar=polar))
        paths.append(solver.path(solver.init(Rows(a)), a.T @ r, r))
    plain, other = paths
    dampings = torch.logspace(-17, 1, 19, dtype=torch.float64)
    tol = 1e-6  # ε/√λ where the smallest directions lead
    assert_close(other.norm(dampings), plain.norm(dampings), tol, "‖x(λ)‖")
    reductions = [path.predict_reduction(dampings) for path in (other, plain)]
    assert_close(*reductions, 1e-8, "predicted")
    assert_close(other.at(dampings[4:]), plain.at(dampings[4:]), tol, "x(λ)")
    radii = plain.norm(dampings)
    recovered = other.damping_for(radii)
    want = plain.damping_for(radii)
    assert float((recovered / want - 1).abs().max()) < 1e-5


def test_many_rows_are_lifted_at_once() -> None:
    a = random(5, 8)
    c = random(3, 5)
    for form in ("rows", "kernel", "matrix_free"):
        assert_close(factored_gram(a, form).lift_rows(c), c @ a, 1e-14, f"c A from {form}")


def test_the_spectrum_of_a_broken_matrix_keeps_shape_and_device() -> None:
    gram = Rows(torch.full((3, 4), torch.nan).double())
    state = PseudoInverse().init(gram)
    assert isinstance(state, Spectrum)
    assert not state.finite
    x = state.combine(torch.ones(2, 1).double())
    assert x.shape == (2, 4)
    assert x.dtype == torch.float64


def test_only_what_is_not_finite_is_broken() -> None:
    """The sum of finite entries may overflow."""
    huge = torch.full((3, 2), 1e308, dtype=torch.float64)
    assert pinv.is_finite(huge)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = huge.clone()
        broken[1, 1] = bad
        assert not pinv.is_finite(broken)
    assert not pinv.is_finite(torch.tensor([torch.inf, -torch.inf]))


def test_a_path_is_that_of_its_own_right_hand_side() -> None:
    a = random(6, 3)
    one = vector(3)
    two = vector(3) + 1
    r = vector(6)
    solver = PseudoInverse()
    state = solver.init(Rows(a))
    for g, white in ((one, None), (two, None), (a.T @ r, r), (one, None), (a.T @ r, None)):
        fresh = solver.path(solver.init(Rows(a)), g, white)
        assert_close(solver.path(state, g, white).gamma, fresh.gamma, 1e-14, "γ")
