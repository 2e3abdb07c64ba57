r"""Retractions of whole layers for the hot loop: a few numbers per layer, no host in between.

With squared norms q (P,) of the parameters and powers B (P, U) of the scalings, the parameters at
log-scales t have x = q exp(2Bt). Newton's method from t = 0 finds

    equal norms   D log(R x) = 0      R (blocks, P) adds up a block, D (U, blocks) takes differences
    balance       Bᵀx = 0

Without biases the first is linear in t and done in one step; else the distance from the slice after
an SGD step is O(lr²) and two steps leave O(lr⁸).
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
_ROUNDS = 4


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
        self._blocks, self._differences = None, None
        self._steps = 2
        if isinstance(slice, EqualNorm):
            self._blocks, self._differences = self._matrices(slice, eye)
            # one kind of powers in each block: log-linear
            mixed = any(
                len({tuple(powers[self.names.index(n)].tolist()) for n in b}) > 1
                for b in self._counted(slice)
            )
            self._steps = 2 if mixed else 1
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

    def run(self, turn: int | None = None, followers: Followers | None = None) -> None:
        """Retract; followers are carried along."""
        ws = [self._params[n] for n in self.names]
        factors = self.factors(self._squares()).unbind()
        for name, w, factor in zip(self.names, ws, factors, strict=True):
            w.mul_(factor)
            for target, power in (followers or {}).get(name, ()):
                target.mul_(factor**power)

    def _squares(self) -> Tensor:
        """|w|² of all parameters, (P,)."""
        ws = [self._params[n].detach() for n in self.names]
        norms = torch._foreach_norm(ws, 2, torch.float32 if _half(ws) else None)
        return torch.stack([n.to(self._powers.dtype) for n in norms]).square()

    @property
    def dtype(self) -> torch.dtype:
        """In which factors are computed."""
        return self._powers.dtype

    def factors(self, squares: Tensor) -> Tensor:
        """What each parameter is to be multiplied by, (P,), given their squared norms (P,)."""
        return (self._powers @ self._log_scales(squares)).exp()

    def _log_scales(self, squares: Tensor) -> Tensor:
        t = squares.new_zeros(self._powers.shape[1])
        for _ in range(self._steps):
            x = squares * (2 * (self._powers @ t)).exp()
            if self._blocks is None or self._differences is None:
                slope = self._powers.mT @ x
                jacobian = 2 * (self._powers.mT * x) @ self._powers
            else:
                sums = self._blocks @ x
                slope = 0.5 * self._differences @ sums.log()
                jacobian = self._differences @ ((self._blocks * x) / sums[:, None]) @ self._powers
            t = t - (self._inverted(jacobian) @ slope).clamp(-_FAR, _FAR)
        # a layer that is zero or not finite: nothing is scaled
        return torch.where(torch.isfinite(t).all(), t, 0.0)

    def _inverted(self, jacobian: Tensor) -> Tensor:
        """J⁻¹; on a GPU by products from the last one, so that no host is needed."""
        if not jacobian.is_cuda:
            return torch.linalg.inv_ex(jacobian)[0]
        return self._inverse.copy_(inverse_by_products(jacobian, self._inverse))


def inverse_by_products(a: Tensor, last: Tensor) -> Tensor:
    """A few rounds of X ← X(2 − AX) towards A⁻¹, from an inverse of something like A.

    Where that is far off, from a start that converges, if not within one call.
    """
    eye = torch.eye(len(a), dtype=a.dtype, device=a.device)
    safe = a.mT / (a.abs().sum(0).max() * a.abs().sum(1).max())
    off = [torch.linalg.matrix_norm(eye - a @ x) for x in (last, safe)]
    x = torch.where(off[0] < off[1], last, safe)
    for _ in range(_ROUNDS):
        x = x @ (2 * eye - a @ x)
    return torch.where(torch.isfinite(x).all(), x, 0.0)


def _half(ws: list[Tensor]) -> bool:
    return ws[0].dtype in (torch.float16, torch.bfloat16)
