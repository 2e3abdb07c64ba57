"""Layers whose output is W·a + b at every place that shares the weight.

With the sharing axis t and groups g, and inputs ā_t = (a_t, h_t) whose homogeneous coordinate h_t
is what the bias multiplies (1, but 0 at the derivatives of a jet),

    row    = Σ_t δ_t ⊗ ā_t
    A Aᵀ   = Σ_tt' (ā_t·ā'_t') (δ_t·δ'_t')        (Hadamard of Grams when there is one place)
    A v    = Σ_t δ_tᵀ V ā_t
    Aᵀ c   = Σ_t (Σ_r c_r δ_rt) ⊗ ā_t

Where a mean over positions follows, all of them have one cotangent and the row is δ ⊗ Σ_t ā_t: one
place, whatever their number. K-FAC asks for the sides of the Kronecker product, and squared rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..._core.products import add_cross_gram
from .gram import (
    SeparatedCotangents,
    add_contracted,
    add_hadamard,
    add_materialized,
    add_separated,
    cheapest,
    inner,
)
from .registry import Block

_SQUARES = 2**24  # entries of samples' gradients held at once


def _moment(x: Tensor, longest: int) -> Tensor:
    """Σ xxᵀ over the positions of (G, P, n)."""
    if x.shape[-1] > longest:
        return x.square().sum(1)
    return x.mT @ x


class AffineBlock(Block):
    """Weight (G·O, I) and bias (G·O) from inputs (N, G, T, I) and cotangents (N, R, G, T, O).

    Inputs may be a function of a slice of samples, so that convolution patches are formed only for
    the samples at hand and only while they are used; then `width` is I. `homogeneous` is h, (T,),
    by default all ones. An `is_transposed` weight is held as (G·I, O).
    """

    def __init__(
        self,
        weight: str | None,
        bias: str | None,
        inputs: Tensor | Callable[[slice], Tensor],
        delta: Tensor,
        homogeneous: Tensor | None = None,
        *,
        width: int = 0,
        is_transposed: bool = False,
        looks: dict[str, bool] | None = None,
    ) -> None:
        if isinstance(inputs, Tensor):
            inputs, width = inputs.__getitem__, inputs.shape[-1]
        n, _, g, t, _ = delta.shape
        self._weight = weight
        self._bias = bias
        self._h = homogeneous
        self.is_transposed = is_transposed
        if looks is None:
            self.looks = {}
        else:
            self.looks = looks
        self.names = tuple(n for n in (weight, bias) if n is not None)
        self._inputs_of = inputs
        self.shape = (n, g, t, width)
        self._delta = delta

    def __getstate__(self) -> dict[str, Any]:
        """All but what is found anew."""
        return {k: v for k, v in vars(self).items() if k not in ("_pooled", "_separated")}

    def _inputs(self) -> Tensor:
        return self._inputs_of(slice(0, self.shape[0]))

    def _like(
        self, inputs: Callable[[slice], Tensor], delta: Tensor, height: Tensor | None
    ) -> AffineBlock:
        """A block of the same parameters."""
        kept: dict[str, Any] = {"is_transposed": self.is_transposed, "looks": self.looks}
        names = self._weight, self._bias
        return AffineBlock(*names, inputs, delta, height, width=self.shape[3], **kept)

    def narrow(self, start: int, stop: int) -> Block:
        def inputs(some: slice) -> Tensor:
            return self._inputs_of(slice(start + some.start, start + some.stop))

        return self._like(inputs, self._delta[start:stop], self._h)

    def traced(self) -> Block:
        """The covectors become output features: Σ_r δ_r·δ'_r is one product."""
        delta = self._delta.permute(0, 2, 3, 1, 4).flatten(3).unsqueeze(1)
        return self._like(self._inputs_of, delta, self._h)

    def _shifts(self) -> Tensor:
        """Σ_t h_t δ_t, the cotangents of the bias: (N, R, G, O)."""
        if self._h is None:
            return self._delta.sum(3)
        return torch.einsum("nrgto,t->nrgo", self._delta, self._h)

    @cached_property
    def _pooled(self) -> AffineBlock:
        """For `add_gram`, the same rows from one place, where all positions have one cotangent."""
        t = self.shape[2]
        first = self._delta[:, :, :, :1]
        before = self.looks.get("pooled")
        if t == 1 or before is False:
            return self
        # a layer whose positions differ shows it at the second one already
        if before:
            some = (t,)
        else:
            some = (2, t)
        alike = all(bool((self._delta[:, :, :, :k] == first).all()) for k in some)
        self.looks["pooled"] = alike
        if not alike:
            return self

        def inputs(some: slice) -> Tensor:
            return self._inputs_of(some).sum(2, keepdim=True)

        if self._h is None:
            height = first.new_tensor([t])
        else:
            height = self._h.sum().reshape(1)
        return self._like(inputs, first, height)

    @cached_property
    def _separated(self) -> list[SeparatedCotangents]:
        """By group, the factors of the cotangents where covectors and positions separate."""
        before = self.looks.get("separated")
        found = []
        if before is False:
            return []
        for g in range(self.shape[1]):
            one = SeparatedCotangents.of(self._delta[:, :, g], hopeful=bool(before))
            self.looks["separated"] = one is not None
            if one is None:
                return []
            found.append(one)
        return found

    @property
    def route(self) -> str:
        return self._pooled._route(self._pooled)

    def _route(self, other: AffineBlock) -> str:
        """The cheapest way to the Gram, by operations."""
        if self._weight is None:
            return "rows"
        way, look = cheapest(self._delta, other._delta, self.shape[3])
        if look and self._separated and other._separated:
            return "separated"
        return way

    def rows(self) -> dict[str, Tensor]:
        out = {}
        if self._weight is not None:
            rows = torch.einsum("nrgto,ngti->nrgoi", self._delta, self._inputs())
            out[self._weight] = (rows.mT if self.is_transposed else rows).flatten(2)
        if self._bias is not None:
            out[self._bias] = self._shifts().flatten(2)
        return out

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        n, g, t, i = self.shape
        o = self._delta.shape[-1]
        y: Tensor | float = 0.0
        if self._weight is not None:
            x = self._by_group(self._inputs())
            w = v[self._weight]
            if self.is_transposed:
                w = w.reshape(g, i, o).mT
            else:
                w = w.reshape(g, o, i)
            y = torch.stack([a @ b.T for a, b in zip(x, w, strict=True)])
            y = y.view(g, n, t, o).transpose(0, 1)
        if self._bias is not None:
            shift = v[self._bias].reshape(1, g, 1, o)
            y = y + (shift if self._h is None else shift * self._h[:, None])
        return torch.einsum("nrgto,ngto->nr", self._delta, torch.as_tensor(y).expand(n, g, t, o))

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        delta = torch.einsum("nrgto,nr->ngto", self._delta, c)
        out = {}
        if self._weight is not None:
            x = self._by_group(self._inputs())
            d = self._by_group(delta)
            shares = [a.T @ b for a, b in zip(d, x, strict=True)]
            if self.is_transposed:
                shares = [x.T for x in shares]
            out[self._weight] = (shares[0] if len(shares) == 1 else torch.stack(shares)).flatten()
        if self._bias is not None:
            if self._h is not None:
                delta = delta * self._h[:, None]
            out[self._bias] = delta.sum((0, 2)).flatten()
        return out

    @property
    def weight(self) -> str | None:
        """The weight's name, where it takes part."""
        return self._weight

    @property
    def _height(self) -> Tensor:
        """h, (T,)."""
        if self._h is None:
            return self._delta.new_ones(self.shape[2])
        return self._h

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

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return inputs ā (N, G, T, I or I + 1) and cotangents δ (N, R, G, T, O) of the rows.

        The last column of ā belongs to the bias where there is one; a row is Σ_t δ_t ⊗ ā_t.
        """
        return self._extended(), self._delta

    def squares(self, u: Tensor | None, w: Tensor | None) -> Tensor:
        r"""Σ_n (UᵀV_nW)² of the rows V_n = Σ_t δ_t ⊗ ā_t, entry by entry: (G, O, I or I + 1).

        U (G, O, O) and W are orthogonal; None stands for the identity.
        """
        n, _, t, _ = self.shape
        delta = self._delta.flatten(0, 1)  # (N·R, G, T, O)
        if u is not None:
            delta = delta @ u
        x = self._extended()
        x = (x if w is None else x @ w).repeat_interleave(len(delta) // n, 0)
        if t == 1:
            return torch.einsum("ngto,ngti->goi", delta.square(), x.square())
        panel = max(1, _SQUARES // (delta.shape[-1] * x.shape[-1] * x.shape[1]))
        pieces = zip(delta.split(panel), x.split(panel), strict=True)
        return torch.stack([(d.mT @ a).square().sum(0) for d, a in pieces]).sum(0)

    @staticmethod
    def _by_group(x: Tensor) -> Tensor:
        """(N, G, T, ·) -> (G, N·T, ·)."""
        return x.transpose(0, 1).flatten(1, 2)

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        """Σ_g Σ_tt' (ā ā'ᵀ) ∘ (δ δ'ᵀ)."""
        assert isinstance(other, AffineBlock)
        one = self._pooled
        if other is self:
            two = one
        else:
            two = other._pooled
        one._add(out, two, one._route(two), budget)

    def _add(self, out: Tensor, other: AffineBlock, route: str, budget: int) -> None:
        same = other is self
        if self._weight is not None:
            x = self._inputs()
        else:
            x = None
        if same or x is None:
            y = x
        else:
            y = other._inputs()
        if x is None or y is None or route == "materialized":
            if x is not None and y is not None:
                add_materialized(out, self._delta, other._delta, x, y, budget)
            if self._bias is not None:
                shifts = self._shifts().flatten(2).flatten(0, 1)
                add_cross_gram(
                    out, shifts, shifts if same else other._shifts().flatten(2).flatten(0, 1)
                )
            return
        if self._bias is None:
            heights = None
        else:
            heights = self._height[:, None, None] * other._height
        for g in range(self.shape[1]):
            if route == "separated":
                one = self._moments(g, x)
                add_separated(out, one, one if same else other._moments(g, y), budget)
                continue
            d1 = self._delta[:, :, g]
            if same:
                d2 = d1
            else:
                d2 = other._delta[:, :, g]
            if route == "contracted":
                add = add_contracted
            else:
                add = add_hadamard
            add(out, d1, d2, partial(inner, x[:, g], y[:, g], heights), budget)

    def _moments(self, g: int, inputs: Tensor) -> tuple[SeparatedCotangents, Tensor]:
        """The factors of a group and their moments with the inputs."""
        if self._bias is None:
            heights = None
        else:
            heights = self._height
        return self._separated[g], self._separated[g].moments(inputs[:, g], heights)
