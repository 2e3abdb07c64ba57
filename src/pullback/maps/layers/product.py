r"""Products with a stack of matrices that a parameter holds, whoever multiplies.

A parameter may hold G matrices W_g, each as (O, I) or *turned*, (I, O). A use multiplies places a
by the matrices that it picks,

    z = W_g(t) a_t + b_g(t),        row = Σ_t e_g(t) ⊗ δ_t ⊗ a_t.

Then every g has a Kronecker product of its own, from its own places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .affine import AffineBlock
from .moments import Moments, Sharing, counted, means, moments, second_moment
from .registry import Block, Layer, Use, joined, register

if TYPE_CHECKING:
    from ..functions import Entries


@dataclass(frozen=True)
class Multiplication:
    """A product with matrices in a parameter: which ones, and where the axes of x and out go."""

    #: G, O, I
    form: tuple[int, int, int]
    #: which of the matrices, one after the other: one for all places, or one each
    first: int
    used: int
    #: whether they are held as (I, O)
    turned: bool
    #: the trailing axes of the output, brought to places, matrices and features
    order: tuple[int, ...]
    #: how many of these are matrices, none where their products are added up, and how many features
    axes: tuple[int, int]
    #: instead of `first` and `used`, the matrix of each place
    index: Tensor | None
    #: axes of x that are added up; then its axes (lead, places, matrices, features), by count
    summed: tuple[int, ...]
    x_order: tuple[int, ...]
    counts: tuple[int, int, int, int]
    #: whether the output's features come last, and those of x
    plain: bool

    @classmethod
    def read(
        cls, entries: Entries, letters: tuple[str, str, str], index: Tensor | None
    ) -> Multiplication | None:
        """Read a product off; None where a parameter is used in another way than by matrices."""
        w, x, z = letters
        if any(len({*some}) < len(some) for some in letters):
            return None
        axes = dict(zip(w, zip(entries.size, entries.stride, strict=True), strict=True))
        if index is not None or entries.index is not None:  # axis 0 is picked by place
            if index is None:
                index = entries.index
            if entries.index is not None and w[0] not in z[:1]:
                return None
            axes.pop(w[0])
        shared = {a for a, (n, s) in axes.items() if a in x and a in z and (n == 1 or s == 0)}
        axes = {a: pair for a, pair in axes.items() if a not in shared}  # expanded to these
        if any(a not in x and a not in z for a in axes):
            return None
        picked = sorted((a for a in axes if a in x and a in z), key=lambda a: -axes[a][1])
        outer = sorted((a for a in axes if a not in x), key=lambda a: -axes[a][1])
        inner = sorted((a for a in axes if a not in z), key=lambda a: -axes[a][1])
        many = len(picked)
        found = None
        for k in range(len(inner) if inner and not picked and index is None else 1):
            # Σ_k W_k x_k with matrices that lie apart: all of them have the same output
            parts = [*picked, *inner[:k]], outer, inner[k:]
            found = _matrices(entries, *([axes[a] for a in some] for some in parts))
            if found is not None:
                picked, _, inner = parts
                break
        if found is None:
            return None
        form, first, used, turned = found
        if index is not None and (first or picked):
            return None
        lead = 0
        while lead < len(z) and z[lead] in x and z[lead] not in axes:
            lead += 1
        rest = [a for a in z[lead:] if a not in axes]
        if any(a not in x for a in rest):  # the weight was expanded along it
            return None
        tail = [*rest, *picked[:many], *outer]
        order = tuple(z.index(a) - len(z) for a in tail)
        x_order = tuple(x.index(a) for a in [*z[:lead], *rest, *picked, *inner])
        summed = tuple(i for i, a in enumerate(x) if a not in z and a not in axes)
        counts = (lead, len(rest), len(picked), len(inner))
        plain = not turned and form[0] == 1 and index is None
        plain = plain and order == (-1,) and x_order == tuple(range(len(x)))
        if index is not None and len(rest) + lead > 1:
            index = index.view(-1, *[1] * (len(rest) + lead - 1))
        return cls(form, first, used, turned, order, (many, len(outer)), index, summed,
                   x_order, counts, plain)  # fmt: skip

    def inputs(self, x: Tensor) -> Tensor:
        """Bring x to (*lead, places, matrices, features)."""
        if self.summed:
            x = x.sum(self.summed, keepdim=True)
        x = x.permute(*self.x_order, *self.summed)
        sizes = x.shape
        lead, rest, picked, _ = self.counts
        t = prod(sizes[lead : lead + rest])
        m = prod(sizes[lead + rest : lead + rest + picked])
        return x.reshape(*sizes[:lead], t, m, -1)

    def outputs(self, z: Tensor) -> Tensor:
        """Bring the output, or its cotangent, to (*lead, places, matrices, features)."""
        lead = z.ndim - len(self.order)
        many, wide = self.axes
        z = z.permute(*range(lead), *(z.ndim + axis for axis in self.order))
        sizes = z.shape
        stop = z.ndim - wide
        shape = sizes[lead : stop - many], sizes[stop - many : stop], sizes[stop:]
        z = z.reshape(*sizes[:lead], *map(prod, shape))
        together = not many and self.used > 1  # Σ_k W_k a_k
        if together:
            return z.expand(*z.shape[:-2], self.used, -1)
        return z


def _matrices(
    entries: Entries, picked: Sequence[Any], outer: Sequence[Any], inner: Sequence[Any]
) -> tuple[tuple[int, int, int], int, int, bool] | None:
    """Form (G, O, I), first matrix, how many, and whether turned; None if they are no matrices."""
    merged = [_merged(some) for some in (picked, outer, inner)]
    if any(m is None for m in merged):
        return None
    (used, apart), (o, down), (i, along) = merged  # pyright: ignore[reportGeneralTypeIssues]
    if (i == 1 or along == 1) and (o == 1 or down == i):
        turned = False
    elif (o == 1 or down == 1) and (i == 1 or along == o):
        turned = True
    else:
        return None
    size = o * i
    total = entries.parameter.numel()
    if not size or (used > 1 and apart != size) or entries.offset % size or total % size:
        return None
    return (total // size, o, i), entries.offset // size, used, turned


def _merged(axes: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Length and stride of several axes as one."""
    axes = [pair for pair in axes if pair[0] != 1]
    if any(s != n * t for (_, s), (n, t) in pairwise(axes)):
        return None
    if axes:
        return (prod(n for n, _ in axes), axes[-1][1])
    return (1, 1)


class ProductUse(nn.Module):
    """A use of a weight, perhaps with a bias, by a product with matrices (O, I): for a module."""

    product: Multiplication

    def __init__(self, parameters: Mapping[str, Tensor | None], product: Multiplication) -> None:
        super().__init__()
        self.__dict__.update(_parameters=dict(parameters), product=product)


class TurnedProduct(ProductUse):
    """The same, of matrices that are held as (I, O)."""


@register(ProductUse)
class Matrices(Layer):
    """a (*lead, T, M, I) and δ as `Multiplication.outputs` gives it, (*lead, T, M, O)."""

    use = "product"
    curvature = "kronecker"

    def features(self, module: Any, ndim: int) -> int:
        return len(module.product.order)

    def form(self, module: Any) -> tuple[int, int, int]:
        g, o, i = module.product.form
        if self.turned:
            return (g, i, o)
        return (g, o, i)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        products = [u.module.product for u in uses]
        if any(p.index is not None or p.used != p.form[0] for p in products):
            return StackBlock(names, uses, turned=self.turned)
        inputs = joined([_inputs(u) for u in uses], 2)
        delta = joined([_delta(u) for u in uses], 3)
        return AffineBlock(names["weight"], names.get("bias"), inputs, delta, turned=self.turned)

    def counted(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        return counted(module.product.outputs(delta), keep)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        given = module.product
        if sharing.reduce and given.index is None:
            if keep is None:
                kept = None
            else:
                kept = sharing.by_sample(keep, 2).flatten(1, 2)
            seen = sharing.by_sample(x, 3).flatten(1, 2)  # (N, places, M, I)
            if kept is not None and kept.shape[-1] == 1:
                kept = kept[..., 0]
            elif kept is not None:  # each matrix has places of its own
                seen = seen * kept[..., None]
                kept = None
            seen, kept = means(seen, kept)
            return self._placed(given, moments(seen.transpose(0, 1), sharing, kept))
        if given.index is not None:
            parts = [moments(rows[None], sharing, k) for rows, k in _segments(given, x, keep)]
            second, first = (torch.cat([getattr(m, n) for m in parts]) for n in ("second", "first"))
            places = torch.stack([torch.as_tensor(m.places, device=x.device) for m in parts])
            return Moments(second, first, places.flatten())
        if keep is None:
            kept = None
        else:
            kept = keep.movedim(-1, 0).flatten(1)
        if kept is not None and len(kept) == 1:
            kept = kept[0]
        return self._placed(given, moments(_by_matrix(x), sharing, kept))

    def _placed(self, given: Multiplication, found: Moments) -> Moments:
        """Return moments of all matrices of the stack, zero for those that were not used."""
        if given.form[0] == 1:
            return found
        places = torch.as_tensor(found.places, device=found.first.device).expand(given.used)
        return Moments(_among(given, found.second), _among(given, found.first),
                       _among(given, places))  # fmt: skip

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        given = module.product
        d = given.outputs(delta)
        if given.index is not None:
            parts = [second_moment(rows[None], sharing) for rows, _ in _segments(given, d, None)]
            return torch.cat(parts)
        if sharing.reduce:
            d = sharing.by_sample(d, 3).sum((1, 2)).transpose(0, 1)
        else:
            d = _by_matrix(d)
        found = second_moment(d, sharing)
        if given.form[0] == 1:
            return found
        return _among(given, found)


@register(TurnedProduct)
class TurnedMatrices(Matrices):
    """The same for matrices (I, O)."""

    use = "transposed_product"
    input_first = turned = True


def _by_matrix(x: Tensor) -> Tensor:
    """(*lead, T, M, n) -> (M, places, n)."""
    return x.movedim(-2, 0).flatten(1, -2)


def _among(given: Multiplication, some: Tensor) -> Tensor:
    """Put what belongs to the matrices in use at their place among zeros."""
    out = some.new_zeros(given.form[0], *some.shape[1:])
    out[given.first : given.first + given.used] = some
    return out


def _segments(
    given: Multiplication, x: Tensor, keep: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The places (P, n) of each matrix, and which of them count."""
    assert given.index is not None
    order = given.index.flatten().argsort(stable=True)
    # one wait for the device, on statistics steps
    sizes = torch.bincount(given.index.flatten(), minlength=given.form[0]).tolist()
    if keep is None:
        kept = [None] * len(sizes)
    else:
        kept = keep.flatten()[order].split(sizes)
    yield from zip(x.flatten(0, -2)[order].split(sizes), kept, strict=True)


class StackBlock(Block):
    """G matrices (O, I) or turned ones (I, O), and their biases (G, O): each use picks some."""

    def __init__(
        self, names: Mapping[str, str | None], uses: Sequence[Use], *, turned: bool
    ) -> None:
        self._weight = names["weight"]
        self._bias = names.get("bias")
        self.names = tuple(n for n in (self._weight, self._bias) if n is not None)
        self._uses = uses
        self._turned = turned
        self._form = uses[0].module.product.form

    def narrow(self, start: int, stop: int) -> Block:
        uses = [
            replace(u, input=u.input[start:stop], delta=u.delta[start:stop]) for u in self._uses
        ]
        names = {"weight": self._weight, "bias": self._bias}
        return StackBlock(names, uses, turned=self._turned)

    def rows(self) -> dict[str, Tensor]:
        g, o, i = self._form
        like = self._uses[0].delta
        weight = like.new_zeros(*like.shape[:2], g, o, i)
        bias = like.new_zeros(*like.shape[:2], g, o)
        for use in self._uses:
            a = _inputs(use)
            d = _delta(use)
            pick = _picked(use)
            weight += torch.einsum("nrmto,nmti,nmtg->nrgoi", d, a, pick)
            bias += torch.einsum("nrmto,nmtg->nrgo", d, pick)
        return self._by_name(weight, bias, 2)

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        g, o, i = self._form
        weight = c.new_zeros(g, o, i)
        bias = c.new_zeros(g, o)
        for use in self._uses:
            a = _inputs(use)
            d = torch.einsum("nrmto,nr->nmto", _delta(use), c)
            given = use.module.product
            if given.index is not None:
                pairs = zip(_segments(given, d, None), _segments(given, a, None), strict=True)
                for k, ((rows, _), (seen, _)) in enumerate(pairs):
                    weight[k] += rows.mT @ seen
                    bias[k] += rows.sum(0)
                continue
            at = slice(given.first, given.first + given.used)
            rows, seen = (t.transpose(0, 1).flatten(1, 2) for t in (d, a))
            weight[at] += rows.mT @ seen
            bias[at] += rows.sum(1)
        return self._by_name(weight, bias, 0)

    def _by_name(self, weight: Tensor, bias: Tensor, lead: int) -> dict[str, Tensor]:
        """Both as the parameters hold them, flat but for the leading axes."""
        if self._turned:
            held = weight.mT
        else:
            held = weight
        found = {self._weight: held.flatten(lead), self._bias: bias.flatten(lead)}
        return {n: t for n, t in found.items() if n is not None}


def _inputs(use: Use) -> Tensor:
    """(N, *places, T, M, I) -> (N, M, T, I)."""
    x = use.input[:, None].flatten(1, -3)
    return x.transpose(1, 2)


def _delta(use: Use) -> Tensor:
    """(N, R, *places, *features) -> (N, R, M, T, O)."""
    d = use.module.product.outputs(use.delta)
    return d[:, :, None].flatten(2, -3).transpose(2, 3)


def _picked(use: Use) -> Tensor:
    """Whether a place is multiplied by matrix g: (N, M, T, G), or an expanded view of it."""
    given = use.module.product
    g = use.module.product.form[0]
    a = _inputs(use)
    if given.index is None:
        at = torch.arange(given.used, device=a.device) + given.first
        one = torch.nn.functional.one_hot(at, g).to(a.dtype)[None, :, None]
        return one.expand(*a.shape[:3], g)
    return torch.nn.functional.one_hot(given.index.reshape(a.shape[:3]), g).to(a.dtype)
