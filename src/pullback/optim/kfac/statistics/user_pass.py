"""The loss's own cotangents, measured while the user's backward pass sends them down the graph.

With fisher="empirical" a second pass would repeat them, up to a sign per sample. Hooks before the
layers' nodes see them for nothing. The backward pass under way owns what they add up, by a callback
at its end, and the hooks know it weakly: a pass that fails leaves nothing behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....grams.kronecker.packed import memory
from ..factors.factor import BlockKey
from .cotangents import CotangentPass, UseMoments, form_inputs, measuring
from .descent import Descent
from .sums import Sums

AllSums = Mapping[BlockKey, Sums]

_ENGINE: Any = torch.autograd.Variable._execution_engine
_HALF = (torch.float16, torch.bfloat16)
_WAITING = 2**25  # entries of inputs that are held until their moments are formed together


class UserPass:
    """Measures the layers along the backward pass under way, and calls `finish` at its end.

    The descent's root is the node whose hook runs now, and its covector the cotangent there.
    """

    def __init__(self, down: CotangentPass, finish: Callable[[CotangentPass], None]) -> None:
        way = down.descent
        self._down, self._finish, self._entries = down, finish, way.record.entries
        self._task = torch._C._current_graph_task_id()
        self._versions = [entry.input._version for entry in self._entries]
        self._waiting: list[UseMoments] = []
        self._held = 0  # entries of the inputs that wait
        self._handles: list[Any] = []
        for i, edge in enumerate(way.edges):
            if edge == way.root:
                self._measure(i, way.covector)
            else:
                hook = partial(_observe, weakref.ref(self), i, edge.output_nr)
                self._handles.append(edge.node.register_prehook(hook))
        way.covector = way.covector.new_empty(()).expand(way.covector.shape)  # may be large
        _ENGINE.queue_callback(self._end)

    def _measure(self, i: int, delta: Tensor) -> None:
        """Measure one use and let go of its input, which the pass under way frees too."""
        entry = self._entries[i]
        if entry.input._version != self._versions[i]:  # overwritten meanwhile
            return
        if torch._C._current_graph_task_id() != self._task:  # a pass inside of a user's hook
            return
        with measuring(delta.device):
            self._down.measure(i, delta)
            entry.input = entry.input.new_empty(0)
            own = self._down.uses[i]
            if own.seen is not None:
                self._waiting.append(own)
                self._held += own.seen[1].numel()
            if self._held > _WAITING:
                form_inputs(self._waiting)
                self._waiting, self._held = [], 0

    def _end(self) -> None:
        for handle in self._handles:
            handle.remove()
        with measuring(self._down.descent.covector.device):
            self._finish(self._down)


def _observe(
    held: weakref.ref[UserPass], i: int, number: int, cotangents: Sequence[Tensor | None]
) -> None:
    own, delta = held(), cotangents[number]
    if own is not None and delta is not None:
        own._measure(i, delta)


def passes(way: Descent) -> tuple[int, ...]:
    """Return the uses that the backward pass under way is going to reach."""
    will = torch._C._will_engine_execute_node
    return tuple([i for i, edge in enumerate(way.edges) if will(edge.node)])


def tells(way: Descent, covector: Tensor) -> bool:
    """Whether a covector with signs would show that samples meet: some have another sign."""
    same = torch.equal(covector, way.covector) or torch.equal(covector, -way.covector)
    return way.samples == 1 or not same


def alike(way: Descent, found: AllSums, expected: AllSums) -> bool:
    """Whether both sums of squares are the same, up to round-off in the layers' precision."""
    half = any(entry.input.dtype in _HALF for entry in way.record.entries)
    for key, own in found.items():
        for factor, side in own.values.items():
            got, want = memory(side), memory(expected[key].values[factor])
            limit = 1e-3 if half else torch.finfo(want.dtype).eps ** 0.8
            if got.shape != want.shape or not (got - want).norm() <= limit * want.norm():
                return False
    return True
