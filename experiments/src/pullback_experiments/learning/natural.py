"""Natural K-FAC from one mapping of settings, as grids of settings have them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pullback import KFAC
from pullback.optim.kfac import Estimation, Natural

_OF_THE_RULE = (
    "likelihood", "metric", "fisher", "damping", "momentum", "kl_clip", "ekfac", "warmup",
)  # fmt: skip
_OF_ESTIMATION = tuple(f.name for f in fields(Estimation) if f.name not in _OF_THE_RULE)


def natural_kfac(model: nn.Module, lr: float | None = None, **settings: Any) -> KFAC:
    """Return `KFAC` by the natural rule; settings of the rule and of its estimation go there.

    Statistics and inversions follow the given intervals from the first step on, unless `warmup` is
    set: the recorded runs were made so.
    """
    estimation = {n: settings.pop(n) for n in _OF_ESTIMATION if n in settings}
    rule_options = {n: settings.pop(n) for n in _OF_THE_RULE if n in settings}
    rule = Natural(**{"warmup": 0, **rule_options}, estimation=Estimation(**estimation))
    return KFAC(model, lr, rule=rule, **settings)


def close_kfac(optimizer: Optimizer) -> AbstractContextManager[object]:
    """Return a context at whose end K-FAC removes its hooks; nothing ends for other optimizers."""
    if isinstance(optimizer, KFAC):
        return optimizer
    return nullcontext()
