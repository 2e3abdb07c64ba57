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
from .._core.checks import refuse_values
from .._core.errors import PullbackError
from .._core.processes import Processes
from ..maps import Linearization
from .change import FunctionChange
from .layouts import KernelLayout, as_layout
from .tangent import Tangent, arguments, as_tangent, parts, samples
from .tiles import MEMORY, check_events, check_sizes, gather_tiles, refuse_others, tiles


class TangentKernel(ABC):
    """A kernel on inputs that a model's tangent space has."""

    def __init__(self, tangent: Tangent) -> None:
        self.tangent = tangent

    @abstractmethod
    def raised(self, v: Tensor) -> Tensor:
        """B v, (p,): the gradient that belongs to the differential v."""

    @abstractmethod
    def matrix(
        self, x: Any, x2: Any, layout: KernelLayout, chunk: int | None, memory: int | None
    ) -> Tensor:
        """K(x, x2) in a layout, K(x, x) where x2 is None."""

    def __call__(
        self,
        x: Any,
        x2: Any = None,
        *,
        layout: str = "full",
        chunk: int | None = None,
        memory: int | None = None,
    ) -> Tensor:
        """K(x, x2), or K(x, x); not divided by the number of samples."""
        return self.matrix(x, None if x2 is x else x2, as_layout(layout), chunk, memory)

    def expand(self, x: Any, cotangents: Tensor) -> FunctionChange:
        """Σ_i K(·, x_i) c_i for cotangents c (N, *event): the tangent vector dφ·B Jᵀc."""
        linear = self.tangent.at(x)
        c = check_cotangents(cotangents, linear)
        return FunctionChange(self.tangent, self.raised(linear.vjp(c)))

    def operator(self, x: Any, x2: Any = None, *, chunk: int = 1024) -> KernelOperator:
        """K(x, x2) by its products alone."""
        return KernelOperator(self, x, x2, chunk)


class NTK(TangentKernel):
    """Θ(x, x') = J(x) J(x')ᵀ; the tiles may be shared by several processes."""

    def __init__(self, tangent: Tangent, processes: Processes | None = None) -> None:
        super().__init__(tangent)
        self._processes = Processes() if processes is None else processes

    def raised(self, v: Tensor) -> Tensor:
        return v

    def matrix(
        self, x: Any, x2: Any, layout: KernelLayout, chunk: int | None, memory: int | None
    ) -> Tensor:
        n = samples(arguments(x))
        n2 = n if x2 is None else samples(arguments(x2))
        found = tiles(self.tangent, x, x2, layout, chunk, memory, self._processes)
        if not self._processes.is_single:
            refuse_others(self.tangent, x, x2, self._processes)
            found = gather_tiles(found, self.tangent.space.zeros(0), self._processes)
        out: Tensor | None = None
        for rows, some, tile in found:
            if rows == slice(0, n) and some == slice(0, n2):
                return tile  # the only one, which need not be copied
            if out is None:
                out = tile.new_empty(n, n2, *tile.shape[2:])
            out[rows, some] = tile
            if x2 is None and some != rows:
                out[some, rows] = layout.flip(tile)
        assert out is not None
        return out


class FeatureKernel(TangentKernel):
    """K = H H'ᵀ from features that are formed: H(x) of shape (N, m, k)."""

    @abstractmethod
    def features(self, linear: Linearization) -> Tensor:
        """H(x), (N, m, k), of a batch."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Entries that the features of one output need, J's row included where it is formed."""

    def matrix(
        self, x: Any, x2: Any, layout: KernelLayout, chunk: int | None, memory: int | None
    ) -> Tensor:
        memory = MEMORY if memory is None else memory
        h = self.features_at(x, chunk, memory)
        h2 = h if x2 is None else self.features_at(x2, chunk, memory)
        check_events(h.shape[1:], h2.shape[1:])
        return torch.einsum(layout.of_features, h, h2)

    def features_at(self, x: Any, chunk: int | None = None, memory: int = MEMORY) -> Tensor:
        """H(x), in chunks of samples that fit the memory."""
        check_sizes(chunk, memory)
        args = arguments(x)
        n = samples(args)
        probe = self.tangent.probe(args)
        held = probe.event.numel() * self.width * torch.finfo(self.tangent.space.dtype).bits // 8
        step = max(1, min(n, memory // held)) if chunk is None else chunk
        with torch.no_grad():
            pieces = [
                self.features(self.tangent.chunk(args, a, min(a + step, n), probe))
                for a in range(0, n, step)
            ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


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
    r"""The empirical neural tangent kernel Θ = J(x) J(x2)ᵀ, without J where layers have structure.

    For a linear layer with inputs ā and output cotangents δ the share is (ā ā'ᵀ) ∘ (δ δ'ᵀ).

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
    """Θ(x, x2) by products: `matvec(u)` is one reverse and one forward pass."""
    return NTK(as_tangent(model, params)).operator(x, x2, chunk=chunk)


def check_cotangents(cotangents: Tensor, linear: Linearization) -> Tensor:
    """One cotangent per entry of the output, in its shape."""
    shape = linear.value.shape
    refuse_values("The batch of cotangents", cotangents)
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
        self._one = parts(arguments(x), chunk)
        self._two = self._one if x2 is None or x2 is x else parts(arguments(x2), chunk)
        first, tangent = self._one[0], kernel.tangent
        probe = tangent.probe(first)
        tangent.chunk(first, 0, min(samples(first), 2 * len(probe.value)), probe)
        self.event, space = tuple(probe.event), tangent.space
        m = probe.event.numel()
        self.shape = tuple(m * sum(samples(a) for a in side) for side in (self._one, self._two))
        self.dtype, self.device = space.dtype, space.device

    def matvec(self, u: Tensor) -> Tensor:
        """K u."""
        if u.numel() != self.shape[1]:
            raise PullbackError(
                "The vector does not fit the kernel",
                f"{tuple(u.shape)} for a kernel of shape {self.shape}",
                f"Pass {self.shape[1]} entries",
            )
        tangent, flat = self._kernel.tangent, u.ndim == 1 and self.event != ()
        pieces = u.reshape(-1, *self.event).to(self.dtype).split([samples(a) for a in self._two])
        with torch.no_grad():
            v = tangent.space.zeros(tangent.space.size)
            for args, piece in zip(self._two, pieces, strict=True):
                v += tangent.at(args).vjp(piece)
            v = self._kernel.raised(v)
            out = torch.cat([tangent.at(args).jvp(v) for args in self._one])
        return out.flatten() if flat else out
