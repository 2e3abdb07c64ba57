"""Polygons in the plane."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..arguments import check_names, is_integer, require
from .domain import Domain
from .patch import Patch, Placed
from .region import PatchRegion, Region
from .sampling import Axis

#: edges closer than this share of the extent touch: some digits above round-off
_TOUCH_SHARE = 1e-12


class Polygon(Domain):
    """The region that a closed chain of edges surrounds; it need not be convex.

    Edge k goes from vertex k to vertex k + 1, and the last one back to the first. Points are drawn
    from triangles, so measures are exact. A triangle with four Gauss points or more integrates
    cubics exactly.

    Args:
        vertices: (n, 2) with n ≥ 3, around the region in either direction.
        names: of the coordinates.

    >>> house = Polygon([(0, 0), (2, 0), (2, 1), (1, 2), (0, 1)])
    >>> house.measure, house.face(0).measure, len(house.sample(100))
    (3.0, 2.0, 100)
    """

    def __init__(
        self, vertices: Sequence[Sequence[float]] | Tensor, names: Sequence[str] | None = None
    ) -> None:
        self.vertices = _check_vertices(vertices)
        self.names = check_names(names, 2)
        self.low = self.vertices.amin(0)
        self.high = self.vertices.amax(0)

    @property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """The first and the last vertex of every edge, (n, 2) each."""
        return self.vertices, self.vertices.roll(-1, 0)

    @property
    def _sign(self) -> float:
        """1 where the vertices go round counterclockwise, −1 where clockwise."""
        a, b = (end - self.vertices[0] for end in self._ends)
        return float(_cross(a, b).sum().sign())

    def build(self) -> Sequence[Patch]:
        """Return one patch per triangle."""
        chain = self.vertices
        if self._sign < 0:
            chain = chain.flip(0)
        return [_make_triangle(*corners) for corners in triangulate(chain)]

    def inside(self, x: Tensor, tol: float) -> Tensor:
        return self._signed_distance(x) <= tol

    def build_boundary(self) -> Region:
        patches: list[Patch] = []
        for number in range(len(self.vertices)):
            patches += self.face(number).patches
        return PatchRegion(self.names, patches, self.low, self.high, self._is_on_boundary)

    def face(self, name: str | int, side: str | None = None) -> Region:
        """Return edge number `name`, from that vertex to the next."""
        count = len(self.vertices)
        if not is_integer(name, 0) or int(name) >= count or side is not None:
            edge = repr(name)
            if side is not None:
                edge += f", {side!r}"
            raise PullbackError(
                f"There is no edge {edge}",
                f"this polygon's edges are numbered from 0 to {count - 1}",
                "Use .face(k) for the edge from vertex k to vertex k + 1",
            )
        a, b = (end[int(name)] for end in self._ends)
        along = (b - a) / (b - a).norm()
        outward = self._sign * torch.stack([along[1], -along[0]])

        def place(u: Tensor) -> Placed:
            return a + u * (b - a), outward.expand(len(u), 2)

        def inside(x: Tensor, tol: float) -> Tensor:
            return _distance_to_segment(x, a, b) <= tol

        patch = Patch((Axis(),), float((b - a).norm()), place)
        return PatchRegion(self.names, [patch], torch.minimum(a, b), torch.maximum(a, b), inside)

    def _is_on_boundary(self, x: Tensor, tol: float) -> Tensor:
        """Return True for points at most `tol` from the boundary, (n,)."""
        return self._signed_distance(x).abs() <= tol

    def _signed_distance(self, x: Tensor) -> Tensor:
        """Return how far points (n, 2) are from the nearest edge, negative inside: (n,).

        A point is inside if the ray from it to the right crosses an odd number of edges.
        """
        distance = torch.full((len(x),), torch.inf, dtype=x.dtype)
        is_inside = torch.zeros(len(x), dtype=torch.bool)
        for a, b in zip(*self._ends, strict=True):
            distance = torch.minimum(distance, _distance_to_segment(x, a, b))
            spans = (a[1] > x[:, 1]) != (b[1] > x[:, 1])
            left = (_cross(b - a, x - a) > 0) == (b[1] > a[1])
            is_inside ^= spans & left
        return torch.where(is_inside, -distance, distance)

    def __repr__(self) -> str:
        corners = [tuple(v) for v in self.vertices.tolist()]
        return f"Polygon({corners}, names={self.names})"


def triangulate(chain: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Cut a simple polygon (n, 2), counterclockwise, into triangles that are.

    An ear is a corner whose triangle holds no other vertex; the roundest one is cut off until
    nothing is left. Vertices on a straight edge are passed over.
    """
    out = []
    while len(chain) > 2:
        a = chain.roll(1, 0)
        b = chain
        c = chain.roll(-1, 0)
        area = _cross(b - a, c - b)
        longest = torch.stack([b - a, c - b, a - c]).square().sum(-1).amax(0)
        straight = area.abs() <= _TOUCH_SHARE * longest
        if straight.any():
            chain = chain[~(torch.arange(len(chain)) == straight.nonzero()[0, 0])]
            continue
        shape = torch.where((area > 0) & ~_has_vertex_inside(a, b, c), area / longest, -torch.inf)
        ear = int(shape.argmax())
        if not shape[ear] > 0:
            raise PullbackError(
                "The polygon could not be cut into triangles",
                "parts of its boundary nearly touch",
                "Move them apart, or describe the region by several polygons",
            )
        out.append((a[ear], b[ear], c[ear]))
        chain = torch.cat([chain[:ear], chain[ear + 1 :]])
    return out


def _make_triangle(a: Tensor, b: Tensor, c: Tensor) -> Patch:
    """Return the triangle x = a + √u ((b − a) + v (c − b)), a map that keeps areas."""

    def place(u: Tensor) -> Placed:
        return a + u[:, :1].sqrt() * ((b - a) + u[:, 1:] * (c - b)), None

    axes = (Axis(power=2), Axis())
    return Patch(axes, 0.5 * float(_cross(b - a, c - b)), place)


def _has_vertex_inside(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return whether the triangle at each corner holds a vertex that is none of its own, (n,)."""
    edges = ((a, b), (b, c), (c, a))
    sides = [_cross((end - start)[:, None], b[None] - start[:, None]) for start, end in edges]
    holds = (torch.stack(sides) >= 0).all(0)  # row: triangle, column: vertex
    rows = torch.arange(len(b))
    for shift in (-1, 0, 1):
        holds[rows, (rows + shift) % len(b)] = False
    return holds.any(1)


def _check_vertices(vertices: object) -> Tensor:
    """Return the vertices; raise unless they are those of a polygon that does not touch itself."""
    try:
        v = torch.as_tensor(vertices, dtype=torch.float64).detach().cpu().clone()
    except (TypeError, ValueError, RuntimeError):
        v = torch.empty(0)
    usable = v.ndim == 2 and v.shape[1] == 2 and len(v) >= 3 and bool(v.isfinite().all())
    remedy = "Pass at least three pairs of finite numbers, such as [(0, 0), (1, 0), (0, 1)]"
    require(usable, "The list of vertices", vertices, remedy)
    extent = float((v.amax(0) - v.amin(0)).max())
    following = v.roll(-1, 0)
    is_repeated = (v - following).norm(dim=1) <= _TOUCH_SHARE * extent
    if is_repeated.any():
        k = int(is_repeated.nonzero()[0, 0])
        raise PullbackError(
            "An edge of the polygon has no length",
            f"vertices {k} and {(k + 1) % len(v)} are the same, {tuple(v[k].tolist())}",
            "Leave one out; the last edge leads back to the first vertex by itself",
        )
    if torch.linalg.svdvals(v - v.mean(0))[1] <= _TOUCH_SHARE * extent:
        raise PullbackError(
            "The polygon has no area", "all vertices lie on a line", "Move one of them off it"
        )
    edges = _find_meeting_edges(v, following, _TOUCH_SHARE * extent)
    if edges is not None:
        i, j = edges
        raise PullbackError(
            "The polygon crosses or touches itself",
            f"edges {i} and {j} meet (edge k goes from vertex k to vertex k + 1)",
            "List the vertices in order around it; cut out a hole with a - b",
        )
    return v


def _find_meeting_edges(a: Tensor, b: Tensor, tol: float) -> tuple[int, int] | None:
    """Return two edges a[k] → b[k] that cross or touch, None if there are none.

    They touch if one passes through an end of the other.
    """
    n = len(a)
    rows = torch.arange(n)
    side = _cross((b - a)[:, None], a[None] - a[:, None])  # row: edge, column: vertex
    is_split = side * side.roll(-1, 1) < 0  # the two ends of edge j lie on both sides of line i
    crossing = is_split & is_split.T
    touching = torch.stack(
        [_distance_to_segment(a, p, q) <= tol for p, q in zip(a, b, strict=True)]
    )
    touching[rows, rows] = touching[rows, (rows + 1) % n] = False
    pairs = (crossing | touching).nonzero().tolist()
    if not pairs:
        return None
    first, second = pairs[0]
    return first, second


def _distance_to_segment(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the distances of points (N, 2) to the segment from a to b."""
    along = b - a
    t = ((x - a) @ along / along.square().sum()).clamp(0, 1)
    return (x - a - t[:, None] * along).norm(dim=1)


def _cross(a: Tensor, b: Tensor) -> Tensor:
    """a₁b₂ − a₂b₁ along the last axis."""
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]
