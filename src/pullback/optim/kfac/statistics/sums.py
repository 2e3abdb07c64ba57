"""The sums of one statistics step by block, their means, and their sums over processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from math import isnan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ...._core.processes import Processes
from ....grams.kronecker.packed_matrix import (
    FactorMatrix,
    get_entries,
    launch_sum,
    pack,
    zeros_like,
)
from ....maps.layers import Compound, Layer
from ....maps.layers.moments import Moments
from ....maps.proof import accumulate
from ..factors.block import SPECTRUM, BlockKey, FactorKey, FactorSide

#: the factors of a bias that has a block by itself; its input is 1 everywhere
BIAS_INPUT = FactorKey("bias", FactorSide.COLUMNS)
BIAS_OUTPUT = FactorKey("bias", FactorSide.ROWS)


def get_factor_keys(layer: Layer | Compound, key: BlockKey) -> tuple[FactorKey, FactorKey]:
    """Return the keys of the input factor and of the output factor of a layer's weight.

    The input factor acts on the columns of the block. It acts on the rows where the layer holds its
    weight as (inputs, outputs), as an embedding does, and the block is not that of the transpose.
    """
    rows = FactorKey(layer.use, FactorSide.ROWS)
    columns = FactorKey(layer.use, FactorSide.COLUMNS)
    if layer.input_first and not key.is_transposed:
        return rows, columns
    return columns, rows


@dataclass
class Sums:
    """Sums over the positions and samples of all forward calls since the last step.

    `inputs` are the moments of what layers saw; `values` are quadratic in the cotangents: their
    second moments, and the squares of units, diagonals and spectra.
    """

    inputs: dict[FactorKey, Moments] = field(default_factory=dict)
    values: dict[FactorKey, FactorMatrix] = field(default_factory=dict)

    def add(self, factor: FactorKey, term: Moments | FactorMatrix) -> None:
        """Add the moments of the inputs of one use, or a term that is quadratic in cotangents."""
        sums: dict[FactorKey, Any] = self.values
        if isinstance(term, Moments):
            sums = self.inputs
        if factor in sums:
            term = sums[factor] + term
        sums[factor] = term


class Obstacle(IntEnum):
    """Why a forward pass gave no statistics, in the order in which a pass meets the obstacles."""

    NOT_CALLED = 0
    OTHER_PARAMETERS = 1
    WITHOUT_GRADIENTS = 2
    EVALUATION_MODE = 3
    INDEPENDENT_OUTPUT = 4
    OUTPUT_NOT_REACHED = 5
    PARAMETERS_NOT_REACHED = 6
    INPUT_DERIVATIVES = 7

    @property
    def description(self) -> str:
        """The reason in words, as the cause of an error."""
        return _DESCRIPTIONS[self]

    @property
    def remedy(self) -> str:
        """What to do, in words."""
        remedy = (
            "Call the module given to KFAC, in training mode, and backpropagate from its output "
            "before step()"
        )
        if self is Obstacle.NOT_CALLED:
            remedy += (
                ". Calls of its parts are not seen: give KFAC the part that is called, "
                "KFAC(model.net), or put model.decode(model.encode(x)) into its forward. If it is "
                "compiled, give KFAC the compiled module: KFAC(torch.compile(model))"
            )
        if self is Obstacle.OTHER_PARAMETERS:
            remedy += ". Build the optimizer again where layers or parameters were replaced"
        return remedy


_DESCRIPTIONS = {
    Obstacle.NOT_CALLED: "the model was not called, or it returned no tensor",
    Obstacle.OTHER_PARAMETERS: "the model was called inside a transform of torch.func, or held "
    "other parameters than the optimizer's",
    Obstacle.WITHOUT_GRADIENTS: "the model was called without gradients",
    Obstacle.EVALUATION_MODE: "the model was in evaluation mode",
    Obstacle.INDEPENDENT_OUTPUT: "the model's output does not depend on its parameters",
    Obstacle.OUTPUT_NOT_REACHED: "no gradient reached the model's output",
    Obstacle.PARAMETERS_NOT_REACHED: "the gradient passed the model's output, but not to its "
    "parameters",
    Obstacle.INPUT_DERIVATIVES: "the loss was made of derivatives of the model's output by its "
    "inputs, and the metric is that of the output itself; step(objective=...) takes such terms",
}


@dataclass
class Pool:
    """The sums of all blocks since the last step, and the number of samples in them."""

    sums: dict[BlockKey, Sums] = field(default_factory=dict)
    #: NaN after a pass whose outputs or gradients were not finite
    samples: Tensor | float = 0.0
    #: how many forward passes were to be measured, also those whose sums are not added yet
    calls: int = 0
    #: why there are no statistics, if there are none; of several passes, the one that came
    #: farthest counts
    obstacle: Obstacle = Obstacle.NOT_CALLED

    def of(self, key: BlockKey) -> Sums:
        """Return a block's sums, empty ones at first."""
        return self.sums.setdefault(key, Sums())

    def add(self, sums: Mapping[BlockKey, Sums], samples: Tensor | float) -> None:
        """Add the sums of one pass and its number of samples; `calls` has counted it already."""
        for key, block_sums in sums.items():
            accumulate(self.of(key).inputs, block_sums.inputs)
            accumulate(self.of(key).values, block_sums.values)
        self.samples = self.samples + samples

    def note_obstacle(self, obstacle: Obstacle) -> None:
        """Note why a pass gave no statistics."""
        self.obstacle = max(self.obstacle, obstacle)


def compute_means(
    pool: Pool, scale: Tensor | float
) -> dict[BlockKey, dict[FactorKey, FactorMatrix]]:
    """Return the factors of all blocks: means over samples (cotangents) and positions (inputs).

    The means over samples are multiplied by `scale`. The means overwrite the sums in their memory.
    """
    factors_by_block: dict[BlockKey, dict[FactorKey, FactorMatrix]] = {}
    cotangent_sums: list[Tensor] = []
    input_sums = _DividedSums()
    for key, block_sums in pool.sums.items():
        cotangent_sums += map(get_entries, block_sums.values.values())
        factors = dict(block_sums.values)
        if BIAS_OUTPUT in factors:
            groups = factors[BIAS_OUTPUT].shape[0]
            factors[BIAS_INPUT] = get_entries(factors[BIAS_OUTPUT]).new_ones(groups, 1)
        uses = {factor.use for factor in block_sums.values}
        for factor, moments in block_sums.inputs.items():
            if factor.use in uses:
                input_factors = _list_input_factors(factor, moments, key.is_joint)
                input_sums.add(input_factors.values(), moments.positions)
                factors |= input_factors
        factors_by_block[key] = factors
    _multiply(cotangent_sums, scale / pool.samples)
    input_sums.divide()
    return factors_by_block


def _list_input_factors(
    factor: FactorKey, moments: Moments, is_joint: bool
) -> dict[FactorKey, FactorMatrix]:
    """Return Σaaᵀ by the key of the input factor; a joint block has Σa as well.

    The diagonal of a joint block's Σaaᵀ is extended to that of (a, 1).
    """
    if not is_joint:
        return {factor: pack(moments.second)}
    if len(moments.second.shape) == 3:
        return {
            factor: pack(moments.second),
            FactorKey(factor.use, FactorSide.MEAN): moments.first,
        }
    counts = moments.positions
    if isinstance(counts, Tensor):
        counts = counts.view(-1, 1)
    ones = torch.ones_like(moments.second[:, :1])
    return {factor: torch.cat([moments.second, ones * counts], 1)}


class _DividedSums:
    """Sums over positions that are divided in place, those of one device by one kernel."""

    def __init__(self) -> None:
        self._sums: dict[torch.device, list[Tensor]] = {}
        self._counts: dict[torch.device, list[float]] = {}

    def add(self, sums: Iterable[FactorMatrix], positions: Tensor | float) -> None:
        """Divide sums by a tensor of positions at once, and by a number in `divide`."""
        for total in sums:
            entries = get_entries(total)
            if isinstance(positions, Tensor):
                _divide_groups(entries, positions.view(-1, *[1] * (len(total.shape) - 1)))
            else:
                self._sums.setdefault(entries.device, []).append(entries)
                self._counts.setdefault(entries.device, []).append(positions or torch.nan)

    def divide(self) -> None:
        """Divide the sums whose number of positions is known on the host."""
        for device, sums in self._sums.items():
            torch._foreach_div_(sums, self._counts[device])


def _divide_groups(total: Tensor, positions: Tensor) -> None:
    """Divide sums over positions by their number; a group without any takes the mean of all."""
    if len(positions) == 1:
        total.div_(positions)
        return
    pooled = total.sum(0, keepdim=True) / positions.sum()
    total.copy_(torch.where(positions == 0, pooled, total / positions))


def _multiply(tensors: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place, those of one device and dtype by one kernel."""
    batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        batches.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for batch in batches.values():
        if isinstance(factor, Tensor):
            torch._foreach_mul_(batch, factor.to(batch[0]))
        else:
            torch._foreach_mul_(batch, factor)


class Quantity(StrEnum):
    """What is summed for a factor."""

    #: what is quadratic in cotangents; all others are sums over inputs
    VALUES = "values"
    #: Σaaᵀ
    SECOND = "second"
    #: Σa
    FIRST = "first"
    #: over how many positions
    POSITIONS = "positions"


class SumKey(NamedTuple):
    """One of a block's sums."""

    quantity: Quantity
    factor: FactorKey


BlockTensors = dict[SumKey, FactorMatrix]
#: shape and dtype of each of a block's sums
SumShapes = dict[SumKey, tuple[tuple[int, ...], torch.dtype]]
ShapesByBlock = dict[BlockKey, SumShapes]


def list_sums(sums: Sums) -> BlockTensors:
    """Return a block's sums one by one; `join_sums` is the inverse."""
    tensors: BlockTensors = {}
    for factor, value in sorted(sums.values.items()):
        tensors[SumKey(Quantity.VALUES, factor)] = value
    for factor, moments in sorted(sums.inputs.items()):
        positions = torch.as_tensor(moments.positions, dtype=torch.float64)
        tensors[SumKey(Quantity.SECOND, factor)] = moments.second
        tensors[SumKey(Quantity.FIRST, factor)] = moments.first
        tensors[SumKey(Quantity.POSITIONS, factor)] = positions
    return tensors


def join_sums(tensors: BlockTensors) -> Sums:
    """Return a block's sums from their tensors; `list_sums` is the inverse."""
    sums = Sums()
    for (quantity, factor), tensor in tensors.items():
        if quantity is Quantity.VALUES:
            sums.values[factor] = tensor
        elif quantity is Quantity.SECOND:
            first = get_entries(tensors[SumKey(Quantity.FIRST, factor)])
            positions = get_entries(tensors[SumKey(Quantity.POSITIONS, factor)])
            sums.inputs[factor] = Moments(tensor, first, positions.to(first))
    return sums


def describe_shapes(tensors: BlockTensors) -> SumShapes:
    """Return shape and dtype of each of a block's sums."""
    return {k: (tuple(tensor.shape), get_entries(tensor).dtype) for k, tensor in tensors.items()}


def join_shapes(shapes_by_rank: Sequence[ShapesByBlock]) -> ShapesByBlock:
    """Return the blocks that any process saw; raise where they contradict each other.

    A process without samples, or whose samples passed other layers, adds nothing to a block that
    others saw. One that sees a parameter in another block is an error on all of them.
    """
    joined: ShapesByBlock = {}
    first_views: dict[str, tuple[int, BlockKey]] = {}
    for rank, shapes in enumerate(shapes_by_rank):
        for key, sum_shapes in shapes.items():
            joined_shapes = joined.setdefault(key, {})
            is_consistent = all(
                joined_shapes.get(k, sum_shapes[k]) == sum_shapes[k] for k in sum_shapes
            )
            for name in key.names:
                first_rank, first_key = first_views.setdefault(name, (rank, key))
                if first_key != key or not is_consistent:
                    first_view = _describe_block(first_key, shapes_by_rank[first_rank])
                    raise PullbackError(
                        f"The processes see {name!r} otherwise",
                        f"process {first_rank} has {first_view} and process {rank} "
                        f"{_describe_block(key, shapes)}",
                        "Let all of them use its layer in the same way, in the same precision",
                    )
            joined_shapes |= sum_shapes
    ordered_keys = sorted(joined, key=lambda key: key.names)
    return {key: dict(sorted(joined[key].items())) for key in ordered_keys}


def _describe_block(key: BlockKey, shapes: ShapesByBlock) -> str:
    """Return a block's kind, parameters, shapes and dtype in words, for an error."""
    factor_shapes = []
    dtypes = []
    for sum_key, (shape, dtype) in shapes[key].items():
        if sum_key.quantity is Quantity.VALUES:
            factor_shapes.append(shape)
            dtypes.append(dtype)
    parameters = ""
    if len(key.names) > 1:
        parameters = f" of {' and '.join(key.names)}"
    return f"a {key.kind} block{parameters} with sides {factor_shapes} in {dtypes[0]}"


def make_zeros(
    sum_key: SumKey, shape: Sequence[int], dtype: torch.dtype, parameter: Tensor
) -> FactorMatrix:
    """Return the zeros that a process adds to a sum of which it saw nothing."""
    zeros = torch.zeros((), dtype=dtype, device=parameter.device).expand(torch.Size(shape))
    if len(shape) == 3 and sum_key.factor != SPECTRUM:
        return zeros_like(zeros)
    return zeros.clone()


def is_broken(pool: Pool) -> bool:
    """Return True if a pass gave outputs or gradients that are not finite."""
    return isinstance(pool.samples, float) and isnan(pool.samples)


class SentSums:
    """The sums of one statistics step while they are added up over all processes.

    Args:
        pool: receives the sums over processes in `finish`.
        sums: this process's sums by block, with the same keys on all processes.
        owners: the ranks that alone get the factors of their blocks; empty if all ranks get them.
    """

    def __init__(
        self,
        pool: Pool,
        sums: dict[BlockKey, BlockTensors],
        processes: Processes,
        device: torch.device,
        owners: Mapping[BlockKey, int],
    ) -> None:
        self.pool = pool
        self.calls = pool.calls
        self._sums = sums
        #: the sums that are no factors, of positions and in eigenbases, go to all ranks in float64
        self._count_keys: list[tuple[BlockKey, SumKey]] = []
        self._factor_keys: list[tuple[BlockKey, SumKey]] = []
        for key, tensors in sums.items():
            for sum_key in tensors:
                if sum_key.quantity is Quantity.POSITIONS or sum_key.factor == SPECTRUM:
                    self._count_keys.append((key, sum_key))
                else:
                    self._factor_keys.append((key, sum_key))
        self._counts = processes.launch_sum(self._list_counts(device), "counts")
        factors = [sums[key][sum_key] for key, sum_key in self._factor_keys]
        ranks = None
        if owners:
            ranks = [owners[key] for key, _ in self._factor_keys]
        self._factors = launch_sum(factors, processes, ranks)

    def _list_counts(self, device: torch.device) -> list[Tensor]:
        """Return the number of samples and the sums of `_count_keys`, in float64."""
        counts = [torch.as_tensor(self.pool.samples)]
        counts += [get_entries(self._sums[key][sum_key]) for key, sum_key in self._count_keys]
        return [count.to(device, torch.float64) for count in counts]

    def finish(self) -> None:
        """Wait for the sums over all processes and put them into the pool."""
        samples, *counts = self._counts.wait()
        for (key, sum_key), count in zip(self._count_keys, counts, strict=True):
            tensors = self._sums[key]
            tensors[sum_key] = count.to(get_entries(tensors[sum_key]).dtype)
        for (key, sum_key), factor in zip(self._factor_keys, self._factors.wait(), strict=True):
            self._sums[key][sum_key] = factor
        self.pool.samples = samples
        self.pool.sums = {key: join_sums(tensors) for key, tensors in self._sums.items()}
