r"""Blocks of a curvature by their eigenvalues: every question is a function of G.

With G = Q diag(s) Qᵀ, products are f(G) v = Q f(s) Qᵀ v and inner products of gradients are
gᵀ f(G) g'. The function is s for products, 1/(s + λ) for solves and 1/√(s + λ) for samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..grams.kronecker import EigenBlock, Pair
from .capture import GradientBlock
from .forms import BlockForm

#: a function of eigenvalues, entry by entry
SpectralFunction = Callable[[Tensor], Tensor]


class SpectralBlock(ABC):
    """G of one block of parameters, in its eigenbasis."""

    form: BlockForm

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """All eigenvalues, in no order: (size,)."""

    @abstractmethod
    def apply(self, function: SpectralFunction, matrices: Tensor) -> Tensor:
        """f(G) v for v of shape (..., G, O, I)."""

    @abstractmethod
    def inner_products(
        self, function: SpectralFunction, gradients: GradientBlock, panel: slice
    ) -> Tensor:
        """gᵀ f(G) g' between the R gradients of each sample in a slice: (n, R, R)."""

    @abstractmethod
    def describe(self) -> str:
        """Return in words in what form G is stored."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are written to a file, by name."""

    def mean_eigenvalue(self) -> float:
        """tr(G)/size."""
        return float(self.eigenvalues().double().sum()) / max(1, self.form.size)


@dataclass(frozen=True)
class KroneckerBlock(SpectralBlock):
    """(U ⊗ W) diag(values) (U ⊗ W)ᵀ: eigenbases of two factors with eigenvalues (G, O, I)."""

    form: BlockForm
    gram: EigenBlock

    @classmethod
    def of_pair(cls, form: BlockForm, pair: Pair) -> KroneckerBlock:
        """Return R ⊗ C in the eigenbases of R and C, which are found in float64.

        In float32 the decomposition of a factor with many equal eigenvalues may not converge.
        """
        dtype = pair.output_factor.dtype
        double = Pair(pair.output_factor.double(), pair.input_factor.double())
        block = double.eigen_block()
        eigenvalues = block.eigenvalues.to(dtype)
        bases = (_cast(block.output_basis, dtype), _cast(block.input_basis, dtype))
        return cls(form, EigenBlock(*bases, eigenvalues))

    def replace_eigenvalues(self, values: Tensor) -> KroneckerBlock:
        """Return the same bases with other eigenvalues."""
        return replace(self, gram=replace(self.gram, eigenvalues=values))

    def eigenvalues(self) -> Tensor:
        return self.gram.eigenvalues.flatten()

    def apply(self, function: SpectralFunction, matrices: Tensor) -> Tensor:
        return self.replace_eigenvalues(function(self.gram.eigenvalues)).gram.matvec(matrices)

    def inner_products(
        self, function: SpectralFunction, gradients: GradientBlock, panel: slice
    ) -> Tensor:
        coordinates = gradients.rotate(
            self.gram.output_basis, self.gram.input_basis, panel
        ).flatten(2)
        weights = function(self.gram.eigenvalues).flatten()
        return (coordinates * weights) @ coordinates.mT

    def factors(self) -> Pair:
        """Return R and C with the partial traces of the block; for K-FAC, R ⊗ C is the block."""
        values = self.gram.eigenvalues
        trace = values.sum((1, 2), keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
        output_values = values.sum(2)
        input_values = (values / trace).sum(1)
        return Pair(
            _rotate_back(self.gram.output_basis, output_values),
            _rotate_back(self.gram.input_basis, input_values),
        )

    def describe(self) -> str:
        groups, rows, columns = self.form.shape
        if self.gram.output_basis is None and self.gram.input_basis is None:
            return f"diagonal {groups * rows * columns}"
        if rows == 1 and groups == 1:
            return f"dense {columns}"
        prefix = ""
        if groups > 1:
            prefix = f"{groups} × "
        output_side = _describe_side(rows, self.gram.output_basis)
        input_side = _describe_side(columns, self.gram.input_basis)
        return f"Kronecker {prefix}{output_side} ⊗ {input_side}"

    def tensors(self) -> dict[str, Tensor]:
        tensors = vars(self.gram)
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _rotate_back(basis: Tensor | None, values: Tensor) -> Tensor:
    """Return U diag(values) Uᵀ, (G, n, n), or the values where there is no basis, (G, n)."""
    if basis is None:
        return values
    return (basis * values[:, None]) @ basis.mT


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.to(dtype)


def _describe_side(length: int, basis: Tensor | None) -> str:
    if basis is None and length > 1:
        return f"diagonal {length}"
    return str(length)


@dataclass(frozen=True)
class LowRankBlock(SpectralBlock):
    """V diag(values) Vᵀ with fewer directions than parameters; all others have eigenvalue 0.

    Attributes:
        form: one long vector.
        directions: Vᵀ, orthonormal rows (k, p).
        values: (k,).
    """

    form: BlockForm
    directions: Tensor
    values: Tensor

    def eigenvalues(self) -> Tensor:
        zeros = self.values.new_zeros(self.form.size - len(self.values))
        return torch.cat([self.values, zeros])

    def apply(self, function: SpectralFunction, matrices: Tensor) -> Tensor:
        flat = matrices.flatten(-3)
        coordinates = flat @ self.directions.T
        outside = self._weight_outside(function)
        weights = function(self.values) - outside
        moved = (coordinates * weights) @ self.directions + outside * flat
        return moved.view(matrices.shape)

    def inner_products(
        self, function: SpectralFunction, gradients: GradientBlock, panel: slice
    ) -> Tensor:
        flat = gradients.matrices(panel).flatten(2)
        coordinates = flat @ self.directions.T
        outside = self._weight_outside(function)
        weights = function(self.values) - outside
        return (coordinates * weights) @ coordinates.mT + outside * (flat @ flat.mT)

    def _weight_outside(self, function: SpectralFunction) -> Tensor:
        """f(0), for the directions that no sample moves."""
        return function(self.values.new_zeros(()))

    def mean_eigenvalue(self) -> float:
        return float(self.values.double().sum()) / max(1, self.form.size)

    def describe(self) -> str:
        return f"exact, {len(self.values)} directions of {self.form.size}"

    def tensors(self) -> dict[str, Tensor]:
        return {"directions": self.directions, "values": self.values}


def restore_block(form: BlockForm, tensors: dict[str, Tensor]) -> SpectralBlock:
    """Return the block that `tensors()` described."""
    if "directions" in tensors:
        return LowRankBlock(form, tensors["directions"], tensors["values"])
    bases = (tensors.get("output_basis"), tensors.get("input_basis"))
    return KroneckerBlock(form, EigenBlock(*bases, tensors["eigenvalues"]))
