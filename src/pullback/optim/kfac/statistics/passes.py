"""A forward pass on its way to statistics: started, pending, and received with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...._core.errors import PullbackError
from ...._core.graph import skip_dtype_casts
from ....maps.record import ForwardRecord, RecordedPass
from .repeated_call import RepeatedCall


@dataclass(frozen=True)
class PassLimits:
    """Bounds on what is kept of a pass."""

    #: entries of an output from which on it is computed twice instead of kept: 64 MiB of float32
    large_output: int = 2**24


_LIMITS = PassLimits()

#: the layers of a pass; or how to run it again, if it ran in compiled code
Source = ForwardRecord | RepeatedCall


class StartedCall(NamedTuple):
    """A forward pass under way: its layers, and the tensors among its arguments."""

    source: Source
    inputs: list[Tensor]


class PendingPass:
    """What is kept of a forward pass until its output z receives a gradient.

    The graph owns it, by a hook: so it owns neither z nor z's node, and is gone with the graph.
    `inputs` are the tensors among the call's arguments, for metrics that depend on them.
    """

    def __init__(self, z: Tensor, call: StartedCall) -> None:
        source = call.source
        node, number = skip_dtype_casts(z)
        self.source: Source | None = source
        self.inputs: Sequence[Tensor] = call.inputs
        self._value = z.detach()
        self._number = number
        self._dtype = z.dtype
        self._version = z._version
        if node is None:
            self._leaf = z
        else:
            self._leaf = None
        if isinstance(source, ForwardRecord) and node is not None:
            if z.numel() >= _LIMITS.large_output and node is z.grad_fn and source.note_head(node):
                # while the loss is differentiated there would be one more tensor of this size;
                # `head_output` computes it again
                self._value = None
            source.release(node)

    def clear(self) -> None:
        """Let go of everything; a user may keep the graph for long."""
        self.source = None
        self._leaf = None
        self._value = None
        self.inputs = ()

    def value(self) -> Tensor:
        """Return z as the model gave it; an error where it was changed in place."""
        if self._value is None:
            assert isinstance(self.source, ForwardRecord)
            return self.source.head_output(self._dtype)
        if self._value._version != self._version:
            raise PullbackError(
                "The model's output was changed in place",
                "the metric at the output needs the values that the model gave",
                "Change a copy: z = z + 1, not z += 1",
            )
        return self._value

    def root(self) -> Tensor | GradientEdge:
        """Return where z stands in the graph; only while its hook runs."""
        if self._leaf is not None:
            return self._leaf
        return GradientEdge(torch._C._current_autograd_node(), self._number)


@dataclass
class ReceivedPass:
    """A recorded pass whose output has received its gradient: what statistics are made of."""

    forward: RecordedPass
    #: ∂loss/∂z
    cotangent: Tensor
    #: the tensors among the call's arguments
    inputs: Sequence[Tensor]
    #: z, until it is taken
    output: Tensor | None
    #: whether the user's pass has all that a second one would: the layers, and no graph of its own
    allows_user_pass: bool

    def __post_init__(self) -> None:
        assert self.output is not None
        self._dtype = self.output.dtype
        self.is_large = self.output.numel() >= _LIMITS.large_output

    def take_output(self, *, retain: bool) -> Tensor:
        """Return z; it is let go here unless it is to be retained."""
        output = self.output
        assert output is not None
        if not retain:
            self.output = None
        return output

    def repeat_output(self) -> Tensor:
        """Return z once more after it was taken: the retained one, or computed by its layer."""
        if self.output is None:
            return self.forward.record.head_output(self._dtype)
        return self.output
