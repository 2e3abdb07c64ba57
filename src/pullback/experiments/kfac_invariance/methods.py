"""The optimizers under comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from ... import KFAC
from ...optim.kfac import Damping, Invariant
from .nets import Side

_LR, _CLIP = 0.5, 1e-3
LAMBDA = 1e-3


@dataclass(frozen=True)
class Method:
    """Something to compare: its name, the group it is shown in, and how it is built."""

    name: str
    group: str
    build: Callable[[Side], Optimizer]


def _kfac(group: str, damping: float | Damping, momentum: float, ema: float) -> Method:
    def build(side: Side) -> Optimizer:
        return KFAC(
            side.model, _LR, metric=side.metric, fisher="exact", damping=damping, kl_clip=_CLIP,
            momentum=momentum, ema=ema, statistics_every=1, invert_every=1,
        )  # fmt: skip

    return Method(f"{group}, momentum {momentum:g}, ema {ema:g}", group, build)


def _every(group: str, damping: float | Damping) -> list[Method]:
    return [_kfac(group, damping, momentum, ema) for momentum in (0.0, 0.9) for ema in (0.0, 0.95)]


UNDAMPED, INVARIANT, TIKHONOV = "K-FAC, undamped", "K-FAC, invariant", "K-FAC, Tikhonov"

METHODS = (
    *_every(UNDAMPED, 0.0),
    *_every(INVARIANT, Invariant(1e-2)),
    _kfac(TIKHONOV, LAMBDA, 0.9, 0.95),
    Method("Adam", "Adam", lambda side: torch.optim.Adam(side.model.parameters(), lr=1e-2)),
    Method("SGD", "SGD", lambda side: torch.optim.SGD(side.model.parameters(), lr=1e-2)),
)
GROUPS = tuple(dict.fromkeys(m.group for m in METHODS))
