"""One pair of networks trained side by side by one method: how far apart their functions get."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pullback import KFAC
from pullback.grams.kronecker import Pair as Sides
from pullback.grams.kronecker import sides

from .methods import Method
from .nets import Pair, Side

STEPS = 10
_LOST = 1e300  # of a network that diverged; JSON has no infinity


@dataclass
class Record:
    """What was measured.

    Attributes:
        mismatch: before the first step ‖f − f†‖/‖f‖, after each step ‖f − f†‖ over how far f
            has moved so far at most, at inputs not trained on.
        loss: of the network's batch, before each step.
        condition: the worst of any factor on its range, of either network, at any step.
        notes: what K-FAC reports of its blocks, by network.
        degenerate: singular sides of the network after the last step, in words.
    """

    mismatch: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    condition: float | None = None
    notes: list[str] = field(default_factory=list)
    degenerate: list[str] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """The largest mismatch after a step."""
        return max(self.mismatch[1:])


def run(pair: Pair, method: Method, steps: int = STEPS) -> Record:
    """So many steps of both networks on the same batches."""
    optimizers = [method.build(side) for side in (pair.one, pair.two)]
    both = list(zip((pair.one, pair.two), optimizers, strict=True))
    first, other = (_values(side, pair.held) for side in (pair.one, pair.two))
    record, moved, worst = Record([_relative(first - other, float(first.norm()))]), 0.0, 1.0
    for _ in range(steps):
        x, y = pair.batch()
        for side, optimizer in both:
            optimizer.zero_grad()
            loss = side.loss(side.model(x), y)
            loss.backward()
            optimizer.step()
            if side is pair.one:
                record.loss.append(_short(float(loss.detach())))
            if isinstance(optimizer, KFAC):
                worst = max(worst, condition(optimizer))
        f, g = (_values(side, pair.held) for side in (pair.one, pair.two))
        moved = max(moved, float((f - first).norm()))
        record.mismatch.append(_relative(f - g, moved))
    for optimizer in optimizers:
        if isinstance(optimizer, KFAC):
            record.condition = _short(worst)
            record.notes += [f"{k}: {v}" for k, v in optimizer.info.notes.items()]
            optimizer.close()
    if isinstance(known := optimizers[0], KFAC):
        record.degenerate = [
            f"{d.names[0]}, {d.side} side, rank {d.rank} of {d.size}: {d.reason}"
            for d in known.degenerate()
        ]
    return record


@torch.no_grad()
def _values(side: Side, x: Tensor) -> Tensor:
    return side.seen(side.model(x))


def _relative(difference: Tensor, scale: float) -> float:
    return _short(float(difference.norm()) / scale)


def _short(value: float) -> float:
    return float(f"{value:.3e}") if math.isfinite(value) else _LOST


def condition(optimizer: KFAC) -> float:
    """The worst condition number of a factor, on its range."""
    worst = 1.0
    for block in optimizer.gram().blocks:
        assert isinstance(block, Sides)
        for side in (block.left, block.right):
            values, _ = sides.eigen(side)
            least = values.masked_fill(~sides.cut(values), math.inf).amin(-1)
            worst = max(worst, float((values.amax(-1) / least).max()))
    return worst
