"""Bases C of parameter directions, (p, k), and the tangent kernel of the basis {dφ·c_i}.

A basis is held as the Gram C Cᵀ with the factor A = Cᵀ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._core.checks import require_finite_tensor
from .._core.errors import PullbackError, require
from .._core.space import ParameterSpace
from ..grams import FactoredGram, Operator, Rows
from ..maps import Linearization
from .kernel import NTK, FeatureKernel, TangentKernel
from .tangent import Tangent, as_tangent
from .tiles import MEMORY


def as_basis(basis: Any, space: ParameterSpace) -> FactoredGram:
    """Return C Cᵀ of a basis of parameter directions.

    Args:
        basis: a matrix C (p, k), dense or sparse; tangent vectors, each a dict of tensors by
            parameter name or a flat (p,) tensor; or an object with `matvec` and `rmatvec`.
        space: the parameters.
    """
    if isinstance(basis, Tensor):
        return Rows(_convert_matrix(basis, space).mT)
    if callable(getattr(basis, "matvec", None)) and callable(getattr(basis, "rmatvec", None)):
        return _implicit(basis.matvec, basis.rmatvec, space)
    is_list = isinstance(basis, Sequence) and not isinstance(basis, str) and bool(basis)
    remedy = "Pass a matrix (p, k), a list of tangent vectors, or an object with matvec and rmatvec"
    require(is_list, "The basis", basis, remedy)
    return Rows(torch.stack([_flatten_tangent(v, space) for v in basis]))


def _convert_matrix(matrix: Tensor, space: ParameterSpace) -> Tensor:
    """Return C with the dtype and device of the parameters; raise if it does not fit them."""
    if matrix.ndim != 2 or matrix.shape[0] != space.size or not matrix.shape[1]:
        raise PullbackError(
            "The basis does not fit the parameters",
            f"it has shape {tuple(matrix.shape)} for {space.size} parameters",
            f"Pass C of shape ({space.size}, k), one column per direction",
        )
    if matrix.layout not in (torch.strided, torch.sparse_coo):
        matrix = matrix.to_sparse_csr()
    values = matrix
    if matrix.layout == torch.sparse_coo:
        values = matrix.coalesce().values()
    elif matrix.layout == torch.sparse_csr:
        values = matrix.values()
    require_finite_tensor("The basis", values)
    return matrix.detach().to(space.device, space.dtype)


def _flatten_tangent(vector: Any, space: ParameterSpace) -> Tensor:
    """Return a tangent vector, flat or a dict by name, as (p,); raise if it does not fit."""
    if isinstance(vector, Mapping):
        shapes = dict(zip(space.names, space.shapes, strict=True))
        wrong = []
        for name, value in vector.items():
            if not isinstance(value, Tensor) or value.shape != shapes.get(name):
                wrong.append(name)
        if wrong:
            raise PullbackError(
                "A tangent vector does not fit the parameters",
                f"unknown or of another shape: {wrong}",
                "Give one tensor per moved parameter, in its shape",
            )
        vector = space.flatten({n: vector.get(n) for n in space.names})
    require_finite_tensor("A tangent vector", vector)
    return _convert_matrix(vector.reshape(-1, 1), space)[:, 0]


def _implicit(
    matvec: Callable[[Tensor], Tensor], rmatvec: Callable[[Tensor], Tensor], space: ParameterSpace
) -> Operator:
    """Return C Cᵀ of a basis known by products; raise unless the two are transposes.

    One product with each of them shows the sizes.
    """
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(space.size, generator=generator, dtype=torch.float64)
    v = v.to(space.device, space.dtype)
    try:
        pulled = rmatvec(v)
        c = torch.randn(pulled.shape, generator=generator, dtype=torch.float64).to(v)
        pushed = matvec(c)
        left = (pushed * v).sum()
        right = (pulled * c).sum()
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
    return Operator(rmatvec, matvec, (pulled.numel(), space.size), space.dtype, space.device)


class GTK(FeatureKernel):
    """K(x, x') = Σ_i b_i(x) ⊗ b_i(x') with b_i = dφ·c_i: J C Cᵀ J'ᵀ.

    Whatever the basis, it is orthonormal in the RKHS of this kernel. Where the b_i are linearly
    dependent (for ReLU networks they are on every layer-wise slice: there is one scaling symmetry
    per hidden unit), their Gram matrix in it is a projection and not the identity.
    """

    def __init__(self, tangent: Tangent, basis: Any) -> None:
        super().__init__(tangent)
        self.basis = as_basis(basis, tangent.space)

    def to_direction(self, v: Tensor) -> Tensor:
        return self.basis.matvec(v)

    @property
    def width(self) -> int:
        return self.basis.count + self.tangent.space.size

    def features(self, linear: Linearization) -> Tensor:
        """Return J C, by k forward passes, or from rows of J where that is cheaper."""
        n = len(linear.value)
        event = linear.value.shape[1:]
        m = event.numel()
        k = self.basis.count
        if 6 * k < m * (k + 3):  # a pass costs about 6 multiply-adds per sample and parameter
            units = torch.eye(k, dtype=linear.space.dtype, device=linear.space.device)
            columns = (linear.jvp(self.basis.lift(unit)) for unit in units)
            return torch.stack([c.reshape(n, m) for c in columns], -1)
        rows = linear.rows()
        if self.basis.structure.holds == "rows":
            return (self.basis.rows() @ rows.T).T.view(n, m, k)
        return torch.stack([self.basis.project(row) for row in rows]).view(n, m, k)


def gtk(
    model: nn.Module | Tangent,
    x: Any,
    x2: Any = None,
    *,
    basis: Any = None,
    layout: str = "full",
    params: Mapping[str, Tensor] | None = None,
    chunk: int | None = None,
    memory: int = MEMORY,
) -> Tensor:
    """J C Cᵀ J'ᵀ; without a basis it is the NTK.

    Args:
        model, x, x2, layout, params, chunk: as in `ntk`.
        basis: C: a matrix (p, k), dense or sparse, in the order of the parameters; a list of
            tangent vectors, each a dict by parameter name or a flat tensor; or an object with
            `matvec` and `rmatvec` over flat vectors.
        memory: bytes for rows of J; the features J C, (N·m, k), are held beside them.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> gtk(model, torch.eye(2), basis=torch.tensor([[2.0], [1.0]]), layout="trace")
    tensor([[4., 2.],
            [2., 1.]])
    """
    tangent = as_tangent(model, params)
    kernel: TangentKernel = NTK(tangent) if basis is None else GTK(tangent, basis)
    return kernel(x, x2, layout=layout, chunk=chunk, memory=memory)
