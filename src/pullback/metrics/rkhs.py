"""Reproducing kernels on inputs: the inner products ⟨K_x, K_x'⟩ = K(x, x') of function spaces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import factorial, inf
from numbers import Real

import torch
from torch import Tensor

from .._core.errors import PullbackError, require
from .._core.products import cross_gram


@dataclass(frozen=True)
class DistanceLimits:
    """How distances between points are computed."""

    #: samples whose pairs give the median distance: 2 million pairs take milliseconds
    median_points: int = 2048
    #: coordinates from which on inner products replace differences: a tenth of the time at 64, but
    #: 0.4 of it at 16, where their cancellation is not worth it
    fewest_coordinates: int = 64
    #: flops below which either takes a millisecond at most
    fewest_flops: int = 2**20
    #: squared distances below this fraction of the points' squared lengths lose too many digits:
    #: four of sixteen in float64
    near: float = 1e-4
    #: the fraction of near pairs from which on differences are taken for all pairs: a gathered pair
    #: costs several times one in order
    most_near: float = 1 / 8
    #: the largest order ν of a Matérn kernel: beyond it the factorials lose digits
    largest_order: float = 20.0


_LIMITS = DistanceLimits()


class ReproducingKernel(ABC):
    """K(x, x') for points (N, ...) and (M, ...), flattened to vectors: a matrix (N, M)."""

    @abstractmethod
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the matrix K(x_i, y_j)."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items())
        return f"{type(self).__name__}({fields})"


class Matern(ReproducingKernel):
    """K = d^ν K_ν(d) 2^(1−ν)/Γ(ν), d = ‖x − x'‖/scale: the kernel of the Sobolev space H^s(Rⁿ).

    Its Fourier transform is (1 + |ξ|²)^(−s) up to a factor, with s = ν + n/2 (`smoothness`). The
    paper prints s = n + 3 for ν = 3/2, where it is (n + 3)/2. For half-integers ν it is e^(−d)
    times a polynomial:

        ν = 1/2: e^(−d)     3/2: e^(−d)(1 + d)     5/2: e^(−d)(1 + d + d²/3).

    Gaussian-process libraries divide the length by √(2ν): their Matérn kernel of lengthscale ℓ is
    this one with scale = ℓ/√(2ν).

    Args:
        order: ν, one of 1/2, 3/2, 5/2, ...; larger ones are smoother.
        scale: the unit of length in input space.

    >>> points = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    >>> print(Matern()(points, points)[0])
    tensor([1.0000, 0.7358, 0.1991], dtype=torch.float64)
    """

    def __init__(self, order: float = 1.5, scale: float = 1.0) -> None:
        is_positive = isinstance(order, (int, float)) and order > 0
        is_half_integer = is_positive and float(order - 0.5).is_integer()
        if not is_half_integer or order > _LIMITS.largest_order:
            raise PullbackError(
                "The Matérn kernel's order is not usable",
                f"got {order!r}, and it is a polynomial times e^(−d) for half-integers alone",
                "Use 0.5, 1.5, 2.5, ... (at most 19.5), or pass a function of your own as kernel=",
            )
        is_length = isinstance(scale, Real) and not isinstance(scale, bool) and 0 < scale < inf
        remedy = "Use a positive number, such as metrics.median_distance(x)"
        require(is_length, "The kernel's scale", scale, remedy)
        self.order = float(order)
        self.scale = float(scale)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        d = distances(x, y) / self.scale
        polynomial = torch.zeros_like(d)
        for coefficient in _coefficients(int(self.order)):
            polynomial = polynomial * d + coefficient
        return torch.exp(-d) * polynomial

    def smoothness(self, n: int) -> float:
        """Return the s of H^s(Rⁿ): ν + n/2, which is (n + 3)/2 for ν = 3/2."""
        return self.order + n / 2


@lru_cache
def _coefficients(p: int) -> tuple[float, ...]:
    """Return the coefficients of d^p, ..., d⁰ in the polynomial of ν = p + 1/2."""
    coefficients = []
    for k in range(p + 1):
        binomial = factorial(p + k) / (factorial(k) * factorial(p - k))
        coefficients.append(factorial(p) / factorial(2 * p) * binomial * 2 ** (p - k))
    return tuple(coefficients)


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Return ‖x_i − y_j‖ of samples (N, ...) and (M, ...), accurate between near points too."""
    points = x.reshape(len(x), -1)
    others = points if y is x else y.reshape(len(y), -1)
    coordinates = points.shape[1]
    flops = len(points) * len(others) * coordinates
    is_large = coordinates >= _LIMITS.fewest_coordinates and flops >= _LIMITS.fewest_flops
    has_graph = points.requires_grad or others.requires_grad
    if is_large and not has_graph and points.device.type != "mps":
        return _distances_by_products(points, others)
    return _distances_by_differences(points, others)


def _distances_by_differences(x: Tensor, y: Tensor) -> Tensor:
    """Return ‖x_i − y_j‖ from the differences of all pairs."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _distances_by_products(x: Tensor, y: Tensor) -> Tensor:
    """Return √(|x|² + |y|² − 2x·y), in float64, which takes a tenth of the time of differences.

    Pairs that are near each other, where digits cancel, are computed from differences.
    """
    center = x.mean(0, dtype=torch.float64)
    points = x - center
    others = points if y is x else y - center
    sizes = points.square().sum(1)[:, None] + others.square().sum(1)
    squares = torch.addcmul(sizes, cross_gram(points, others), sizes.new_tensor(-2.0))
    is_near = squares <= _LIMITS.near * sizes
    i, j = is_near.nonzero(as_tuple=True)
    if len(i) > _LIMITS.most_near * is_near.numel():
        return _distances_by_differences(x, y)
    lengths = squares.clamp_(min=0).sqrt_()
    lengths[i, j] = (points[i] - others[j]).norm(dim=1)
    return lengths.to(x.dtype)


def median_distance(x: Tensor) -> float:
    """Return the median of ‖x_i − x_j‖ over pairs i < j.

    It is a scale at which K is neither I nor all-ones. Of more than 2048 samples, 2048 evenly
    spaced ones are taken.

    >>> median_distance(torch.tensor([[0.0], [1.0], [3.0]]))
    2.0
    """
    is_float = isinstance(x, Tensor) and x.ndim > 0 and x.is_floating_point()
    if not is_float or len(x) < 2:
        description = type(x).__name__
        if isinstance(x, Tensor):
            description = f"shape {tuple(x.shape)} of {x.dtype}"
        raise PullbackError(
            "There is no distance between these inputs",
            f"got {description}",
            "Give two or more samples of a float tensor, samples first",
        )
    x = x.detach()[:: -(-len(x) // _LIMITS.median_points)]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    median = float(torch.pdist(x.to(dtype).reshape(len(x), -1)).median())
    if not 0 < median < inf:
        raise PullbackError(
            "The median distance is no scale",
            f"it is {median}: the inputs coincide or are not finite",
            "Leave equal inputs out",
        )
    return median


#: what `Sobolev(kernel=...)` takes
KernelLike = ReproducingKernel | Callable[[Tensor, Tensor], Tensor]
