"""Which outputs of the model the metric measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .._core.capture import Selector
from .._core.checks import require_number
from .._core.errors import refuse_unknown
from ..likelihoods import Likelihood, reduction_of


@dataclass(frozen=True)
class Outputs:
    """What the metric measures of a model.

    Attributes:
        select: which tensor of a structured output: a key, an index or a function of the output.
        batch_dim: the output's axis of samples.
        reduction: "mean" or "sum" over samples, for metric and loss alike; by default that of the
            loss given as `likelihood`, else "mean".
        metric_batch: other inputs to average the metric over than those of the loss (see
            `NaturalGradient.step`).
    """

    select: Selector = None
    batch_dim: int = 0
    reduction: str | None = None
    metric_batch: Any = None

    def __post_init__(self) -> None:
        require_number("batch_dim=", self.batch_dim, least=float("-inf"), whole=True)
        if self.reduction is not None:
            refuse_unknown("reduction", self.reduction, ("mean", "sum"))


def as_outputs(
    output: Selector | Outputs, likelihood: Likelihood | Callable[..., Tensor] | None
) -> Outputs:
    """Return what the metric measures, with the reduction of the loss where none is given."""
    outputs = output if isinstance(output, Outputs) else Outputs(output)
    if outputs.reduction is None:
        outputs = replace(outputs, reduction=reduction_of(likelihood))
    return outputs
