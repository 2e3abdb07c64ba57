"""The loss around a minimum along rays, in coordinates in which it is round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import hessian, jacrev, vmap

from ..._core.checks import refuse_values
from ..._core.errors import PullbackError, refuse_unknown, reraise_fatal
from ..local.ambient import Parametrization, refuse_loss


@dataclass(frozen=True)
class LandscapeThresholds:
    """Numbers of evaluations and of the search for axes.

    Attributes:
        chunk: points that are evaluated at once.
        slack: share of ε that a minimum may be above the lowest point of its set.
        turns: of the axes at most; each may find the set some ten times as long.
        roundness: longest over shortest reach of a set that needs no further turn.
        directions: that are tried in a turn at least.
        octaves: of lengths, up and down from 1, at which the end of the set is looked for: from
            1e-18 to 1e18.
    """

    chunk: int = 4096
    slack: float = 0.01
    turns: int = 12
    roundness: float = 8.0
    directions: int = 128
    octaves: int = 60


THRESHOLDS = LandscapeThresholds()


class Landscape:
    r"""F(w₀ + BTu) − F(w₀) and √det((JB)ᵀ M (JB)), for many u (n, k) at once.

    Without a basis B is the identity. `rank` is that of dφ at the minimum, by singular values of
    SᵀJ above `tolerance` times the largest. T = `map`, at first the identity, stretches a set that
    is long and thin across the parameters' own axes: it would fall through any grid of them.
    """

    def __init__(
        self,
        phi: Parametrization,
        loss: Callable[[Tensor], Tensor],
        basis: Tensor | str | None,
        tolerance: float,
    ) -> None:
        self._phi = phi
        self._space = phi.space
        phi.linearize()  # refuses what cannot be measured
        self._origin = self._space.flatten(phi.point).to(torch.float64)
        self._loss = loss
        self.tolerance = tolerance
        self.evaluations = 0
        self.basis = torch.eye(self._space.size, dtype=torch.float64, device=self._space.device)
        values, vectors = self._find_spectrum()
        self.rank = int((values > tolerance * values[0]).sum()) if len(values) else 0
        if isinstance(basis, str):
            refuse_unknown("basis", basis, ("tangent",))
            self.basis = vectors[:, : self.rank]
        elif basis is not None:
            self.basis = self._check_basis(basis)
        self.dimension = self.basis.shape[1]
        self.map = torch.eye(self.dimension, dtype=torch.float64, device=self._space.device)
        self.base = float(self._losses(torch.zeros_like(self.map[:1]))[0])
        refuse_values("The loss at the minimum", torch.tensor(self.base))

    @property
    def stretch(self) -> float:
        """|det T|, the volume in θ = Tu of a unit cube in u."""
        return float(torch.linalg.det(self.map).abs())

    def _check_basis(self, basis: Tensor) -> Tensor:
        refuse_values("The basis", basis, (self._space.size, "k"))
        basis = basis.detach().to(self._origin)
        lengths = torch.linalg.svdvals(basis)
        if basis.shape[1] > len(basis) or not bool(lengths[-1] > self.tolerance * lengths[0]):
            raise PullbackError(
                "The basis spans fewer directions than it has columns",
                "its columns are linearly dependent",
                "Leave some out",
            )
        return basis

    def _flat(self, points: Tensor) -> Tensor:
        """Parameters (n, p) from u (n, k)."""
        return self._origin + points @ (self.basis @ self.map).T

    def _value(self, flat: Tensor) -> Tensor:
        """φ's values at parameters (p,), in their own shape."""
        split = self._space.split(flat)
        return self._phi.value({n: v.to(self._phi.point[n].dtype) for n, v in split.items()})

    def _loss_at(self, flat: Tensor) -> Tensor:
        height = self._loss(self._value(flat))
        refuse_loss(height)
        return height.reshape(()).to(torch.float64)

    def _losses(self, points: Tensor) -> Tensor:
        self.evaluations += len(points)
        try:
            with torch.no_grad():
                return vmap(self._loss_at, chunk_size=THRESHOLDS.chunk)(self._flat(points))
        except RuntimeError as error:
            reraise_fatal(error)
            if "vmap" not in str(error):
                raise
            raise PullbackError(
                "Loss and φ cannot be evaluated at many points at once",
                str(error).splitlines()[0],
                "Write both without .item(), float() and branches on values",
            ) from error

    def height(self, points: Tensor) -> Tensor:
        """F − F(w₀) at u (n, k); not a number counts as infinitely high."""
        return (self._losses(points) - self.base).nan_to_num(nan=torch.inf)

    def check(self, epsilon: float) -> None:
        """Raise where ε is lost in the loss's round-off."""
        smallest = 100 * torch.finfo(self._space.dtype).eps * abs(self.base)
        if not epsilon > smallest:
            raise PullbackError(
                "epsilon is below what the loss resolves",
                f"it is {epsilon:.2g} beside a loss of {self.base:.2g} in {self._space.dtype}",
                f"Use more than {smallest:.2g}, or float64",
            )

    def refuse_lower(self, heights: Tensor, epsilon: float) -> None:
        """Raise where points of the set lie well below the given one, which is no minimum then."""
        lowest = float(heights.min()) if heights.numel() else 0.0
        if lowest < -THRESHOLDS.slack * epsilon:
            raise PullbackError(
                "The point is no minimum",
                f"the loss is lower by {-lowest:.2g} at others that hang together with it",
                "Descend further, or raise epsilon",
            )

    def curvature(self) -> Tensor:
        """The Hessian of F at the minimum along the basis, (k, k)."""
        zero = torch.zeros(self.dimension, dtype=torch.float64, device=self._origin.device)
        return hessian(lambda theta: self._loss_at(self._origin + self.basis @ theta))(zero)

    def _arranged_value(self, flat: Tensor) -> Tensor:
        """φ's values at parameters (p,), samples first."""
        return self._phi.arrange(self._value(flat)).to(torch.float64)

    def _pull_back(self, flat: Tensor) -> Tensor:
        """SᵀJB at parameters (n, p): (n, rows, k)."""
        z = vmap(self._arranged_value, chunk_size=THRESHOLDS.chunk)(flat)
        find_jacobians = vmap(jacrev(self._arranged_value), chunk_size=THRESHOLDS.chunk // 8)
        jacobians = find_jacobians(flat).flatten(2, -2)
        covectors = self._covectors(z).flatten(3)  # (n, R, N, |event|)
        rows = torch.einsum("brne,bnep->bnrp", covectors, jacobians)
        return rows.flatten(1, 2) @ self.basis

    def _covectors(self, z: Tensor) -> Tensor:
        """The rows of Sᵀ at many values, (n, R, N, *event)."""

        def find_covectors(value: Tensor) -> Tensor:
            return self._phi.factor(value).covectors(value)

        try:
            return vmap(find_covectors)(z)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a metric that looks at values cannot be batched
            return torch.stack([find_covectors(value) for value in z])

    def _find_spectrum(self) -> tuple[Tensor, Tensor]:
        """Singular values of SᵀJB at the minimum, and right singular vectors as columns."""
        with torch.no_grad():
            _, values, vectors = torch.linalg.svd(self._pull_back(self._origin[None])[0])
        return values, vectors.T

    def density(self, points: Tensor) -> Tensor:
        """√det((JB)ᵀ M (JB)) at u (n, k), and zero where JB has a kernel."""
        with torch.no_grad():
            pulled = self._pull_back(self._flat(points))
            if pulled.shape[1] < pulled.shape[2]:
                return pulled.new_zeros(len(points))
            values = torch.linalg.svdvals(pulled)
        is_deficient = values[:, -1] <= self.tolerance * values[:, 0]
        return torch.where(is_deficient, 0.0, values.prod(1))


def round_landscape(landscape: Landscape, epsilon: float) -> bool:
    """Set T along the axes of the loss's curvature, each as long as the set reaches along it.

    Where the curvature says little of the set (kinks, quartic minima), directions are tried, and
    the axes turned to where they reach furthest. False where it reaches without end along an axis.
    """
    axes = _find_axes(landscape)
    reach = _find_reach(landscape, axes.T, epsilon, refuse=True)
    if not bool(reach.isfinite().all()):
        return False
    landscape.map = axes * reach
    for turn in range(THRESHOLDS.turns):
        previous_map = landscape.map
        previous_stretch = landscape.stretch
        new_map = _turn_axes(landscape, epsilon, torch.Generator().manual_seed(turn))
        if new_map is None:
            break
        landscape.map = new_map
        if landscape.stretch <= previous_stretch:  # as where the minimum lies off center
            landscape.map = previous_map
            break
    return True


def _turn_axes(landscape: Landscape, epsilon: float, generator: torch.Generator) -> Tensor | None:
    """Return columns along the axes of Σ xxᵀ over ends x of the set.

    None where the set is round already, or has no end.
    """
    shape = (max(THRESHOLDS.directions, 4 * landscape.dimension), landscape.dimension)
    normal = torch.randn(shape, dtype=torch.float64, generator=generator).to(landscape.map)
    directions = normal / normal.norm(dim=1, keepdim=True)
    reach = _find_reach(landscape, directions, epsilon)
    is_long = reach.max() > THRESHOLDS.roundness * reach.min()
    if not bool(reach.isfinite().all() & is_long):
        return None
    ends = directions * (reach / reach.max())[:, None]
    axes = torch.linalg.eigh(ends.T @ ends)[1]
    lengths = _find_reach(landscape, axes.T, epsilon)
    if not bool(lengths.isfinite().all()):
        return None
    return landscape.map @ (axes * lengths)


def _find_reach(
    landscape: Landscape, directions: Tensor, epsilon: float, *, refuse: bool = False
) -> Tensor:
    """Return how far the set goes along lines (m, k): the geometric mean of both directions.

    The end is found by doubling. With `refuse`, points below the minimum on the way raise.
    """
    octaves = THRESHOLDS.octaves
    exponents = torch.arange(-octaves, octaves + 1, dtype=torch.float64, device=directions.device)
    lengths = 2.0**exponents
    rays = torch.stack([directions, -directions])
    points = lengths[:, None, None, None] * rays
    heights = landscape.height(points.flatten(0, 2)).view(points.shape[:3])
    is_above = heights >= epsilon
    if refuse:
        landscape.refuse_lower(heights[is_above.int().cumsum(0) == 0], epsilon)
    ends = lengths[is_above.int().argmax(0)].where(is_above.any(0), torch.inf)
    return ends.log2().mean(0).exp2()


def _find_axes(landscape: Landscape) -> Tensor:
    """Return eigenvectors of the Hessian as columns; the basis's axes where there is none."""
    identity = torch.eye(landscape.dimension, dtype=torch.float64, device=landscape.basis.device)
    try:
        curvature = landscape.curvature()
    except (PullbackError, torch.OutOfMemoryError):
        raise
    except RuntimeError:  # an operation without second derivatives
        return identity
    if not bool(torch.isfinite(curvature).all()):
        return identity
    return torch.linalg.eigh((curvature + curvature.T) / 2)[1]
