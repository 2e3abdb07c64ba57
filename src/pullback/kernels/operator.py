r"""A tangent kernel by its products alone: one reverse and one forward pass each."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .tangent import Arguments, Tangent, arguments, part
from .tiles import check_sizes


class Raises(Protocol):
    """What the products need of a kernel J B J'ᵀ."""

    tangent: Tangent

    def raised(self, v: Tensor) -> Tensor:
        """B v."""
        ...


class KernelOperator:
    """u ↦ J(x) B J(x2)ᵀ u by one reverse and one forward pass: nothing is formed.

    Vectors are (N2, *event), or flat (N2·m,); the answer has the same kind of shape. `@` also
    takes matrices (N2·m, k), and gives (N·m, k).
    """

    def __init__(self, kernel: Raises, x: Any, x2: Any = None, chunk: int = 1024) -> None:
        self._kernel, self._chunk = kernel, chunk
        self._one = _parts(arguments(x), chunk)
        x2 = None if x2 is x else x2
        self._two = self._one if x2 is None else _parts(arguments(x2), chunk)
        first, tangent = self._one[0], kernel.tangent
        probe = tangent.probe(first)
        tangent.chunk(first, 0, min(len(first[0]), 2 * len(probe.value)), probe)
        self.event, space = tuple(probe.event), tangent.space
        m = probe.event.numel()
        self.shape = tuple(m * sum(len(a[0]) for a in side) for side in (self._one, self._two))
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
        pieces = u.reshape(-1, *self.event).to(self.dtype).split([len(a[0]) for a in self._two])
        with torch.no_grad():
            v = tangent.space.zeros(tangent.space.size)
            for args, piece in zip(self._two, pieces, strict=True):
                v += tangent.at(args).vjp(piece)
            v = self._kernel.raised(v)
            out = torch.cat([tangent.at(args).jvp(v) for args in self._one])
        return out.flatten() if flat else out

    def rmatvec(self, u: Tensor) -> Tensor:
        """Kᵀ u."""
        return self.T.matvec(u)

    @property
    def T(self) -> KernelOperator:
        """K(x2, x)."""
        other = object.__new__(KernelOperator)
        other.__dict__.update(self.__dict__)
        other._one, other._two, other.shape = self._two, self._one, self.shape[::-1]
        return other

    def __matmul__(self, u: Tensor) -> Tensor:
        """K u, or K of every column of a matrix (N2·m, k)."""
        values = u.shape[1:] == self.event and u.numel() == self.shape[1]
        if not values and u.ndim == 2 and u.shape[0] == self.shape[1]:
            return torch.stack([self.matvec(column) for column in u.T], 1)
        return self.matvec(u)


def _parts(args: Arguments, chunk: int) -> list[Arguments]:
    check_sizes(chunk)
    return [part(args, a, a + chunk) for a in range(0, len(args[0]), chunk)]
