"""Domains: measures, membership, normals, the divergence theorem, counts, and refusals."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pullback._core.errors import PullbackError
from pullback.pde.domains import (
    Ball,
    Box,
    Difference,
    Disk,
    Domain,
    Intersection,
    Interval,
    PointSet,
    Polygon,
    Region,
    SpaceTime,
    Union,
)
from pullback.pde.domains.sampling import Gauss, Grid, Points, Sampler

SAMPLERS: list[str | Sampler] = ["sobol", "grid", "gauss", "uniform", "lhs", Grid()]
PI = math.pi
Field = Callable[[Tensor], Tensor]
square = Box([(0, 1), (0, 1)])
ring = square - Disk((0.5, 0.5), 0.25)
arrow = Polygon([(1, 1), (0, 2), (2, 1), (0, 0)])  # concave, clockwise
SIDES = 2 * math.sqrt(5) + 2 * math.sqrt(2)
ROUND = PI / 4 - math.atan(0.5)  # the arrow's angle at the origin
lens = 2 * PI / 3 - math.sqrt(3) / 2  # two unit disks, centers at distance 1

# domain, measure, measure of the boundary
EXACT: dict[str, tuple[Domain, float, float]] = {
    "interval": (Interval(-1, 2), 3, 2),
    "box1": (Box([(0.5, 1)]), 0.5, 2),
    "box2": (Box([(0, 2), (-1, 0)]), 2, 6),
    "box3": (Box([(0, 1), (0, 2), (0, 3)]), 6, 22),
    "box5": (Box([(0, 2)] * 5), 32, 160),
    "ball1": (Ball((1.0,), 2), 4, 2),
    "disk": (Disk((1, -1), 2), 4 * PI, 4 * PI),
    "ball3": (Ball((0, 1, 2), 0.5), PI / 6, PI),
    "ball5": (Ball((0,) * 5), 8 * PI**2 / 15, 8 * PI**2 / 3),
    "spacetime": (SpaceTime(Interval(-1, 1), (1, 4)), 6, 6),
    "cylinder": (SpaceTime(Disk(), (0, 2)), 2 * PI, 4 * PI),
    "triangle": (Polygon([(0, 0), (3, 0), (0, 4)]), 6, 12),
    "arrow": (arrow, 1, SIDES),
    "prism": (SpaceTime(arrow, (1, 3)), 2, 2 * SIDES),
}
CUT: dict[str, tuple[Domain, float, float]] = {
    "square - disk": (ring, 1 - PI / 16, 4 + PI / 2),
    "corner cut": (square - Disk((0, 0), 0.5), 1 - PI / 16, 3 + PI / 4),
    "disk & disk": (Disk() & Disk((1, 0)), lens, 4 * PI / 3),
    "disk | disk": (Disk() | Disk((1, 0)), 2 * PI - lens, 8 * PI / 3),
    "apart": (square | Disk((5, 5)), 1 + PI, 4 + 2 * PI),
    "adjacent": (square | Box([(1, 3), (0, 1)]), 3, 8),
    "overlapping": (square | Box([(0.5, 2), (0, 1)]), 2, 6),
    "flush": (square & Box([(0.5, 2), (0, 1)]), 0.5, 3),
    "L": (Box([(-1, 1), (-1, 1)]) - Box([(0, 1), (0, 1)]), 3, 8),
    "shell": (Ball((0, 0, 0), 1) - Ball((0, 0, 0), 0.5), 7 * PI / 6, 5 * PI),
    "intervals": (Interval(0, 1) | Interval(2, 4), 3, 4),
    "gap": (Interval(0, 3) - Interval(1, 2), 2, 4),
    "nested": (ring | Disk((0.5, 0.5), 0.1), 1 - 0.0525 * PI, 4 + 0.7 * PI),
    "arrow - disk": (arrow - Disk((0, 0), 1), 1 - ROUND / 2, SIDES - 2 + ROUND),
    "arrow | square": (arrow | Box([(-1, 0), (0, 2)]), 3, SIDES + 6),
    "two polygons": (arrow & Polygon([(0, -1), (3, -1), (3, 1), (0, 1)]), 0.5, 0.5 * SIDES + 1),
    "in time": (SpaceTime(ring, (0, 2)), 2 - PI / 8, 8 + PI),
}
EVERY = {**EXACT, **CUT}
domains = pytest.mark.parametrize("name", EVERY)


def polynomial(dim: int, space: int) -> tuple[Field, Field]:
    """A cubic vector field along the first `space` coordinates, and its divergence."""
    g = torch.Generator().manual_seed(3)
    a = torch.randn(dim, dim, generator=g, dtype=torch.float64)
    b = torch.randn(dim, dim, generator=g, dtype=torch.float64)
    along = (torch.arange(dim) < space).double()

    def field(x: Tensor) -> Tensor:
        return (x @ a.T) * (x @ b.T) * x * along

    def divergence(x: Tensor) -> Tensor:
        p = x @ a.T
        q = x @ b.T
        return (p * q + x * (a.diagonal() * q + b.diagonal() * p)) @ along

    return field, divergence


def flux(region: Region, n: int, field: Field) -> float:
    points = region.quadrature(n)
    assert points.normals is not None
    return float(points.weights @ (field(points.x) * points.normals).sum(1))


# --- measures -------------------------------------------------------------------------------


@domains
def test_measures(name: str) -> None:
    domain, volume, area = EVERY[name]
    tolerance = 1e-12 if name in EXACT else 5e-4
    assert domain.measure == pytest.approx(volume, rel=tolerance)
    assert domain.boundary.measure == pytest.approx(area, rel=tolerance)


@domains
@pytest.mark.parametrize("which", SAMPLERS, ids=str)
def test_weights_sum_to_the_measure_and_points_belong(name: str, which: str | Sampler) -> None:
    domain = EVERY[name][0]
    for region in (domain, domain.boundary):
        n = 640
        points = region.sample(n, which)
        assert points.x.dtype == torch.float64
        assert points.x.shape == (len(points), domain.dim)
        assert float(points.weights.sum()) == pytest.approx(region.measure, rel=1e-12)
        assert bool((points.weights > 0).all())
        assert bool(region.contains(points.x).all())
        assert bool(domain.contains(points.x).all())
        assert bool((points.x >= region.low - 1e-9).all())
        assert bool((points.x <= region.high + 1e-9).all())
        if points.normals is None:
            assert region is domain
        else:
            assert region is domain.boundary
        ends = region is domain.boundary and domain.dim == 1
        if ends:
            assert len(points) == round(region.measure)
        elif which in ("sobol", "uniform", "lhs"):
            assert len(points) == n
        else:
            assert n / 20 < len(points) <= n


def test_random_points_cover_each_part_in_proportion() -> None:
    points = (square | Disk((5, 5))).sample(1000).x
    share = float(square.contains(points).double().mean())
    assert share == pytest.approx(1 / (1 + PI), abs=1e-3)
    x = Ball((0,) * 4).sample(4096).x
    assert float((x.norm(dim=1) < 0.5).double().mean()) == pytest.approx(1 / 16, abs=2e-3)
    second = (x[:, :, None] * x[:, None, :]).mean(0)  # ∫ xxᵀ / |B| = I/(d + 2)
    assert torch.allclose(second, torch.eye(4).double() / 6, atol=3e-3)
    omega = Ball((0,) * 6).boundary.sample(4096).x
    second = (omega[:, :, None] * omega[:, None, :]).mean(0)
    assert torch.allclose(second, torch.eye(6).double() / 6, atol=5e-3)


# --- quadrature, normals, the divergence theorem ---------------------------------------------


@domains
def test_the_divergence_theorem(name: str) -> None:
    domain = EVERY[name][0]
    # in space-time over space only: the boundary is the lateral one
    field, divergence = polynomial(domain.dim, domain.dim - isinstance(domain, SpaceTime))
    points = domain.quadrature(20_000)
    inside = float(points.weights @ divergence(points.x))
    size = float(points.weights @ divergence(points.x).abs())
    smooth = name in EXACT and domain.dim <= 3
    tolerance = 1e-11 if smooth else 3e-3
    assert flux(domain.boundary, 20_000, field) == pytest.approx(inside, abs=tolerance * size)


@domains
def test_normals_are_unit_and_outward(name: str) -> None:
    domain = EVERY[name][0]
    points = domain.boundary.sample(500)
    assert points.normals is not None
    assert torch.allclose(points.normals.norm(dim=1), torch.ones(len(points)).double())
    step = 1e-4 * points.normals
    assert float(domain.contains(points.x + step).double().mean()) <= 0.01, "corners excepted"
    assert float(domain.contains(points.x - step).double().mean()) >= 0.99


def test_gauss_on_balls_is_exact_for_polynomials() -> None:
    x, w = (lambda p: (p.x, p.weights))(Disk().sample(8**2, "gauss"))
    assert float(w @ (x[:, 0] ** 2 * x[:, 1] ** 4)) == pytest.approx(PI / 64, rel=1e-12)
    x, w = (lambda p: (p.x, p.weights))(Ball((0, 0, 0)).sample(8**3, "gauss"))
    assert float(w @ (x[:, 0] ** 2 * x[:, 2] ** 4)) == pytest.approx(4 * PI / 315, rel=1e-12)
    x, w = (lambda p: (p.x, p.weights))(Ball((0, 0, 0)).boundary.sample(64, "gauss"))
    assert float(w @ (x[:, 0] ** 2 * x[:, 1] ** 4)) == pytest.approx(4 * PI / 35, rel=1e-12)


def test_quadrature_of_smooth_functions() -> None:
    p = Box([(0, 1), (0, 2), (-1, 1)]).quadrature(1000)
    want = (math.e - 1) * (math.e**2 - 1) * (math.e - 1 / math.e)
    assert float(p.weights @ p.x.sum(1).exp()) == pytest.approx(want, rel=1e-12)
    p = Ball((0, 0, 0)).quadrature(8000)
    want = 4 * PI * (math.cosh(1) - math.sinh(1))  # ∫ e^x over the unit ball
    assert float(p.weights @ p.x[:, 2].exp()) == pytest.approx(want, rel=1e-12)
    p = Box([(0, 1)] * 6).quadrature(2**14)
    assert float(p.weights @ p.x.sum(1).exp()) == pytest.approx((math.e - 1) ** 6, rel=1e-4)
    assert torch.equal(p.x, Box([(0, 1)] * 6).quadrature(2**14).x)
    p = (square | Box([(1, 3), (0, 1)])).quadrature(500)
    assert float(p.weights @ p.x.sum(1).exp()) == pytest.approx(
        (math.e**3 - 1) * (math.e - 1), rel=1e-12
    ), "nothing is cut off, so it is Gauss"
    p = ring.quadrature(20_000)
    assert float(p.weights @ p.x[:, 0]) == pytest.approx(0.5 * (1 - PI / 16), rel=1e-3)
    assert len(Disk().quadrature(1)) == 1


# --- seeds ----------------------------------------------------------------------------------


@domains
def test_the_seed_decides(name: str) -> None:
    domain = EVERY[name][0]
    before = torch.get_rng_state()
    for region in (domain, domain.boundary):
        for which in ("sobol", "uniform", "lhs"):
            a, b, c = (region.sample(50, which, seed=s) for s in (1, 1, 2))
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.weights, b.weights)
            if not (domain.dim == 1 and region is not domain):
                assert not torch.equal(a.x, c.x)
    assert torch.equal(before, torch.get_rng_state())


@domains
def test_domains_pickle(name: str) -> None:
    domain = EVERY[name][0]
    unpickled = pickle.loads(pickle.dumps(domain))
    assert torch.equal(unpickled.sample(20).x, domain.sample(20).x)
    assert repr(unpickled) == repr(domain)


# --- boxes ----------------------------------------------------------------------------------


def test_names() -> None:
    assert Interval(0, 1).names == ("x",)
    assert Interval(0, 1, "r").names == ("r",)
    assert Box([(0, 1)] * 3).names == ("x", "y", "z")
    assert Box([(0, 1)] * 4).names == ("x1", "x2", "x3", "x4")
    assert Disk(names=("r", "z")).names == ("r", "z")
    assert SpaceTime(square, (0, 1)).names == ("x", "y", "t")
    assert PointSet(torch.zeros(2, 2)).names == ("x", "y")
    assert (square - Disk()).names == square.boundary.names == ("x", "y")


def test_a_grid_on_the_boundary_of_a_square() -> None:
    points = square.boundary.sample(20, "grid")
    assert len(points) == 20
    assert points.weights.tolist() == pytest.approx([0.2] * 20)
    bottom = points.x[points.x[:, 1] == 0]
    assert sorted(bottom[:, 0].tolist()) == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert len(torch.unique(points.x, dim=0)) == 20, "no corner twice"


def test_faces_share_the_points_in_proportion() -> None:
    slab = Box([(0, 10), (0, 1)])
    x = slab.boundary.sample(22, "grid").x
    counts = [int((x[:, i] == v).sum()) for i, v in ((0, 0), (0, 10), (1, 0), (1, 1))]
    assert counts == [1, 1, 10, 10]
    assert len(square.boundary.sample(10).x) == 10, "3 + 3 + 2 + 2"
    assert len(square.boundary.sample(2).x) == 4, "each face has at least one"
    assert len(Box([(0, 1e-3), (0, 1), (0, 1)]).boundary.sample(7).x) == 7
    assert len(Box([(0, 1)] * 3).boundary.sample(6, "grid")) == 6, "the faces' centers"


def test_faces() -> None:
    box = Box([(0, 1), (2, 4)])
    points = box.face("y", "high").sample(8)
    assert len(points) == 8
    assert points.x[:, 1].tolist() == [4.0] * 8
    assert points.normals is not None
    assert points.normals.tolist() == [[0.0, 1.0]] * 8
    assert box.face("x", "low").measure == 2
    end = Interval(0, 3).face("x", "low").sample(5)
    assert end.x.tolist() == [[0.0]]
    assert end.weights.tolist() == [1.0]
    inside = box.face("x", "low").contains(torch.tensor([[0.0, 3.0], [0.0, 5.0], [0.5, 3.0]]))
    assert inside.tolist() == [True, False, False]


def test_pairs_match() -> None:
    domain = SpaceTime(Box([(0, 1), (2, 4)]), (0, 3))
    pairs = domain.pairs("y")
    for a, b in (pairs.sample(50), pairs.sample(49, "grid", seed=3)):
        assert a.x[:, 1].tolist() == [2.0] * len(a)
        assert b.x[:, 1].tolist() == [4.0] * len(a)
        assert torch.equal(a.x[:, [0, 2]], b.x[:, [0, 2]])
        assert a.normals is not None
        assert b.normals is not None
        assert torch.equal(a.normals, -b.normals)
    assert pairs.names == ("x", "y", "t")
    a, b = Interval(-1, 1).pairs("x").sample(4)
    assert (a.x.tolist(), b.x.tolist()) == ([[-1.0]], [[1.0]])


# --- polygons -------------------------------------------------------------------------------


def star(count: int, seed: int) -> Tensor:
    """A polygon of random radii around (3, −1): simple, and far from convex."""
    g = torch.Generator().manual_seed(seed)
    radius = 0.1 + torch.rand(count, generator=g, dtype=torch.float64)
    angle = 2 * PI * torch.arange(count, dtype=torch.float64) / count
    return torch.stack([3 + radius * angle.cos(), radius * angle.sin() - 1], 1)


def spiral(turns: int, count: int) -> Tensor:
    """A band of width 0.2 that winds around the origin."""
    angle = torch.linspace(PI, 2 * PI * turns, count, dtype=torch.float64)
    arm = [
        (angle / (2 * PI) + shift)[:, None] * torch.stack([angle.cos(), angle.sin()], 1)
        for shift in (0.2, 0.0)
    ]
    return torch.cat([arm[0], arm[1].flip(0)])


POLYGONS = {
    "star 5": star(5, 0),
    "star 12": star(12, 1),
    "star 101": star(101, 2),
    "spiral": spiral(3, 40),
    "far": star(8, 3) + 1e6,
    "comb": torch.tensor([0, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0, 0, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2])
    .double()
    .view(2, 12)
    .T,
}


@pytest.mark.parametrize("name", POLYGONS)
@pytest.mark.parametrize("step", [1, -1])
def test_moments_of_polygons(name: str, step: int) -> None:
    """∫ 1, ∫ x, ∫ x² and ∫ xy by Green's theorem, edge by edge."""
    if step < 0:
        v = POLYGONS[name].flip(0)
    else:
        v = POLYGONS[name]
    polygon = Polygon(v)
    base = v.mean(0)
    x, y = (v - base).T
    p, q = (v.roll(-1, 0) - base).T
    cross = step * (x * q - p * y)  # all of them turn to the left
    want = {
        "1": cross.sum() / 2,
        "x": (cross * (x + p)).sum() / 6,
        "xx": (cross * (x * x + x * p + p * p)).sum() / 12,
        "xy": (cross * (x * q + 2 * x * y + 2 * p * q + p * y)).sum() / 24,
    }
    size = float(polygon.measure)
    assert size == pytest.approx(float(want["1"]), rel=1e-9 if name == "far" else 1e-12)
    generator = torch.Generator()
    points = Points.cat([p.draw(9, Gauss(), generator) for p in polygon.patches])
    a, b = (points.x - base).T
    scale = float(((v - base).norm(dim=1).amax() ** 2) * size)
    for key, values in {"x": a, "xx": a * a, "xy": a * b}.items():
        assert float(points.weights @ values) == pytest.approx(float(want[key]), abs=1e-9 * scale)
    rim = polygon.boundary.quadrature(10 * len(v))
    length = (v - v.roll(-1, 0)).norm(dim=1).sum()
    assert polygon.boundary.measure == pytest.approx(float(length), rel=1e-12)
    assert rim.normals is not None
    flow = float(rim.weights @ ((rim.x - base) * rim.normals).sum(1))  # ∫ div x = 2 area
    assert flow == pytest.approx(2 * size, rel=1e-8)


@pytest.mark.parametrize("name", POLYGONS)
def test_membership_in_polygons(name: str) -> None:
    """Against the winding number, by angles."""
    v = POLYGONS[name]
    polygon = Polygon(v)
    low = polygon.low
    high = polygon.high
    g = torch.Generator().manual_seed(0)
    x = low + (high - low) * torch.rand(2000, 2, generator=g, dtype=torch.float64)
    ray = v[None] - x[:, None]
    angle = torch.atan2(ray[..., 1], ray[..., 0])
    turn = torch.remainder(angle.roll(-1, 1) - angle + PI, 2 * PI) - PI
    assert torch.equal(polygon.contains(x, tol=0.0), turn.sum(1).abs() > PI)
    share = float(polygon.contains(x, tol=0.0).double().mean())
    assert share == pytest.approx(polygon.measure / float((high - low).prod()), abs=0.04)


def test_edges_of_a_polygon() -> None:
    corners = [(0, 0), (2, 0), (2, 1), (1, 1), (1, 3), (0, 3)]
    for order, first in ((corners, [0.0, -1.0]), (corners[::-1], [0.0, 1.0])):
        polygon = Polygon(order)
        points = polygon.face(0).sample(9)
        assert points.normals is not None
        assert points.normals.tolist() == [first] * 9
        assert bool(polygon.boundary.contains(points.x).all())
        assert sum(polygon.face(k).measure for k in range(6)) == polygon.boundary.measure == 10
    arm = Polygon(corners).face(3)
    x = torch.tensor([[1.0, 2.0], [1.0, 0.5], [0.5, 2.0], [1.0, 3.0]])
    assert arm.contains(x).tolist() == [True, False, False, True]
    lateral = SpaceTime(Polygon(corners), (0, 2)).face(3).sample(10)
    assert lateral.x[:, 0].tolist() == [1.0] * 10
    assert lateral.normals is not None
    assert lateral.normals.tolist() == [[1.0, 0.0, 0.0]] * 10
    assert Polygon(corners, names=("r", "z")).names == ("r", "z")
    straight = Polygon([(0, 0), (1, 0), (2, 0), (2, 2), (0, 2)])  # a vertex in mid-edge
    assert (straight.measure, straight.face(1).measure) == (4, 1)
    assert straight.contains(torch.tensor([[1.0, 0.0], [1.0, -0.1]])).tolist() == [True, False]
    assert straight.contains(torch.tensor([[1.0, 0.05]]), tol=-0.1).tolist() == [False]


# --- space-time -----------------------------------------------------------------------------


def test_slices_and_slabs() -> None:
    domain = SpaceTime(ring, (1, 3))
    for region, t, sign in ((domain.initial, 1.0, -1.0), (domain.final, 3.0, 1.0)):
        points = region.sample(100)
        assert points.x[:, 2].tolist() == [t] * 100
        assert bool(domain.space.contains(points.x[:, :2]).all())
        assert bool(region.contains(points.x).all())
        assert not bool(region.contains(points.x + 0.01).any())
        assert region.measure == domain.space.measure
        assert points.normals is not None
        assert points.normals.tolist() == [[0.0, 0.0, sign]] * 100
    slab = domain.slab(1, 1.5)
    assert slab.time == (1, 1.5)
    assert slab.space is domain.space
    assert slab.measure == pytest.approx(0.25 * domain.measure)


def test_lateral_faces() -> None:
    domain = SpaceTime(Interval(-1, 1), (0, 2))
    face = domain.face("x", "high").sample(10, "grid")
    assert face.x[:, 0].tolist() == [1.0] * 10
    assert face.x[:, 1].tolist() == pytest.approx([0.1 + 0.2 * i for i in range(10)])
    assert face.normals is not None
    assert face.normals.tolist() == [[1.0, 0.0]] * 10
    assert len(domain.boundary.sample(10, "grid")) == 10


# --- parts, membership ----------------------------------------------------------------------


def test_where() -> None:
    upper_half = Disk().boundary.where(lambda x: x[:, 1] > 0)
    assert upper_half.measure == pytest.approx(PI, rel=1e-4)
    points = upper_half.sample(200)
    assert len(points) == 200
    assert points.normals is not None
    assert bool((points.x[:, 1] > 0).all())
    assert torch.allclose(points.x, points.normals)
    assert upper_half.contains(torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.0, 0.5]])).tolist() == [
        True,
        False,
        False,
    ]
    quarter = upper_half.where(lambda x: x[:, 0] > 0)
    assert quarter.measure == pytest.approx(PI / 2, rel=1e-3)
    left = Interval(0, 1).boundary.where(lambda x: x[:, 0] < 0.5)
    assert left.measure == 1
    assert left.sample(7).x.tolist() == [[0.0]]
    over = SpaceTime(square, (0, 1)).boundary.where(lambda x: x[:, 0] == 0)
    assert over.measure == 1
    assert len(over.sample(100, "grid")) == 100


def test_where_by_names() -> None:
    by_names = square.boundary.where(lambda x, y: (y < 1) & (x == 0))
    by_points = square.boundary.where(lambda points: (points[:, 1] < 1) & (points[:, 0] == 0))
    assert torch.equal(by_names.sample(20).x, by_points.sample(20).x)
    with pytest.raises(PullbackError, match=r"no coordinate 'z'.*x, y"):
        square.boundary.where(lambda x, z: x < z)


def test_parts_of_a_boundary_are_joined() -> None:
    joined = square.face("x", "low") | square.face("y", "low") | square.face("y", "high")
    assert joined.measure == 3
    points = joined.sample(30)
    assert points.normals is not None
    assert bool((points.x[:, 0] < 1).all())
    middles_of_right_and_left = torch.tensor([[1.0, 0.5], [0.0, 0.5]])
    assert joined.contains(middles_of_right_and_left).tolist() == [False, True]
    with pytest.raises(PullbackError, match="different coordinates"):
        _ = joined | Interval(0, 1).face("x", "low")


def test_membership_has_a_tolerance() -> None:
    x = torch.tensor([[1.0], [1.0 + 1e-12], [1.001], [-1e-12]], dtype=torch.float64)
    assert Interval(0, 1).contains(x).tolist() == [True, True, False, True]
    assert Interval(0, 1).contains(x, tol=0.01).tolist() == [True] * 4
    edge = Disk((100, 0), 0.1).boundary.sample(200)
    assert bool(Disk((100, 0), 0.1).contains(edge.x.float()).all()), "float32 rounds off the disk"


def test_the_boundary_of_a_composite_contains_only_itself() -> None:
    boundary = (square | Box([(1, 3), (0, 1)])).boundary
    x = torch.tensor([[1.0, 0.5], [1.0, 0.0], [0.0, 0.5], [0.5, 0.5], [3.0, 0.2]])
    assert boundary.contains(x).tolist() == [False, True, True, False, True]
    hole = ring.boundary
    x = torch.tensor([[0.75, 0.5], [0.5, 0.5], [0.8, 0.5], [1.0, 0.5]])
    assert hole.contains(x).tolist() == [True, False, False, True]


def test_operators() -> None:
    a = square
    b = Disk()
    assert isinstance(a | b, Union)
    assert isinstance(a & b, Intersection)
    assert isinstance(a - b, Difference)
    with pytest.raises(TypeError):
        _ = a | 3  # pyright: ignore[reportOperatorIssue]


def test_small_parts_of_a_composite_are_sampled() -> None:
    sliver = square & Box([(0.999, 2), (0.999, 2)])
    for which in SAMPLERS:
        assert bool(sliver.contains(sliver.sample(16, which).x).all())
    big = Box([(0, 1000), (0, 1000)])
    assert (big & Disk((500, 500), 0.5)).measure == pytest.approx(PI / 4, rel=1e-3)


# --- measured points --------------------------------------------------------------------------


def test_point_sets() -> None:
    x = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    data = PointSet(x, weights=torch.tensor([1.0, 1, 2, 0, 4]))
    points = data.sample(5)
    assert torch.equal(points.x, x.double())
    assert points.weights.tolist() == pytest.approx([0.125, 0.125, 0.25, 0, 0.5])
    assert (len(data), data.measure, data.dim) == (5, 1, 2)
    assert torch.equal(data.sample().x, data.quadrature(100).x)
    assert bool(data.contains(x).all())
    assert not bool(data.contains(x + 0.01).any())
    assert len(data.patches) == 5
    subset = data.where(lambda x: torch.arange(5) < 3)
    assert len(subset) == 3
    assert subset.measure == pytest.approx(0.5)
    assert PointSet(torch.arange(3.0)).x.shape == (3, 1)
    assert square.points(x).names == ("x", "y")


# --- refusals ---------------------------------------------------------------------------------

NAN = float("nan")
INF = float("inf")
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "empty interval": (lambda: Interval(1, 1), "interval is empty.*a < b"),
    "reversed interval": (lambda: Interval(2, 1), "interval is empty"),
    "nan interval": (lambda: Interval(NAN, 1), "not bounded"),
    "unbounded interval": (lambda: Interval(0, INF), "not bounded"),
    "interval of words": (lambda: Interval("a", 1), "two ends"),  # pyright: ignore
    "empty box": (lambda: Box([(0, 1), (1, 1)]), "Side 2 of the box is empty"),
    "nan box": (lambda: Box([(0, NAN)]), "not bounded"),
    "box of a triple": (lambda: Box([(0, 1, 2)]), "two ends"),
    "no box": (lambda: Box([]), "needs bounds"),
    "a number as a box": (lambda: Box(3), "needs bounds"),  # pyright: ignore
    "flat ball": (lambda: Ball((0, 0), 0), "ball's radius"),
    "negative ball": (lambda: Ball((0, 0), -1), "ball's radius"),
    "nan ball": (lambda: Ball((0, 0), NAN), "ball's radius"),
    "infinite ball": (lambda: Ball((0, 0), INF), "ball's radius"),
    "nan center": (lambda: Ball((0, NAN)), "center"),
    "scalar center": (lambda: Ball(0.0), "center"),  # pyright: ignore
    "two corners": (lambda: Polygon([(0, 0), (1, 1)]), "at least three"),
    "polygon in space": (lambda: Polygon([(0, 0, 0)] * 4), "at least three pairs"),
    "polygon of words": (lambda: Polygon("abc"), "at least three pairs"),  # pyright: ignore
    "ragged polygon": (lambda: Polygon([(0, 0), (1,), (0, 1)]), "at least three pairs"),
    "nan polygon": (lambda: Polygon([(0, 0), (1, NAN), (0, 1)]), "finite numbers"),
    "infinite polygon": (lambda: Polygon([(0, 0), (1, INF), (0, 1)]), "finite numbers"),
    "flat polygon": (lambda: Polygon([(0, 0), (1, 1), (2, 2)]), "no area"),
    "a corner twice": (lambda: Polygon([(0, 0), (1, 0), (1, 0), (0, 1)]), "vertices 1 and 2"),
    "closed chain": (lambda: Polygon([(0, 0), (1, 0), (0, 1), (0, 0)]), "vertices 3 and 0"),
    "bow tie": (lambda: Polygon([(0, 0), (1, 1), (1, 0), (0, 1)]), "crosses or touches.*0 and 2"),
    "pentagram": (lambda: Polygon(star(5, 0)[[0, 2, 4, 1, 3]]), "crosses"),
    "spike": (lambda: Polygon([(0, 0), (2, 0), (1, 0), (1, 1)]), "crosses or touches"),
    "touching": (lambda: Polygon([(0, 0), (2, 0), (2, 2), (1, 0), (0, 2)]), "touches"),
    "edge": (lambda: arrow.face(4), "from 0 to 3"),
    "edge by name": (lambda: arrow.face("x", "low"), "face\\(k\\)"),
    "box's edge": (lambda: square.face(0), "no coordinate 0"),
    "box's side": (lambda: square.face("x"), '"low" or "high"'),
    "disk in space": (lambda: Disk((0, 0, 0)), "Use Ball"),
    "same names": (lambda: Box([(0, 1)] * 2, ("x", "x")), "same name"),
    "too few names": (lambda: Box([(0, 1)] * 2, ("x",)), "2 coordinates"),
    "names that are none": (lambda: Interval(0, 1, 3), "names"),  # pyright: ignore
    "t twice": (lambda: SpaceTime(Interval(0, 1, "t"), (0, 1)), '"t" is used twice'),
    "time over time": (lambda: SpaceTime(SpaceTime(square, (0, 1)), (0, 1)), "used twice"),
    "no time": (lambda: SpaceTime(square, (1, 1)), "time is empty"),
    "no space": (lambda: SpaceTime(square.boundary, (0, 1)), "spatial domain"),  # pyright: ignore
    "empty slab": (lambda: SpaceTime(square, (0, 1)).slab(1, 0.5), "time is empty"),
    "apart": (lambda: square & Disk((5, 5)), "intersection is empty"),
    "corner missed": (lambda: square & Disk((1.9, 1.9)), "intersection is empty"),
    "all removed": (lambda: square - Disk(radius=3), "difference is empty"),
    "dimensions": (lambda: square | Interval(0, 1), "different dimensions"),
    "other names": (lambda: square | Disk(names=("r", "z")), "same names"),
    "space-times": (lambda: SpaceTime(square, (0, 1)) - Ball((0,) * 3), "Combine the spaces"),
    "a region": (lambda: Union(square, square.boundary), "Combine the spaces"),  # pyright: ignore
    "n = 0": (lambda: square.sample(0), "integer ≥ 1"),
    "n < 0": (lambda: square.boundary.sample(-3), "integer ≥ 1"),
    "n float": (lambda: square.sample(10.0), "integer ≥ 1"),  # pyright: ignore
    "n bool": (lambda: square.sample(True), "integer ≥ 1"),
    "quadrature of 0": (lambda: square.quadrature(0), "integer ≥ 1"),
    "seed": (lambda: square.sample(3, seed=0.5), "seed"),  # pyright: ignore
    "sampler": (lambda: square.sample(3, "halton"), "Unknown sampler"),
    "no grid": (lambda: Box([(0, 1)] * 10).sample(10, "grid"), "n ≥ 1024"),
    "no Gauss": (lambda: Ball((0,) * 4).sample(10, "gauss"), "n ≥ 16"),
    "no grid on faces": (lambda: Box([(0, 1)] * 3).boundary.sample(20, "grid"), "n ≥ 24"),
    "no grid of a cut": (
        lambda: (Box([(0, 1)] * 5) - Ball((0,) * 5, 0.5)).sample(10, "grid"),
        "no full grid",
    ),
    "Sobol": (lambda: Box([(0, 1)] * 21202).sample(2), "21201"),
    "coordinate": (lambda: square.face("z", "low"), "no coordinate 'z'.*x, y"),
    "coordinate of pairs": (lambda: square.pairs("t"), "no coordinate"),
    "side": (lambda: square.face("x", "left"), '"low" or "high"'),
    "time's face": (lambda: SpaceTime(square, (0, 1)).face("t", "low"), "initial"),
    "time's pairs": (lambda: SpaceTime(square, (0, 1)).pairs("t"), "initial"),
    "lateral coordinate": (lambda: SpaceTime(square, (0, 1)).face("z", "low"), "no coordinate"),
    "ball's face": (lambda: Disk().face("x", "low"), "no faces"),
    "ball's pairs": (lambda: Disk().pairs("x"), "a Box for Periodic"),
    "cylinder's face": (lambda: SpaceTime(Disk(), (0, 1)).face("x", "low"), "no faces"),
    "x of one axis": (lambda: square.contains(torch.zeros(3)), r"\(N, 2\)"),
    "x of three": (lambda: square.contains(torch.zeros(4, 3)), r"\(N, 2\)"),
    "x a list": (lambda: square.contains([[0.0, 0.0]]), "got list"),  # pyright: ignore
    "complex x": (lambda: square.contains(torch.zeros(1, 2) + 1j), "complex"),
    "points outside": (lambda: square.points(torch.tensor([[0.5, 0.5], [2, 2]])), "point 1 is"),
    "no mask": (lambda: square.where(lambda x: x[:, 0]), "bool tensor"),
    "mask of a wrong shape": (lambda: square.where(lambda x: x > 0), "bool tensor"),
    "no tensor": (lambda: square.where(lambda x: True), "bool tensor"),  # pyright: ignore
    "nothing left": (lambda: square.where(lambda x: x[:, 0] > 2), "is empty"),
    "other n": (lambda: PointSet(torch.zeros(4, 2)).sample(5), "n=4"),
    "no points": (lambda: PointSet(torch.zeros(0, 2)), "needs points"),
    "nan points": (lambda: PointSet(torch.tensor([[NAN]])), "non-finite"),
    "points of points": (lambda: PointSet(torch.zeros(2, 2, 2)), "list of points"),
    "few weights": (lambda: PointSet(torch.zeros(4, 2), weights=torch.ones(3)), "4 weights"),
    "negative weight": (lambda: PointSet(torch.zeros(1, 2), weights=-torch.ones(1)), "weights"),
    "no point left": (lambda: PointSet(torch.zeros(3)).where(lambda x: x[:, 0] > 1), "left"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(PullbackError, match=message) as caught:
        make()
    assert caught.value.remedy
