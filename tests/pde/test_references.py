"""Burgers' equation by Cole and Hopf, against the equation, another method, published numbers."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from pullback import PullbackError
from pullback.pde.catalog.references import Burgers
from tests.pde.differences import derivative, evaluate


def burgers_by_fourier(nu, x, t, n=256):
    """Integrated in time by an explicit Runge–Kutta method of order 8, odd and periodic."""
    k = 1j * math.pi * np.arange(n // 2 + 1)

    def rate(_, u):
        c = np.fft.rfft(u)
        product = np.fft.rfft(u * u)
        product[n // 3 :] = 0
        return np.fft.irfft(nu * k**2 * c - 0.5 * k * product, n)

    grid = -1 + 2 * np.arange(n) / n
    start = -np.sin(math.pi * grid)
    integration = solve_ivp(rate, (0, t), start, method="DOP853", rtol=1e-12, atol=1e-13)
    c = np.fft.rfft(integration.y[:, -1]) / n
    waves = np.exp(1j * math.pi * np.outer(x + 1, np.arange(1, n // 2)))
    return c[0].real + 2 * (waves @ c[1:-1]).real


class TestBurgers:
    def test_late_times(self):
        x = np.array([-0.7, 0.3, 0.5])
        values = evaluate(Burgers(0.1), x, 10.0)
        other = burgers_by_fourier(0.1, x, 10.0, 64)
        assert np.abs(values - other).max() < 1e-11

    @pytest.mark.parametrize("nu", [1e-3, 0.01 / math.pi, 0.01, 0.1, 1.0])
    def test_other_nodes_give_the_same(self, nu):
        u = Burgers(nu)
        unit = np.random.default_rng(1).random((600, 2))
        t = np.concatenate([unit[:200, 1], 1e-6 * unit[200:400, 1], unit[400:, 1]])
        x = np.concatenate([2 * unit[:400, 0] - 1, 0.02 * unit[400:, 0]])  # the shock too
        points = np.stack([x, t], axis=1)
        other = u.quadrature(points, 7 * u.half_nodes // 4, 0.3)
        values = u.quadrature(points, u.half_nodes)
        assert np.abs(values - other).max() < (1e-14 if nu > 2e-3 else 4e-14)

    @pytest.mark.slow
    def test_fourier_method_gives_the_same(self):
        x = np.linspace(-1, 1, 41)
        values = evaluate(Burgers(0.05), x, 0.7)
        assert np.abs(values - burgers_by_fourier(0.05, x, 0.7)).max() < 1e-10

    @pytest.mark.parametrize("nu", [0.01 / math.pi, 0.1])
    def test_equation(self, nu):
        u = Burgers(nu)
        x = np.linspace(-0.9, 0.9, 19)
        t = 0.3
        h = 0.05 * nu
        u_x, u_xx = (derivative(lambda s: evaluate(u, s, t), i, x, h) for i in (1, 2))
        u_t = derivative(lambda s: evaluate(u, x, s), 1, t, 1e-4)
        scale = np.abs(nu * u_xx).max() + np.abs(u_t).max()
        assert np.abs(u_t + evaluate(u, x, t) * u_x - nu * u_xx).max() < 1e-6 * scale

    def test_data_symmetry_and_bounds(self):
        u = Burgers(0.01 / math.pi)
        x = np.linspace(-1, 1, 101)
        t = np.linspace(0, 1, 11)
        assert (evaluate(u, x, 0.0) == np.where(abs(x) == 1, 0, -np.sin(math.pi * x))).all()
        assert (evaluate(u, [[-1.0], [1.0]], t) == 0).all()
        values = evaluate(u, x[:, None], t)
        assert np.abs(values + values[::-1]).max() < 1e-14
        assert np.abs(values).max() <= 1
        # Basdevant et al. (1986): |u_x(0, t)| is 152.00516 at its largest, at t = 1.6037/π
        slope = derivative(lambda s: evaluate(u, s, 1.6037 / math.pi), 1, np.zeros(1), 2e-5)
        assert float(np.squeeze(slope)) == pytest.approx(-152.00516, rel=1e-6)

    def test_tiny_times_are_finite(self):
        x = np.linspace(-1, 1, 9)
        for t in (5e-324, 1e-300, 1e-12):
            values = evaluate(Burgers(0.01), x, t)
            assert np.abs(values + np.sin(math.pi * x)).max() < 1e-10

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
    def test_viscosity_is_positive(self, bad):
        with pytest.raises(PullbackError, match="positive"):
            Burgers(bad)

    @pytest.mark.parametrize(
        ("points", "why"),
        [
            (torch.zeros(3), "shape"),
            (torch.zeros(3, 3), "shape"),
            (torch.zeros(3, 2, dtype=torch.int64), "dtype"),
            (torch.tensor([[0.0, -0.1]]), "t ≥ 0"),
            (torch.tensor([[0.0, math.nan]]), "t ≥ 0"),
        ],
    )
    def test_points_are_checked(self, points, why):
        with pytest.raises(PullbackError, match=why):
            Burgers(0.1)(points)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_dtype_and_no_points(self, dtype):
        u = Burgers(0.1)
        values = u(torch.tensor([[1.0, 0.5], [0.3, 0.2]], dtype=dtype).requires_grad_())
        assert values.dtype == dtype
        assert values.shape == (2, 1)
        assert values[0] == 0
        assert not values.requires_grad
        assert u(torch.zeros(0, 2, dtype=dtype)).shape == (0, 1)
