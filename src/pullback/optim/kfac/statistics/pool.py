"""What is measured on a statistics step, and what was gathered since the last one."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...._core.capture import Selector
from ....maps.layers.moments import Sharing
from ....metrics import Metric
from .derived import follow
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
    "the loss was made of derivatives of the model's output by its inputs, and the metric is that "
    "of the output itself; step(objective=...) takes such terms",
)
_DERIVED = len(MISSED) - 1


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
    #: whether corrected eigenvalues are wanted, sums over samples
    ekfac: bool = False


@dataclass
class Pool:
    """Everything gathered since the last step."""

    sums: dict[Key, Sums] = field(default_factory=dict)
    samples: Tensor | float = 0.0
    calls: int = 0
    missed: int = 0

    def miss(self, reason: int) -> None:
        """One more pass that gave nothing."""
        self.missed = max(self.missed, reason)

    def miss_leaves(self) -> None:
        """A gradient is at the output that does not reach the parameters.

        Its own graph, where it has one, may be for use in a loss.
        """
        self.miss(_DERIVED - 1)
        if torch.is_grad_enabled():
            me = weakref.ref(self)

            def used() -> None:
                if (pool := me()) is not None:
                    pool.miss(_DERIVED)

            follow(torch._C._current_autograd_node(), used)

    def warn(self) -> None:
        """Say what the statistics that were taken do not cover."""
        if self.missed == _DERIVED:
            warnings.warn(
                "The loss has terms in derivatives of the model's output by its inputs. The metric "
                "is that of the output itself; step(objective=...) covers all terms.",
                RuntimeWarning,
                stacklevel=2,
            )
