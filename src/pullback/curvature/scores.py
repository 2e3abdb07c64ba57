r"""Influence of training samples on what a model says of queries.

    score(q, i) = ∇f(q)ᵀ (G + λ)⁻¹ ∇ℓ(z_i)

ℓ is the loss −log p(y|z) of one training sample and f a measure of a query, by default its loss.
Weighting sample i up by ε/N moves the measure by −ε/N · score(q, i): a positive score of a loss is
a sample that helps. (G + λ)⁻¹∇f is formed for a block of queries; then the training data are read
once for each such block, and their gradients are held for one block of parameters at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from .._core.checks import require_number
from .._core.errors import PullbackError
from ..solvers import Relative
from .capture import GradientBlock
from .curvature import Curvature, Damping, invert, resolve_block_damping
from .data import (
    Batch,
    explain_memory,
    match_targets,
    refuse_no_samples,
)
from .measures import Measure
from .progress import ProgressLine
from .queries import QueryBlock, StoredQueries, join_blocks, store_queries
from .reader import GradientReader

#: the damping where none is given, a multiple of each block's mean eigenvalue. Datamodeling scores
#: of 0.03, 0.1, 0.3, 1 and 3 on halves that judge nothing else: 0.38, 0.41, 0.44, 0.47 and 0.49 for
#: an MLP on MNIST that was trained with weight decay; 0.31, 0.30, 0.29, 0.27 and 0.25 for ResNet-9
#: on CIFAR-2 without; 0.31, 0.30, 0.28, 0.26 and 0.23 for a decoder of text with little. As shares
#: of the best one in each task, 0.1 has the largest mean. It is the published heuristic too.
DEFAULT_DAMPING = Relative(0.1)


def resolve_damping(damping: Damping | None) -> Damping:
    """Return the damping, or the default where there is none."""
    if damping is None:
        return DEFAULT_DAMPING
    return damping


@dataclass(frozen=True)
class InfluenceLimits:
    """Sizes of what influence holds at once."""

    #: bytes of (G + λ)⁻¹∇f of one block of queries: the training data are read once per block
    query_bytes: int = 2**31


INFLUENCE_LIMITS = InfluenceLimits()


@dataclass(frozen=True)
class ScoringOptions:
    """What `influence`, `top_k` and `influence_by_module` share.

    Attributes:
        damping: λ, a number or `Relative(r)` for r times each block's mean eigenvalue.
        measure: f(outputs, targets) -> (N,); None for the loss.
        dtype: in which preconditioned gradients are held and multiplied, such as bfloat16.
        query_bytes: of preconditioned gradients that are held at once.
        query_error: relative error up to which they are compressed; None for no compression.
        progress: whether to write a line on stderr; None for terminals.
    """

    damping: Damping | None = None
    measure: Measure | None = None
    dtype: torch.dtype | None = None
    query_bytes: int | None = None
    query_error: float | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.query_error is not None:
            require_number("The error of queries", self.query_error, positive=True)
        if self.query_bytes is not None:
            require_number("The bytes of queries", self.query_bytes, least=1)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise PullbackError(
                "Scores need a float type", f"got dtype={self.dtype}", "Use torch.bfloat16, say"
            )


@dataclass(frozen=True)
class ScoreTile:
    """Scores of some queries with some training samples.

    Attributes:
        first_query, first_sample: where the tile begins.
        by_block: scores (queries, samples) for each block of the curvature, or their sum alone.
    """

    first_query: int
    first_sample: int
    by_block: list[Tensor]


class Scorer:
    """Computes the score matrix tile by tile."""

    def __init__(self, curvature: Curvature, options: ScoringOptions) -> None:
        self._curvature = curvature
        self._options = options
        self._reader = GradientReader(curvature)
        self._damping = resolve_damping(options.damping)
        self._dtype = options.dtype or curvature.space.dtype

    def iterate_tiles(self, queries: Any, training: Any, *, is_summed: bool) -> Iterator[ScoreTile]:
        """Yield the scores tile by tile; with `is_summed` one matrix for all blocks."""
        return self.iterate_block_tiles(
            self._iterate_query_blocks(queries), training, is_summed=is_summed
        )

    def iterate_block_tiles(
        self, blocks: Iterable[QueryBlock], training: Any, *, is_summed: bool
    ) -> Iterator[ScoreTile]:
        """Yield the scores of preconditioned queries; the training data are read for each block."""
        samples_of_first_block = None
        for block in blocks:
            first_sample = 0
            batches = 0
            line = ProgressLine("scores", None, self._options.progress)
            for batch in self._reader.batches(training):
                with explain_memory(batch):
                    gradients = self._reader.gradients(batch, None)
                    by_block = self._score(block, gradients, is_summed)
                yield ScoreTile(block.start, first_sample, by_block)
                first_sample += gradients[0].samples
                batches += 1
                line.update(batches, first_sample)
            refuse_no_samples("training samples", first_sample)
            if samples_of_first_block not in (None, first_sample):
                raise PullbackError(
                    "The training data changed between two blocks of queries",
                    f"first {samples_of_first_block} samples were read, then {first_sample}",
                    "Give a loader that yields the same samples every time it is read",
                )
            samples_of_first_block = first_sample
            line.close(batches, first_sample)

    def _iterate_query_blocks(self, queries: Any) -> Iterator[QueryBlock]:
        """Yield blocks of preconditioned queries, each as large as the limit of bytes allows."""
        limit = self._options.query_bytes or INFLUENCE_LIMITS.query_bytes
        most = max(1, limit // (self._curvature.space.size * self._dtype.itemsize))
        pieces: list[QueryBlock] = []
        first_query = 0
        for batch in self._reader.batches(queries):
            with explain_memory(batch):
                gradients = self._reader.gradients(batch, self._options.measure)
            for start in range(0, gradients[0].samples, most):
                panel = slice(start, min(start + most, gradients[0].samples))
                piece = QueryBlock(first_query, self._precondition(gradients, panel))
                first_query += piece.count
                if pieces and sum(p.bytes for p in pieces) + piece.bytes > limit:
                    yield join_blocks(pieces)
                    pieces = []
                pieces.append(piece)
        refuse_no_samples("queries", first_query)
        yield join_blocks(pieces)

    def _precondition(
        self, gradients: Sequence[GradientBlock], queries: slice
    ) -> list[StoredQueries]:
        """Return (G + λ)⁻¹∇f of the queries in a slice, for each block."""
        solved = []
        for block, gradient in zip(self._curvature.blocks, gradients, strict=True):
            function = invert(resolve_block_damping(block, self._damping))
            matrices = block.apply(function, gradient.matrices(queries)[:, 0])
            solved.append(store_queries(matrices, self._dtype, self._options.query_error))
        return solved

    def _score(
        self, block: QueryBlock, gradients: Sequence[GradientBlock], is_summed: bool
    ) -> list[Tensor]:
        """Return scores (queries, n) of one batch, added up over blocks if summed."""
        samples = gradients[0].samples
        shape = (block.count, samples)
        scores = []
        for queries, gradient in zip(block.by_block, gradients, strict=True):
            if not is_summed or not scores:
                scores.append(self._curvature.space.zeros(*shape))
            for panel in gradient.panels():
                scores[-1][:, panel] += queries.score(gradient, panel)
        return scores


def assemble_tiles(tiles: Iterable[ScoreTile]) -> Tensor:
    """Return one matrix from tiles of summed scores."""
    rows: dict[int, list[Tensor]] = {}
    for tile in tiles:
        rows.setdefault(tile.first_query, []).append(tile.by_block[0])
    return _join_tile_rows(rows)


def _join_tile_rows(pieces: dict[int, list[Tensor]]) -> Tensor:
    """Return one matrix from rows of tiles by their first query."""
    return torch.cat([torch.cat(row, 1) for row in pieces.values()])


def influence(
    curvature: Curvature,
    queries: Any,
    training: Any,
    *,
    damping: Damping | None = None,
    measure: Measure | None = None,
    dtype: torch.dtype | None = None,
    query_bytes: int | None = None,
    query_error: float | None = None,
    progress: bool | None = None,
) -> Tensor:
    r"""Return the influence ∇f(q)ᵀ (G + λ)⁻¹ ∇ℓ(z) of every sample on every query.

    Args:
        curvature: G, from `fit`.
        queries: (inputs, targets), or a loader of such pairs.
        training: the same for the training samples. A loader is read once per block of queries.
        damping: λ, a number or `Relative(r)` for r times each block's mean eigenvalue; by default
            Relative(0.1).
        measure: f(outputs, targets) with one number per query, such as `margin`; by default the
            loss.
        dtype: in which preconditioned gradients are held and multiplied; by default that of the
            curvature. bfloat16 halves memory.
        query_bytes: of preconditioned gradients that are held at once, by default 2 GiB.
        query_error: hold (G + λ)⁻¹∇f of each query as matrices of low rank, with a relative error
            of at most this. A score is then wrong by at most this times ‖(G + λ)⁻¹∇f‖ ‖∇ℓ‖.
        progress: whether to write a line on stderr; by default on terminals.

    Returns:
        (queries, training samples), on the model's device.
    """
    options = ScoringOptions(damping, measure, dtype, query_bytes, query_error, progress)
    scorer = Scorer(curvature, options)
    return assemble_tiles(scorer.iterate_tiles(queries, training, is_summed=True))


def influence_by_module(
    curvature: Curvature,
    queries: Any,
    training: Any,
    *,
    damping: Damping | None = None,
    measure: Measure | None = None,
) -> dict[str, Tensor]:
    """Return the share of each block of parameters in `influence`, by the name of its first one.

    Scores of all blocks add up to `influence`. The exact structure has one block.
    """
    scorer = Scorer(curvature, ScoringOptions(damping, measure))
    names = [form.names[0] for form in curvature.forms]
    rows: list[dict[int, list[Tensor]]] = [{} for _ in names]
    for tile in scorer.iterate_tiles(queries, training, is_summed=False):
        for pieces, scores in zip(rows, tile.by_block, strict=True):
            pieces.setdefault(tile.first_query, []).append(scores)
    return {name: _join_tile_rows(pieces) for name, pieces in zip(names, rows, strict=True)}


def influence_by_token(
    curvature: Curvature,
    queries: Any,
    training: Any,
    *,
    damping: Damping | None = None,
    measure: Measure | None = None,
) -> Tensor:
    r"""Return the influence of the loss at every position of every training sample.

    A sequence's loss is a sum Σ_t ℓ_t over its positions, and so is its influence:
    ∇f(q)ᵀ (G + λ)⁻¹ ∇ℓ_t is the derivative of ℓ_t along (G + λ)⁻¹∇f(q), one forward-mode pass per
    query and batch.

    Returns:
        (queries, training samples, *positions).

    Raises:
        PullbackError: if batches of training samples have different positions, or as `influence`.
    """
    reader = GradientReader(curvature)
    by_batch = list(_iterate_query_directions(curvature, reader, queries, damping, measure))
    refuse_no_samples("queries", len(by_batch))
    directions = torch.cat(by_batch)
    batches = []
    for batch in reader.batches(training):
        tangent = reader.linearize(batch)
        targets = match_targets(curvature.likelihood, tangent.outputs, batch.targets)
        position_losses = _make_position_losses(curvature, targets)
        scores = []
        for direction in directions:
            move = tangent.directional_derivative(direction)
            scores.append(jvp(position_losses, (tangent.outputs,), (move,))[1])
        batches.append(torch.stack(scores))
    refuse_no_samples("training samples", len(batches))
    lengths = {tuple(scores.shape[2:]) for scores in batches}
    if len(lengths) > 1:
        raise PullbackError(
            "Scores of tokens do not fit into one tensor",
            f"batches have positions {sorted(lengths)}",
            "Pad the sequences to one length with targets of ignore_index, or score batch by batch",
        )
    return torch.cat(batches, 1)


def _make_position_losses(curvature: Curvature, targets: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that maps outputs to the losses of all positions."""

    def losses(outputs: Tensor) -> Tensor:
        return curvature.likelihood.nll(outputs, targets)

    return losses


def _iterate_query_directions(
    curvature: Curvature,
    reader: GradientReader,
    queries: Any,
    damping: Damping | None,
    measure: Measure | None,
) -> Iterator[Tensor]:
    """Yield (G + λ)⁻¹∇f as flat vectors, (n, p) per batch of queries."""
    resolved_damping = resolve_damping(damping)
    for batch in reader.batches(queries):
        yield curvature.solve(reader.flat_gradients(batch, measure), resolved_damping)


def self_influence(
    curvature: Curvature,
    data: Any,
    *,
    damping: Damping | None = None,
    measure: Measure | None = None,
) -> Tensor:
    """Return ∇f(z)ᵀ (G + λ)⁻¹ ∇f(z) of every sample, (N,); f is the loss by default.

    Samples with a wrong label stand at the top.
    """
    reader = GradientReader(curvature)
    resolved = resolve_damping(damping)
    scores = []
    for batch in reader.batches(data):
        with explain_memory(batch):
            scores.append(_score_against_itself(curvature, reader, batch, measure, resolved))
    refuse_no_samples("samples", len(scores))
    return torch.cat(scores)


def _score_against_itself(
    curvature: Curvature,
    reader: GradientReader,
    batch: Batch,
    measure: Measure | None,
    damping: Damping,
) -> Tensor:
    """Return ∇f(z)ᵀ (G + λ)⁻¹ ∇f(z) of the samples of a batch, (n,)."""
    gradients = reader.gradients(batch, measure)
    total = curvature.space.zeros(gradients[0].samples)
    for block, gradient in zip(curvature.blocks, gradients, strict=True):
        function = invert(resolve_block_damping(block, damping))
        for panel in gradient.panels():
            total[panel] += block.inner_products(function, gradient, panel)[:, 0, 0]
    return total


@dataclass(frozen=True)
class TopSamples:
    """The k training samples with the largest scores of every query, largest first.

    Attributes:
        scores: (queries, k).
        indices: which training samples, (queries, k).
    """

    scores: Tensor
    indices: Tensor


def top_k(
    curvature: Curvature,
    queries: Any,
    training: Any,
    k: int,
    *,
    damping: Damping | None = None,
    measure: Measure | None = None,
    is_largest: bool = True,
) -> TopSamples:
    """Return the most influential samples of every query, without holding all scores.

    With `is_largest=False` they are the ones with the most negative scores.
    """
    require_number("The number of samples k", k, least=1, whole=True)
    scorer = Scorer(curvature, ScoringOptions(damping, measure))
    best: dict[int, TopSamples] = {}
    for tile in scorer.iterate_tiles(queries, training, is_summed=True):
        scores = tile.by_block[0]
        samples = torch.arange(scores.shape[1], device=scores.device) + tile.first_sample
        indices = samples.expand_as(scores)
        before = best.get(tile.first_query)
        if before is not None:
            scores = torch.cat([before.scores, scores], 1)
            indices = torch.cat([before.indices, indices], 1)
        top = scores.topk(min(k, scores.shape[1]), largest=is_largest)
        best[tile.first_query] = TopSamples(top.values, indices.gather(1, top.indices))
    by_query = list(best.values())
    return TopSamples(
        torch.cat([top.scores for top in by_query]), torch.cat([top.indices for top in by_query])
    )
