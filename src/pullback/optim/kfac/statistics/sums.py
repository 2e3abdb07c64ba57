"""What one statistics step adds up, block by block, its means, and its sums over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

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
from ..factors.block import SPECTRUM, BlockKey, FactorKey, Factors

#: the factors of a bias by itself, whose input is 1 everywhere
BIAS = FactorKey("bias", "right"), FactorKey("bias", "left")


def factors_of(layer: Layer | Compound, key: BlockKey) -> tuple[FactorKey, FactorKey]:
    """Return the factors of inputs and outputs of a layer's weight, in the block's coordinates."""
    role = layer.use
    first = layer.input_first and not key.turned
    one, two = ("left", "right") if first else ("right", "left")
    return FactorKey(role, one), FactorKey(role, two)


@dataclass
class Sums:
    """Sums over the positions and samples of all forward calls since the last step.

    `inputs` are the moments of what layers saw; `values` are quadratic in the cotangents: their
    second moments, and the squares of units, diagonals and spectra.
    """

    inputs: dict[FactorKey, Moments] = field(default_factory=dict)
    values: dict[FactorKey, FactorMatrix] = field(default_factory=dict)

    def add(self, factor: FactorKey, found: Moments | FactorMatrix) -> None:
        """Add the moments of inputs at one use, or what one covector gave there."""
        held: dict[FactorKey, Any] = self.inputs if isinstance(found, Moments) else self.values
        accumulate(held, {factor: found})


#: why a forward pass gave no statistics; of several passes, the one that came farthest counts
MISSED = (
    "the model was not called",
    "the model was called inside a transform of torch.func, or held other parameters than the "
    "optimizer's",
    "the model was called without gradients",
    "the model was in evaluation mode",
    "the model's output does not depend on its parameters",
    "no gradient reached the model's output",
    "the gradient passed the model's output, but not to its parameters",
    "the loss was made of derivatives of the model's output by its inputs, and the metric is that "
    "of the output itself; step(objective=...) takes such terms",
)
UNREACHED = MISSED[6]
DERIVED = MISSED[7]


@dataclass
class Pool:
    """Everything gathered since the last step: sums, and the count of samples beside them."""

    sums: dict[BlockKey, Sums] = field(default_factory=dict)
    samples: Tensor | float = 0.0
    calls: int = 0
    missed: str = MISSED[0]
    #: the sides of each block of which this process has a share, and the others have the rest
    shared: Mapping[BlockKey, frozenset[str]] = field(default_factory=dict)
    #: what it adds there of what is known without measuring: all on one process, 0 on the others
    share: float = 1.0

    def of(self, key: BlockKey) -> Sums:
        """Return a block's sums, empty ones at first."""
        return self.sums.setdefault(key, Sums())

    def share_of(self, key: BlockKey, side: str) -> float:
        """Return how much of what is known without measuring this process adds to a side."""
        if side in self.shared.get(key, ()):
            return self.share
        return 1.0

    def add(self, sums: Mapping[BlockKey, Sums], samples: Tensor | float) -> None:
        for key, own in sums.items():
            accumulate(self.of(key).inputs, own.inputs)
            accumulate(self.of(key).values, own.values)
        self.samples = self.samples + samples

    def miss(self, reason: str) -> None:
        """Note a pass that gave nothing."""
        self.missed = max(self.missed, reason, key=MISSED.index)


def means(pool: Pool, scale: Tensor | float) -> dict[BlockKey, dict[FactorKey, FactorMatrix]]:
    """Means over samples (cotangents) and positions (inputs); cotangents are multiplied by `scale`.

    The memory of the sums becomes that of the means, many of them at once.
    """
    out: dict[BlockKey, dict[FactorKey, FactorMatrix]] = {}
    values: dict[object, list[Tensor]] = {}
    inputs: dict[object, tuple[list[Tensor], list[float]]] = {}
    for key, held in pool.sums.items():
        own = out[key] = dict(held.values)
        for t in map(get_entries, held.values.values()):
            values.setdefault((t.device, t.dtype), []).append(t)
        if BIAS[1] in own:
            ones = get_entries(own[BIAS[1]]).new_ones(own[BIAS[1]].shape[0], 1)
            own[BIAS[0]] = ones * pool.share_of(key, BIAS[0].side)
        roles = {factor.role for factor in held.values}
        for factor, m in held.inputs.items():
            if factor.role in roles:
                share = pool.share_of(key, factor.side)
                for side, t in _sums(m, key.joint, share).items():
                    own[FactorKey(factor.role, side or factor.side)] = t
                    if isinstance(m.positions, Tensor):  # one per group, perhaps
                        _divide(get_entries(t), m.positions.view(-1, *[1] * (len(t.shape) - 1)))
                        continue
                    some, counts = inputs.setdefault(get_entries(t).device, ([], []))
                    some.append(get_entries(t))
                    counts.append(m.positions or torch.nan)
    by = scale / pool.samples
    for some in values.values():
        torch._foreach_mul_(some, by.to(some[0]) if isinstance(by, Tensor) else by)
    for some, counts in inputs.values():
        torch._foreach_div_(some, counts)
    return out


def _divide(total: Tensor, positions: Tensor) -> None:
    """Divide sums over positions by their number; a group without any takes the mean of all."""
    if len(positions) == 1:
        total.div_(positions)
        return
    pooled = total.sum(0, keepdim=True) / positions.sum()
    total.copy_(torch.where(positions == 0, pooled, total / positions))


def _sums(m: Moments, joint: bool, share: float) -> dict[str, FactorMatrix]:
    """Σaaᵀ and, in a joint block, Σa beside it as "mean"; of its diagonal that of (a, 1)."""
    if not joint:
        return {"": pack(m.second)}
    if len(m.second.shape) == 3:
        return {"": pack(m.second), "mean": m.first}
    if isinstance(m.positions, Tensor):
        counts = m.positions.view(-1, 1)
    else:
        counts = m.positions
    return {"": torch.cat([m.second, torch.ones_like(m.second[:, :1]) * counts * share], 1)}


#: one of a block's sums: "values", or of inputs "second" Σaaᵀ, "first" Σa and "positions"
Place = tuple[str, FactorKey]
BlockTensors = dict[Place, FactorMatrix]
#: shapes and dtypes of all sums, by block
Layouts = dict[BlockKey, dict[Place, tuple[tuple[int, ...], torch.dtype]]]


def tensors_of(sums: Sums) -> BlockTensors:
    """Return a block's sums one by one; `sums_of` puts them together again."""
    out: BlockTensors = {("values", f): t for f, t in sorted(sums.values.items())}
    for f, m in sorted(sums.inputs.items()):
        positions = torch.as_tensor(m.positions, dtype=torch.float64)
        out |= {("second", f): m.second, ("first", f): m.first, ("positions", f): positions}
    return out


def sums_of(own: BlockTensors) -> Sums:
    """Return the sums of a block."""
    out = Sums(values={f: t for (kind, f), t in own.items() if kind == "values"})
    for f in [f for kind, f in own if kind == "second"]:
        first = get_entries(own["first", f])
        positions = get_entries(own["positions", f])
        out.inputs[f] = Moments(own["second", f], first, positions.to(first))
    return out


def layout_of(own: BlockTensors) -> dict[Place, tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of a block's sums."""
    return {at: (tuple(t.shape), get_entries(t).dtype) for at, t in own.items()}


def join_layouts(every: Sequence[Layouts]) -> Layouts:
    """Return the blocks that any process saw; raise where they contradict each other.

    A process without samples, or whose samples passed other layers, adds nothing to a block that
    others saw. One that sees a parameter in another block is an error on all of them.
    """
    out: Layouts = {}
    seen: dict[str, tuple[int, BlockKey]] = {}
    for rank, layouts in enumerate(every):
        for key, own in layouts.items():
            held = out.setdefault(key, {})
            fits = all(held.get(at, own[at]) == own[at] for at in own)
            for name in key.names:
                first, other = seen.setdefault(name, (rank, key))
                if other != key or not fits:
                    raise PullbackError(
                        f"The processes see {name!r} otherwise",
                        f"process {first} has {_said(other, every[first])} and process {rank} "
                        f"{_said(key, layouts)}",
                        "Let all of them use its layer in the same way, in the same precision",
                    )
            held |= own
    return {k: dict(sorted(out[k].items())) for k in sorted(out, key=lambda key: key.names)}


def _said(key: BlockKey, layouts: Layouts) -> str:
    found = [layout for (kind, _), layout in layouts[key].items() if kind == "values"]
    if len(key.names) > 1:
        together = f" of {' and '.join(key.names)}"
    else:
        together = ""
    return f"a {key.kind} block{together} with sides {[s for s, _ in found]} in {found[0][1]}"


def zeros_of(at: Place, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> FactorMatrix:
    """Return what a process has of sums that it did not see."""
    zeros = torch.zeros((), dtype=dtype, device=like.device).expand(torch.Size(shape))
    if len(shape) == 3 and at[1] != SPECTRUM:
        return zeros_like(zeros)
    return zeros.clone()


def is_broken(pool: Pool) -> bool:
    """Whether a pass gave something that is not finite."""
    return isinstance(pool.samples, float) and isnan(pool.samples)


class SentSums:
    """The sums of one statistics step, on their way to become those of all processes.

    Of `shared` sides every process keeps its share, over the counts of all. Where blocks have
    `owners`, these alone get the sums.
    """

    def __init__(
        self,
        pool: Pool,
        sums: dict[BlockKey, BlockTensors],
        shared: Mapping[BlockKey, frozenset[str]],
        processes: Processes,
        device: torch.device,
        owners: Mapping[BlockKey, int],
    ) -> None:
        self.pool = pool
        self.calls = pool.calls
        self.shared = shared
        self.processes = processes
        self._sums = sums
        every = [(key, at) for key, own in sums.items() for at in own]
        # numbers that are no sides: of positions, and second moments in eigenbases
        self._numbers = [(k, at) for k, at in every if at[0] == "positions" or at[1] == SPECTRUM]
        rest = [(k, at) for k, at in every if at[0] != "positions" and at[1] != SPECTRUM]
        self._rest = [(key, at) for key, at in rest if at[1].side not in shared[key]]
        counts = [
            torch.as_tensor(pool.samples),
            *(get_entries(sums[k][at]) for k, at in self._numbers),
        ]
        wide = [t.to(device, torch.float64) for t in counts]
        self._counts = processes.launch_sum(wide, "counts")
        sides = [sums[key][at] for key, at in self._rest]
        if owners:
            ranks = [owners[key] for key, _ in self._rest]
        else:
            ranks = None
        self._sides = launch_sum(sides, processes, ranks)

    def finish(self) -> None:
        """Fill the pool with what has been summed."""
        samples, *counts = self._counts.wait()
        for (key, at), t in zip(self._numbers, counts, strict=True):
            self._sums[key][at] = t.to(get_entries(self._sums[key][at]).dtype)
        for (key, at), side in zip(self._rest, self._sides.wait(), strict=True):
            self._sums[key][at] = side
        self.pool.samples = samples
        self.pool.sums = {key: sums_of(own) for key, own in self._sums.items()}


def sides_of(own: BlockTensors) -> dict[FactorKey, FactorMatrix]:
    """Return Σaaᵀ and Σδδᵀ."""
    roles = {f.role for kind, f in own if kind == "values"}
    some = [(f, t) for (kind, f), t in own.items() if kind in ("values", "second")]
    return {f: t for f, t in some if f.role in roles}


def shared_sides(key: BlockKey, factors: Factors, *, read: bool) -> frozenset[str]:
    """Return the sides of a block of which every process may hold a share between inversions.

    Averages are linear, so that shares can be averaged and added up later. If xᵀF̂x is `read` in
    between, it must be linear in what is shared: the longer of both sides, and neither of them
    where a parameter has several roles.
    """
    if not read or not key.kronecker:
        return frozenset({"left", "right", "mean"})
    if len({factor.role for factor in factors}) > 1:
        return frozenset()
    lengths = {f.side: t.shape[-1] for f, t in factors.items() if len(t.shape) == 3}
    longer = lengths.get("right", 0) > lengths.get("left", 0)
    return frozenset({"right", "mean"} if longer else {"left"})
