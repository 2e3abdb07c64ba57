r"""Transposed convolutions: the roles of input and cotangent are exchanged.

Input place t reaches the output places s = t·stride − padding + κ·dilation, so with the cotangents
that it meets there, d_t = (δ[o, s])_{oκ} of width C_out/G·kernel,

    z[o, s] = b_o + Σ_t Σ_i W[i, o, κ] a_t[i]
    row     = Σ_t a_t ⊗ d_t   for the weight (C_in, C_out/G, *kernel),      Σ_s δ_s   for the bias.

So the weight is affine with the *input's* places as sharing axis, and patches of the cotangent.
The bias meets every output place once, a patch not: it has rows of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._core.products import cross
from .affine import AffineBlock
from .moments import Moments, Sharing, counted, means, moments, second_moment
from .patches import windows
from .registry import Block, Layer, Use, joined, register


def _inputs(module: Any, x: Tensor) -> Tensor:
    """(B, C_in, *places) -> (B, G, places, C_in/G)."""
    return x.unflatten(1, (module.groups, -1)).flatten(3).mT


def _patches(module: Any, delta: Tensor, places: Sequence[int]) -> Tensor:
    """(B, C_out, *places') -> (B, G, places, C_out/G·kernel): what each input place reaches."""
    pad: list[int] = []
    sizes = zip(
        delta.shape[2:],
        places,
        module.kernel_size,
        module.stride,
        module.padding,
        module.dilation,
        strict=True,
    )
    for out, t, k, s, p, d in sizes:
        reach = (t - 1) * s + d * (k - 1) + 1
        pad = [p, reach - p - out, *pad]  # negative where output padding lies beyond any input
    return windows(module, F.pad(delta, pad))


class TransposedBlock(Block):
    """Weight (G·I, O) and bias from all uses of them; patches are formed only while in use.

    The weight's rows are those of an affine layer (O, I) per group, transposed.
    """

    def __init__(self, weight: str | None, bias: str | None, uses: Sequence[Use]) -> None:
        self._weight, self._bias, self._uses = weight, bias, uses
        self.names = tuple(n for n in (weight, bias) if n is not None)
        module = uses[0].module
        i = module.in_channels // module.groups
        self._layout = (module.groups, i, module.weight[0].numel())  # G, I, O

    def _affine(self) -> AffineBlock:
        """The weight as an affine layer (G·O, I)."""
        assert self._weight is not None
        inputs = joined([_sample_inputs(u) for u in self._uses], 2)
        delta = joined([_sample_patches(u) for u in self._uses], 3)
        n, g, t, i = inputs.shape
        return AffineBlock(self._weight, None, inputs.__getitem__, (n, g, t, i), delta)

    def _shifts(self) -> Tensor:
        """Σ_s δ_s: (N, R, C_out)."""
        shifts = []
        for use in self._uses:
            channel = use.delta.ndim - use.features
            shared = [axis for axis in range(2, use.delta.ndim) if axis != channel]
            shifts.append(use.delta.sum(shared))
        return sum(shifts[1:], shifts[0])

    @property
    def route(self) -> str:
        if self._weight is None:
            return "rows"
        (g, i, o), (n, r) = self._layout, self._uses[0].delta.shape[:2]
        t = sum(u.input.numel() for u in self._uses) // (n * g * i)
        shape_only = torch.empty(n, r, g, t, o, device="meta")  # a report forms no patches
        return AffineBlock(
            self._weight, None, shape_only.__getitem__, (n, g, t, i), shape_only
        ).route

    def narrow(self, start: int, stop: int) -> Block:
        uses = [
            replace(u, input=u.input[start:stop], delta=u.delta[start:stop]) for u in self._uses
        ]
        return TransposedBlock(self._weight, self._bias, uses)

    def rows(self) -> dict[str, Tensor]:
        g, i, o = self._layout
        out = {}
        if self._weight is not None:
            rows = self._affine().rows()[self._weight]
            out[self._weight] = rows.unflatten(2, (g, o, i)).mT.flatten(2)
        if self._bias is not None:
            out[self._bias] = self._shifts()
        return out

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        total: Tensor | float = 0.0
        if self._weight is not None:
            w = v[self._weight].reshape(self._layout).mT
            total = self._affine().project({self._weight: w})
        if self._bias is not None:
            total = total + self._shifts() @ v[self._bias].flatten()
        assert isinstance(total, Tensor)
        return total

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        g, i, o = self._layout
        out = {}
        if self._weight is not None:
            lifted = self._affine().lift(c)[self._weight]
            out[self._weight] = lifted.view(g, o, i).mT.flatten()
        if self._bias is not None:
            out[self._bias] = (c[..., None] * self._shifts()).sum((0, 1))
        return out

    def gram(self, other: Block, budget: int) -> Tensor:
        assert isinstance(other, TransposedBlock)
        total: Tensor | float = 0.0
        if self._weight is not None:
            mine = self._affine()
            total = mine.gram(mine if other is self else other._affine(), budget)
        if self._bias is not None:
            x = self._shifts().flatten(0, 1)
            total = total + cross(x, x if other is self else other._shifts().flatten(0, 1))
        assert isinstance(total, Tensor)
        return total


def _sample_inputs(use: Use) -> Tensor:
    """(N, *calls, C_in, *places) -> (N, G, T, C_in/G)."""
    n, dims = len(use.input), use.features
    a = _inputs(use.module, use.input.reshape(-1, *use.input.shape[-dims:]))
    return a.unflatten(0, (n, -1)).transpose(1, 2).flatten(2, 3)


def _sample_patches(use: Use) -> Tensor:
    """(N, R, *calls, C_out, *places') -> (N, R, G, T, C_out/G·kernel)."""
    (n, r), dims = use.delta.shape[:2], use.features
    flat = use.delta.reshape(-1, *use.delta.shape[-dims:])
    d = _patches(use.module, flat, use.input.shape[1 - dims :])
    return d.unflatten(0, (n, r, -1)).transpose(2, 3).flatten(3, 4)


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTranspose(Layer):
    """`output_padding` and `output_size` need no care: the cotangent has the output's shape."""

    curvature, input_first, joint = "kronecker", True, False

    def features(self, module: Any, ndim: int) -> int:
        return 1 + len(module.kernel_size)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        return TransposedBlock(names["weight"], names["bias"], uses)

    def counted(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        """Of the input's places (B, *places), those that reach a cotangent, or are kept."""
        dims = len(module.kernel_size)
        delta = delta if delta.ndim == 2 + dims else delta[None]
        if keep.ndim == 1:
            return counted(delta.flatten(1), keep)
        reached = delta.unflatten(1, (module.groups, -1)).any(2)
        reached = _patches(module, reached, x.shape[-dims:]).movedim(1, 2).flatten(2)
        return counted(reached.unflatten(1, x.shape[-dims:]), keep)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        a = _inputs(module, x if x.ndim == 2 + len(module.kernel_size) else x[None])
        if keep is not None:
            keep = keep.reshape(len(keep), -1).expand(len(a), a.shape[2])  # (B, places)
        if not sharing.reduce:
            kept = None if keep is None else keep.flatten()
            return moments(a.transpose(0, 1).flatten(1, 2), sharing, kept)
        if keep is not None:
            keep = sharing.by_sample(keep).flatten(1)
        a, kept = means(sharing.by_sample(a.transpose(1, 2), 3).flatten(1, 2), keep)
        return moments(a.transpose(0, 1), sharing, kept)

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        dims = len(module.kernel_size)
        delta = delta if delta.ndim == 2 + dims else delta[None]
        d = _patches(module, delta, x.shape[-dims:])  # (B, G, places, O)
        if sharing.reduce:
            return second_moment(sharing.by_sample(d.sum(2), 2).sum(1).transpose(0, 1), sharing)
        return second_moment(d.transpose(0, 1).flatten(1, 2), sharing)

    def shifts(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        dims = len(module.kernel_size)
        d = (delta if delta.ndim == 2 + dims else delta[None]).flatten(2)
        d = sharing.by_sample(d.sum(2)).sum(1) if sharing.reduce else d.mT.flatten(0, 1)
        return second_moment(d[None], sharing)
