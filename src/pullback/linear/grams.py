"""Grams of linear networks: with a small matrix, or by products with the factors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from .._core.factor import Factor
from .._core.svd import svd
from ..grams import FactoredGram, Operator, Structure
from .tangents import FactorTangent, Isometric


@dataclass(frozen=True)
class CoreLimits:
    """Sizes of a matrix C up to which it is formed and decomposed.

    Attributes:
        side: its smaller side, up to which the SVD costs less than a few seconds.
        entries: of C: 256 MiB in float64.
    """

    side: int = 1024
    entries: int = 2**25

    def can_hold(self, rows: int, columns: int) -> bool:
        """Return True if a matrix of this shape may be formed."""
        return min(rows, columns) <= self.side and rows * columns <= self.entries


LIMITS = CoreLimits()


class CoreGram(FactoredGram):
    """G = EᵀCᵀC E for a matrix C (n, q) and an isometry Eᵀ from R^q into R^p."""

    def __init__(
        self,
        core: Tensor,
        size: int,
        reduce: Callable[[Tensor], Tensor],
        expand: Callable[[Tensor], Tensor],
    ) -> None:
        self._core = core
        self._reduce = reduce
        self._expand = expand
        self.count = core.shape[0]
        self.size = size
        self.dtype = core.dtype
        self.device = core.device
        has_few_rows = core.shape[0] <= core.shape[1]
        self.structure = Structure(
            "kernel" if has_few_rows else "operator",
            factored=True,
            low_rank=self.count < self.size,
            closed=True,
            spectral=not has_few_rows,
        )

    def project(self, v: Tensor) -> Tensor:
        return self._core @ self._reduce(v)

    def lift(self, c: Tensor) -> Tensor:
        return self._expand(self._core.T @ c)

    def lift_rows(self, c: Tensor) -> Tensor:
        return self._expand(c @ self._core)

    def rows(self) -> Tensor:
        return self._expand(self._core)

    def kernel(self) -> Tensor:
        return self._core @ self._core.T

    def row_norms(self) -> Tensor:
        return self._core.norm(dim=1)

    def trace(self) -> Tensor:
        return self._core.square().sum()

    def spectrum(self) -> Isometric | None:
        if not bool(torch.isfinite(self._core).all()):
            return None
        return Isometric(svd(self._core), self._reduce, self._expand)


@dataclass(frozen=True)
class FlatFactor:
    """S and Sᵀ of a metric at values of a shape, on flat vectors."""

    factor: Factor
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """n, the length of Sᵀv."""
        return self.shape[0] * prod(self.factor.white)

    def transpose(self, v: Tensor) -> Tensor:
        """Sᵀ on the last axis, (..., n_z) -> (..., n)."""
        return self.factor.transpose(v.reshape(*v.shape[:-1], *self.shape)).flatten(v.ndim - 1)

    def apply(self, c: Tensor) -> Tensor:
        """S c, (n,) -> (n_z,)."""
        return self.factor.apply(c.view(self.shape[0], *self.factor.white)).flatten()


class TangentGram(Operator):
    """G = JᵀMJ by products with the factors; JJᵀ = Σ LLᵀ ⊗ RᵀR where a matrix is asked for."""

    def __init__(self, tangent: FactorTangent, factor: FlatFactor) -> None:
        self._tangent = tangent
        self._factor = factor
        first = tangent.terms[0].left
        super().__init__(
            lambda v: factor.transpose(tangent.push(tangent.split(v))),
            lambda c: tangent.pull_flat(factor.apply(c)),
            (factor.count, tangent.size),
            first.dtype,
            first.device,
        )
        self.structure = replace(self.structure, closed=True)

    def kernel(self) -> Tensor:
        return self._factor.transpose(self._factor.transpose(self._tangent.kernel()).T)

    def trace(self) -> Tensor:
        return self.kernel().diagonal().sum()


def make_tangent_gram(
    tangent: FactorTangent, factor: FlatFactor, limits: CoreLimits = LIMITS
) -> FactoredGram:
    """Return the Gram with C formed where its SVD is cheap, else by products."""
    if not limits.can_hold(tangent.count, tangent.width):
        return TangentGram(tangent, factor)
    core = factor.transpose(tangent.core().T).T
    return CoreGram(core.contiguous(), tangent.size, tangent.reduce, tangent.expand)
