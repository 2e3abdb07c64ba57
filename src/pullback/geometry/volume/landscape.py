"""The loss around a minimum, in coordinates in which the set below F(w₀) + ε is round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import hessian, jacrev, vmap

from ..._core.checks import require_finite_tensor
from ..._core.errors import PullbackError, refuse_unknown, reraise_fatal
from ..local.ambient import Parametrization, require_scalar_loss


@dataclass(frozen=True)
class _Limits:
    """What bounds the search for the set below F(w₀) + ε."""

    #: losses that one batched call evaluates: the memory of φ's values at so many parameters
    points_per_call: int = 4096
    #: Jacobians that one batched call computes; each takes several times the memory of a value
    jacobians_per_call: int = 512
    #: the share of ε by which the minimum may lie above the lowest point of its set: an error of
    #: 1 % in ε, as large as a volume's error on the hardest sets that are tested
    height_share: float = 0.01
    #: at most so many turns of the axes; a turn that makes the set no rounder ends them earlier
    turns: int = 12
    #: longest over shortest reach of a set that needs no further turn: a grid of a hundred cells
    #: along the long axis still has a dozen across it
    roundness: float = 8.0
    #: directions that a turn tries, at least. Of rotated quartics with axes of 1 : 10 : 100 the
    #: volume errs by up to 3 % with 16 directions, 1 % with 128, 0.5 % with 512.
    directions: int = 128
    #: and times the dimension: the directions must span all axes, with some to spare
    directions_per_dimension: int = 4
    #: distances that are tried along a ray are 2^−60 to 2^60: the range of float64's resolution
    #: around 1 with room on both sides
    doublings: int = 60


_LIMITS = _Limits()


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
        #: how often the loss was evaluated
        self.evaluations = 0
        self.basis = torch.eye(self._space.size, dtype=torch.float64, device=self._space.device)
        sigma, right_vectors = self._decompose_jacobian()
        self.rank = 0
        if len(sigma):
            self.rank = int((sigma > tolerance * sigma[0]).sum())
        if isinstance(basis, str):
            refuse_unknown("basis", basis, ("tangent",))
            self.basis = right_vectors[:, : self.rank]
        elif basis is not None:
            self.basis = self._check_basis(basis)
        self.dimension = self.basis.shape[1]
        self.map = torch.eye(self.dimension, dtype=torch.float64, device=self._space.device)
        self.base = float(self._evaluate_losses(torch.zeros_like(self.map[:1]))[0])
        require_finite_tensor("The loss at the minimum", torch.tensor(self.base))

    @property
    def stretch(self) -> float:
        """|det T|, the volume in θ = Tu of a unit cube in u."""
        return float(torch.linalg.det(self.map).abs())

    def _check_basis(self, basis: Tensor) -> Tensor:
        require_finite_tensor("The basis", basis, (self._space.size, "k"))
        basis = basis.detach().to(self._origin)
        sigma = torch.linalg.svdvals(basis)
        if basis.shape[1] > len(basis) or not bool(sigma[-1] > self.tolerance * sigma[0]):
            raise PullbackError(
                "The basis spans fewer directions than it has columns",
                "its columns are linearly dependent",
                "Leave some out",
            )
        return basis

    def _find_parameters(self, points: Tensor) -> Tensor:
        """Return parameters (n, p) from u (n, k)."""
        return self._origin + points @ (self.basis @ self.map).T

    def _evaluate_phi(self, flat: Tensor) -> Tensor:
        """Return φ at parameters (p,), in φ's own shape."""
        pieces = self._space.split(flat)
        dtypes = {name: tensor.dtype for name, tensor in self._phi.point.items()}
        return self._phi.evaluate({name: v.to(dtypes[name]) for name, v in pieces.items()})

    def _evaluate_loss(self, flat: Tensor) -> Tensor:
        """Return F at parameters (p,), as a number in float64."""
        loss = self._loss(self._evaluate_phi(flat))
        require_scalar_loss(loss)
        return loss.reshape(()).to(torch.float64)

    def _evaluate_losses(self, points: Tensor) -> Tensor:
        """Return F at u (n, k), (n,)."""
        self.evaluations += len(points)
        try:
            with torch.no_grad():
                return vmap(self._evaluate_loss, chunk_size=_LIMITS.points_per_call)(
                    self._find_parameters(points)
                )
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
        return (self._evaluate_losses(points) - self.base).nan_to_num(nan=torch.inf)

    def refuse_unresolved(self, epsilon: float) -> None:
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
        if not heights.numel():
            return
        lowest = float(heights.min())
        if lowest < -_LIMITS.height_share * epsilon:
            raise PullbackError(
                "The point is no minimum",
                f"the loss is lower by {-lowest:.2g} at others that hang together with it",
                "Descend further, or raise epsilon",
            )

    def curvature(self) -> Tensor:
        """The Hessian of F at the minimum along the basis, (k, k)."""
        zero = torch.zeros(self.dimension, dtype=torch.float64, device=self._origin.device)
        return hessian(lambda theta: self._evaluate_loss(self._origin + self.basis @ theta))(zero)

    def _evaluate_samples(self, flat: Tensor) -> Tensor:
        """Return φ at parameters (p,) with samples first, in float64."""
        return self._phi.arrange(self._evaluate_phi(flat)).to(torch.float64)

    def _compute_whitened_jacobians(self, flat: Tensor) -> Tensor:
        """Return SᵀJB at parameters (n, p): (n, rows, k)."""
        differentiate = jacrev(self._evaluate_samples)
        z = vmap(self._evaluate_samples, chunk_size=_LIMITS.points_per_call)(flat)
        jacobians = vmap(differentiate, chunk_size=_LIMITS.jacobians_per_call)(flat)
        jacobians = jacobians.flatten(2, -2)
        covectors = self._evaluate_covectors(z).flatten(3)  # (n, R, N, |event|)
        rows = torch.einsum("brne,bnep->bnrp", covectors, jacobians)
        return rows.flatten(1, 2) @ self.basis

    def _evaluate_covectors(self, z: Tensor) -> Tensor:
        """Return the rows of Sᵀ at many values, (n, R, N, *event)."""

        def evaluate(value: Tensor) -> Tensor:
            return self._phi.factor(value).covectors(value)

        try:
            return vmap(evaluate)(z)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a metric that looks at values cannot be batched
            return torch.stack([evaluate(value) for value in z])

    def _decompose_jacobian(self) -> tuple[Tensor, Tensor]:
        """Return singular values of SᵀJB at the minimum, and right singular vectors as columns."""
        with torch.no_grad():
            jacobian = self._compute_whitened_jacobians(self._origin[None])[0]
            _, sigma, right_vectors = torch.linalg.svd(jacobian)
        return sigma, right_vectors.T

    def density(self, points: Tensor) -> Tensor:
        """√det((JB)ᵀ M (JB)) at u (n, k), and zero where JB has a kernel."""
        with torch.no_grad():
            jacobians = self._compute_whitened_jacobians(self._find_parameters(points))
            if jacobians.shape[1] < jacobians.shape[2]:
                return jacobians.new_zeros(len(points))
            sigma = torch.linalg.svdvals(jacobians)
        has_kernel = sigma[:, -1] <= self.tolerance * sigma[:, 0]
        return torch.where(has_kernel, 0.0, sigma.prod(1))


def round_landscape(landscape: Landscape, epsilon: float) -> bool:
    """Set T along the axes of the loss's curvature, each as long as the set reaches along it.

    If the curvature says little of the set (kinks, quartic minima), directions are tried, and
    the axes turned to where they reach furthest. Returns False if the set is unbounded along an
    axis.
    """
    axes = _find_curvature_axes(landscape)
    reach = _measure_reach(landscape, axes.T, epsilon, refuse_lower=True)
    if not bool(reach.isfinite().all()):
        return False
    landscape.map = axes * reach
    for turn in range(_LIMITS.turns):
        previous_map = landscape.map
        previous_volume = landscape.stretch
        longer_map = _turn_axes(landscape, epsilon, torch.Generator().manual_seed(turn))
        if longer_map is None:
            break
        landscape.map = longer_map
        if landscape.stretch <= previous_volume:  # as where the minimum lies off center
            landscape.map = previous_map
            break
    return True


def _turn_axes(landscape: Landscape, epsilon: float, generator: torch.Generator) -> Tensor | None:
    """Return T with columns along the axes of Σ xxᵀ over ends x of the set.

    Returns None if the set is round already, or is unbounded.
    """
    k = landscape.dimension
    count = max(_LIMITS.directions, _LIMITS.directions_per_dimension * k)
    normal = torch.randn(count, k, dtype=torch.float64, generator=generator).to(landscape.map)
    directions = normal / normal.norm(dim=1, keepdim=True)
    reach = _measure_reach(landscape, directions, epsilon)
    is_bounded = bool(reach.isfinite().all())
    if not is_bounded or bool(reach.max() <= _LIMITS.roundness * reach.min()):
        return None
    ends = directions * (reach / reach.max())[:, None]
    axes = torch.linalg.eigh(ends.T @ ends)[1]
    lengths = _measure_reach(landscape, axes.T, epsilon)
    if not bool(lengths.isfinite().all()):
        return None
    return landscape.map @ (axes * lengths)


def _measure_reach(
    landscape: Landscape, directions: Tensor, epsilon: float, *, refuse_lower: bool = False
) -> Tensor:
    """Return how far the set goes along lines (m, k): the geometric mean of both ways, (m,).

    Distances double until the loss has risen by ε; a line that never gets there reaches ∞. With
    `refuse_lower` the function raises if a point before that lies well below the minimum.
    """
    exponents = torch.arange(
        -_LIMITS.doublings, _LIMITS.doublings + 1, dtype=torch.float64, device=directions.device
    )
    lengths = 2.0**exponents
    rays = torch.stack([directions, -directions])
    points = lengths[:, None, None, None] * rays
    heights = landscape.height(points.flatten(0, 2)).view(points.shape[:3])
    is_above = heights >= epsilon
    if refuse_lower:
        is_before_end = is_above.int().cumsum(0) == 0
        landscape.refuse_lower(heights[is_before_end], epsilon)
    ends = lengths[is_above.int().argmax(0)].where(is_above.any(0), torch.inf)
    return ends.log2().mean(0).exp2()


def _find_curvature_axes(landscape: Landscape) -> Tensor:
    """Return eigenvectors of the Hessian as columns; the parameters' axes if there is none."""
    parameter_axes = torch.eye(
        landscape.dimension, dtype=torch.float64, device=landscape.basis.device
    )
    try:
        curvature = landscape.curvature()
    except (PullbackError, torch.OutOfMemoryError):
        raise
    except RuntimeError:  # an operation without second derivatives
        return parameter_axes
    if not bool(torch.isfinite(curvature).all()):
        return parameter_axes
    return torch.linalg.eigh((curvature + curvature.T) / 2)[1]
