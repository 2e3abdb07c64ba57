"""What a K-FAC optimizer learns from the passes it saw: averages, and inverses when it is time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...._core.errors import PullbackError
from ....grams.kronecker.sides import diagonal
from ..blocks.curvature import Curvature
from ..blocks.damping import Damping
from ..blocks.entering import Unsure
from ..blocks.runs import in_runs
from ..statistics.gather import Gatherer
from ..statistics.sums import Key
from .look import Look, finite


class Learning:
    """Statistics into averages, averages into inverses."""

    curvature: Curvature
    damping: Damping
    ema: float
    ekfac: bool
    reduction: str
    grad_scaler: Any
    statistics_every: int
    invert_every: int
    _closed: bool
    _skipped: bool
    _gatherer: Gatherer
    _memory: Any
    _by_name: dict[str, nn.Parameter]
    #: statistics that were taken up unless the device found them not finite, which is yet unknown
    _unsure: tuple[Look, Unsure] | None = None
    #: whether statistics are due that the forward pass was not told of: the last step, which took
    #: them, turned out to have changed nothing
    _owing = False

    def _due(self) -> bool:
        return not self._closed and self._memory["steps"] % self.statistics_every == 0

    def _learn(self, found: dict[Key, dict[str, Tensor]] | None) -> bool:
        """Take up the statistics gathered since the last step, if all are finite."""
        self._skipped = False
        if found is None:
            found = self._gathered()
        if not found:
            return False
        self._skipped = not finite(_telling([t for x in found.values() for t in x.values()]))
        if self._skipped:
            self._memory["skipped"] = self._memory.get("skipped", 0) + 1
            return False
        self.curvature.take(found, self.ema, self.damping, self._memory["damping"])
        self._memory["taken"] += 1
        return True

    def _unsure_of(self, found: dict[Key, dict[str, Tensor]]) -> Unsure | None:
        """The same statistics, to be taken up without waiting for the device.

        Only where nothing else depends on it: where inverses are to be renewed it is better to
        wait, and a block that is new has no averages yet. (Averages that mostly forget would keep
        the round-off of what they forgot.)
        """
        forgets = self.ema < 0.5
        if self.ekfac or self.damping.referenced or forgets:
            return None
        if not found or self._to_invert(self._memory["taken"] + 1):
            return None
        return self.curvature.unsure(found)

    def _learn_unsure(self, unsure: Unsure, good: Tensor) -> None:
        """Take them up where they are finite and `good` holds, which the device alone knows yet."""
        good = good & finite(unsure.telling())
        unsure.enter(self.ema, (~good).to(torch.float32))
        self._memory["taken"] += 1
        self._unsure = Look(None, good), unsure

    def _settle_statistics(self, accepted: bool) -> bool:
        """Take notice of statistics that were not finite, if the last ones were such."""
        pending, self._unsure = self._unsure, None
        if pending is None or not pending[0].reason():
            return True
        pending[1].undo()
        self._memory["taken"] -= 1
        self._skipped = accepted
        if accepted:
            self._memory["skipped"] = self._memory.get("skipped", 0) + 1
        return False

    def _gathered(self) -> dict[Key, dict[str, Tensor]]:
        """The averages over what the hooks saw since the last step."""
        if not self._gatherer.pool.calls:
            if self._due() and not self._owing:
                raise PullbackError(
                    "A statistics step saw no layer",
                    self._gatherer.missed,
                    "Call the module given to KFAC, in training mode, and backpropagate from its "
                    "output before step()",
                )
            return {}
        self._skipped = not self._gatherer.pool.sums  # nothing finite was met
        loss_scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())
        return self._gatherer.averages(self.reduction, loss_scale)

    def _invert(self, taken: bool) -> None:
        """Renew inverses when it is time, and make those that are missing."""
        held = self.curvature
        again = self._memory.pop("again", False)  # the damping grew after a rejected step
        if (taken and self._to_invert(self._memory["taken"])) or again:
            keys = list(held.averages)
        else:
            keys = [k for k in held.averages if k not in held.inverses]
        if keys:
            once = self.invert_every == 1 == self.statistics_every and on_cpu(self._by_name)
            held.invert(self.damping, self._memory["damping"], keys, eigen=self.ekfac, once=once)
            if self.ekfac:
                self._gatherer.bases = held.inverses

    def _to_invert(self, count: int) -> bool:
        """Whether inverses are to be renewed with this many statistics taken up."""
        steps = self._memory["steps"]
        early = steps < self.invert_every and count & (count - 1) == 0
        return steps % self.invert_every == 0 or early

    def _notes(self) -> dict[str, str]:
        notes = {", ".join(k.names): note for k, note in self.curvature.notes.items()}
        if self._skipped:
            notes["statistics"] = "they were not finite; the last good ones stay"
        return notes


def _telling(moments: list[Tensor]) -> list[Tensor]:
    """Of a second moment the diagonal tells: no entry is larger.

    On a GPU many contiguous tensors are looked at in one launch, which diagonals are not.
    """
    here = [diagonal(t) for t in moments if not t.is_cuda]
    return here + in_runs([t for t in moments if t.is_cuda])


def on_cpu(parameters: Mapping[str, Tensor]) -> bool:
    """Whether the model is there, where solving with factors is cheaper than inverting them."""
    return next(iter(parameters.values())).device.type == "cpu"
