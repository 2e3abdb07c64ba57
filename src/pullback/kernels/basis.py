r"""Bases C of parameter directions, (p, k), in the forms they come in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.space import ParameterSpace


class Basis(ABC):
    """Columns c_i ∈ R^p; {dφ·c_i} is what a GTK sums over."""

    #: number of columns k
    size: int

    @abstractmethod
    def matvec(self, c: Tensor) -> Tensor:
        """C c: (k,) -> (p,)."""

    @abstractmethod
    def rmatvec(self, v: Tensor) -> Tensor:
        """Cᵀ v: (p,) -> (k,)."""

    def after(self, rows: Tensor) -> Tensor:
        """A C for rows A, (n, p) -> (n, k)."""
        return torch.stack([self.rmatvec(row) for row in rows])

    def column(self, i: int, space: ParameterSpace) -> Tensor:
        """c_i."""
        unit = space.zeros(self.size)
        unit[i] = 1
        return self.matvec(unit)


class DenseBasis(Basis):
    """C as a matrix, dense or sparse."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self._transposed = matrix.mT
        self.size = matrix.shape[1]

    def matvec(self, c: Tensor) -> Tensor:
        return self.matrix @ c

    def rmatvec(self, v: Tensor) -> Tensor:
        return self._transposed @ v

    def after(self, rows: Tensor) -> Tensor:
        return (self._transposed @ rows.T).T


class ImplicitBasis(Basis):
    """C by its products, each a function of one flat vector."""

    def __init__(
        self,
        matvec: Callable[[Tensor], Tensor],
        rmatvec: Callable[[Tensor], Tensor],
        size: int,
    ) -> None:
        self._matvec, self._rmatvec, self.size = matvec, rmatvec, size

    def matvec(self, c: Tensor) -> Tensor:
        return self._matvec(c)

    def rmatvec(self, v: Tensor) -> Tensor:
        return self._rmatvec(v)


def as_basis(basis: Any, space: ParameterSpace) -> Basis:
    """C from a matrix (p, k), dense or sparse; from tangent vectors, each a dict of tensors by
    parameter name or a flat (p,) tensor; or from an object with `matvec` and `rmatvec`.
    """
    if isinstance(basis, Tensor):
        return DenseBasis(_matrix(basis, space))
    if callable(getattr(basis, "matvec", None)) and callable(getattr(basis, "rmatvec", None)):
        return _implicit(basis.matvec, basis.rmatvec, space)
    if isinstance(basis, Sequence) and len(basis) == 2 and all(map(callable, basis)):
        return _implicit(basis[0], basis[1], space)
    if isinstance(basis, Sequence) and basis:
        return DenseBasis(torch.stack([_flat(v, space) for v in basis], 1))
    raise PullbackError(
        "The basis is not usable",
        f"got {type(basis).__name__}",
        "Pass a matrix (p, k), a list of tangent vectors, or an object with matvec and rmatvec",
    )


def _matrix(matrix: Tensor, space: ParameterSpace) -> Tensor:
    if matrix.ndim != 2 or matrix.shape[0] != space.size or not matrix.shape[1]:
        raise PullbackError(
            "The basis does not fit the parameters",
            f"it has shape {tuple(matrix.shape)} for {space.size} parameters",
            f"Pass C of shape ({space.size}, k), one column per direction",
        )
    if matrix.is_complex():
        raise PullbackError("The basis is complex", "tangent vectors are real", "Pass its parts")
    if matrix.layout not in (torch.strided, torch.sparse_coo):
        matrix = matrix.to_sparse_csr()
    values = matrix.coalesce().values() if matrix.layout == torch.sparse_coo else matrix
    values = values.values() if values.layout == torch.sparse_csr else values
    if not bool(torch.isfinite(values).all()):
        raise PullbackError("The basis is not finite", "C contains NaN or infinity", "Check it")
    return matrix.detach().to(space.device, space.dtype)


def _flat(vector: Any, space: ParameterSpace) -> Tensor:
    if isinstance(vector, Mapping):
        unknown = [n for n in vector if n not in space.names]
        shapes = dict(zip(space.names, space.shapes, strict=True))
        wrong = unknown or [n for n, v in vector.items() if _shape(v) != shapes[n]]
        if wrong:
            raise PullbackError(
                "A tangent vector does not fit the parameters",
                f"unknown or of another shape: {wrong}",
                "Give one tensor per moved parameter, in its shape",
            )
        vector = space.flatten({n: vector.get(n) for n in space.names})
    if not isinstance(vector, Tensor):
        raise PullbackError(
            "A tangent vector is not usable",
            f"got {type(vector).__name__}",
            "Pass a dict of tensors by parameter name, or a flat tensor",
        )
    return _matrix(vector.reshape(-1, 1), space)[:, 0]


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _implicit(
    matvec: Callable[[Tensor], Tensor], rmatvec: Callable[[Tensor], Tensor], space: ParameterSpace
) -> ImplicitBasis:
    """Sizes from one product each, and whether the two are transposes of each other."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(space.size, generator=generator, dtype=torch.float64)
    v = v.to(space.device, space.dtype)
    try:
        pulled = rmatvec(v)
        c = torch.randn(pulled.shape, generator=generator, dtype=torch.float64).to(v)
        pushed = matvec(c)
        left, right = (pushed * v).sum(), (pulled * c).sum()
    except (RuntimeError, IndexError, ValueError) as error:
        raise PullbackError(
            "The basis does not fit the parameters",
            f"its products fail for {space.size} parameters: {error}",
            "matvec takes (k,) to (p,), rmatvec (p,) to (k,)",
        ) from error
    scale = pushed.norm() * v.norm() + pulled.norm() * c.norm()
    if not bool((left - right).abs() <= torch.finfo(v.dtype).eps ** 0.5 * scale):
        raise PullbackError(
            "The basis contradicts itself",
            "rmatvec is not the transpose of matvec",
            "Let ⟨matvec(c), v⟩ = ⟨c, rmatvec(v)⟩ for all c and v",
        )
    return ImplicitBasis(matvec, rmatvec, pulled.numel())
