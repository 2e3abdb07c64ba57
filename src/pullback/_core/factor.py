r"""Factors S of a metric M = S Sᵀ over function values.

Tensors on both sides have shape (*batch, N, *event), samples first. `whiten` inverts S on its
range: the r with S r = g, from which the natural gradient is A⁺r with A = SᵀJ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .errors import PullbackError, Status


@dataclass(frozen=True)
class Whitened:
    """The r with S r = g, or the reason why there is none."""

    value: Tensor | None
    status: Status = Status.OK

    @classmethod
    def if_valid(cls, r: Tensor, in_range: Tensor | None = None) -> Whitened:
        """Return r if it is finite and g was in the range of S, else the reason."""
        is_valid = torch.isfinite(r).all()
        if in_range is not None:
            is_valid = is_valid & in_range
        if bool(is_valid):
            return cls(r)
        return cls(None, Status.NOT_REPRESENTABLE)


class Factor(ABC):
    """S at given function values of shape (N, *event)."""

    #: whether S mixes samples; then rows of J are formed first and S is applied after
    couples_samples: bool = False
    #: whether Sᵀv = 0 for a v that is the same at all samples
    subtracts_means: bool = False
    #: L, where S = P (L⁻ᵀ ⊗ I) with a P that keeps samples apart: then M = P (K⁻¹ ⊗ I) Pᵀ, K = L Lᵀ
    coupling: Tensor | None = None
    #: the shape of r for one sample
    white: tuple[int, ...]

    @abstractmethod
    def apply(self, r: Tensor) -> Tensor:
        """S r."""

    @abstractmethod
    def transpose(self, v: Tensor) -> Tensor:
        """Sᵀ v."""

    @abstractmethod
    def whiten(self, g: Tensor, eps: float | None = None) -> Whitened:
        """The r with S r = g; `eps` is the precision of g where it is lower than its dtype's."""

    def __matmul__(self, r: Tensor) -> Tensor:
        return self.apply(r)

    def matvec(self, v: Tensor) -> Tensor:
        """M v = S Sᵀ v."""
        return self.apply(self.transpose(v))

    def separate(self) -> Factor:
        """P: the factor without its coupling between samples."""
        return self

    def covectors(self, value: Tensor) -> Tensor:
        """The columns of S, one per entry of r, for every sample at once: (R, N, *event)."""
        size = prod(self.white)
        eye = torch.eye(size, dtype=value.dtype, device=value.device)
        return self.apply(eye.view(size, 1, *self.white).expand(size, value.shape[0], *self.white))


class Diagonal(Factor):
    """S = diag(scale), entry by entry."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        self.white = tuple(scale.shape[1:])

    def apply(self, r: Tensor) -> Tensor:
        return self.scale * r

    def transpose(self, v: Tensor) -> Tensor:
        return self.scale * v

    def whiten(self, g: Tensor, eps: float | None = None) -> Whitened:
        return Whitened.if_valid(torch.where(g == 0, 0.0, g / self.scale))


class Blocks(Factor):
    """S given as one matrix (|event|, k) per sample."""

    def __init__(self, matrices: Tensor, event: tuple[int, ...]) -> None:
        self._s = matrices
        self._event = event
        self.white = (matrices.shape[-1],)

    @classmethod
    def of_metric(cls, metric: Tensor, event: tuple[int, ...]) -> Blocks:
        """S = U √Λ of positive semidefinite matrices M (N, |event|, |event|)."""
        if not bool(torch.isfinite(metric).all()):
            raise PullbackError(
                "The metric is not finite",
                "M overflows or is undefined at these outputs",
                "Check the metric or potential there, or scale the outputs down",
            )
        values, vectors = torch.linalg.eigh((metric + metric.mT) / 2)
        tolerance = torch.finfo(metric.dtype).eps ** 0.5
        if bool((values[..., 0] < -tolerance * values.abs().amax(-1)).any()):
            raise PullbackError(
                "The metric is not positive semidefinite",
                f"M has the eigenvalue {float(values.min()):.3g}",
                "Use a convex potential, or a metric that measures lengths",
            )
        floor = torch.finfo(metric.dtype).eps * metric.shape[-1] * values[..., -1:]
        values = torch.where(values > floor, values, 0.0)
        return cls(vectors * values.sqrt()[..., None, :], event)

    def apply(self, r: Tensor) -> Tensor:
        return torch.einsum("nek,...nk->...ne", self._s, r).unflatten(-1, self._event)

    def transpose(self, v: Tensor) -> Tensor:
        flat = v.flatten(v.ndim - len(self._event))
        return torch.einsum("nek,...ne->...nk", self._s, flat)

    def whiten(self, g: Tensor, eps: float | None = None) -> Whitened:
        flat = g.flatten(1)
        r = torch.einsum("nke,ne->nk", torch.linalg.pinv(self._s), flat)
        error = (self.apply(r).flatten(1) - flat).norm()
        precision = eps or torch.finfo(g.dtype).eps
        return Whitened.if_valid(r, error <= precision**0.5 * flat.norm())


class Scaled(Factor):
    """√w · S for weights w: a number, or one per sample or entry, given as (N, ...)."""

    def __init__(self, factor: Factor, weight: Tensor | float, event: tuple[int, ...]) -> None:
        self._factor = factor
        self.white = factor.white
        self.couples_samples = factor.couples_samples
        self.coupling = factor.coupling
        self.subtracts_means = factor.subtracts_means and not isinstance(weight, Tensor)
        if isinstance(weight, Tensor):
            weight = weight.reshape(*weight.shape, *[1] * (1 + len(event) - weight.ndim))
            self._root: Tensor | float = weight.sqrt()
        else:
            self._root = weight**0.5

    def apply(self, r: Tensor) -> Tensor:
        return self._root * self._factor.apply(r)

    def transpose(self, v: Tensor) -> Tensor:
        return self._factor.transpose(self._root * v)

    def whiten(self, g: Tensor, eps: float | None = None) -> Whitened:
        return self._factor.whiten(torch.where(g == 0, 0.0, g / self._root), eps)

    def separate(self) -> Factor:
        if self.coupling is None:
            return self
        separate = copy(self)
        separate._factor = self._factor.separate()
        separate.coupling = None
        separate.couples_samples = False
        separate.subtracts_means = False
        return separate


class Mixed(Factor):
    """S = P (L⁻ᵀ ⊗ I) over the samples for K = L Lᵀ, so that M = P (K⁻¹ ⊗ I) Pᵀ couples the batch.

    L acts beside the shape of r, and P is `inner`.
    """

    couples_samples = True

    def __init__(self, cholesky: Tensor, inner: Factor) -> None:
        self.coupling = self._lower = cholesky
        self.white = inner.white
        self._inner = inner

    def separate(self) -> Factor:
        return self._inner

    def _solve_over_samples(self, x: Tensor, *, transpose: bool) -> Tensor:
        """Return L⁻ᵀ x (`transpose`) or L⁻¹ x along the axis of samples."""
        axis = x.ndim - 1 - len(self.white)
        samples_first = x.movedim(axis, 0)
        columns = samples_first.reshape(samples_first.shape[0], -1)
        triangle = self._lower.mT if transpose else self._lower
        solved = torch.linalg.solve_triangular(triangle, columns, upper=transpose)
        return solved.view(samples_first.shape).movedim(0, axis)

    def apply(self, r: Tensor) -> Tensor:
        return self._inner.apply(self._solve_over_samples(r, transpose=True))

    def transpose(self, v: Tensor) -> Tensor:
        return self._solve_over_samples(self._inner.transpose(v), transpose=False)

    def whiten(self, g: Tensor, eps: float | None = None) -> Whitened:
        separate = self._inner.whiten(g, eps)
        if separate.value is None:
            return separate
        flat = self._lower.mT @ separate.value.flatten(1)
        return Whitened.if_valid(flat.view(separate.value.shape))
