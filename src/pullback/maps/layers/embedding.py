"""`nn.Embedding`: a linear layer whose one-hot input stays an index and is never formed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.products import add_at
from ..._core.space import compute_dtype
from .gram import add_hadamard
from .moments import Moments, Sharing, compute_second_moment, find_kept_or_reached_positions
from .registry import Block, Layer, Use, join_uses, register


class GatherBlock(Block):
    """Table (V, D) from indices (N, T) and cotangents (N, R, T, D)."""

    def __init__(self, name: str, table: tuple[int, int], index: Tensor, delta: Tensor) -> None:
        self.names = (name,)
        self._name = name
        self._table = table
        self._index = index
        self._delta = delta

    @property
    def route(self) -> str:
        return "hadamard"

    def narrow(self, start: int, stop: int) -> Block:
        index = self._index[start:stop]
        delta = self._delta[start:stop]
        return GatherBlock(self._name, self._table, index, delta)

    def trace_covectors(self) -> Block:
        delta = self._delta.transpose(1, 2).flatten(2).unsqueeze(1)
        return GatherBlock(self._name, self._table, self._index, delta)

    def rows(self) -> dict[str, Tensor]:
        n, r, _, d = self._delta.shape
        size = self._table[0]
        start = size * torch.arange(n, device=self._index.device)
        out = self._delta.new_zeros(n * size, r, d)
        index = (start[:, None] + self._index).flatten()
        add_at(out, index, self._delta.transpose(1, 2).flatten(0, 1))
        return {self._name: out.view(n, size, r, d).transpose(1, 2).flatten(2)}

    def project(self, v: Mapping[str, Tensor]) -> Tensor:
        table = v[self._name].reshape(self._table)  # a parameter may have the shape (1, T, d)
        return torch.einsum("nrtd,ntd->nr", self._delta, table[self._index])

    def lift(self, c: Tensor) -> dict[str, Tensor]:
        delta = torch.einsum("nrtd,nr->ntd", self._delta, c).flatten(0, 1)
        out = add_at(delta.new_zeros(self._table), self._index.flatten(), delta)
        return {self._name: out.flatten()}

    def add_gram(self, out: Tensor, other: Block, budget: int) -> None:
        """Σ_tt' [i_t = i'_t'] (δ_t·δ'_t')."""
        assert isinstance(other, GatherBlock)

        def same(one: slice, two: slice) -> Tensor:
            return self._index[one][:, :, None, None] == other._index[two][None, None]

        add_hadamard(out, self._delta, other._delta, same, budget)


class BagUse(nn.Module):
    """A use of a table by sums or means over bags of rows: for `F.embedding_bag`.

    Bags (N, L) of indices are padded to one length; `weights`, (N, L), multiply the rows, and are
    zero for padding.
    """

    description = "sums over bags of its rows"
    weights: Tensor

    def __init__(self, weight: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.__dict__.update(_parameters={"weight": weight}, weights=weights)


@register(nn.Embedding)
class Embedding(Layer):
    """index (N, T), δ (N, R, T, D); `padding_idx` receives no gradient.

    For K-FAC the one-hot inputs have a diagonal second moment, how often each index occurs, which
    stands on the left: the weight has a row per index.
    """

    use = "embedding"
    curvature = "kronecker"
    input_first = True
    one_hot = True

    def form(self, module: Any) -> tuple[int, int, int]:
        return 1, module.num_embeddings, module.embedding_dim

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        module = uses[0].module
        index = join_uses([u.input[:, None].flatten(1) for u in uses], 1)
        delta = join_uses([u.delta[:, :, None].flatten(2, -2) for u in uses], 2)
        if module.padding_idx is not None:
            delta = delta * (index != module.padding_idx)[:, None, :, None]
        name = names["weight"]
        assert name is not None
        return GatherBlock(name, (module.num_embeddings, module.embedding_dim), index, delta)

    def counted_positions(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        return find_kept_or_reached_positions(delta, keep)

    def input_moments(
        self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None
    ) -> Moments:
        if module.padding_idx is not None:
            words = x != module.padding_idx
            if keep is None:
                keep = words
            else:
                keep = words & keep
        ones = torch.ones_like(x, dtype=compute_dtype(module.weight.dtype))
        if keep is not None:
            ones = ones * keep
        counts = ones.new_zeros(module.num_embeddings).index_add_(0, x.flatten(), ones.flatten())
        # all may be padding
        if keep is None:
            positions = x.numel()
        else:
            positions = keep.sum().clamp(min=1)
        return Moments(counts[None], counts[None], positions)

    def output_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if module.padding_idx is not None:
            delta = delta * (x != module.padding_idx)[..., None]
        return compute_second_moment(delta.reshape(1, -1, delta.shape[-1]), sharing)


@register(BagUse)
class EmbeddingBag(Layer):
    """index (N, L), δ (N, R, D): row = Σ_l w_l e_index(l) ⊗ δ, with one δ for the whole bag.

    For K-FAC the inputs c = Σ_l w_l e_index(l) have their squares as a diagonal second moment.
    """

    use = "embedding_bag"
    curvature = "kronecker"
    input_first = True
    one_hot = True

    def form(self, module: Any) -> tuple[int, int, int]:
        rows, columns = module._parameters["weight"].shape
        return 1, rows, columns

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        table = uses[0].module._parameters["weight"].shape
        index = join_uses([use.input for use in uses], 1)
        shares = [use.delta[:, :, None] * use.module.weights[:, None, :, None] for use in uses]
        name = names["weight"]
        assert name is not None
        return GatherBlock(name, (table[0], table[1]), index, join_uses(shares, 2))

    def counted_positions(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        return find_kept_or_reached_positions(delta, keep)

    def input_moments(
        self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None
    ) -> Moments:
        table = module._parameters["weight"]
        weights = module.weights.to(compute_dtype(table.dtype))
        positions: Tensor | float = len(x)
        if keep is not None:
            weights = weights * keep.reshape(-1, 1)
            positions = keep.sum().clamp(min=1)
        # one number for each bag and index that is in it; an index may be there several times
        bags = torch.arange(len(x), device=x.device)[:, None]
        pairs, pair_numbers = torch.unique(bags * len(table) + x, return_inverse=True)
        entries = add_at(weights.new_zeros(len(pairs)), pair_numbers.flatten(), weights.flatten())
        indices = pairs % len(table)
        squares = add_at(weights.new_zeros(len(table)), indices, entries.square())
        sums = add_at(weights.new_zeros(len(table)), indices, entries)
        return Moments(squares[None], sums[None], positions)

    def output_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        return compute_second_moment(delta[None], sharing)
