"""What is known of the ways through a model, and what may happen on one that is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .aims import Aim
from .plan import Plan


class NotFinite(Exception):
    """The covector met values that are not finite, from which nothing can be learned."""


class Changed(Exception):
    """The model went another way than before, and the covector is gone: another one is needed."""


@dataclass(frozen=True)
class Known:
    """What was established about one way through the model."""

    plan: Plan
    #: by use of a layer
    aims: Sequence[Aim]
    #: which uses of layers, and which ends of compound ones, a covector met
    met: tuple[Any, ...]
    #: the uses below which there is no other
    last: list[int]
    #: whether the proof holds from now on
    settled: bool


def norms(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Of those that have entries."""
    given = {n: g for n, g in gradients.items() if g is not None and g.numel()}
    if not given:
        return {}
    return dict(zip(given, torch._foreach_norm(list(given.values())), strict=True))


def settled(plan: Plan, gradients: Mapping[str, Tensor | None]) -> bool:
    """Whether the proof holds from now on: a gradient of zero proves nothing."""
    return all(bool(norm > 0) for n, norm in norms(gradients).items() if n not in plan.plain)
