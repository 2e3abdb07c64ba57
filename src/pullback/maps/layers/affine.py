"""Layers whose output is W·a + b at all positions that share the weight.

With the sharing axis t and groups g, and inputs ā_t = (a_t, h_t) whose homogeneous coordinate h_t
is what the bias multiplies (1, but 0 at the derivatives of a jet),

    row    = Σ_t δ_t ⊗ ā_t
    A Aᵀ   = Σ_tt' (ā_t·ā'_t') (δ_t·δ'_t')        (Hadamard of Grams when there is one position)
    A v    = Σ_t δ_tᵀ V ā_t
    Aᵀ c   = Σ_t (Σ_r c_r δ_rt) ⊗ ā_t

Where a mean over positions follows, all of them have one cotangent and the row is δ ⊗ Σ_t ā_t, as
from one position. K-FAC asks for the sides of the Kronecker product, and squared rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.products import add_cross_gram
from .gram import (
    ContractedInputs,
    Route,
    SeparatedCotangents,
    add_contracted,
    add_hadamard,
    add_materialized,
    add_separated,
    estimate_costs,
    form_row_panels,
    form_rows,
    multiply_inputs,
)
from .registry import Block, CotangentStructure

#: entries of samples' gradients that are held at once to be squared: 64 MiB in float32, beside
#: the activations of the whole network
_SQUARES = 2**24


def _sum_outer_products(x: Tensor, longest: int) -> Tensor:
    """Return Σ xxᵀ over the positions of (G, P, n), or its diagonal where n exceeds `longest`."""
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
        structure_tests: dict[CotangentStructure, bool] | None = None,
    ) -> None:
        if isinstance(inputs, Tensor):
            inputs, width = inputs.__getitem__, inputs.shape[-1]
        n, _, g, t, _ = delta.shape
        self._weight = weight
        self._bias = bias
        self._h = homogeneous
        self.is_transposed = is_transposed
        self.structure_tests: dict[CotangentStructure, bool] = {}
        if structure_tests is not None:
            self.structure_tests = structure_tests
        self.names = tuple(n for n in (weight, bias) if n is not None)
        self._inputs_of = inputs
        self.shape = (n, g, t, width)
        self._delta = delta

    @property
    def nbytes(self) -> int:
        """Bytes of the cotangents, and of inputs at all samples."""
        return self._delta.nbytes + prod(self.shape) * self._delta.element_size()

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but the cached properties."""
        cached = ("_single_position_block", "_separated_cotangents", "_own_route")
        return {name: value for name, value in vars(self).items() if name not in cached}

    def _inputs(self) -> Tensor:
        return self._inputs_of(slice(0, self.shape[0]))

    def _replace_data(
        self, inputs: Callable[[slice], Tensor], delta: Tensor, height: Tensor | None
    ) -> AffineBlock:
        """Return a block of the same parameters with other inputs and cotangents."""
        return AffineBlock(
            self._weight,
            self._bias,
            inputs,
            delta,
            height,
            width=self.shape[3],
            is_transposed=self.is_transposed,
            structure_tests=self.structure_tests,
        )

    def narrow(self, start: int, stop: int) -> Block:
        def inputs(samples: slice) -> Tensor:
            return self._inputs_of(slice(start + samples.start, start + samples.stop))

        return self._replace_data(inputs, self._delta[start:stop], self._h)

    def to(self, dtype: torch.dtype) -> Block:
        def inputs(samples: slice) -> Tensor:
            return self._inputs_of(samples).to(dtype)

        height = self._h
        if height is not None:
            height = height.to(dtype)
        return self._replace_data(inputs, self._delta.to(dtype), height)

    def trace_covectors(self) -> Block:
        """Return a block whose covectors are output features: Σ_r δ_r·δ'_r is one product."""
        delta = self._delta.permute(0, 2, 3, 1, 4).flatten(3).unsqueeze(1)
        return self._replace_data(self._inputs_of, delta, self._h)

    def _bias_cotangents(self) -> Tensor:
        """Return Σ_t h_t δ_t, (N, R, G, O)."""
        if self._h is None:
            return self._delta.sum(3)
        return torch.einsum("nrgto,t->nrgo", self._delta, self._h)

    @property
    def _pooled_block(self) -> AffineBlock:
        """The block that `add_gram` works with: that of a single position where there is one."""
        if self._single_position_block is None:
            return self
        return self._single_position_block

    @cached_property
    def _single_position_block(self) -> AffineBlock | None:
        """A block with the same rows from one position, if all positions have one cotangent."""
        if not self._has_equal_positions():
            return None
        all_inputs = self._inputs_of  # not this block: a cycle would keep its cotangents alive

        def inputs(samples: slice) -> Tensor:
            return all_inputs(samples).sum(2, keepdim=True)

        first = self._delta[:, :, :, :1]
        if self._h is None:
            height = first.new_tensor([self.shape[2]])
        else:
            height = self._h.sum().reshape(1)
        return self._replace_data(inputs, first, height)

    def _has_equal_positions(self) -> bool:
        """Return True if several positions all have the same cotangents."""
        positions = self.shape[2]
        was_equal = self.structure_tests.get(CotangentStructure.EQUAL_POSITIONS)
        if positions == 1 or was_equal is False:
            return False
        first = self._delta[:, :, :, :1]
        # positions that differ usually differ at the second one already
        is_equal = was_equal or bool((self._delta[:, :, :, :2] == first).all())
        is_equal = is_equal and bool((self._delta == first).all())
        self.structure_tests[CotangentStructure.EQUAL_POSITIONS] = is_equal
        return is_equal

    @cached_property
    def _separated_cotangents(self) -> list[SeparatedCotangents]:
        """The factors v and g of the cotangents of each group; empty if they do not separate."""
        was_separated = self.structure_tests.get(CotangentStructure.SEPARATED)
        if was_separated is False:
            return []
        groups = []
        for g in range(self.shape[1]):
            factors = SeparatedCotangents.of(self._delta[:, :, g], is_likely=bool(was_separated))
            self.structure_tests[CotangentStructure.SEPARATED] = factors is not None
            if factors is None:
                return []
            groups.append(factors)
        return groups

    @property
    def route(self) -> str:
        return self._pooled_block._own_route.value

    @cached_property
    def _own_route(self) -> Route:
        """The formula for the Gram of this block with itself."""
        return self._choose_route(self)

    def _choose_route(self, other: AffineBlock) -> Route:
        """Return the formula for the Gram that takes the fewest operations."""
        if self._weight is None:
            return Route.ROWS
        costs = estimate_costs(self._delta, other._delta, self.shape[3])
        if (
            costs.is_separation_worth_testing
            and self._separated_cotangents
            and other._separated_cotangents
        ):
            return Route.SEPARATED
        return costs.cheapest

    def rows(self) -> dict[str, Tensor]:
        out = {}
        if self._weight is not None:
            rows = torch.einsum("nrgto,ngti->nrgoi", self._delta, self._inputs())
            if self.is_transposed:
                rows = rows.mT
            out[self._weight] = rows.flatten(2)
        if self._bias is not None:
            out[self._bias] = self._bias_cotangents().flatten(2)
        return out

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        n, g, t, i = self.shape
        o = self._delta.shape[-1]
        y: Tensor | float = 0.0
        if self._weight is not None:
            x = self._group_positions(self._inputs())
            w = v[self._weight]
            if self.is_transposed:
                w = w.reshape(g, i, o).mT
            else:
                w = w.reshape(g, o, i)
            y = torch.stack([a @ b.T for a, b in zip(x, w, strict=True)])
            y = y.view(g, n, t, o).transpose(0, 1)
        if self._bias is not None:
            shift = v[self._bias].reshape(1, g, 1, o)
            if self._h is not None:
                shift = shift * self._h[:, None]
            y = y + shift
        return torch.einsum("nrgto,ngto->nr", self._delta, torch.as_tensor(y).expand(n, g, t, o))

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        delta = torch.einsum("nrgto,nr->ngto", self._delta, c)
        out = {}
        if self._weight is not None:
            x = self._group_positions(self._inputs())
            d = self._group_positions(delta)
            gradients = [a.T @ b for a, b in zip(d, x, strict=True)]
            if self.is_transposed:
                gradients = [gradient.T for gradient in gradients]
            if len(gradients) == 1:
                out[self._weight] = gradients[0].flatten()
            else:
                out[self._weight] = torch.stack(gradients).flatten()
        if self._bias is not None:
            if self._h is not None:
                delta = delta * self._h[:, None]
            out[self._bias] = delta.sum((0, 2)).flatten()
        return out

    @property
    def weight(self) -> str | None:
        """The weight's name, or None if the block has no weight."""
        return self._weight

    @property
    def _height(self) -> Tensor:
        """h, (T,)."""
        if self._h is None:
            return self._delta.new_ones(self.shape[2])
        return self._h

    def sides(self, longest: int) -> tuple[Tensor, Tensor]:
        r"""Σ δδᵀ, (G, O, O), and mean āāᵀ, (G, I, I) or with the bias (G, I + 1, I + 1).

        Their Kronecker product takes each position for a sample of its own. Sides longer than
        `longest` are diagonals, (G, n).
        """
        d = self._delta.flatten(0, 1).transpose(0, 1).flatten(1, 2)
        a = self._append_height().transpose(0, 1).flatten(1, 2)
        return _sum_outer_products(d, longest), _sum_outer_products(a, longest) / a.shape[1]

    def _append_height(self) -> Tensor:
        """Return ā, (N, G, T, I) or with the bias (N, G, T, I + 1)."""
        x = self._inputs()
        if self._bias is None:
            return x
        return torch.cat([x, self._height[:, None].expand(*x.shape[:3], 1)], 3)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return inputs ā (N, G, T, I or I + 1) and cotangents δ (N, R, G, T, O) of the rows.

        The last column of ā belongs to the bias where there is one; a row is Σ_t δ_t ⊗ ā_t.
        """
        return self._append_height(), self._delta

    def squares(self, u: Tensor | None, w: Tensor | None) -> Tensor:
        r"""Σ_n (UᵀV_nW)² of the rows V_n = Σ_t δ_t ⊗ ā_t, entry by entry: (G, O, I or I + 1).

        U (G, O, O) and W are orthogonal; None stands for the identity.
        """
        n, _, t, _ = self.shape
        delta = self._delta.flatten(0, 1)  # (N·R, G, T, O)
        if u is not None:
            delta = delta @ u
        x = self._append_height()
        if w is not None:
            x = x @ w
        if len(delta) != n:
            x = x.repeat_interleave(len(delta) // n, 0)
        if t == 1:
            return torch.einsum("ngto,ngti->goi", delta.square(), x.square())
        panel = max(1, _SQUARES // (delta.shape[-1] * x.shape[-1] * x.shape[1]))
        pieces = zip(delta.split(panel), x.split(panel), strict=True)
        return torch.stack([(d.mT @ a).square().sum(0) for d, a in pieces]).sum(0)

    @staticmethod
    def _group_positions(x: Tensor) -> Tensor:
        """Return (N, G, T, ·) as (G, N·T, ·)."""
        return x.transpose(0, 1).flatten(1, 2)

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        """Add Σ_g Σ_tt' (ā ā'ᵀ) ∘ (δ δ'ᵀ) to `out`."""
        assert isinstance(other, AffineBlock)
        pooled = self._pooled_block
        if other is self:
            pooled._add_gram_by(pooled._own_route, out, pooled, budget)
            return
        pooled_other = other._pooled_block
        pooled._add_gram_by(pooled._choose_route(pooled_other), out, pooled_other, budget)

    def _add_gram_by(self, route: Route, out: Tensor, other: AffineBlock, budget: int) -> None:
        """Add the Gram by a formula; a bias alone has rows only."""
        if self._weight is None or route is Route.MATERIALIZED:
            self._add_from_rows(out, other, budget)
        elif route is Route.SEPARATED:
            self._add_separated(out, other, budget)
        else:
            self._add_by_pairs(out, other, route, budget)

    def _add_from_rows(self, out: Tensor, other: AffineBlock, budget: int) -> None:
        """Add the Gram of the weight's rows, formed a panel at a time, and of the bias's."""
        if self._weight is not None and self._has_fewer_rows_than_inputs():
            rows = self._form_weight_rows(budget)
            other_rows = rows
            if other is not self:
                other_rows = other._form_weight_rows(budget)
            add_cross_gram(out, rows, other_rows)
        elif self._weight is not None:
            inputs = self._inputs()
            other_inputs = inputs
            if other is not self:
                other_inputs = other._inputs()
            add_materialized(out, self._delta, other._delta, inputs, other_inputs, budget)
        if self._bias is not None:
            rows = self._bias_cotangents().flatten(2).flatten(0, 1)
            other_rows = rows
            if other is not self:
                other_rows = other._bias_cotangents().flatten(2).flatten(0, 1)
            add_cross_gram(out, rows, other_rows)

    def row_panels(self, budget: int) -> Iterator[Tensor] | None:
        pooled = self._pooled_block
        if pooled._choose_route(pooled) not in (Route.ROWS, Route.MATERIALIZED):
            return None
        return pooled._iterate_row_panels(budget)

    def _iterate_row_panels(self, budget: int) -> Iterator[Tensor]:
        """Yield the rows of the weight, a panel at a time, and those of the bias."""
        if self._weight is not None and self._has_fewer_rows_than_inputs():
            yield self._form_weight_rows(budget)
        elif self._weight is not None:
            entries = budget // (4 * self._delta.element_size())
            yield from form_row_panels(self._delta, self._inputs(), entries)
        if self._bias is not None:
            yield self._bias_cotangents().flatten(2).flatten(0, 1)

    def _has_fewer_rows_than_inputs(self) -> bool:
        """Return True if a sample's rows of the weight have fewer entries than its inputs."""
        _, r, _, t, o = self._delta.shape
        return r * o < t

    def _form_weight_rows(self, budget: int) -> Tensor:
        """Return the rows of the weight, (N·R, G·O·I), from inputs of some samples at a time.

        Patches of a convolution with large kernels have many times the entries of its images.
        """
        n, g, t, i = self.shape
        sample_bytes = g * t * i * self._delta.element_size()
        step = max(1, budget // (8 * sample_bytes))
        rows = []
        for start in range(0, n, step):
            samples = slice(start, min(start + step, n))
            rows.append(form_rows(self._delta[samples], self._inputs_of(samples)))
        return torch.cat(rows)

    def _add_separated(self, out: Tensor, other: AffineBlock, budget: int) -> None:
        """Add the Gram from separated cotangents, group by group."""
        inputs = self._inputs()
        other_inputs = inputs
        if other is not self:
            other_inputs = other._inputs()
        for g in range(self.shape[1]):
            factors = self._contract_inputs(g, inputs)
            other_factors = factors
            if other is not self:
                other_factors = other._contract_inputs(g, other_inputs)
            add_separated(out, factors, other_factors, budget)

    def _add_by_pairs(self, out: Tensor, other: AffineBlock, route: Route, budget: int) -> None:
        """Add the Gram from the inner products of inputs at pairs of positions, group by group."""
        inputs = self._inputs()
        other_inputs = inputs
        if other is not self:
            other_inputs = other._inputs()
        heights = None
        if self._bias is not None:
            heights = self._height[:, None, None] * other._height
        add = add_hadamard
        if route is Route.CONTRACTED:
            add = add_contracted
        for g in range(self.shape[1]):
            delta = self._delta[:, :, g]
            other_delta = delta  # the same object: then half of the products is formed
            if other is not self:
                other_delta = other._delta[:, :, g]
            weights = partial(multiply_inputs, inputs[:, g], other_inputs[:, g], heights)
            add(out, delta, other_delta, weights, budget)

    def _contract_inputs(self, g: int, inputs: Tensor) -> ContractedInputs:
        """Return the factors of a group's cotangents with M_oi = Σ_t g_to a_ti."""
        heights = None
        if self._bias is not None:
            heights = self._height
        factors = self._separated_cotangents[g]
        return ContractedInputs(factors.v, factors.contract(inputs[:, g], heights))
