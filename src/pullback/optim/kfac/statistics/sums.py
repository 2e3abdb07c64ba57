"""What one statistics step adds up, block by block, and the means of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ....grams.kronecker.packed import Side, memory, packed
from ....maps.layers import Compound, Layer
from ....maps.layers.moments import Moments
from ....maps.proof import accumulate
from ..factors.factor import BlockKey, Factor

#: the factors of a bias by itself, whose input is 1 everywhere
BIAS = Factor("bias", "right"), Factor("bias", "left")


def factors_of(layer: Layer | Compound, key: BlockKey) -> tuple[Factor, Factor]:
    """Return the factors of inputs and outputs of a layer's weight, in the block's coordinates."""
    role, first = type(layer).__name__, layer.input_first and not key.turned
    one, two = ("left", "right") if first else ("right", "left")
    return Factor(role, one), Factor(role, two)


@dataclass
class Sums:
    """Sums over the places and samples of all forward calls since the last step.

    `inputs` are the moments of what layers saw; `values` are quadratic in the cotangents: their
    second moments, and the squares of units, diagonals and spectra.
    """

    inputs: dict[Factor, Moments] = field(default_factory=dict)
    values: dict[Factor, Side] = field(default_factory=dict)

    def add(self, factor: Factor, found: Moments | Side) -> None:
        """Add the moments of inputs at one use, or what one covector gave there."""
        held: dict[Factor, Any] = self.inputs if isinstance(found, Moments) else self.values
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
UNREACHED, DERIVED = MISSED[6], MISSED[7]


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
        return self.share if side in self.shared.get(key, ()) else 1.0

    def add(self, sums: Mapping[BlockKey, Sums], samples: Tensor | float) -> None:
        """Add the sums of one forward pass."""
        for key, own in sums.items():
            accumulate(self.of(key).inputs, own.inputs)
            accumulate(self.of(key).values, own.values)
        self.samples = self.samples + samples

    def miss(self, reason: str) -> None:
        """Note a pass that gave nothing."""
        self.missed = max(self.missed, reason, key=MISSED.index)


def means(pool: Pool, scale: Tensor | float) -> dict[BlockKey, dict[Factor, Side]]:
    """Means over samples (cotangents) and places (inputs); cotangents are multiplied by `scale`.

    The memory of the sums becomes that of the means, many of them at once.
    """
    out: dict[BlockKey, dict[Factor, Side]] = {}
    values: dict[object, list[Tensor]] = {}
    inputs: dict[object, tuple[list[Tensor], list[float]]] = {}
    for key, held in pool.sums.items():
        own = out[key] = dict(held.values)
        for t in map(memory, held.values.values()):
            values.setdefault((t.device, t.dtype), []).append(t)
        if BIAS[1] in own:
            ones = memory(own[BIAS[1]]).new_ones(own[BIAS[1]].shape[0], 1)
            own[BIAS[0]] = ones * pool.share_of(key, BIAS[0].side)
        roles = {factor.role for factor in held.values}
        for factor, m in held.inputs.items():
            if factor.role in roles:
                share = pool.share_of(key, factor.side)
                for side, t in _sums(m, key.joint, share).items():
                    own[Factor(factor.role, side or factor.side)] = t
                    if isinstance(m.places, Tensor):  # one per group, perhaps
                        _divide(memory(t), m.places.view(-1, *[1] * (len(t.shape) - 1)))
                        continue
                    some, counts = inputs.setdefault(memory(t).device, ([], []))
                    some.append(memory(t))
                    counts.append(m.places or torch.nan)
    by = scale / pool.samples
    for some in values.values():
        torch._foreach_mul_(some, by.to(some[0]) if isinstance(by, Tensor) else by)
    for some, counts in inputs.values():
        torch._foreach_div_(some, counts)
    return out


def _divide(total: Tensor, places: Tensor) -> None:
    """Divide sums over places by their number; a group without any takes the mean of all."""
    if len(places) == 1:
        total.div_(places)
        return
    pooled = total.sum(0, keepdim=True) / places.sum()
    total.copy_(torch.where(places == 0, pooled, total / places))


def _sums(m: Moments, joint: bool, share: float) -> dict[str, Side]:
    """Σaaᵀ and, in a joint block, Σa beside it as "mean"; of its diagonal that of (a, 1)."""
    if not joint:
        return {"": packed(m.second)}
    if len(m.second.shape) == 3:
        return {"": packed(m.second), "mean": m.first}
    counts = m.places.view(-1, 1) if isinstance(m.places, Tensor) else m.places
    return {"": torch.cat([m.second, torch.ones_like(m.second[:, :1]) * counts * share], 1)}
