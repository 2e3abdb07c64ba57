"""Moves of the function by a step, and functions in the span of a kernel's sections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .tangent import Tangent, as_arguments, split_samples

#: samples that are evaluated at a time: they bound the memory of activations, not the result
_CHUNK = 1024


@dataclass(frozen=True)
class FunctionChange:
    """The tangent vector dφ·v: x* ↦ J(x*) v, (N, *event).

    `direction` is v, flat over the parameters. A descent step w ← w − ηv moves the function by −η
    times this to first order; `actual` says by how much it moves it.
    """

    tangent: Tangent
    direction: Tensor

    def __call__(self, x: Any) -> Tensor:
        """Return J(x) v."""
        return self._by_chunks(x, lambda args: self.tangent.at(args).jvp(self.direction))

    def actual(self, x: Any) -> Tensor:
        """Return φ(w + v)(x) − φ(w)(x), to compare the prediction with."""
        tangent = self.tangent
        moved_parameters = tangent.move_parameters(self.direction)
        moved = Tangent(tangent.model, moved_parameters, output=tangent.output)
        return self._by_chunks(x, lambda args: moved.at(args).value - tangent.at(args).value)

    def _by_chunks(self, x: Any, function: Callable[[Any], Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.cat([function(args) for args in split_samples(as_arguments(x), _CHUNK)])

    def parameters(self) -> dict[str, Tensor]:
        """Return v by the parameters' names."""
        return self.tangent.space.split(self.direction)

    def __mul__(self, scale: float) -> FunctionChange:
        return replace(self, direction=scale * self.direction)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Expansion:
    r"""f = Σ_i K(·, x_i) c_i in the RKHS of a kernel; coefficients c are (N, *event).

    ⟨f, f'⟩ = Σ_ij c_i·K(x_i, x'_j) c'_j. The kernel is a function of two batches that gives (N, N')
    for all outputs alike, or (N, N', m, m).
    """

    kernel: Callable[[Any, Any], Tensor]
    points: Any
    coefficients: Tensor

    def __call__(self, x: Any) -> Tensor:
        """Return f(x), (N', *event)."""
        event = self.coefficients.shape[1:]
        return _apply_kernel(self.kernel(x, self.points), self.coefficients).unflatten(1, event)

    def inner(self, other: Expansion) -> Tensor:
        """Return ⟨f, f'⟩, a number."""
        c = self.coefficients.flatten(1)
        return (c * _apply_kernel(self.kernel(self.points, other.points), other.coefficients)).sum()

    def norm(self) -> Tensor:
        """Return ‖f‖."""
        return self.inner(self).clamp(min=0).sqrt()


def _apply_kernel(kernel: Tensor, c: Tensor) -> Tensor:
    """Return Σ_j K_ij c_j, (N, m)."""
    flat = c.flatten(1)
    if kernel.ndim not in (2, 4) or kernel.shape[1] != len(c):
        raise PullbackError(
            "The kernel does not fit its coefficients",
            f"kernel {tuple(kernel.shape)}, coefficients {tuple(c.shape)}",
            "Let it return (N, N') or (N, N', m, m), and give one coefficient per point",
        )
    flat = flat.to(kernel.dtype)
    if kernel.ndim == 2:
        return kernel @ flat
    return torch.einsum("ijab,jb->ia", kernel, flat)
