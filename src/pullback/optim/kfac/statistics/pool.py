"""What is measured on a statistics step, and what was gathered since the last one."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ...._core.capture import Selector
from ....maps.layers.moments import Sharing
from ....metrics import Metric
from .sums import Key, Sums

#: why a forward pass gave no statistics; of several passes, the one that came farthest tells
MISSED = (
    "the model was not called",
    "the model was called inside a transform of torch.func, or held other parameters than the "
    "optimizer's",
    "the model was called without gradients",
    "the model was in evaluation mode",
    "the model's output does not depend on its parameters",
    "no gradient reached the model's output",
    "the gradient passed the model's output, but not to its parameters",
)


@dataclass(frozen=True)
class Recipe:
    """What is measured: the metric at the output, and how places and samples count."""

    metric: Metric
    fisher: str
    sharing: Sharing
    joint: bool
    draws: int
    output: Selector
    batch_dim: int


@dataclass
class Pool:
    """Everything gathered since the last step."""

    sums: dict[Key, Sums] = field(default_factory=dict)
    samples: Tensor | float = 0.0
    calls: int = 0
    missed: int = 0
