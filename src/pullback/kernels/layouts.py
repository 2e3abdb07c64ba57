r"""Layouts of a kernel: the m×m blocks K(x_i, x'_j) are stored whole, or their diagonals or traces.

    full        (N, N', m, m)   K_ij = J_i J'_jᵀ
    diagonal    (N, N', m)      the entries (o, o) of each block
    trace       (N, N')         their sum Σ_o, not divided by m

m counts the entries of one output, flattened. neural-tangents' `trace_axes=(-1,)` is the trace
divided by m, its `diagonal_axes=(-1,)` the diagonal, and `trace_axes=()` the full kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .._core.errors import PullbackError, refuse_unknown
from ..maps import Linearization, Pulled, identity_covectors


class KernelLayout(ABC):
    """One way to store a kernel; J is never stored."""

    #: the kernel H H'ᵀ of features (N, m, k) and (N', m, k), for einsum
    of_features: str

    @abstractmethod
    def pull(self, linear: Linearization) -> list[Pulled]:
        """Return the pulled-back covectors of a batch, from which its tiles are multiplied."""

    @abstractmethod
    def tile(self, one: list[Pulled], two: list[Pulled], budget: int) -> Tensor:
        """Return the kernel of two batches; the symmetry is used where they are the same."""

    def flip(self, tile: Tensor) -> Tensor:
        """Return K(x', x) from K(x, x')."""
        return tile.transpose(0, 1)


class Full(KernelLayout):
    """(N, N', m, m), as a view of the matrix (N·m, N'·m)."""

    of_features = "iak,jbk->ijab"

    def pull(self, linear: Linearization) -> list[Pulled]:
        return [linear.pullback(identity_covectors(linear.value))]

    def tile(self, one: list[Pulled], two: list[Pulled], budget: int) -> Tensor:
        k = _kernel(one[0], two[0], budget)
        return k.view(*one[0].shape, *two[0].shape).transpose(1, 2)

    def flip(self, tile: Tensor) -> Tensor:
        return tile.permute(1, 0, 3, 2)


class Trace(KernelLayout):
    """(N, N'): one product per layer, m times cheaper than the full kernel."""

    of_features = "iak,jak->ij"

    def pull(self, linear: Linearization) -> list[Pulled]:
        return [linear.pullback(identity_covectors(linear.value)).trace_covectors()]

    def tile(self, one: list[Pulled], two: list[Pulled], budget: int) -> Tensor:
        return _kernel(one[0], two[0], budget)


class OutputDiagonal(KernelLayout):
    """(N, N', m): one kernel (N, N') per output."""

    of_features = "iak,jak->ija"

    def pull(self, linear: Linearization) -> list[Pulled]:
        covectors = identity_covectors(linear.value)
        return [linear.pullback(covectors[o : o + 1]) for o in range(len(covectors))]

    def tile(self, one: list[Pulled], two: list[Pulled], budget: int) -> Tensor:
        return torch.stack([_kernel(a, b, budget) for a, b in zip(one, two, strict=True)], -1)


LAYOUTS: dict[str, KernelLayout] = {"full": Full(), "trace": Trace(), "diagonal": OutputDiagonal()}


def as_layout(layout: str) -> KernelLayout:
    """Return the layout of this name."""
    refuse_unknown("layout", layout, LAYOUTS)
    return LAYOUTS[layout]


def as_matrix(kernel: Tensor, outputs: int) -> Tensor:
    """Return a kernel as a matrix (N·m, N'·m): a scalar one, (N, N'), acts on each output alone."""
    if kernel.ndim == 2:
        eye = torch.eye(outputs, dtype=kernel.dtype, device=kernel.device)
        if outputs == 1:
            return kernel
        return torch.kron(kernel, eye)
    if kernel.ndim == 3:
        kernel = torch.diag_embed(kernel)
    if kernel.ndim != 4 or kernel.shape[2:] != (outputs, outputs):
        raise PullbackError(
            "The kernel does not fit the values",
            f"it has shape {tuple(kernel.shape)} for {outputs} outputs",
            "Give (N, N'), (N, N', m) or (N, N', m, m)",
        )
    return kernel.transpose(1, 2).flatten(2).flatten(0, 1)


def _kernel(one: Pulled, two: Pulled, budget: int) -> Tensor:
    return one.kernel(None if two is one else two, budget=budget)
