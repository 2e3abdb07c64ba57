r"""Products with a stack of matrices that a parameter holds, whichever function multiplies.

A parameter may hold G matrices W_g, each as (O, I) or transposed, (I, O). A use multiplies
positions a_t by the matrices that it picks,

    z_t = W_g(t) a_t + b_g(t),        row = Σ_t e_g(t) ⊗ δ_t ⊗ a_t.

Then every g has a Kronecker product of its own, from its own positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .affine import AffineBlock
from .moments import (
    Moments,
    Sharing,
    average_positions,
    compute_moments,
    compute_second_moment,
    find_kept_or_reached_positions,
)
from .registry import Block, Layer, Use, join_uses, register


@dataclass(frozen=True)
class MatrixProduct:
    """A product with matrices in a parameter: which ones, and where the axes of x and z go.

    Attributes:
        form: G, O, I.
        first, used: which of the matrices, one after the other: one for all positions, or one each.
        is_transposed: whether they are held as (I, O).
        output_order: the trailing axes of the output in the order positions, matrices, rows.
        output_stack_axes: how many of these count matrices; none where products are added up.
        row_axes: how many of these count rows.
        index: instead of `first` and `used`, the matrix of each position.
        summed_axes: axes of x that are added up before the product.
        input_order: the other axes of x in the order lead, positions, matrices, columns.
        lead_axes, position_axes, input_stack_axes: how many of these there are.
        is_linear: whether it is what `nn.Linear` computes.
    """

    form: tuple[int, int, int]
    first: int
    used: int
    is_transposed: bool
    output_order: tuple[int, ...]
    output_stack_axes: int
    row_axes: int
    index: Tensor | None
    summed_axes: tuple[int, ...]
    input_order: tuple[int, ...]
    lead_axes: int
    position_axes: int
    input_stack_axes: int
    is_linear: bool

    def arrange_inputs(self, x: Tensor) -> Tensor:
        """Bring x to (*lead, positions, matrices, columns)."""
        if self.summed_axes:
            x = x.sum(self.summed_axes, keepdim=True)
        x = x.permute(*self.input_order, *self.summed_axes)
        stack_start = self.lead_axes + self.position_axes
        column_start = stack_start + self.input_stack_axes
        positions = prod(x.shape[self.lead_axes : stack_start])
        matrices = prod(x.shape[stack_start:column_start])
        columns = prod(x.shape[column_start:])
        return x.reshape(*x.shape[: self.lead_axes], positions, matrices, columns)

    def arrange_outputs(self, z: Tensor) -> Tensor:
        """Bring the output, or its cotangent, to (*lead, positions, matrices, rows)."""
        lead = z.ndim - len(self.output_order)
        z = z.permute(*range(lead), *(z.ndim + axis for axis in self.output_order))
        row_start = z.ndim - self.row_axes
        stack_start = row_start - self.output_stack_axes
        positions = prod(z.shape[lead:stack_start])
        matrices = prod(z.shape[stack_start:row_start])
        rows = prod(z.shape[row_start:])
        z = z.reshape(*z.shape[:lead], positions, matrices, rows)
        if not self.output_stack_axes and self.used > 1:  # Σ_k W_k a_k has one output for all k
            return z.expand(*z.shape[:-2], self.used, -1)
        return z


class ProductUse(nn.Module):
    """A module that represents a function: a product with matrices (O, I), perhaps with a bias."""

    description = "a product of matrices"
    product: MatrixProduct

    def __init__(self, parameters: Mapping[str, Tensor | None], product: MatrixProduct) -> None:
        super().__init__()
        self.__dict__.update(_parameters=dict(parameters), product=product)


class TransposedProductUse(ProductUse):
    """The same, where the parameter holds the matrices as (I, O)."""

    description = "a product x @ w"


@register(ProductUse)
class Matrices(Layer):
    """Formulas of products with matrices that a parameter holds.

    T counts positions and M the matrices of one use: inputs a are (*lead, T, M, I), and cotangents
    δ are (*lead, T, M, O) once `MatrixProduct.arrange_outputs` has arranged them.
    """

    use = "product"
    curvature = "kronecker"

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        return len(module.product.output_order)

    def form(self, module: Any) -> tuple[int, int, int]:
        matrices, rows, columns = module.product.form
        if self.is_transposed:
            return matrices, columns, rows
        return matrices, rows, columns

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        products = [use.module.product for use in uses]
        if any(p.index is not None or p.used != p.form[0] for p in products):
            return StackBlock(names, uses, is_transposed=self.is_transposed)
        inputs = join_uses([_arrange_inputs(use) for use in uses], 2)
        delta = join_uses([_arrange_cotangents(use) for use in uses], 3)
        weight = names["weight"]
        bias = names.get("bias")
        return AffineBlock(weight, bias, inputs, delta, is_transposed=self.is_transposed)

    def counted_positions(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        return find_kept_or_reached_positions(module.product.arrange_outputs(delta), keep)

    def input_moments(
        self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None
    ) -> Moments:
        product = module.product
        if product.index is not None:
            return _compute_picked_moments(product, x, sharing, keep)
        if sharing.reduce:
            return _fill_moments(product, _compute_mean_moments(x, sharing, keep))
        mask = None
        if keep is not None:
            mask = keep.movedim(-1, 0).flatten(1)
            if len(mask) == 1:
                mask = mask[0]
        return _fill_moments(product, compute_moments(_move_matrices_first(x), sharing, mask))

    def output_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        product = module.product
        cotangents = product.arrange_outputs(delta)
        if product.index is not None:
            segments = _split_by_matrix(product, cotangents, None)
            return torch.cat([compute_second_moment(rows[None], sharing) for rows, _ in segments])
        if sharing.reduce:
            cotangents = sharing.by_sample(cotangents, 3).sum((1, 2)).transpose(0, 1)
        else:
            cotangents = _move_matrices_first(cotangents)
        return _fill_stack(product, compute_second_moment(cotangents, sharing))


@register(TransposedProductUse)
class TransposedMatrices(Matrices):
    """The same, where the parameter holds the matrices as (I, O)."""

    use = "transposed_product"
    input_first = True
    is_transposed = True


def _move_matrices_first(x: Tensor) -> Tensor:
    """Return x (*lead, T, M, n) as (M, positions, n)."""
    return x.movedim(-2, 0).flatten(1, -2)


def _compute_mean_moments(x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
    """Return the moments of the samples' means over positions, (M, N, I)."""
    by_sample = sharing.by_sample(x, 3).flatten(1, 2)  # (N, positions, M, I)
    mask = None
    if keep is not None:
        mask = sharing.by_sample(keep, 2).flatten(1, 2)
        if mask.shape[-1] == 1:
            mask = mask[..., 0]
        else:  # each matrix has positions of its own
            by_sample = by_sample * mask[..., None]
            mask = None
    by_sample, mask = average_positions(by_sample, mask)
    return compute_moments(by_sample.transpose(0, 1), sharing, mask)


def _compute_picked_moments(
    product: MatrixProduct, x: Tensor, sharing: Sharing, keep: Tensor | None
) -> Moments:
    """Return, for each matrix, the moments of the positions that picked it."""
    by_matrix = [
        compute_moments(rows[None], sharing, mask)
        for rows, mask in _split_by_matrix(product, x, keep)
    ]
    counts = [torch.as_tensor(m.positions, device=x.device) for m in by_matrix]
    return Moments(
        torch.cat([m.second for m in by_matrix]),
        torch.cat([m.first for m in by_matrix]),
        torch.stack(counts).flatten(),
    )


def _fill_moments(product: MatrixProduct, moments: Moments) -> Moments:
    """Return moments of all matrices of the stack, zero for those that were not used."""
    if product.form[0] == 1:
        return moments
    positions = torch.as_tensor(moments.positions, device=moments.first.device)
    return Moments(
        _fill_stack(product, moments.second),
        _fill_stack(product, moments.first),
        _fill_stack(product, positions.expand(product.used)),
    )


def _fill_stack(product: MatrixProduct, values: Tensor) -> Tensor:
    """Return values of all matrices of the stack, zero for those that were not used."""
    if product.form[0] == 1:
        return values
    out = values.new_zeros(product.form[0], *values.shape[1:])
    out[product.first : product.first + product.used] = values
    return out


def _split_by_matrix(
    product: MatrixProduct, x: Tensor, keep: Tensor | None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the positions (P, n) that picked each matrix, and a mask of those that count."""
    assert product.index is not None
    index = product.index.flatten()
    order = index.argsort(stable=True)
    # one wait for the device, on statistics steps
    sizes = torch.bincount(index, minlength=product.form[0]).tolist()
    masks: Sequence[Tensor | None] = [None] * len(sizes)
    if keep is not None:
        masks = keep.flatten()[order].split(sizes)
    yield from zip(x.flatten(0, -2)[order].split(sizes), masks, strict=True)


class StackBlock(Block):
    """G matrices (O, I) or transposed ones (I, O), and their biases (G, O): each use picks some."""

    def __init__(
        self, names: Mapping[str, str | None], uses: Sequence[Use], *, is_transposed: bool
    ) -> None:
        self._weight = names["weight"]
        self._bias = names.get("bias")
        self.names = tuple(n for n in (self._weight, self._bias) if n is not None)
        self._uses = uses
        self._is_transposed = is_transposed
        self._form = uses[0].module.product.form

    def narrow(self, start: int, stop: int) -> Block:
        uses = [
            replace(use, input=use.input[start:stop], delta=use.delta[start:stop])
            for use in self._uses
        ]
        names = {"weight": self._weight, "bias": self._bias}
        return StackBlock(names, uses, is_transposed=self._is_transposed)

    def rows(self) -> dict[str, Tensor]:
        matrices, rows, columns = self._form
        delta = self._uses[0].delta
        weight = delta.new_zeros(*delta.shape[:2], matrices, rows, columns)
        bias = delta.new_zeros(*delta.shape[:2], matrices, rows)
        for use in self._uses:
            a = _arrange_inputs(use)
            d = _arrange_cotangents(use)
            picks = _make_one_hot(use)
            weight += torch.einsum("nrmto,nmti,nmtg->nrgoi", d, a, picks)
            bias += torch.einsum("nrmto,nmtg->nrgo", d, picks)
        return self._name_gradients(weight, bias, 2)

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        matrices, rows, columns = self._form
        weight = c.new_zeros(matrices, rows, columns)
        bias = c.new_zeros(matrices, rows)
        for use in self._uses:
            product = use.module.product
            a = _arrange_inputs(use)
            d = torch.einsum("nrmto,nr->nmto", _arrange_cotangents(use), c)
            if product.index is not None:
                pairs = zip(
                    _split_by_matrix(product, d, None),
                    _split_by_matrix(product, a, None),
                    strict=True,
                )
                for k, ((cotangents, _), (inputs, _)) in enumerate(pairs):
                    weight[k] += cotangents.mT @ inputs
                    bias[k] += cotangents.sum(0)
                continue
            used = slice(product.first, product.first + product.used)
            cotangents = d.transpose(0, 1).flatten(1, 2)
            inputs = a.transpose(0, 1).flatten(1, 2)
            weight[used] += cotangents.mT @ inputs
            bias[used] += cotangents.sum(1)
        return self._name_gradients(weight, bias, 0)

    def _name_gradients(self, weight: Tensor, bias: Tensor, lead: int) -> dict[str, Tensor]:
        """Return both by parameter, as the parameters hold them, flat after `lead` axes."""
        out = {}
        if self._weight is not None:
            if self._is_transposed:
                weight = weight.mT
            out[self._weight] = weight.flatten(lead)
        if self._bias is not None:
            out[self._bias] = bias.flatten(lead)
        return out


def _arrange_inputs(use: Use) -> Tensor:
    """Return a use's inputs (N, *positions, T, M, I) as (N, M, T, I)."""
    x = use.input[:, None].flatten(1, -3)
    return x.transpose(1, 2)


def _arrange_cotangents(use: Use) -> Tensor:
    """Return a use's cotangents (N, R, *positions, *features) as (N, R, M, T, O)."""
    d = use.module.product.arrange_outputs(use.delta)
    return d[:, :, None].flatten(2, -3).transpose(2, 3)


def _make_one_hot(use: Use) -> Tensor:
    """Return 1 where a position is multiplied by matrix g, else 0: (N, M, T, G)."""
    product = use.module.product
    count = product.form[0]
    a = _arrange_inputs(use)
    one_hot = nn.functional.one_hot
    if product.index is None:
        used = torch.arange(product.used, device=a.device) + product.first
        return one_hot(used, count).to(a.dtype)[None, :, None].expand(*a.shape[:3], count)
    return one_hot(product.index.reshape(a.shape[:3]), count).to(a.dtype)
