"""The contract of a direction rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ...._core.flags import lerp_unless
from ....grams.kronecker.inverse import Inverse


class Rule(ABC):
    """How a gradient becomes a direction: steepest descent for a norm on the layer's weights.

    Attributes:
        needs: what is prepared per block: "inverse" sides, Cholesky "factors", an "eigenbasis" with
            eigenvalues, a "basis" that follows the averages, or the inverse "root" of the input
            side.
        moments: which moments it keeps per block, "first" or "second", each of every entry
            ("entries") or of every row ("rows").
        inputs: whether it needs the input side alone, which the forward pass gives.
        matrices: whether it is for weight matrices alone; all other parameters then follow AdamW.
        head: whether it is for the output layer too.
        rest: the share of the learning rate at which the parameters that it is not for follow
            AdamW; those of param groups with `"rule": "adam"` follow it at their own rate.
        defaults: of those arguments of `KFAC` that are not given.
    """

    needs: str = "inverse"
    moments: ClassVar[Mapping[str, str]] = {}
    inputs: bool = False
    matrices: bool = True
    head: bool = True
    rest: float = 1.0
    defaults: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        """Return directions for stacked gradients, and advance the moments.

        Args:
            prepared: of B blocks of one shape.
            given: weights (B, O, I) and perhaps biases (B, O); for units one tensor (k, U).
            good: a flag on the device; where it is False, the moments stay as they were.
        """

    def suited(self, *, once: bool, exact: bool) -> Rule:
        """Return the rule for factors that serve `once`, or whose products are damped `exact`."""
        return self

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"


def advance(moment: Tensor, new: Tensor, weight: float, good: Tensor | None) -> None:
    """Set moment ← moment + weight·(new − moment), unless the flag on the device is False."""
    lerp_unless(None if good is None else (~good).float(), [moment], [new], weight)
