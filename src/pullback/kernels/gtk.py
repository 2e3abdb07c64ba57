r"""The generalized tangent kernel of a basis {dφ·c_i} of the tangent space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..maps import Linearization
from .basis import Basis, as_basis
from .kernel import NTK, FeatureKernel, TangentKernel
from .tangent import Model, Tangent, as_tangent
from .tiles import MEMORY


class GTK(FeatureKernel):
    """K(x, x') = Σ_i b_i(x) ⊗ b_i(x') with b_i = dφ·c_i: J C Cᵀ J'ᵀ.

    Whatever the basis, it is orthonormal in the RKHS of this kernel. Where the b_i are linearly
    dependent (for ReLU networks they are on every layer-wise slice: there is one scaling symmetry
    per hidden unit), their Gram matrix in it is a projection and not the identity.
    """

    def __init__(self, tangent: Tangent, basis: Any) -> None:
        super().__init__(tangent)
        self.basis: Basis = as_basis(basis, tangent.space)

    def raised(self, v: Tensor) -> Tensor:
        return self.basis.matvec(self.basis.rmatvec(v))

    @property
    def width(self) -> int:
        return self.basis.size + self.tangent.space.size

    def features(self, linear: Linearization) -> Tensor:
        """J C: k forward passes, or rows of J where those are fewer."""
        n, event = len(linear.value), linear.value.shape[1:]
        m, k = event.numel(), self.basis.size
        if 6 * k < m * (k + 3):  # a pass costs about 6 multiply-adds per sample and parameter
            columns = (linear.jvp(self.basis.column(i, linear.space)) for i in range(k))
            return torch.stack([c.reshape(n, m) for c in columns], -1)
        return self.basis.after(linear.rows()).view(n, m, k)


def gtk(
    model: Model | Tangent,
    x: Any,
    x2: Any = None,
    *,
    basis: Any = None,
    layout: str = "full",
    params: Mapping[str, Tensor] | None = None,
    chunk: int | None = None,
    memory: int = MEMORY,
) -> Tensor:
    """J C Cᵀ J'ᵀ, in the layouts of `ntk`; without a basis it is the NTK.

    Args:
        model: as for `ntk`.
        x: inputs, samples first.
        x2: other inputs, by default x.
        basis: C: a matrix (p, k), dense or sparse, in the order of the parameters; a list of
            tangent vectors, each a dict by parameter name or a flat tensor; or an object with
            `matvec` and `rmatvec` (or the pair of functions) over flat vectors.
        layout: "full", "diagonal" or "trace".
        params: the parameters to differentiate by, and where.
        chunk: samples at a time.
        memory: bytes for rows of J; the features J C, (N·m, k), are held beside them.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> gtk(model, torch.eye(2), basis=torch.tensor([[2.0], [1.0]]), layout="trace")
    tensor([[4., 2.],
            [2., 1.]])
    """
    tangent = as_tangent(model, params)
    kernel: TangentKernel = NTK(tangent) if basis is None else GTK(tangent, basis)
    return kernel(x, x2, layout=layout, chunk=chunk, memory=memory)
