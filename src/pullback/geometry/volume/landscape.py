"""The loss around a minimum along rays, in coordinates in which it is round."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import hessian, jacrev, vmap

from ..._core.checks import require_finite_tensor
from ..._core.errors import PullbackError, refuse_unknown, reraise_fatal
from ..local.ambient import Parametrization, require_scalar_loss

_CHUNK = 4096
_SLACK = 0.01  # of ε that a minimum may be above the lowest point of its set


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
        self._phi, self._space = phi, phi.space
        phi.linearize()  # refuses what cannot be measured
        self._origin = self._space.flatten(phi.point).to(torch.float64)
        self._loss, self.tolerance, self.evaluations = loss, tolerance, 0
        self.basis = torch.eye(self._space.size, dtype=torch.float64, device=self._space.device)
        values, vectors = self._spectrum()
        self.rank = int((values > tolerance * values[0]).sum()) if len(values) else 0
        if isinstance(basis, str):
            refuse_unknown("basis", basis, ("tangent",))
            self.basis = vectors[:, : self.rank]
        elif basis is not None:
            self.basis = self._check_basis(basis)
        self.dimension = self.basis.shape[1]
        self.map = torch.eye(self.dimension, dtype=torch.float64, device=self._space.device)
        self.base = float(self._losses(torch.zeros_like(self.map[:1]))[0])
        require_finite_tensor("The loss at the minimum", torch.tensor(self.base))

    @property
    def stretch(self) -> float:
        """|det T|, the volume in θ = Tu of a unit cube in u."""
        return float(torch.linalg.det(self.map).abs())

    def _check_basis(self, basis: Tensor) -> Tensor:
        require_finite_tensor("The basis", basis, (self._space.size, "k"))
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
        require_scalar_loss(height)
        return height.reshape(()).to(torch.float64)

    def _losses(self, points: Tensor) -> Tensor:
        self.evaluations += len(points)
        try:
            with torch.no_grad():
                return vmap(self._loss_at, chunk_size=_CHUNK)(self._flat(points))
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
        if lowest < -_SLACK * epsilon:
            raise PullbackError(
                "The point is no minimum",
                f"the loss is lower by {-lowest:.2g} at others that hang together with it",
                "Descend further, or raise epsilon",
            )

    def curvature(self) -> Tensor:
        """The Hessian of F at the minimum along the basis, (k, k)."""
        zero = torch.zeros(self.dimension, dtype=torch.float64, device=self._origin.device)
        return hessian(lambda theta: self._loss_at(self._origin + self.basis @ theta))(zero)

    def _arrange_value(self, flat: Tensor) -> Tensor:
        return self._phi.arrange(self._value(flat)).to(torch.float64)

    def _pull_back(self, flat: Tensor) -> Tensor:
        """SᵀJB at parameters (n, p): (n, rows, k)."""
        z = vmap(self._arrange_value, chunk_size=_CHUNK)(flat)
        jacobians = vmap(jacrev(self._arrange_value), chunk_size=_CHUNK // 8)(flat).flatten(2, -2)
        covectors = self._covectors(z).flatten(3)  # (n, R, N, |event|)
        rows = torch.einsum("brne,bnep->bnrp", covectors, jacobians)
        return rows.flatten(1, 2) @ self.basis

    def _covectors(self, z: Tensor) -> Tensor:
        """The rows of Sᵀ at many values, (n, R, N, *event)."""

        def one(value: Tensor) -> Tensor:
            return self._phi.factor(value).covectors(value)

        try:
            return vmap(one)(z)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a metric that looks at values cannot be batched
            return torch.stack([one(value) for value in z])

    def _spectrum(self) -> tuple[Tensor, Tensor]:
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
        deficient = values[:, -1] <= self.tolerance * values[:, 0]
        return torch.where(deficient, 0.0, values.prod(1))


_TURNS = 12  # at most; each may find the set some ten times as long
_ROUND = 8  # longest over shortest reach that needs no further turn


def round_landscape(landscape: Landscape, epsilon: float) -> bool:
    """Set T along the axes of the loss's curvature, each as long as the set reaches along it.

    Where the curvature says little of the set (kinks, quartic minima), directions are tried, and
    the axes turned to where they reach furthest. False where it reaches without end along an axis.
    """
    axes = _axes(landscape)
    reach = _reach(landscape, axes.T, epsilon, refuse=True)
    if not bool(reach.isfinite().all()):
        return False
    landscape.map = axes * reach
    for turn in range(_TURNS):
        before, volume = landscape.map, landscape.stretch
        turned = _turn_axes(landscape, epsilon, torch.Generator().manual_seed(turn))
        if turned is None:
            break
        landscape.map = turned
        if landscape.stretch <= volume:  # as where the minimum lies off center
            landscape.map = before
            break
    return True


def _turn_axes(landscape: Landscape, epsilon: float, generator: torch.Generator) -> Tensor | None:
    """Columns along the axes of Σ xxᵀ over ends x of the set; None where these are round already.

    Or where the set has no end.
    """
    k, map = landscape.dimension, landscape.map
    drawn = torch.randn(max(128, 4 * k), k, dtype=torch.float64, generator=generator).to(map)
    directions = drawn / drawn.norm(dim=1, keepdim=True)
    reach = _reach(landscape, directions, epsilon)
    if not bool(reach.isfinite().all() & (reach.max() > _ROUND * reach.min())):
        return None
    ends = directions * (reach / reach.max())[:, None]
    axes = torch.linalg.eigh(ends.T @ ends)[1]
    lengths = _reach(landscape, axes.T, epsilon)
    return map @ (axes * lengths) if bool(lengths.isfinite().all()) else None


def _reach(
    landscape: Landscape, directions: Tensor, epsilon: float, *, refuse: bool = False
) -> Tensor:
    """How far the set goes along lines (m, k), by doubling: the geometric mean of both ways."""
    lengths = 2.0 ** torch.arange(-60, 61, dtype=torch.float64, device=directions.device)
    both = torch.stack([directions, -directions])
    points = lengths[:, None, None, None] * both
    heights = landscape.height(points.flatten(0, 2)).view(points.shape[:3])
    above = heights >= epsilon
    if refuse:
        landscape.refuse_lower(heights[above.int().cumsum(0) == 0], epsilon)
    ends = lengths[above.int().argmax(0)].where(above.any(0), torch.inf)
    return ends.log2().mean(0).exp2()


def _axes(landscape: Landscape) -> Tensor:
    """Eigenvectors of the Hessian as columns; the parameters' own axes where there is none."""
    own = torch.eye(landscape.dimension, dtype=torch.float64, device=landscape.basis.device)
    try:
        curvature = landscape.curvature()
    except (PullbackError, torch.OutOfMemoryError):
        raise
    except RuntimeError:  # an operation without second derivatives
        return own
    if not bool(torch.isfinite(curvature).all()):
        return own
    return torch.linalg.eigh((curvature + curvature.T) / 2)[1]
