"""The optimizers under comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from pullback import KFAC
from pullback.optim.kfac import Damping, Invariant

from .nets import Side

_LR, _CLIP = 0.5, 1e-3
_FIRST_ORDER = 1e-2


@dataclass(frozen=True)
class Method:
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
    build: Callable[[Side], Optimizer]
    plain: bool = False


def _kfac(
    group: str, damping: float | Damping, momentum: float, ema: float, *, plain: bool = False
) -> Method:
    def build(side: Side) -> Optimizer:
        return KFAC(
            side.model, _LR, metric=side.metric, fisher="exact", damping=damping, kl_clip=_CLIP,
            momentum=momentum, ema=ema, statistics_every=1, invert_every=1,
        )  # fmt: skip

    about = f"lr {_LR:g}, damping {damping!r}, KL clip {_CLIP:.0e}, exact Fisher at every step"
    return Method(f"{group}, momentum {momentum:g}, ema {ema:g}", group, about, build, plain)


def _every(group: str, damping: float | Damping) -> list[Method]:
    return [
        _kfac(group, damping, momentum, ema, plain=bool(momentum) == bool(ema))
        for momentum in (0.0, 0.9)
        for ema in (0.0, 0.95)
    ]


def _adam(side: Side) -> Optimizer:
    return torch.optim.Adam(side.model.parameters(), lr=_FIRST_ORDER)


def _sgd(side: Side) -> Optimizer:
    return torch.optim.SGD(side.model.parameters(), lr=_FIRST_ORDER)


UNDAMPED, INVARIANT, TIKHONOV = "K-FAC, undamped", "K-FAC, invariant", "K-FAC, Tikhonov"

METHODS = (
    *_every(UNDAMPED, 0.0),
    *_every(INVARIANT, Invariant(1e-2)),
    _kfac(TIKHONOV, 1e-3, 0.9, 0.95),
    Method("Adam", "Adam", f"lr {_FIRST_ORDER:g}", _adam),
    Method("SGD", "SGD", f"lr {_FIRST_ORDER:g}", _sgd),
)
GROUPS = tuple(dict.fromkeys(m.group for m in METHODS))
