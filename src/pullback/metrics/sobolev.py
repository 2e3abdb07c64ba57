"""The Sobolev metric: functions are measured in an RKHS norm, which couples the batch."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from .._core.errors import PullbackError, require
from .._core.factor import Factor, Mixed
from .._core.space import compute_dtype
from .base import Euclidean, Fisher, Metric
from .rkhs import KernelLike, Matern, ReproducingKernel, median_distance


@dataclass(frozen=True)
class SobolevThresholds:
    """Default jitter, and when a kernel matrix is refused or warned of."""

    #: added to K's unit diagonal in float64 and in float32: a few times the round-off of K's
    #: largest eigenvalue, which is the batch size where inputs coincide
    jitter_float64: float = 1e-10
    jitter_float32: float = 1e-5
    #: correlations this near to 0 or 1 count as such
    correlation: float = 1e-6
    #: |K − Kᵀ| relative to |K| from which on a kernel is not symmetric
    asymmetry: float = 1e-4


_THRESHOLDS = SobolevThresholds()
#: metrics that have warned: each warns once
_WARNED: WeakSet[Any] = WeakSet()


class Sobolev(Metric):
    r"""M = P (K⁻¹ ⊗ I) Pᵀ over the batch, with the kernel matrix K_ij = K(x_i, x_j) of the inputs.

    M is the squared norm in the RKHS of K of the smallest function with given values on the batch.
    By default P = I and K = e^(−d)(1 + d), d = ‖x − x'‖/scale: the Sobolev space H^s(Rⁿ) with
    s = (n + 3)/2. With J of full row rank and the loss Σℓ a natural-gradient step moves the
    function by −ηK∇ℓ on the batch; under means, the loss ℓ̄ = Σℓ/N and the Gram JᵀMJ/N have the
    same step. At K = I it is the Euclidean metric, or `inner`.

    With `inner=Fisher(likelihood)`, P_i is the likelihood's factor at sample i, PPᵀ its Fisher
    information. For `Categorical` Pᵀdz = d(2√p): the function measured is x ↦ 2√p(x) on the sphere.

    Args:
        scale: the length in input space beyond which two samples are unrelated; 20 is the same as
            dividing the inputs by 20. `median_distance(x)` is a good start.
        jitter: added to K's unit diagonal (times K's mean diagonal where it is another one), since
            equal inputs make K singular; 1e-10 in float64 and 1e-5 in float32 unless given.
        order: ν of the Matérn kernel, a half-integer: then s = ν + n/2.
        kernel: instead of scale and order, a `ReproducingKernel` or a function (x, x') ↦ (N, N').
        inner: the Fisher metric of single samples that the outputs are measured in.
    """

    couples_samples = True

    def __init__(
        self,
        scale: float = 1.0,
        jitter: float | None = None,
        *,
        order: float = 1.5,
        kernel: KernelLike | None = None,
        inner: Fisher | None = None,
    ) -> None:
        if kernel is not None and (scale != 1.0 or order != 1.5 or not callable(kernel)):
            raise PullbackError(
                "Sobolev's kernel is not usable",
                f"got kernel={kernel!r} with scale={scale!r} and order={order!r}",
                "Give scale and order, or a kernel that has its own, as a function of two batches",
            )
        usable = jitter is None or (isinstance(jitter, Real) and 0 <= jitter < float("inf"))
        require(usable, "The jitter", jitter, "Use a number ≥ 0")
        if inner is not None and not isinstance(inner, Fisher):
            raise PullbackError(
                "Sobolev's inner metric is not a Fisher metric",
                f"got {inner!r}: a factor that is known up to a rotation by sample cannot be "
                "compared between samples",
                "Pass inner=Fisher(likelihood), or leave it out",
            )
        self.kernel_of: KernelLike = Matern(order, scale) if kernel is None else kernel
        self.jitter = jitter
        self.inner = inner

    @property
    def scale(self) -> float | None:
        """The kernel's unit of length; None for a kernel of the user's without one."""
        return getattr(self.kernel_of, "scale", None)

    def kernel(
        self, inputs: Tensor, dtype: torch.dtype, result_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return K + jitter·I on the batch.

        Args:
            inputs: (N, ...).
            dtype: in which the kernel is evaluated, and which decides the default jitter.
            result_dtype: that of the matrix; None is the same.
        """
        x = inputs.detach().to(dtype)
        if result_dtype is None:
            result_dtype = dtype
        k = self.kernel_of(x, x)
        if not isinstance(k, Tensor) or k.shape != (len(x), len(x)):
            description = tuple(k.shape) if isinstance(k, Tensor) else type(k).__name__
            raise PullbackError(
                "The kernel does not fit the batch",
                f"it gave {description} for {len(x)} samples",
                f"Return the matrix K(x_i, x_j): {(len(x), len(x))}",
            )
        k = k.detach().to(x.device, result_dtype)
        eye = torch.eye(len(k), dtype=result_dtype, device=k.device)
        return k + self._choose_jitter(dtype) * k.diagonal().mean() * eye

    def _choose_jitter(self, dtype: torch.dtype) -> float:
        """Return the user's jitter, or the default of this precision."""
        if self.jitter is not None:
            return self.jitter
        if dtype == torch.float64:
            return _THRESHOLDS.jitter_float64
        return _THRESHOLDS.jitter_float32

    def cholesky(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Return L with L Lᵀ = K + jitter·I; warn once if K is near the identity or all-ones.

        L is computed in double precision: in single, a jitter of 1e-5 is below the round-off of
        K's largest eigenvalue, which is the batch size where inputs coincide.
        """
        computed_in = dtype if inputs.device.type == "mps" else torch.float64
        k = self.kernel(inputs, dtype, computed_in)
        if not isinstance(self.kernel_of, ReproducingKernel) and not _is_symmetric(k):
            raise PullbackError(
                "The kernel is not symmetric", "K(x, x') ≠ K(x', x)", "Use a reproducing kernel"
            )
        lower, info = torch.linalg.cholesky_ex((k + k.mT) / 2)
        if not bool(torch.isfinite(lower).all() & (info == 0)):
            raise _singular_kernel_error(k)
        if self not in _WARNED:
            self._warn_of_trivial_kernel(k, inputs, self._choose_jitter(dtype))
        return lower.to(dtype)

    def _warn_of_trivial_kernel(self, k: Tensor, inputs: Tensor, jitter: float) -> None:
        """Warn if all correlations between samples are 0, or all are 1."""
        if len(k) < 2:
            return
        root = k.diagonal().sqrt()
        correlations = k * (1 + jitter) / (root[:, None] * root)
        is_diagonal = torch.eye(len(k), dtype=torch.bool, device=k.device)
        between = correlations[~is_diagonal]
        if bool((between.abs() < _THRESHOLDS.correlation).all()):
            matrix = "the identity"
            meaning = "it relates no two samples, as if there were no kernel"
        elif bool((between > 1 - _THRESHOLDS.correlation).all()):
            matrix = "all-ones"
            meaning = "no two samples are told apart, and K is nearly singular"
        else:
            return
        _WARNED.add(self)
        try:
            hint = f"it is {median_distance(inputs):.3g} here"
        except PullbackError:
            hint = "here all inputs coincide"
        warnings.warn(
            f"The Sobolev kernel {self.kernel_of!r} is numerically {matrix} on this batch: "
            f"{meaning}. Set scale near metrics.median_distance(inputs); {hint}.",
            stacklevel=2,
        )

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        if not isinstance(inputs, Tensor):
            raise _unusable_inputs_error("none", z)
        has_samples = inputs.ndim > 0 and len(inputs) > 0 and len(inputs) == len(z)
        if not has_samples or not inputs.is_floating_point():
            raise _unusable_inputs_error(f"{tuple(inputs.shape)} of {inputs.dtype}", z)
        lower = self.cholesky(inputs.to(z.device), compute_dtype(z.dtype))
        return Mixed(lower, (self.inner or Euclidean()).factor(z))

    def samples(self, z: Tensor) -> int:
        return (self.inner or Euclidean()).samples(z)

    def __repr__(self) -> str:
        fields = f"kernel={self.kernel_of!r}, jitter={self.jitter!r}, inner={self.inner!r}"
        return f"Sobolev({fields})"


def _is_symmetric(k: Tensor) -> bool:
    """Return True if K(x, x') = K(x', x) up to round-off."""
    asymmetry = (k - k.mT).abs().max()
    return not bool(asymmetry > _THRESHOLDS.asymmetry * k.abs().max())


def _singular_kernel_error(k: Tensor) -> PullbackError:
    """Return why K has no Cholesky factor."""
    if not bool(torch.isfinite(k).all()):
        return PullbackError(
            "The Sobolev kernel is not finite",
            "some inputs, or values of the kernel, are NaN or infinite",
            "Check the batch",
        )
    return PullbackError(
        "The Sobolev kernel is singular on this batch",
        "some inputs coincide or lie within round-off of each other, or a kernel of your "
        "own is not positive",
        "Raise jitter, or lower scale",
    )


def _unusable_inputs_error(description: str, z: Tensor) -> PullbackError:
    """Return the error for inputs, described in words, that are no points for outputs z."""
    return PullbackError(
        "Sobolev needs the model's inputs as points of a vector space",
        f"got {description} for {z.shape[0]} samples",
        "Give the model a float tensor with one entry per sample as its first argument",
    )
