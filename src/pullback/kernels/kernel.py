r"""Tangent kernels K(x, x') = J(x) B J(x')ᵀ with a positive semidefinite B on the parameters.

    B = I             the neural tangent kernel Θ
    B = C Cᵀ          the generalized tangent kernel of the basis {dφ·c_i}
    B = (JᵀMJ)⁺       the projected kernel K_f of the metric M

Each makes {dφ·c_i}, with B = C Cᵀ, an orthonormal basis of its own RKHS.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._core.capture import Selector
from .._core.checks import require_finite_tensor
from .._core.errors import PullbackError
from .._core.processes import Processes
from ..maps import Linearization
from .change import FunctionChange
from .layouts import KernelLayout, as_layout
from .tangent import Tangent, as_arguments, as_tangent, count_samples, split_samples
from .tiles import (
    MEMORY,
    check_events,
    check_sizes,
    compute_tiles,
    gather_tiles,
    refuse_different_arguments,
)


class TangentKernel(ABC):
    """A kernel on inputs that a model's tangent space has."""

    def __init__(self, tangent: Tangent) -> None:
        self.tangent = tangent

    @abstractmethod
    def to_direction(self, v: Tensor) -> Tensor:
        """Return B v, (p,): the direction of parameters that belongs to the differential v."""

    @abstractmethod
    def matrix(
        self, x: Any, x2: Any, layout: KernelLayout, chunk: int | None, memory: int | None
    ) -> Tensor:
        """Return K(x, x2) in a layout, K(x, x) where x2 is None."""

    def __call__(
        self,
        x: Any,
        x2: Any = None,
        *,
        layout: str = "full",
        chunk: int | None = None,
        memory: int | None = None,
    ) -> Tensor:
        """Return K(x, x2), or K(x, x); not divided by the number of samples."""
        if x2 is x:
            x2 = None
        return self.matrix(x, x2, as_layout(layout), chunk, memory)

    def expand(self, x: Any, cotangents: Tensor) -> FunctionChange:
        """Return Σ_i K(·, x_i) c_i for cotangents c (N, *event): the tangent vector dφ·B Jᵀc."""
        linear = self.tangent.at(x)
        c = check_cotangents(cotangents, linear)
        return FunctionChange(self.tangent, self.to_direction(linear.vjp(c)))

    def operator(self, x: Any, x2: Any = None, *, chunk: int = 1024) -> KernelOperator:
        """Return K(x, x2) as an operator, which is never formed."""
        return KernelOperator(self, x, x2, chunk)


class NTK(TangentKernel):
    """Θ(x, x') = J(x) J(x')ᵀ; the tiles may be shared by several processes."""

    def __init__(self, tangent: Tangent, processes: Processes | None = None) -> None:
        super().__init__(tangent)
        self._processes = Processes() if processes is None else processes

    def to_direction(self, v: Tensor) -> Tensor:
        return v

    def matrix(
        self, x: Any, x2: Any, layout: KernelLayout, chunk: int | None, memory: int | None
    ) -> Tensor:
        n = count_samples(as_arguments(x))
        n2 = n if x2 is None else count_samples(as_arguments(x2))
        tiles = compute_tiles(self.tangent, x, x2, layout, chunk, memory, self._processes)
        if not self._processes.is_single:
            refuse_different_arguments(self.tangent, x, x2, self._processes)
            tiles = gather_tiles(tiles, self.tangent.space.zeros(0), self._processes)
        kernel: Tensor | None = None
        for tile in tiles:
            rows = tile.rows
            columns = tile.columns
            if rows == slice(0, n) and columns == slice(0, n2):
                return tile.values  # the only one, which need not be copied
            if kernel is None:
                kernel = tile.values.new_empty(n, n2, *tile.values.shape[2:])
            kernel[rows, columns] = tile.values
            if x2 is None and columns != rows:
                kernel[columns, rows] = layout.flip(tile.values)
        assert kernel is not None
        return kernel


class FeatureKernel(TangentKernel):
    """K = H H'ᵀ from features that are formed: H(x) of shape (N, m, k)."""

    @abstractmethod
    def features(self, linear: Linearization) -> Tensor:
        """Return H(x), (N, m, k), of a batch."""

    @property
    @abstractmethod
    def width(self) -> int:
        """The entries that the features of one output need, with J's row where it is formed."""

    def matrix(
        self, x: Any, x2: Any, layout: KernelLayout, chunk: int | None, memory: int | None
    ) -> Tensor:
        if memory is None:
            memory = MEMORY
        h = self.features_at(x, chunk, memory)
        h2 = h if x2 is None else self.features_at(x2, chunk, memory)
        check_events(h.shape[1:], h2.shape[1:])
        return torch.einsum(layout.of_features, h, h2)

    def features_at(self, x: Any, chunk: int | None = None, memory: int = MEMORY) -> Tensor:
        """Return H(x), computed in chunks of samples that fit the memory."""
        check_sizes(chunk, memory)
        args = as_arguments(x)
        n = count_samples(args)
        probe = self.tangent.probe(args)
        if chunk is None:
            itemsize = self.tangent.space.dtype.itemsize
            bytes_per_sample = probe.event.numel() * self.width * itemsize
            chunk = max(1, min(n, memory // bytes_per_sample))
        pieces = []
        with torch.no_grad():
            for start in range(0, n, chunk):
                linear = self.tangent.chunk(args, start, min(start + chunk, n), probe)
                pieces.append(self.features(linear))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces)


def ntk(
    model: nn.Module | Tangent,
    x: Any,
    x2: Any = None,
    *,
    layout: str = "full",
    params: Mapping[str, Tensor] | None = None,
    output: Selector = None,
    chunk: int | None = None,
    memory: int | None = None,
    group: Any = None,
) -> Tensor:
    r"""Return the empirical neural tangent kernel Θ = J(x) J(x2)ᵀ.

    J is not formed where layers have structure. For a linear layer with inputs ā and output
    cotangents δ the share is (ā ā'ᵀ) ∘ (δ δ'ᵀ).

    Args:
        model: a module with one output per sample, of any shape (m entries).
        x: inputs, samples first; a tuple for models of several arguments, a dict for named ones.
        x2: other inputs, by default x itself: then half of the work is done, and K is symmetric.
        layout: "full" (N, N2, m, m), "diagonal" (N, N2, m), or "trace" (N, N2), the sum over
            outputs, not divided by m.
        params: the parameters to differentiate by, and where; by default those that require
            gradients.
        output: which tensor of a structured output is the function's value; by default its logits.
        chunk: samples pulled back at a time; by default what fits the memory.
        memory: bytes for temporaries, beside the kernel itself; by default 1 GiB, on a GPU up to a
            quarter of what J would take or of what is free.
        group: processes that share the tiles; all call this with the same inputs and parameters,
            and all get the whole kernel.

    >>> model = torch.nn.Linear(2, 3)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    >>> ntk(model, x).shape, ntk(model, x, layout="trace")
    (torch.Size([2, 2, 3, 3]), tensor([[ 6.,  3.],
            [ 3., 15.]]))
    """
    tangent = as_tangent(model, params, copy=False, output=output)
    return NTK(tangent, Processes(group))(x, x2, layout=layout, chunk=chunk, memory=memory)


def ntk_operator(
    model: nn.Module | Tangent,
    x: Any,
    x2: Any = None,
    *,
    params: Mapping[str, Tensor] | None = None,
    chunk: int = 1024,
) -> KernelOperator:
    """Return Θ(x, x2) as an operator: `matvec(u)` is one reverse and one forward pass."""
    return NTK(as_tangent(model, params)).operator(x, x2, chunk=chunk)


def check_cotangents(cotangents: Tensor, linear: Linearization) -> Tensor:
    """Return the cotangents in the output's shape; raise unless there is one per entry."""
    shape = linear.value.shape
    require_finite_tensor("The batch of cotangents", cotangents)
    if cotangents.numel() != shape.numel() or len(cotangents) != len(linear.value):
        raise PullbackError(
            "The cotangents do not fit the model's output",
            f"{tuple(cotangents.shape)} for values of shape {tuple(shape)}",
            "Pass ∂ℓ/∂f, one number per entry of the output",
        )
    return cotangents.detach().reshape(shape).to(linear.value)


class KernelOperator:
    """u ↦ J(x) B J(x2)ᵀ u by one reverse and one forward pass: nothing is formed.

    Vectors are (N2, *event), or flat (N2·m,); the answer has the same kind of shape.
    """

    def __init__(self, kernel: TangentKernel, x: Any, x2: Any = None, chunk: int = 1024) -> None:
        check_sizes(chunk)
        self._kernel = kernel
        self._row_chunks = split_samples(as_arguments(x), chunk)
        self._column_chunks = self._row_chunks
        if x2 is not None and x2 is not x:
            self._column_chunks = split_samples(as_arguments(x2), chunk)
        first = self._row_chunks[0]
        tangent = kernel.tangent
        probe = tangent.probe(first)
        # raises where the model couples samples
        tangent.chunk(first, 0, min(count_samples(first), 2 * len(probe.value)), probe)
        self.event = tuple(probe.event)
        space = tangent.space
        m = probe.event.numel()
        rows = sum(map(count_samples, self._row_chunks))
        columns = sum(map(count_samples, self._column_chunks))
        self.shape = (m * rows, m * columns)
        self.dtype = space.dtype
        self.device = space.device

    def matvec(self, u: Tensor) -> Tensor:
        """Return K u."""
        if u.numel() != self.shape[1]:
            raise PullbackError(
                "The vector does not fit the kernel",
                f"{tuple(u.shape)} for a kernel of shape {self.shape}",
                f"Pass {self.shape[1]} entries",
            )
        tangent = self._kernel.tangent
        is_flat = u.ndim == 1 and self.event != ()
        counts = [count_samples(args) for args in self._column_chunks]
        pieces = u.reshape(-1, *self.event).to(self.dtype).split(counts)
        with torch.no_grad():
            v = tangent.space.zeros(tangent.space.size)
            for args, piece in zip(self._column_chunks, pieces, strict=True):
                v += tangent.at(args).vjp(piece)
            v = self._kernel.to_direction(v)
            product = torch.cat([tangent.at(args).jvp(v) for args in self._row_chunks])
        if is_flat:
            return product.flatten()
        return product
