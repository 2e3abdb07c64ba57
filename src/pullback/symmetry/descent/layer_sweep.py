r"""Retractions of whole layers for the hot loop: a few numbers per layer, no host in between.

With squared norms q (P,) of the parameters and powers B (P, U) of the scalings, the parameters at
log-scales t have x = q exp(2Bt). Newton's method from t = 0 finds

    equal norms   D log(R x) = 0      R (blocks, P) adds up a block, D (U, blocks) takes differences
    balance       Bᵀx = 0             with Jacobians 2D(R x∘B)/(R x) and 2Bᵀ(x∘B)

Without biases the first is linear in t and done in one step; else the distance δ from the slice
after an SGD step is O(lr²), one step leaves O(δ²), and each further one with the same inverse one
more power, at the price of a few products: two of them end where a second Newton step would. (In
float32 one is enough.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..slices.layer_slice import EqualNorm
from ..slices.slice import Slice
from ..slices.units import wide
from .sweep import Followers

_FAR = 30.0
_ROUNDS = 3


class LayerSweep:
    """Retraction of merged scalings.

    Args:
        slice: `EqualNorm`, or `Balanced` of merged scalings.
        params: by name; scaled in place.
    """

    def __init__(self, slice: Slice, params: Mapping[str, Tensor]) -> None:
        self.names = slice.units.names
        self._params = params
        first = params[self.names[0]]
        eye = torch.eye(slice.units.total, dtype=wide(first), device=first.device)
        powers = [part.log_factor(eye).reshape(-1) for part in slice.units.parts]
        self._powers = torch.stack(powers)
        self._twice = 2 * self._powers
        self._blocks, self._left = None, self._powers.mT
        #: whether the slice is orthogonal to orbits: equal norms are balanced without biases
        self.orthogonal = True
        self._chords = 2 if first.dtype == torch.float64 else 1
        if isinstance(slice, EqualNorm):
            self._blocks, self._left = self._matrices(slice, eye)
            # one kind of powers in each block: log-linear
            kinds = dict(zip(self.names, map(tuple, self._powers.tolist()), strict=True))
            blocks = self._counted(slice)
            mixed = any(len({kinds[n] for n in block}) > 1 for block in blocks)
            self._chords *= mixed
            self.orthogonal = not mixed and sum(map(len, blocks)) == len(kinds)
        # of the Jacobian at the last retraction: the start of the next
        self._inverse = torch.zeros_like(eye)
        if eye.is_cuda:
            for _ in range(16):
                self.factors(self._squares())

    @property
    def turns(self) -> int:
        """All layers are retracted at once."""
        return 1

    def _counted(self, slice: EqualNorm) -> list[tuple[str, ...]]:
        blocks = [block for links in slice.chains for block in links.blocks]
        return [b.names if slice.biases else b.weights(self._params) for b in blocks]

    def _matrices(self, slice: EqualNorm, like: Tensor) -> tuple[Tensor, Tensor]:
        counted = self._counted(slice)
        adds = like.new_zeros(len(counted), len(self.names))
        for k, names in enumerate(counted):
            adds[k, [self.names.index(n) for n in names]] = 1
        differences, start = [], 0
        for links in slice.chains:
            for k in range(start, start + len(links.blocks) - 1):
                row = like.new_zeros(len(counted))
                row[k], row[k + 1] = 1, -1
                differences.append(row)
            start += len(links.blocks)
        return adds, torch.stack(differences)

    def run(
        self,
        turn: int | None = None,
        followers: Followers | None = None,
        moved: Tensor | None = None,
    ) -> None:
        """Retract; followers are carried along, and log-scales added to `moved`, (U,)."""
        ws = [self._params[n] for n in self.names]
        # in the precision of the weights: kernels that convert as they go are slow
        low = torch.float64 if ws[0].dtype == torch.float64 else torch.float32
        t = self._log_scales(self._squares())
        if moved is not None:
            moved.add_(t)
        factors = (self._powers @ t).exp().to(low).unbind()
        for name, w, factor in zip(self.names, ws, factors, strict=True):
            w.mul_(factor)
            for target, power in (followers or {}).get(name, ()):
                target.mul_(factor**power)

    def _squares(self) -> Tensor:
        """|w|² of all parameters, (P,)."""
        ws = [self._params[n].detach() for n in self.names]
        norms = torch._foreach_norm(ws, 2, torch.float32 if _half(ws) else None)
        return torch.stack(norms).to(self.dtype).square()

    @property
    def dtype(self) -> torch.dtype:
        """In which factors are computed."""
        return self._powers.dtype

    def factors(self, squares: Tensor) -> Tensor:
        """What each parameter is to be multiplied by, (P,), given their squared norms (P,)."""
        return (self._powers @ self._log_scales(squares)).exp()

    def _log_scales(self, squares: Tensor) -> Tensor:
        sums = self._sums(squares)
        inverse = self._inverted(self._jacobian(squares, sums))
        t = -(inverse @ self._slope(sums))
        for _ in range(self._chords):
            moved = self._sums(squares * (self._twice @ t).exp())
            t = torch.addmv(t, inverse, self._slope(moved), alpha=-1)
        # a layer that is zero or not finite: nothing is scaled
        return (t + 0 * t.sum()).nan_to_num(0.0, 0.0, 0.0).clamp_(-_FAR, _FAR)

    def _sums(self, x: Tensor) -> Tensor:
        """What slopes are made of: squared norms of blocks, or x itself."""
        return x if self._blocks is None else self._blocks @ x

    def _slope(self, sums: Tensor) -> Tensor:
        """What is to vanish, (U,)."""
        return self._left @ (sums if self._blocks is None else sums.log())

    def _jacobian(self, x: Tensor, sums: Tensor) -> Tensor:
        """The slope's derivative by t, (U, U)."""
        if self._blocks is None:
            return (self._left * x) @ self._twice
        return self._left @ ((self._blocks * x / sums[:, None]) @ self._twice)

    def _inverted(self, jacobian: Tensor) -> Tensor:
        """J⁻¹; on a GPU by products from the last one, so that no host is needed."""
        if not jacobian.is_cuda:
            return torch.linalg.inv_ex(jacobian)[0]
        return self._inverse.copy_(inverse_by_products(jacobian, self._inverse))


def inverse_by_products(a: Tensor, last: Tensor) -> Tensor:
    """A few rounds of X ← 2X − XAX towards A⁻¹, from an inverse of something like A.

    Where that is far off, from Aᵀ/|A|², which converges, if not within one call. With it, and ever
    after, |1 − AX|² is less than the number of rows.
    """
    off = torch.eye(len(a), dtype=a.dtype, device=a.device).addmm_(a, last, alpha=-1)
    near = torch.linalg.vector_norm(off) < len(a) ** 0.5
    x = torch.where(near, last, a.mT / torch.linalg.vector_norm(a).square())
    for _ in range(_ROUNDS):
        x = torch.addmm(x, x @ a, x, beta=2, alpha=-1)
    return x.nan_to_num(0.0, 0.0, 0.0)


def _half(ws: list[Tensor]) -> bool:
    return ws[0].dtype in (torch.float16, torch.bfloat16)
