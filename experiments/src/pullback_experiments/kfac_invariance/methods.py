"""The optimizers under comparison, and a run of one of them on a pair of networks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from pullback import KFAC
from pullback.grams.kronecker import Pair as Sides
from pullback.grams.kronecker import factor_matrix
from pullback.optim.kfac import Damping, Invariant

from ..learning.natural import natural_kfac
from .nets import TwinPair, TwinSide

_LR = 0.5
_CLIP = 1e-3
_FIRST_ORDER = 1e-2


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
            side.model, _LR, metric=side.metric, fisher="exact", damping=damping, kl_clip=_CLIP,
            momentum=momentum, ema=ema, statistics_every=1, invert_every=1,
        )  # fmt: skip

    about = f"lr {_LR:g}, damping {damping!r}, KL clip {_CLIP:.0e}, exact Fisher at every step"
    return TwinMethod(f"{group}, momentum {momentum:g}, ema {ema:g}", group, about, build, plain)


def _every(group: str, damping: float | Damping) -> list[TwinMethod]:
    return [
        _kfac(group, damping, momentum, ema, plain=bool(momentum) == bool(ema))
        for momentum in (0.0, 0.9)
        for ema in (0.0, 0.95)
    ]


def _adam(side: TwinSide) -> Optimizer:
    return torch.optim.Adam(side.model.parameters(), lr=_FIRST_ORDER)


def _sgd(side: TwinSide) -> Optimizer:
    return torch.optim.SGD(side.model.parameters(), lr=_FIRST_ORDER)


UNDAMPED = "K-FAC, undamped"
INVARIANT = "K-FAC, invariant"
TIKHONOV = "K-FAC, Tikhonov"

METHODS = (
    *_every(UNDAMPED, 0.0),
    *_every(INVARIANT, Invariant(1e-2)),
    _kfac(TIKHONOV, 1e-3, 0.9, 0.95),
    TwinMethod("Adam", "Adam", f"lr {_FIRST_ORDER:g}", _adam),
    TwinMethod("SGD", "SGD", f"lr {_FIRST_ORDER:g}", _sgd),
)
GROUPS = tuple(dict.fromkeys(m.group for m in METHODS))


STEPS = 10
_LOST = 1e300  # of a network that diverged; JSON has no infinity


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
        """The largest mismatch after a step."""
        return max(self.mismatch[1:])


def run(pair: TwinPair, method: TwinMethod, steps: int = STEPS) -> TwinRun:
    """So many steps of both networks on the same batches."""
    optimizers = [method.build(side) for side in (pair.one, pair.two)]
    twins = list(zip((pair.one, pair.two), optimizers, strict=True))
    first, other = (_values(side, pair.probe_inputs) for side in (pair.one, pair.two))
    record = TwinRun([_relative(first - other, float(first.norm()))])
    moved = 0.0
    worst = 1.0
    for _ in range(steps):
        x, y = pair.batch()
        for side, optimizer in twins:
            optimizer.zero_grad()
            loss = side.loss(side.model(x), y)
            loss.backward()
            optimizer.step()
            if side is pair.one:
                record.loss.append(_short(float(loss.detach())))
            if isinstance(optimizer, KFAC):
                worst = max(worst, condition(optimizer))
        f, g = (_values(side, pair.probe_inputs) for side in (pair.one, pair.two))
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
def _values(side: TwinSide, x: Tensor) -> Tensor:
    return side.readout(side.model(x))


def _relative(difference: Tensor, scale: float) -> float:
    return _short(float(difference.norm()) / scale)


def _short(value: float) -> float:
    if math.isfinite(value):
        return float(f"{value:.3e}")
    return _LOST


def condition(optimizer: KFAC) -> float:
    """The worst condition number of a factor, on its range."""
    worst = 1.0
    for block in optimizer.gram().blocks:
        assert isinstance(block, Sides)
        for side in (block.output_factor, block.input_factor):
            values, _ = factor_matrix.eigendecompose(side)
            least = values.masked_fill(~factor_matrix.is_above_round_off(values), math.inf).amin(-1)
            worst = max(worst, float((values.amax(-1) / least).max()))
    return worst
