"""Reproducing kernels on inputs: the inner products ⟨K_x, K_x'⟩ = K(x, x') of function spaces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from math import factorial, inf
from numbers import Real

import torch
from torch import Tensor

from .._core.errors import PullbackError, require
from .._core.products import cross_gram

_POINTS = 2048  # whose pairs tell the median distance
_WIDE, _PRODUCTS = 64, 2**20  # from where on inner products are faster than differences
_CANCELS = 1e-4  # squared distances, of the points' squared lengths, that lose too many digits


class ReproducingKernel(ABC):
    """K(x, x') for points (N, ...) and (M, ...), flattened to vectors: a matrix (N, M)."""

    @abstractmethod
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The matrix K(x_i, y_j)."""

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
        half = isinstance(order, (int, float)) and order > 0 and float(order - 0.5).is_integer()
        if not half or order > 20:
            raise PullbackError(
                "The Matérn kernel's order is not usable",
                f"got {order!r}, and it is a polynomial times e^(−d) for half-integers alone",
                "Use 0.5, 1.5, 2.5, ... (at most 19.5), or pass a function of your own as kernel=",
            )
        length = isinstance(scale, Real) and not isinstance(scale, bool) and 0 < scale < inf
        remedy = "Use a positive number, such as metrics.median_distance(x)"
        require(length, "The kernel's scale", scale, remedy)
        self.order, self.scale = float(order), float(scale)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        d = distances(x, y) / self.scale
        polynomial = torch.zeros_like(d)
        for coefficient in _coefficients(int(self.order)):
            polynomial = polynomial * d + coefficient
        return torch.exp(-d) * polynomial

    def smoothness(self, n: int) -> float:
        """The s of H^s(Rⁿ): ν + n/2, which is (n + 3)/2 for ν = 3/2."""
        return self.order + n / 2


@lru_cache
def _coefficients(p: int) -> tuple[float, ...]:
    """Of d^p, ..., d⁰ in the polynomial of ν = p + 1/2."""
    return tuple(
        factorial(p) / factorial(2 * p) * factorial(p + k) / (factorial(k) * factorial(p - k))
        * 2 ** (p - k)
        for k in range(p + 1)
    )  # fmt: skip


def distances(x: Tensor, y: Tensor) -> Tensor:
    """‖x_i − y_j‖ of samples (N, ...) and (M, ...), without cancellation between near points."""
    same = x is y
    x, y = x.reshape(len(x), -1), y.reshape(len(y), -1)
    large = x.shape[1] >= _WIDE and len(x) * len(y) * x.shape[1] >= _PRODUCTS
    if large and not (x.requires_grad or y.requires_grad) and x.device.type != "mps":
        return _expanded(x, x if same else y)
    return _direct(x, y)


def _direct(x: Tensor, y: Tensor) -> Tensor:
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _expanded(x: Tensor, y: Tensor) -> Tensor:
    """√(|x|² + |y|² − 2x·y) in float64, a tenth of the time; near pairs are subtracted first."""
    center = x.mean(0, dtype=torch.float64)
    one = x - center
    two = one if y is x else y - center
    sizes = one.square().sum(1)[:, None] + two.square().sum(1)
    squares = torch.addcmul(sizes, cross_gram(one, two), sizes.new_tensor(-2.0))
    near = squares <= _CANCELS * sizes
    i, j = near.nonzero(as_tuple=True)
    if len(i) > near.numel() // 8:
        return _direct(x, y)
    out = squares.clamp_(min=0).sqrt_()
    out[i, j] = (one[i] - two[j]).norm(dim=1)
    return out.to(x.dtype)


def median_distance(x: Tensor) -> float:
    """The median of ‖x_i − x_j‖ over pairs i < j: a scale at which K is neither I nor all-ones.

    Of more than 2048 samples, 2048 evenly spaced ones are taken.

    >>> median_distance(torch.tensor([[0.0], [1.0], [3.0]]))
    2.0
    """
    usable = isinstance(x, Tensor) and x.ndim > 0 and x.is_floating_point()
    if not usable or len(x) < 2:
        got = f"shape {tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise PullbackError(
            "There is no distance between these inputs",
            f"got {got}",
            "Give two or more samples of a float tensor, samples first",
        )
    x = x.detach()[:: -(-len(x) // _POINTS)]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    found = float(torch.pdist(x.to(dtype).reshape(len(x), -1)).median())
    if not 0 < found < inf:
        raise PullbackError(
            "The median distance is no scale",
            f"it is {found}: the inputs coincide or are not finite",
            "Leave equal inputs out",
        )
    return found


#: what `Sobolev(kernel=...)` takes
KernelLike = ReproducingKernel | Callable[[Tensor, Tensor], Tensor]
