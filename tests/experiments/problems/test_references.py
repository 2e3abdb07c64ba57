"""Reference solutions against their equations, other methods and published numbers."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from pullback._core.errors import PullbackError
from pullback.pde import Points
from pullback.pde.discretization.residual import LocalResidual
from pullback_experiments import problems
from pullback_experiments.problems import references
from pullback_experiments.problems.references import base
from pullback_experiments.problems.references.cavity_flow import Cavity
from pullback_experiments.problems.references.etdrk4 import FourierTrajectory
from tests.pde.differences import derivative, evaluate


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """One cache for this file, apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("PULLBACK_CACHE", str(path))
        patch.setattr(Cavity, "degrees", (44, 34))
        yield path


@pytest.fixture(scope="module")
def smooth_kdv(folder):
    return references.KortewegDeVries(mu=0.1)


@pytest.fixture(scope="module")
def thick_allen_cahn(folder):
    return references.AllenCahn(diffusion=0.01)


@pytest.fixture(scope="module")
def cavity(folder):
    return references.Cavity(100.0)


class TestAllenCahn:
    def test_equation(self, thick_allen_cahn):
        u = thick_allen_cahn
        x = np.linspace(-0.97, 0.97, 25)
        for t in (0.05, 0.5, 0.9):
            u_xx = derivative(lambda s, t=t: evaluate(u, s, t), 2, x, 5e-3)
            u_t = derivative(lambda s: evaluate(u, x, s), 1, t, 1e-3)
            value = evaluate(u, x, t)
            assert np.abs(u_t - 0.01 * u_xx - 5 * (value - value**3)).max() < 1e-6

    def test_initial_value_is_met(self, thick_allen_cahn):
        x = np.linspace(-1, 1, 201)
        start = x**2 * np.cos(math.pi * x)
        assert (evaluate(thick_allen_cahn, x, 0.0) == start).all()
        # u = w + O(t), and the kink of the heat flow w is off by 4√(Dt/π) at x = ±1
        t = 1e-9
        actual = evaluate(thick_allen_cahn, x, t)
        assert np.abs(actual - start)[1:-1].max() < 1e-6
        assert actual[0] + 1 == pytest.approx(4 * math.sqrt(0.01 * t / math.pi), rel=1e-3)

    def test_symmetry_bounds_and_accuracy(self, thick_allen_cahn):
        x = np.linspace(-1, 1, 101)
        t = np.linspace(0, 1, 21)
        values = evaluate(thick_allen_cahn, x[:, None], t)
        assert np.abs(values - values[::-1]).max() < 1e-13
        assert np.abs(values).max() <= 1 + 1e-12
        assert thick_allen_cahn.accuracy < 1e-9

    def test_continuous_where_panels_meet(self, thick_allen_cahn):
        x = np.linspace(-1, 1, 33)
        edges = thick_allen_cahn._trajectories[0].edges[2:-1]
        before = evaluate(thick_allen_cahn, x[:, None], edges * (1 - 1e-14))
        assert np.abs(before - evaluate(thick_allen_cahn, x[:, None], edges)).max() < 1e-11


class TestKdV:
    def test_equation(self, smooth_kdv):
        u = smooth_kdv
        x = np.linspace(-0.9, 0.9, 25)
        for t in (0.05, 0.5, 0.9):
            u_x, u_xxx = (derivative(lambda s, t=t: evaluate(u, s, t), i, x, 2e-3) for i in (1, 3))
            u_t = derivative(lambda s: evaluate(u, x, s), 1, t, 1e-4)
            assert np.abs(u_t + evaluate(u, x, t) * u_x + 0.01 * u_xxx).max() < 1e-5

    def test_conserved(self, smooth_kdv):
        """Mass ∫u, momentum ∫u² and energy ∫ ηu³/3 − μ²u_x²; the trapezoidal rule is exact."""
        n = 512
        x = -1 + 2 * np.arange(n) / n
        t = np.linspace(0, 1, 7)
        u = evaluate(smooth_kdv, x, t[:, None])
        c = np.fft.rfft(u, axis=1)
        u_x = np.fft.irfft(1j * math.pi * np.arange(n // 2 + 1) * c, n, axis=1)
        assert np.abs(u.mean(axis=1)).max() < 1e-13
        assert np.abs((u**2).mean(axis=1) - 0.5).max() < 1e-10
        energy = (u**3 / 3 - 0.01 * u_x**2).mean(axis=1)
        assert np.abs(energy - energy[0]).max() < 1e-9

    def test_initial_value_period_and_accuracy(self, smooth_kdv):
        x = np.linspace(-1, 1, 101)
        assert np.abs(evaluate(smooth_kdv, x, 0.0) - np.cos(math.pi * x)).max() < 1e-14
        ends = evaluate(smooth_kdv, [[-1.0], [1.0]], np.linspace(0, 1, 11))
        assert np.abs(ends[0] - ends[1]).max() < 1e-12
        assert smooth_kdv.accuracy < 1e-9

    def test_too_narrow_solitons_are_refused(self):
        with pytest.raises(PullbackError, match="too narrow"):
            references.KortewegDeVries(mu=1e-3)


def residuals(problem, reference, x, t, h, dt):
    """The equation's residuals of the reference, by central differences in x and t."""

    def by(order, axis):
        step = dt if axis else h

        def at(s):
            return reference.values(np.stack([x, s] if axis else [s, t], axis=1))

        return torch.from_numpy(derivative(at, order, t if axis else x, step))

    names = {(): (0, 0), (1,): (1, 1), (0,): (1, 0), (0, 0): (2, 0), (0,) * 4: (4, 0)}
    actual = {i: by(*n) for i, n in names.items() if i}
    actual[()] = torch.from_numpy(reference.values(np.stack([x, t], axis=1)))
    sites = (Points(torch.from_numpy(np.stack([x, t], axis=1)), torch.ones(len(x))),)
    local = LocalResidual(problem, problem.conditions[0], sites, {})
    at = problem.fields.index
    return local({(s, f, i): actual[i][:, at(f)] for s, f, i in local.keys}), actual


class TestKuramotoSivashinsky:
    """In the beginning; what comes after is the same equation, and slow."""

    @pytest.fixture
    def problem(self, folder):
        return problems.KuramotoSivashinsky(time=0.05)

    def test_equation(self, problem):
        u = problem.reference
        x = np.linspace(0.1, 6.1, 40)
        r, actual = residuals(problem, u, x, np.full_like(x, 0.03), 0.02, 1e-4)
        assert r.abs().max() < 1e-4 * actual[(1,)].abs().max()

    def test_start_symmetry_and_accuracy(self, problem):
        u = problem.reference
        x = np.linspace(0, 2 * math.pi, 65)
        start = np.cos(x) * (1 + np.sin(x))
        assert np.abs(evaluate(u, x, 0.0) - start).max() < 1e-14
        about = np.linspace(0, math.pi / 2, 33)
        one, two = (evaluate(u, math.pi / 2 + s * about, 0.05) for s in (-1, 1))
        assert np.abs(one + two).max() < 1e-10
        assert u.accuracy < 1e-9

    def test_explicit_method_gives_the_same(self, problem):
        n = 96
        time = 0.02
        k = np.fft.rfftfreq(n, 1 / n)
        x = 2 * math.pi * np.arange(n) / n
        linear = 100 * ((k / 16) ** 2 - (k / 16) ** 4)

        def rate(_, u):
            square = np.fft.rfft(u * u)
            square[n // 3 :] = 0
            return np.fft.irfft(linear * np.fft.rfft(u) - 50j / 16 * k * square, n)

        start = np.cos(x) * (1 + np.sin(x))
        actual = solve_ivp(rate, (0, time), start, method="DOP853", rtol=1e-11, atol=1e-12)
        assert np.abs(actual.y[:, -1] - evaluate(problem.reference, x, time)).max() < 1e-7

    def test_chaos_is_refused(self):
        with pytest.raises(PullbackError, match="chaotic"):
            references.KuramotoSivashinsky(2.0)


class TestGrayScott:
    @pytest.fixture
    def problem(self, folder):
        return problems.GrayScott(time=0.05)

    def test_equation(self, problem):
        x = np.linspace(-0.95, 0.9, 40)
        r, actual = residuals(problem, problem.reference, x, np.full_like(x, 0.03), 5e-3, 1e-4)
        assert r.abs().max() < 1e-5 * actual[(1,)].abs().max()

    def test_start_symmetry_and_accuracy(self, problem):
        x = torch.linspace(0, 1, 65, dtype=torch.float64)
        at = lambda s, t: problem.reference(torch.stack([s * x, torch.full_like(x, t)], 1))  # noqa: E731
        bump = torch.exp(-10 * (1 - torch.cos(math.pi * x)))
        want = torch.stack([1 - 0.5 * bump, 0.25 * bump], 1)
        torch.testing.assert_close(at(1, 0.0), want, atol=1e-12, rtol=0)
        torch.testing.assert_close(at(1, 0.05), at(-1, 0.05), atol=1e-12, rtol=0)
        assert problem.reference.accuracy < 1e-7

    def test_explicit_method_gives_the_same(self, problem):
        n = 128
        time = 0.05
        k = math.pi * np.fft.rfftfreq(n, 1 / n)
        x = -1 + 2 * np.arange(n) / n

        def rate(_, w):
            u, v = w.reshape(2, n)
            u_xx, v_xx = (np.fft.irfft(-(k**2) * np.fft.rfft(f), n) for f in (u, v))
            reaction = 1000 * u * v * v
            return np.concatenate(
                [0.2 * u_xx + 40 * (1 - u) - reaction, 0.1 * v_xx - 100 * v + reaction]
            )

        bump = np.exp(-10 * (1 - np.cos(math.pi * x)))
        start = np.concatenate([1 - 0.5 * bump, 0.25 * bump])
        actual = solve_ivp(rate, (0, time), start, method="DOP853", rtol=1e-11, atol=1e-12)
        points = np.stack([x, np.full_like(x, time)], axis=1)
        want = problem.reference.values(points).T.ravel()
        assert np.abs(actual.y[:, -1] - want).max() < 1e-8

    def test_too_narrow_pulses_are_refused(self):
        with pytest.raises(PullbackError, match="too narrow"):
            references.GrayScott(diffusion=1e-3)


def assert_steady_flow(cavity, limit):
    """Momentum and continuity by central differences, away from the walls."""
    x, y = (s.ravel() for s in np.meshgrid(*2 * [np.linspace(0.15, 0.85, 7)]))

    def by_x(order):
        at = lambda s: cavity.values(np.stack([s, y], axis=1)).T  # noqa: E731
        return derivative(at, order, x, 5e-3)

    def by_y(order):
        at = lambda s: cavity.values(np.stack([x, s], axis=1)).T  # noqa: E731
        return derivative(at, order, y, 5e-3)

    u, v, _ = cavity.values(np.stack([x, y], axis=1)).T
    w_x = by_x(1)
    w_y = by_y(1)
    laplacian = by_x(2) + by_y(2)
    assert np.abs(w_x[0] + w_y[1]).max() < 1e-6
    momentum = u * w_x + v * w_y - laplacian / cavity.reynolds
    assert np.abs(momentum[0] + w_x[2]).max() < limit
    assert np.abs(momentum[1] + w_y[2]).max() < limit


class TestCavity:
    def test_walls(self, cavity):
        s = torch.linspace(0.01, 0.99, 33, dtype=torch.float64)
        zero = torch.zeros_like(s)
        one = torch.ones_like(s)
        lid = 16 * s**2 * (1 - s) ** 2
        for points, u in [((s, one), lid), ((s, zero), zero), ((zero, s), zero), ((one, s), zero)]:
            actual = cavity(torch.stack(points, dim=1))
            torch.testing.assert_close(actual[:, 0], u, atol=1e-10, rtol=0)
            torch.testing.assert_close(actual[:, 1], zero, atol=1e-10, rtol=0)

    def test_equations(self, cavity):
        assert_steady_flow(cavity, 1e-3)

    def test_mean_pressure_is_zero(self, cavity):
        nodes, weights = np.polynomial.legendre.leggauss(64)
        x, y = np.meshgrid((nodes + 1) / 2, (nodes + 1) / 2)
        p = cavity.values(np.stack([x.ravel(), y.ravel()], axis=1))[:, 2]
        assert abs(p @ np.outer(weights, weights).ravel() / 4) < 1e-5
        assert cavity.accuracy < 5e-5

    def test_slow_flow_is_symmetric(self):
        c = references.Cavity(1e-6)
        points = np.random.default_rng(2).random((50, 2))
        values = c.values(points)
        mirrored = c.values(points * [-1, 1] + [1, 0])
        assert np.abs(values - mirrored * [1, -1, -1])[:, :2].max() < 1e-6

    def test_large_reynolds_is_refused(self):
        with pytest.raises(PullbackError, match="1000"):
            references.Cavity(5000.0)


class TestTrajectory:
    def test_polynomial_in_time_and_modes_in_space(self):
        rng = np.random.default_rng(0)
        edges = np.array([0.0, 0.2, 1.0])
        nodes = np.linspace(edges[:-1], edges[1:], 5, axis=1)
        c = rng.standard_normal((3, 7)) + 1j * rng.standard_normal((3, 7))
        coefficients = np.add.reduce([nodes[..., None] ** i * c[i] for i in range(3)])
        u = FourierTrajectory(edges, coefficients)
        x = rng.uniform(-1, 1, 40)
        t = np.concatenate([[0.0, 0.2, 1.0, 0.05], rng.random(36)])
        modes = np.exp(1j * math.pi * np.outer(x + 1, np.arange(7))) * np.r_[1, np.full(6, 2)]
        exact = (modes * (t[:, None] ** np.arange(3) @ c)).sum(axis=1).real
        assert np.abs(u(x, t) - exact).max() < 1e-12


class TestCache:
    def fresh(self, monkeypatch, path):
        monkeypatch.setenv("PULLBACK_CACHE", str(path))
        counted = []

        def compute():
            counted.append(1)
            return {"a": np.arange(3.0)}

        def get(version=1, **parameters):
            arrays = base.load_or_compute("name", parameters, version, ("a",), compute)
            assert (arrays["a"] == np.arange(3)).all()
            return len(counted)

        return get

    def test_computed_once_for_each_key(self, monkeypatch, tmp_path):
        get = self.fresh(monkeypatch, tmp_path / "new" / "folder")
        assert [get(nu=1.0), get(nu=1.0), get(nu=2.0), get(2, nu=1.0), get(nu=2.0)] == [
            1,
            1,
            2,
            3,
            3,
        ]
        assert all(p.suffix == ".npz" for p in (tmp_path / "new" / "folder").iterdir())

    @pytest.mark.parametrize("damage", ["empty", "half", "flipped", "other"])
    def test_damaged_file_is_computed_again(self, monkeypatch, tmp_path, damage):
        get = self.fresh(monkeypatch, tmp_path)
        get()
        (path,) = tmp_path.iterdir()
        data = bytearray(path.read_bytes())
        if damage == "other":
            np.savez(path, b=np.zeros(2))
        elif damage == "flipped":
            data[len(data) // 2 - 40] ^= 255
            path.write_bytes(data)
        else:
            path.write_bytes(data[: len(data) // 2 if damage == "half" else 0])
        assert [get(), get()] == [2, 2]

    def test_no_folder_can_be_written(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("in the way")
        get = self.fresh(monkeypatch, tmp_path / "file" / "cache")
        assert [get(), get()] == [1, 2]

    def test_failed_write_leaves_nothing(self, monkeypatch, tmp_path):
        get = self.fresh(monkeypatch, tmp_path)

        def full(*_):
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", full)
        assert [get(), get()] == [1, 2]
        assert list(tmp_path.iterdir()) == []

    def test_default_folder(self, monkeypatch):
        monkeypatch.delenv("PULLBACK_CACHE")
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
        assert base.folder() == Path("/some/where/pullback")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert base.folder() == Path("~/.cache/pullback").expanduser()

    def test_solution_from_disk_is_the_same(self, smooth_kdv):
        smooth_kdv.accuracy  # noqa: B018  computes and stores
        repeated = references.KortewegDeVries(mu=0.1)
        repeated._compute = lambda: pytest.fail("computed again")
        x = np.linspace(-1, 1, 7)
        assert (evaluate(repeated, x, 0.3) == evaluate(smooth_kdv, x, 0.3)).all()
        assert repeated.accuracy == smooth_kdv.accuracy


class Shear(references.Reference):
    domain = ((-1.0, 1.0), (0.0, 1.0))

    def values(self, points):
        return (1 - points[:, :1]) * points[:, 1:]


class TestArguments:
    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
    @pytest.mark.parametrize(
        "make",
        [
            lambda v: references.AllenCahn(diffusion=v),
            lambda v: references.AllenCahn(reaction=v),
            lambda v: references.KortewegDeVries(eta=v),
            lambda v: references.KortewegDeVries(mu=v),
            lambda v: references.Cavity(reynolds=v),
        ],
    )
    def test_parameters_are_positive(self, make, bad):
        with pytest.raises(PullbackError, match="positive"):
            make(bad)

    @pytest.mark.parametrize(
        ("points", "why"),
        [
            (torch.zeros(3), "shape"),
            (torch.zeros(3, 3), "shape"),
            (torch.zeros(3, 2, dtype=torch.int64), "dtype"),
            (torch.tensor([[0.0, 0.5], [1.1, 0.5]]), "domain"),
            (torch.tensor([[0.0, -0.1]]), "domain"),
            (torch.tensor([[0.0, math.nan]]), "domain"),
        ],
    )
    def test_points_are_checked(self, points, why):
        with pytest.raises(PullbackError, match=why):
            Shear()(points)

    def test_unresolved_solution_is_refused(self):
        for error in (0.1, math.nan):
            with pytest.raises(PullbackError, match="not resolved"):
                base.require_resolved(error, "this")

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_dtype_rounding_and_no_points(self, dtype):
        u = Shear()
        x = torch.tensor([[1 + torch.finfo(dtype).eps, 0.5], [0.3, 0.2]], dtype=dtype)
        actual = u(x.requires_grad_())
        assert actual.dtype == dtype
        assert actual.shape == (2, 1)
        assert actual[0] == 0
        assert not actual.requires_grad
        assert u(torch.zeros(0, 2, dtype=dtype)).shape == (0, 1)

    def test_no_points_for_solvers(self, smooth_kdv):
        assert smooth_kdv(torch.zeros(0, 2)).shape == (0, 1)
        assert references.Cavity()(torch.zeros(0, 2)).shape == (0, 3)


@pytest.mark.slow
class TestDefaults:
    def test_allen_cahn(self):
        u = references.AllenCahn()
        assert u.accuracy < 1e-9
        x = np.linspace(-0.99, 0.99, 37)
        t = 0.8
        u_xx = derivative(lambda s: evaluate(u, s, t), 2, x, 5e-4)
        u_t = derivative(lambda s: evaluate(u, x, s), 1, t, 1e-3)
        value = evaluate(u, x, t)
        assert np.abs(u_t - 1e-4 * u_xx - 5 * (value - value**3)).max() < 1e-4

    def test_kdv(self):
        u = references.KortewegDeVries()
        assert u.accuracy < 1e-9
        x = -1 + 2 * np.arange(1024) / 1024
        assert np.abs((evaluate(u, x, 1.0) ** 2).mean() - 0.5) < 1e-9

    def test_cavity_at_a_large_reynolds_number(self, monkeypatch):
        monkeypatch.setattr(Cavity, "degrees", (60, 48))
        c = references.Cavity(1000.0)
        assert c.accuracy < 1e-5
        assert_steady_flow(c, 1e-4)
