"""What K-FAC asks of an affine layer: the sides of its Kronecker product, and squared rows."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from .base import Block

_SQUARES = 2**24  # entries of samples' gradients held at once


class Sided(Block):
    """A block of rows Σ_t δ_t ⊗ ā_t, from inputs (N, G, T, I) and cotangents (N, R, G, T, O)."""

    shape: tuple[int, int, int, int]
    _bias: str | None
    _delta: Tensor

    @abstractmethod
    def _inputs(self) -> Tensor:
        """a, (N, G, T, I)."""

    @property
    @abstractmethod
    def _height(self) -> Tensor:
        """h, (T,), what the bias multiplies."""

    def sides(self, longest: int) -> tuple[Tensor, Tensor]:
        r"""Σ δδᵀ, (G, O, O), and mean āāᵀ, (G, I, I) or with the bias (G, I + 1, I + 1).

        Their Kronecker product takes every place for a sample of its own. Sides longer than
        `longest` are diagonals, (G, n).
        """
        d = self._delta.flatten(0, 1).transpose(0, 1).flatten(1, 2)
        a = self._extended().transpose(0, 1).flatten(1, 2)
        return _moment(d, longest), _moment(a, longest) / a.shape[1]

    def _extended(self) -> Tensor:
        """ā, (N, G, T, I) or with the bias (N, G, T, I + 1)."""
        x = self._inputs()
        if self._bias is None:
            return x
        return torch.cat([x, self._height[:, None].expand(*x.shape[:3], 1)], 3)

    def squares(self, u: Tensor | None, w: Tensor | None) -> Tensor:
        r"""Σ_n (UᵀV_nW)² of the rows V_n = Σ_t δ_t ⊗ ā_t, entry by entry: (G, O, I or I + 1).

        U (G, O, O) and W are orthogonal; None stands for the identity.
        """
        n, _, t, _ = self.shape
        delta = self._delta.flatten(0, 1)  # (N·R, G, T, O)
        delta = delta if u is None else delta @ u
        x = self._extended()
        x = (x if w is None else x @ w).repeat_interleave(len(delta) // n, 0)
        if t == 1:
            return torch.einsum("ngto,ngti->goi", delta.square(), x.square())
        panel = max(1, _SQUARES // (delta.shape[-1] * x.shape[-1] * x.shape[1]))
        pieces = zip(delta.split(panel), x.split(panel), strict=True)
        return torch.stack([(d.mT @ a).square().sum(0) for d, a in pieces]).sum(0)


def _moment(x: Tensor, longest: int) -> Tensor:
    """Σ xxᵀ over the places of (G, P, n)."""
    return x.square().sum(1) if x.shape[-1] > longest else x.mT @ x
