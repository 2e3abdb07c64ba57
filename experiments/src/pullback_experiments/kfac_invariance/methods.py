"""The optimizers under comparison, and a run of one of them on a pair of networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor
from torch.optim import Optimizer

from pullback import KFAC
from pullback.grams.kronecker import Pair as Sides
from pullback.grams.kronecker import factor_matrix
from pullback.optim.kfac import Damping, Invariant

from ..learning.natural import natural_kfac
from .nets import TwinPair, TwinSide


@dataclass(frozen=True)
class TwinRates:
    """The settings that methods share."""

    #: K-FAC's learning rate
    kfac: float = 0.5
    #: the bound of K-FAC's steps
    kl_clip: float = 1e-3
    #: the learning rate of Adam and SGD
    first_order: float = 1e-2


RATES = TwinRates()


@dataclass(frozen=True)
class TwinMethod:
    """Something to compare.

    Attributes:
        name: of this variant.
        group: what tables call it and its other variants.
        about: its settings.
        build: makes the optimizer of one network.
        plain: whether it runs at the edges of the theorems too.
    """

    name: str
    group: str
    about: str
    build: Callable[[TwinSide], Optimizer]
    plain: bool = False


def _kfac(
    group: str, damping: float | Damping, momentum: float, ema: float, *, plain: bool = False
) -> TwinMethod:
    def build(side: TwinSide) -> Optimizer:
        return natural_kfac(
            side.model, RATES.kfac, metric=side.metric, fisher="exact", damping=damping,
            kl_clip=RATES.kl_clip, momentum=momentum, ema=ema, statistics_every=1, invert_every=1,
        )  # fmt: skip

    about = f"lr {RATES.kfac:g}, damping {damping!r}, KL clip {RATES.kl_clip:.0e}"
    about += ", exact Fisher at every step"
    return TwinMethod(f"{group}, momentum {momentum:g}, ema {ema:g}", group, about, build, plain)


def _every(group: str, damping: float | Damping) -> list[TwinMethod]:
    methods = []
    for momentum, ema in product((0.0, 0.9), (0.0, 0.95)):
        is_plain = bool(momentum) == bool(ema)
        methods.append(_kfac(group, damping, momentum, ema, plain=is_plain))
    return methods


def _adam(side: TwinSide) -> Optimizer:
    return torch.optim.Adam(side.model.parameters(), lr=RATES.first_order)


def _sgd(side: TwinSide) -> Optimizer:
    return torch.optim.SGD(side.model.parameters(), lr=RATES.first_order)


UNDAMPED = "K-FAC, undamped"
INVARIANT = "K-FAC, invariant"
TIKHONOV = "K-FAC, Tikhonov"

METHODS = (
    *_every(UNDAMPED, 0.0),
    *_every(INVARIANT, Invariant(1e-2)),
    _kfac(TIKHONOV, 1e-3, 0.9, 0.95),
    TwinMethod("Adam", "Adam", f"lr {RATES.first_order:g}", _adam),
    TwinMethod("SGD", "SGD", f"lr {RATES.first_order:g}", _sgd),
)
GROUPS = tuple(dict.fromkeys(m.group for m in METHODS))


@dataclass
class TwinRun:
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
        """Return the largest mismatch after a step."""
        return max(self.mismatch[1:])


def run(pair: TwinPair, method: TwinMethod, steps: int = 10) -> TwinRun:
    """Train both networks on the same batches, and return how far their functions differ."""
    sides = (pair.one, pair.two)
    optimizers = [method.build(side) for side in sides]
    start, start_of_twin = (_values(side, pair.probe_inputs) for side in sides)
    record = TwinRun([_relative(start - start_of_twin, float(start.norm()))])
    moved = 0.0
    worst = 1.0
    for _ in range(steps):
        x, y = pair.batch()
        losses = [_take_step(*twin, x, y) for twin in zip(sides, optimizers, strict=True)]
        record.loss.append(_short(losses[0]))
        worst = max(worst, *map(condition, optimizers))
        f, g = (_values(side, pair.probe_inputs) for side in sides)
        moved = max(moved, float((f - start).norm()))
        record.mismatch.append(_relative(f - g, moved))
    _note_blocks(record, optimizers, worst)
    return record


def _take_step(side: TwinSide, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
    """Take a step of one network, and return the loss before it."""
    optimizer.zero_grad()
    loss = side.loss(side.model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _note_blocks(record: TwinRun, optimizers: Sequence[Optimizer], worst: float) -> None:
    """Add what K-FAC reports of its blocks, and end it; nothing for another optimizer."""
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, KFAC):
            continue
        if number == 0:
            record.degenerate = [
                f"{d.names[0]}, {d.side} side, rank {d.rank} of {d.size}: {d.reason}"
                for d in optimizer.degenerate()
            ]
        record.condition = _short(worst)
        record.notes += [f"{k}: {v}" for k, v in optimizer.info.notes.items()]
        optimizer.close()


@torch.no_grad()
def _values(side: TwinSide, x: Tensor) -> Tensor:
    return side.readout(side.model(x))


def _relative(difference: Tensor, scale: float) -> float:
    return _short(float(difference.norm()) / scale)


def _short(value: float) -> float:
    if math.isfinite(value):
        return float(f"{value:.3e}")
    return 1e300  # a network that diverged; JSON has no infinity


def condition(optimizer: Optimizer) -> float:
    """Return the worst condition number of a factor of K-FAC, on its range; 1 without factors."""
    worst = 1.0
    if not isinstance(optimizer, KFAC):
        return worst
    for block in optimizer.gram().blocks:
        assert isinstance(block, Sides)
        for side in (block.output_factor, block.input_factor):
            values, _ = factor_matrix.eigendecompose(side)
            least = values.masked_fill(~factor_matrix.is_above_round_off(values), math.inf).amin(-1)
            worst = max(worst, float((values.amax(-1) / least).max()))
    return worst
