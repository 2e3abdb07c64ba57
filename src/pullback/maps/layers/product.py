r"""Products with a stack of matrices that a parameter holds, whoever multiplies.

A parameter may hold G matrices W_g, each as (O, I) or *turned*, (I, O). A use multiplies places a
by the matrices that it picks,

    z = W_g(t) a_t + b_g(t),        row = Σ_t e_g(t) ⊗ δ_t ⊗ a_t.

Then every g has a Kronecker product of its own, from its own places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .affine import AffineBlock
from .moments import Moments, Sharing, counted, means, moments, second_moment
from .registry import Block, Layer, Use, joined, register


class ProductUse(nn.Module):
    """A use of a parameter as G matrices (O, I), in the place of a module.

    Args:
        parameters: weight and bias, or None.
        form: G, O, I.
        first, used: which of the matrices, one after the other: one for all places, or one each.
        order: the trailing axes of the output, brought to places, matrices and features.
        axes: how many of these axes are matrices, and how many features.
        index: instead, the matrix of each place.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor | None],
        form: tuple[int, int, int],
        *,
        first: int = 0,
        used: int = 1,
        order: tuple[int, ...] = (-1,),
        axes: tuple[int, int] = (0, 1),
        index: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.__dict__["_parameters"] = dict(parameters)
        self.form, self.first, self.used = form, first, used
        self.order, self.axes, self.index = order, axes, index

    def arranged(self, z: Tensor) -> Tensor:
        """The output, or its cotangent, as (*lead, places, matrices, features)."""
        lead, (many, wide) = z.ndim - len(self.order), self.axes
        z = z.permute(*range(lead), *(z.ndim + axis for axis in self.order))
        sizes, stop = z.shape, z.ndim - wide
        shape = sizes[:lead], sizes[lead : stop - many], sizes[stop - many : stop], sizes[stop:]
        return z.reshape(*shape[0], *(torch.Size(s).numel() for s in shape[1:]))


class TurnedProduct(ProductUse):
    """The same, of matrices that are held as (I, O)."""


@register(ProductUse)
class Matrices(Layer):
    """a (*lead, T, M, I) and δ as `Product.arranged` gives it, (*lead, T, M, O)."""

    curvature = "kronecker"

    def features(self, module: Any, ndim: int) -> int:
        return len(module.order)

    def groups(self, module: Any) -> int:
        return module.form[0]

    def form(self, module: Any) -> tuple[int, int, int]:
        g, o, i = module.form
        return (g, i, o) if self.turned else (g, o, i)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        return ProductBlock(names, uses, turned=self.turned)

    def counted(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        return counted(module.arranged(delta), keep)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        if sharing.reduce and module.index is None:
            kept = None if keep is None else sharing.by_sample(keep, 2).flatten(1, 2)
            seen = sharing.by_sample(x, 3).flatten(1, 2)  # (N, places, M, I)
            if kept is not None and kept.shape[-1] == 1:
                kept = kept[..., 0]
            elif kept is not None:  # each matrix has places of its own
                seen, kept = seen * kept[..., None], None
            seen, kept = means(seen, kept)
            return self._placed(module, moments(seen.transpose(0, 1), sharing, kept))
        if module.index is not None:
            parts = [moments(rows[None], sharing, k) for rows, k in _segments(module, x, keep)]
            second, first = (torch.cat([getattr(m, n) for m in parts]) for n in ("second", "first"))
            places = torch.stack([torch.as_tensor(m.places, device=x.device) for m in parts])
            return Moments(second, first, places.flatten())
        kept = None if keep is None else keep.movedim(-1, 0).flatten(1)
        kept = kept[0] if kept is not None and len(kept) == 1 else kept
        return self._placed(module, moments(_by_matrix(x), sharing, kept))

    def _placed(self, module: Any, found: Moments) -> Moments:
        """The moments of the matrices that were used, among those of all."""
        if module.form[0] == 1:
            return found
        places = torch.as_tensor(found.places, device=found.first.device).expand(module.used)
        return Moments(_among(module, found.second), _among(module, found.first),
                       _among(module, places))  # fmt: skip

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        d = module.arranged(delta)
        if module.index is not None:
            parts = [second_moment(rows[None], sharing) for rows, _ in _segments(module, d, None)]
            return torch.cat(parts)
        if sharing.reduce:
            d = sharing.by_sample(d, 3).sum((1, 2)).transpose(0, 1)
        else:
            d = _by_matrix(d)
        found = second_moment(d, sharing)
        return found if module.form[0] == 1 else _among(module, found)


@register(TurnedProduct)
class TurnedMatrices(Matrices):
    """The same for matrices (I, O)."""

    input_first = turned = True


def _by_matrix(x: Tensor) -> Tensor:
    """(*lead, T, M, n) -> (M, places, n)."""
    return x.movedim(-2, 0).flatten(1, -2)


def _among(module: ProductUse, some: Tensor) -> Tensor:
    """Put what belongs to the matrices in use at their place among zeros."""
    out = some.new_zeros(module.form[0], *some.shape[1:])
    out[module.first : module.first + module.used] = some
    return out


def _segments(
    module: ProductUse, x: Tensor, keep: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The places (P, n) of each matrix, and which of them count."""
    assert module.index is not None
    order = module.index.flatten().argsort(stable=True)
    # one wait for the device, on statistics steps
    sizes = torch.bincount(module.index.flatten(), minlength=module.form[0]).tolist()
    kept = [None] * len(sizes) if keep is None else keep.flatten()[order].split(sizes)
    yield from zip(x.flatten(0, -2)[order].split(sizes), kept, strict=True)


class ProductBlock(Block):
    """G matrices (O, I), or turned ones (I, O), and their biases (G, O), from all uses of them."""

    def __init__(
        self, names: Mapping[str, str | None], uses: Sequence[Use], *, turned: bool
    ) -> None:
        self._weight, self._bias = names["weight"], names.get("bias")
        self.names = tuple(n for n in (self._weight, self._bias) if n is not None)
        self._uses, self.turned, self._form = uses, turned, uses[0].module.form
        self.looks = {}

    @property
    def inner(self) -> AffineBlock | None:
        """The affine layer (G·O, I) with these rows, where every use is of all matrices."""
        if any(u.module.index is not None or u.module.used != self._form[0] for u in self._uses):
            return None
        inputs = joined([_inputs(u) for u in self._uses], 2)
        delta = joined([_delta(u) for u in self._uses], 3)
        n, g, t, i = inputs.shape
        names, read = (self._weight, self._bias), inputs.__getitem__
        return AffineBlock(*names, read, (n, g, t, i), delta, looks=self.looks, turned=self.turned)

    @property
    def route(self) -> str:
        inner = self.inner
        return "rows" if inner is None else inner.route

    def narrow(self, start: int, stop: int) -> Block:
        uses = [
            replace(u, input=u.input[start:stop], delta=u.delta[start:stop]) for u in self._uses
        ]
        names = {"weight": self._weight, "bias": self._bias}
        return ProductBlock(names, uses, turned=self.turned)

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        assert isinstance(other, ProductBlock)
        mine = self.inner
        theirs = mine if other is self else other.inner
        if mine is None or theirs is None:
            super().add_gram(out, other, budget)
        else:
            mine.add_gram(out, theirs, budget)

    def rows(self) -> dict[str, Tensor]:
        (g, o, i), (n, r) = self._form, self._uses[0].delta.shape[:2]
        weight = bias = None
        for use in self._uses:
            a, d, pick = _inputs(use), _delta(use), _picked(use)
            if self._weight is not None:
                weight = d.new_zeros(n, r, g, o, i) if weight is None else weight
                weight += torch.einsum("nrmto,nmti,nmtg->nrgoi", d, a, pick)
            if self._bias is not None:
                bias = d.new_zeros(n, r, g, o) if bias is None else bias
                bias += torch.einsum("nrmto,nmtg->nrgo", d, pick)
        out = {}
        if self._weight is not None and weight is not None:
            out[self._weight] = self._held(weight).flatten(2)
        if self._bias is not None and bias is not None:
            out[self._bias] = bias.flatten(2)
        return out

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        inner = self.inner
        if inner is None:
            return super().project(v)
        return inner.project(v)

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        g, o, i = self._form
        weight, bias = c.new_zeros(g, o, i), c.new_zeros(g, o)
        for use in self._uses:
            a, d = _inputs(use), torch.einsum("nrmto,nr->nmto", _delta(use), c)
            if use.module.index is not None:
                pairs = zip(
                    _segments(use.module, d, None), _segments(use.module, a, None), strict=True
                )
                for k, ((rows, _), (seen, _)) in enumerate(pairs):
                    weight[k] += rows.mT @ seen
                    bias[k] += rows.sum(0)
                continue
            at = slice(use.module.first, use.module.first + use.module.used)
            rows, seen = (t.transpose(0, 1).flatten(1, 2) for t in (d, a))
            weight[at] += rows.mT @ seen
            bias[at] += rows.sum(1)
        found = {self._weight: self._held(weight).flatten(), self._bias: bias.flatten()}
        return {n: t for n, t in found.items() if n is not None}

    def _held(self, weight: Tensor) -> Tensor:
        return weight.mT if self.turned else weight


def _inputs(use: Use) -> Tensor:
    """(N, *places, T, M, I) -> (N, M, T, I)."""
    x = use.input[:, None].flatten(1, -3)
    return x.transpose(1, 2)


def _delta(use: Use) -> Tensor:
    """(N, R, *places, *features) -> (N, R, M, T, O)."""
    d = use.module.arranged(use.delta)
    return d[:, :, None].flatten(2, -3).transpose(2, 3)


def _picked(use: Use) -> Tensor:
    """Whether a place is multiplied by matrix g: (N, M, T, G), or an expanded view of it."""
    module, g = use.module, use.module.form[0]
    a = _inputs(use)
    if module.index is None:
        at = torch.arange(module.used, device=a.device) + module.first
        one = torch.nn.functional.one_hot(at, g).to(a.dtype)[None, :, None]
        return one.expand(*a.shape[:3], g)
    return torch.nn.functional.one_hot(module.index.reshape(a.shape[:3]), g).to(a.dtype)
