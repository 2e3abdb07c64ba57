r"""Second moments over the places that share a weight: the sides of K-FAC's Kronecker products.

With inputs ā_nt and cotangents δ_nt at the places t of sample n, the Gram of a weight is
Σ_n (Σ_t δ_nt ⊗ ā_nt)(Σ_t δ_nt ⊗ ā_nt)ᵀ. Sharing by *expansion* takes every place for a sample,

    Σ_nt δδᵀ ⊗ mean_nt āāᵀ,

and by *reduction* adds up first, Σ_n (Σ_t δ)(Σ_t δ)ᵀ ⊗ mean_n (mean_t ā)(mean_t ā)ᵀ. Expansion is
exact for deep linear nets whose loss is a sum over places, reduction where the places are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.products import moment
from ..._core.space import compute_dtype


@dataclass(frozen=True)
class Sharing:
    """How places enter, which axis counts samples, and from where on sides are diagonals."""

    reduce: bool = False
    batch_dim: int = 0
    longest: int = 8192

    def by_sample(self, x: Tensor, features: int = 1) -> Tensor:
        """(N, places, *features), from leading axes in any order."""
        lead = x.ndim - features
        if lead == 0:
            return x[None, None]
        if lead == 1:
            return x[:, None]
        return x.movedim(min(self.batch_dim, lead - 1), 0).flatten(1, lead - 1)


@dataclass(frozen=True)
class Moments:
    """Σ a aᵀ, (G, n, n) or a diagonal (G, n); Σ a, (G, n); and how many places (or G counts)."""

    second: Tensor
    first: Tensor
    places: Tensor | float
    #: those of several layers in one piece of memory, second (L, G, n, n) and first (L, G, n)
    stack: tuple[Tensor, Tensor] | None = None

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.second + other.second, self.first + other.first, self.places + other.places
        )


def second_moment(x: Tensor, sharing: Sharing) -> Tensor:
    """Σ_p x xᵀ over the places of (G, P, n), as a diagonal where n is too long."""
    if x.shape[-1] > sharing.longest:
        return torch.linalg.vector_norm(x, dim=1, dtype=compute_dtype(x.dtype)).square()
    if x.shape[0] == 1:
        return moment(x[0])[None]
    x = x.to(compute_dtype(x.dtype))
    return x.mT @ x


def stackable(x: Tensor) -> bool:
    """Whether products of x can be written where they are wanted, in another precision than x's."""
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)


def stacked(uses: Sequence[Tensor], keep: Tensor | None = None) -> list[Moments]:
    """The moments of several (..., n) in half precision on a GPU, of one shape, side by side.

    `keep` says which places count, (P,).
    """
    n, count = uses[0].shape[-1], len(uses)
    places: Tensor | float = uses[0].numel() // n if keep is None else keep.sum()
    mask = None if keep is None else keep[:, None].to(uses[0].dtype)
    second = uses[0].new_empty(count, 1, n, n, dtype=torch.float32)
    first = uses[0].new_empty(count, 1, n, dtype=torch.float32)
    stack, out = (second, first), []
    for x, s, f in zip(uses, second.unbind(), first.unbind(), strict=True):
        rows = x.reshape(-1, n) if mask is None else x.reshape(-1, n) * mask
        product_into(s[0], rows)
        torch.sum(rows, 0, dtype=torch.float32, out=f[0])
        out.append(Moments(s, f, places, stack))
    return out


def product_into(out: Tensor, x: Tensor) -> None:
    """XᵀX of (P, n) in half precision, accumulated and written in float32."""
    torch.mm(x.T, x, out_dtype=torch.float32, out=out)


def moments(
    x: Tensor, sharing: Sharing, keep: Tensor | None = None, *, first: bool = True
) -> Moments:
    """The moments of (G, P, n); `keep` says which places count, (P,).

    Where nobody needs the first one, since there is no bias, it is zero, (G, 1).
    """
    places: Tensor | float = x.shape[1]
    if keep is not None:
        x, places = x * keep[:, None].to(x.dtype), keep.sum()
    second, dtype = second_moment(x, sharing), compute_dtype(x.dtype)
    ones = x.sum(1, dtype=dtype) if first else x.new_zeros(len(x), 1, dtype=dtype)
    return Moments(second, ones, places)
