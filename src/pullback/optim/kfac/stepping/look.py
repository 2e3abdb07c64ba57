"""Whether a step can be taken, answered without making the device wait."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import isfinite

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ..blocks.ranks import Low
from ..statistics.later import Later
from ..statistics.sums import Key


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all entries are finite, as a tensor."""
    norms = torch._foreach_norm(list(tensors))
    kinds = {(n.dtype, n.device) for n in norms}
    if torch.float16 in (dtypes := {dtype for dtype, _ in kinds}):  # norms overflow there
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        norms = torch._foreach_norm(list(tensors), 2, wide)
    if len(kinds) > 1:
        norms = [n.to(norms[0].device, torch.float64) for n in norms]
    nothing = torch.stack(list(norms)).sum() * 0  # or NaN
    return nothing == nothing


def refuse_none(gradients: Collection[object]) -> None:
    """Raise where nothing was differentiated."""
    if not gradients:
        raise PullbackError(
            "There is no gradient to follow",
            "every parameter's gradient is None",
            "Call loss.backward() before step()",
        )


class Look:
    """Whether a step can be taken from these gradients, and which low-rank ones hold.

    The answer is fetched while the device works on: it is asked for as late as possible.

    Args:
        loss: the loss, where it is known.
        good: whether all gradients are finite, as a tensor.
        low: low-rank gradients.
    """

    def __init__(
        self, loss: float | None, good: Tensor, low: Mapping[Key, Low] | None = None
    ) -> None:
        self._loss, self._low, self.good = loss, low or {}, good
        flags = good.view(1)
        if self._low:
            flags = torch.stack([good, *(x.holds.to(good.device) for x in self._low.values())])
        self._fetched = Later(flags)

    def reason(self) -> str:
        """Why no step can be taken, or nothing."""
        if self._loss is not None and not isfinite(self._loss):
            return f"the loss is {self._loss}"
        return "" if self._fetched()[0] else "a gradient is not finite"

    def low(self) -> dict[Key, Low]:
        """The low-rank gradients that hold."""
        if not self._low:
            return {}
        holds = self._fetched()[1:]
        return {k: x for (k, x), held in zip(self._low.items(), holds, strict=True) if held}
