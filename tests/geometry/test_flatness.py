"""ε-flatness: volumes with closed forms, invariance, and what is refused."""

from __future__ import annotations

from math import asinh, gamma, inf, pi, sqrt

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError, metrics
from pullback.geometry import flatness


def zeros(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64)


def paraboloid(w: Tensor) -> Tensor:
    return torch.stack([w[0], w[1], w[0] * w[1]])


def sum_squares(z: Tensor) -> Tensor:
    return z[0] ** 2 + z[1] ** 2


def norm(z: Tensor) -> Tensor:
    return z.square().sum()


SADDLE = 2 * pi * (2 * sqrt(2) - 1) / 3  # ∫ over the unit disk of √(1 + |w|²)


def chart(theta: Tensor) -> Tensor:
    return paraboloid(torch.stack([torch.sinh(theta[0]), theta[1] + theta[1] ** 3]))


def test_volume_of_a_surface_in_two_charts():
    one, two = (flatness(phi, sum_squares, zeros(2), epsilon=1.0) for phi in (paraboloid, chart))
    for report in (one, two):
        assert report.volume == pytest.approx(SADDLE, rel=1e-4)
        assert abs(report.volume - SADDLE) <= 2 * report.error + 1e-4
    assert one.euclidean == pytest.approx(pi, rel=1e-4)
    assert two.euclidean < 0.7 * one.euclidean


def parabola(w: Tensor) -> Tensor:
    return torch.cat([w, w**2])


def test_a_metric_scales_the_volume():
    eye = torch.eye(2, dtype=torch.float64)
    plain = flatness(parabola, lambda z: z[0] ** 2, zeros(1), epsilon=1.0)
    assert plain.volume == pytest.approx(sqrt(5) + asinh(2) / 2, rel=1e-6)  # its arc length
    double = flatness(
        parabola, lambda z: z[0] ** 2, zeros(1), epsilon=1.0, metric=lambda z: (4 + 0 * z[0]) * eye
    )
    assert double.volume == pytest.approx(2 * plain.volume, rel=1e-9)


def product(w: Tensor) -> Tensor:
    return (w[0] * w[1])[None]


def distance(z: Tensor) -> Tensor:
    return (z - 1).square().sum()


def test_a_rescaling_symmetry_has_no_volume():
    one = torch.ones(2, dtype=torch.float64)
    with pytest.raises(PullbackError, match="rank 1"):
        flatness(product, distance, one, epsilon=0.25)


@pytest.mark.parametrize("scale", [1.0, 100.0, 1e-3])
def test_on_a_slice_dinhs_rescaling_changes_nothing(scale):
    # z from ½ to 3/2 has length 1 wherever on the orbit the slice is laid
    w = torch.tensor([scale, 1 / scale], dtype=torch.float64)
    for basis in ("tangent", torch.eye(2, dtype=torch.float64)[:, :1]):
        report = flatness(product, distance, w, epsilon=0.25, basis=basis)
        assert report.dimension == report.rank == 1
        assert report.volume == pytest.approx(1.0, rel=1e-5)


def test_unbounded_sets_are_reported():
    def arms(w: Tensor) -> Tensor:
        return torch.stack([w[0] * w[1], 0.1 * torch.atan(w[0] - 1)])

    one = torch.ones(2, dtype=torch.float64)
    report = flatness(arms, lambda z: (z[0] - 1).square(), one, epsilon=0.25)
    assert not report.bounded
    assert report.volume == inf
    strip = flatness(lambda w: w, lambda z: z[0] ** 2, zeros(2), epsilon=0.25)
    assert not strip.bounded


def test_only_the_component_of_the_minimum_counts():
    report = flatness(
        lambda w: w, lambda z: ((z**2 - 1) ** 2).sum(), torch.ones(1).double(), epsilon=0.25
    )
    assert report.volume == pytest.approx(sqrt(1.5) - sqrt(0.5), rel=1e-5)


@pytest.mark.slow
def test_a_network_and_its_rescaled_twin():
    torch.manual_seed(0)
    x = torch.randn(20, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1, bias=False)).double()
    target = model(x).detach()

    class Scaled(nn.Module):
        """The same functions, with parameters a hundred times as small."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(
                torch.cat([p.detach().flatten() for p in model.parameters()]) / 100
            )

        def forward(self, x: Tensor) -> Tensor:
            w, b, v = 100 * self.w
            return v * torch.tanh(w * x + b)

    def loss(z: Tensor) -> Tensor:
        return (z - target).square().mean()

    one, two = (flatness(m, loss, inputs=x, epsilon=1e-4) for m in (model, Scaled()))
    assert one.bounded
    assert one.volume == pytest.approx(two.volume, rel=2e-2)
    assert one.euclidean == pytest.approx(1e6 * two.euclidean, rel=2e-2)


@pytest.mark.slow
def test_a_relu_network_needs_a_slice():
    torch.manual_seed(0)
    x = torch.randn(30, 2, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    model = model.double()
    target = model(x).detach()

    def loss(z: Tensor) -> Tensor:
        return (z - target).square().mean()

    with pytest.raises(PullbackError, match="slice"):
        flatness(model, loss, inputs=x, epsilon=1e-4)
    with pytest.raises(PullbackError, match="4 dimensions"):
        flatness(model, loss, inputs=x, epsilon=1e-4, basis="tangent")
    across = torch.eye(6, dtype=torch.float64)[:, :3]
    report = flatness(model, loss, inputs=x, epsilon=1e-4, basis=across)
    assert (report.dimension, report.rank) == (3, 4)
    assert report.bounded
    assert report.volume > 0


def test_fisher_metric_of_the_library():
    x = torch.randn(5, 1, dtype=torch.float64)
    model = nn.Linear(1, 1).double()
    target = model(x).detach()
    report = flatness(
        model,
        lambda z: (z - target).square().mean(),
        inputs=x,
        epsilon=0.01,
        metric=metrics.Euclidean(),
    )
    # in the metric ‖·‖²/N of outputs the set is the ball of radius 0.1 in the plane of outputs
    assert report.volume == pytest.approx(pi * 0.01, rel=1e-3)


def test_bad_input():
    with pytest.raises(PullbackError, match="epsilon"):
        flatness(paraboloid, sum_squares, zeros(2), epsilon=0.0)
    with pytest.raises(PullbackError, match="basis"):
        flatness(paraboloid, sum_squares, zeros(2), epsilon=1.0, basis=torch.ones(3, 1))
    with pytest.raises(PullbackError, match="number"):
        flatness(paraboloid, lambda z: z, zeros(2), epsilon=1.0)
    with pytest.raises(PullbackError, match="number"):
        flatness(paraboloid, lambda z: 1.0, zeros(2), epsilon=1.0)  # type: ignore[arg-type]
    for basis in ([[1.0], [0.0]], torch.full((2, 1), torch.nan), torch.zeros(2, 0)):
        with pytest.raises(PullbackError, match="basis"):
            flatness(paraboloid, sum_squares, zeros(2), epsilon=1.0, basis=basis)  # type: ignore[arg-type]
    for basis in (torch.ones(2, 2), torch.randn(2, 3), torch.zeros(2, 1)):
        with pytest.raises(PullbackError, match="dependent"):
            flatness(paraboloid, sum_squares, zeros(2), epsilon=1.0, basis=basis)
    with pytest.raises(PullbackError, match="finite"):
        flatness(paraboloid, lambda z: z.sum() * torch.nan, zeros(2), epsilon=1.0)
    with pytest.raises(PullbackError, match="dimensions"):
        flatness(lambda w: w, lambda z: z.square().sum(), zeros(4), epsilon=1.0)


def test_points_that_are_no_minimum():
    """The set of the definition lies above F(w₀): below it is another point's set."""

    def saddle(z: Tensor) -> Tensor:
        return norm(z) - 3 * z[0] * z[1]

    for loss in (lambda z: (z - 3).square().sum(), lambda z: z.sum(), saddle):
        with pytest.raises(PullbackError, match="no minimum"):
            flatness(lambda w: w, loss, zeros(2), epsilon=1.0)
    near = torch.full((2,), 0.01, dtype=torch.float64)
    report = flatness(lambda w: w, norm, near, epsilon=1.0)
    assert report.volume == pytest.approx(pi, rel=1e-2)


def test_a_local_minimum_above_another_is_one():
    def wells(z: Tensor) -> Tensor:
        return ((z**2 - 1) ** 2 + 0.3 * z).sum()

    start = torch.tensor([0.9601496], dtype=torch.float64)  # the higher of two
    report = flatness(lambda w: w, wells, start, epsilon=0.1)
    assert 0.3 < report.volume < 0.4


def test_euclidean_volume_along_a_basis_of_any_length():
    basis = 5 * torch.eye(3, dtype=torch.float64)[:, :2]
    report = flatness(lambda w: w, norm, zeros(3), epsilon=1.0, basis=basis)
    assert report.volume == pytest.approx(pi, rel=1e-4)
    assert report.euclidean == pytest.approx(pi, rel=1e-4)


def test_epsilon_below_round_off():
    with pytest.raises(PullbackError, match="resolves"):
        flatness(lambda w: w, lambda z: norm(z) + 1, torch.zeros(2), epsilon=1e-7)
    report = flatness(lambda w: w, lambda z: norm(z) + 1, zeros(2), epsilon=1e-7)
    assert report.volume == pytest.approx(1e-7 * pi, rel=1e-3)


@pytest.mark.parametrize(
    "scale", [0.1, *(pytest.param(scale, marks=pytest.mark.slow) for scale in (1.0, 10.0))]
)
def test_a_rescaled_relu_unit_has_the_same_room(scale):
    """The two-dimensional slice meets the same functions wherever on the orbit it is laid."""
    x = torch.tensor(
        [[2.0, 0], [0, 2], [2, 2], [1, 3], [-2, 0], [0, -2], [-2, -2], [-1, -3]]
    ).double()
    first = nn.Linear(2, 1, bias=False)
    last = nn.Linear(1, 1, bias=False)
    model = nn.Sequential(first, nn.ReLU(), last).double()
    with torch.no_grad():
        first.weight.copy_(scale * torch.tensor([[1.0, 0.5]]))
        last.weight.fill_(1 / scale)
    target = model(x).detach()
    report = flatness(
        model, lambda z: (z - target).square().mean(), inputs=x, epsilon=0.01, basis="tangent"
    )
    # φ(S) is a disk of radius √ε: no point of the set moves the unit's kink across a sample
    assert report.volume == pytest.approx(0.01 * pi, rel=1e-3)


@pytest.mark.parametrize(
    ("dimension", "ratio"), [(2, 1e-8), pytest.param(3, 1e-4, marks=pytest.mark.slow)]
)
def test_a_thin_set_across_the_axes_is_not_without_end(dimension, ratio):
    """{(Σw)² + r|w|² < 1}: an ellipsoid that no grid along the parameters' axes resolves."""

    def thin(z: Tensor) -> Tensor:
        return z.sum().square() + ratio * norm(z)

    report = flatness(lambda w: w, thin, zeros(dimension), epsilon=1.0)
    ball = pi ** (dimension / 2) / gamma(dimension / 2 + 1)
    exact = ball / sqrt((dimension + ratio) * ratio ** (dimension - 1))
    assert report.bounded
    assert report.volume == pytest.approx(exact, rel=2e-3)
    assert report.euclidean == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize(("power", "exact", "ratio"), [(1, 2.0, 1e5), (4, 3.708149, 1.0)])
def test_a_thin_set_is_found_without_curvature(power, exact, ratio):
    """{|u|ᵖ + |rv|ᵖ < 1} across the axes: its Hessian at the minimum is zero, or there is none."""
    turn = torch.tensor([[0.8, -0.6], [0.6, 0.8]], dtype=torch.float64)
    stretch = torch.tensor([1.0, ratio], dtype=torch.float64)
    report = flatness(
        lambda w: stretch * (turn @ w), lambda z: (z.abs() ** power).sum(), zeros(2), epsilon=1.0
    )
    assert report.bounded
    assert report.volume == pytest.approx(exact, rel=2e-3)
    assert report.euclidean == pytest.approx(exact / ratio, rel=2e-3)


def test_a_minimum_far_off_the_center():
    def steep(z: Tensor) -> Tensor:
        return torch.where(z > 0, 1e-4 * z, -1e4 * z).sum()

    report = flatness(lambda w: w, steep, zeros(2), epsilon=1.0)
    assert report.volume == pytest.approx((1e4 + 1e-4) ** 2 / 2, rel=1e-2)


def test_a_loss_that_cannot_be_batched_is_refused():
    with pytest.raises(PullbackError, match="at once"):
        flatness(lambda w: w, lambda z: float(norm(z)) * z.sum(), zeros(2), epsilon=1.0)
