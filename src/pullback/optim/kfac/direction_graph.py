"""Directions of small blocks from a CUDA graph: their kernels end sooner than they are launched.

A stack of blocks takes about fifty kernels. Where these are short, the host launches them more
slowly than the device runs them. One graph replays those of all small stacks at once, where the
rule asks for it (`cuda_graph=True`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from ..checks import find_user_stacklevel
from .block_stack import Stack
from .rules import StepContext


@dataclass(frozen=True)
class GraphLimits:
    """When a graph is worth its memory and its capture."""

    #: entries of a stack. A kernel on more takes longer than its launch; a graph keeps a copy of
    #: the gradients, which would take memory for nothing.
    entries: int = 2**22
    #: steps with the same blocks and options before they are captured: a capture takes as long as
    #: a few steps, and while weights are thawed one by one it would be in vain
    eager_steps: int = 3
    #: captures of one optimizer: where gradients come and go, as of experts that get no rows, or
    #: weights are frozen and thawed by turns, captures would cost more than replays save
    most_captures: int = 5


_LIMITS = GraphLimits()


@dataclass
class CaptureCount:
    """How often the blocks of one optimizer were captured."""

    number: int = 0


class DirectionGraph:
    """The stacks whose directions a graph gives, and the graph once it is captured.

    It is used on steps whose outcome a flag on the device guards. All others run eagerly, as do
    the first steps with new blocks, with other gradients missing, or with other options of a rule.
    """

    def __init__(self, stacks: Sequence[Stack], captures: CaptureCount) -> None:
        self._stacks = [stack for stack in stacks if can_capture(stack)]
        self._captures = captures
        self._rules = {id(stack.rule): stack.rule for stack in self._stacks}
        self._captured: CapturedDirections | None = None
        #: what the captured operations depend on, beside states and gradients
        self._configuration: Any = None
        self._same_steps = 0
        self._has_failed = False

    def directions(self, gradients: Mapping[str, Tensor], is_void: Tensor | None) -> Any:
        """Return directions by name, in buffers of the graph, or {} if the step runs eagerly."""
        if is_void is None or not self._stacks or self._has_failed:
            return {}
        if is_void.is_cuda and torch.cuda.is_current_stream_capturing():
            return {}  # by the user
        self._follow_configuration(gradients)
        if self._same_steps <= _LIMITS.eager_steps:
            return {}
        if self._captured is None and self._captures.number < _LIMITS.most_captures:
            self._captures.number += 1
            self._captured = self._capture(gradients, is_void)
        if self._captured is None:
            return {}
        return self._captured.replay(gradients, is_void)

    def _follow_configuration(self, gradients: Mapping[str, Tensor]) -> None:
        """Count steps with the same gradients and options; drop the graph when they change."""
        present = [_select_names(stack, gradients) for stack in self._stacks]
        configuration = (present, [dict(vars(rule)) for rule in self._rules.values()])
        if configuration != self._configuration:
            self._configuration = configuration
            self._same_steps = 0
            self._captured = None
        self._same_steps += 1

    def _capture(
        self, gradients: Mapping[str, Tensor], is_void: Tensor
    ) -> CapturedDirections | None:
        """Return the captured directions, or None where the device refuses: steps run eagerly."""
        try:
            return CapturedDirections(self._stacks, gradients, is_void)
        except RuntimeError as error:
            self._has_failed = True
            warn(
                f"KFAC could not capture its step in a CUDA graph, and runs without one: {error}",
                stacklevel=find_user_stacklevel(),
            )
            return None


def _select_names(stack: Stack, gradients: Mapping[str, Tensor]) -> list[str]:
    """Return the names of a stack's parameters that have a gradient."""
    return [name for name in stack.names if name in gradients]


def can_capture(stack: Stack) -> bool:
    """Return True if the rule asks for a graph, and the stack is small and not in float64.

    Of float64 on a GPU rules take decompositions, which wait for the device.
    """
    if stack.entries > _LIMITS.entries or stack.dtype == torch.float64:
        return False
    return stack.rule.cuda_graph


class CapturedDirections:
    """Stacks with buffers that hold gradients before a replay, and directions after it."""

    def __init__(
        self, stacks: Sequence[Stack], gradients: Mapping[str, Tensor], is_void: Tensor
    ) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._is_void = is_void.clone()
        self._stacks = [s for s in stacks if not gradients.keys().isdisjoint(s.names)]
        for stack in self._stacks:
            for name in _select_names(stack, gradients):
                self._buffers[name] = torch.empty_like(gradients[name], dtype=stack.dtype)
        self._load(gradients, is_void)
        self._run = capture_graph(self._compute, is_void.device)

    def _load(self, gradients: Mapping[str, Tensor], is_void: Tensor) -> None:
        """Copy gradients and the flag to the buffers that the graph reads."""
        new = [gradients[name] for name in self._buffers]
        torch._foreach_copy_([*self._buffers.values()], new)
        self._is_void.copy_(is_void)

    def _compute(self) -> None:
        """Put directions in place of gradients."""
        context = StepContext(count=0, options={}, is_void=self._is_void)
        for stack in self._stacks:
            directions = stack.split(stack.direction(self._buffers, context))
            for name in stack.names:
                if name in self._buffers:
                    self._buffers[name].copy_(directions[name])

    def replay(self, gradients: Mapping[str, Tensor], is_void: Tensor) -> dict[str, Tensor]:
        """Return the directions of these gradients by name, and advance the states."""
        self._load(gradients, is_void)
        self._run()
        return dict(self._buffers)


def capture_graph(compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that replays the operations of `compute`, which are not run now.

    Other threads, such as one that loads data, may use the device meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        compute()

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay
