"""Keeps an optimizer's parameters on a slice, and its state in step with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..._core.capture import unwrap_model
from ..._core.checks import require_number
from ..._core.errors import PullbackError
from ..._core.replay import Replay, is_recording
from ..actions.scaling import Scaling
from ..scaling_units import ScalingUnits, decision_dtype, multiply_by_exp
from ..slices import Retraction, Slice, make_slice
from .sweeps import Followers, LayerSweep, UnitSweep


def is_idle(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return True where all learning rates and gradients are zero, so that a step changes nothing.

    `torch.distributed.checkpoint` takes such a step to make an optimizer create its state. A rate
    on a device counts as nonzero: reading it would wait.
    """
    if any(_is_nonzero_rate(group.get("lr", 1.0)) for group in groups):
        return False
    for group in groups:
        for p in group["params"]:
            if p.grad is not None and (p.grad.is_sparse or bool(p.grad.any())):
                return False
    return True


def _is_nonzero_rate(rate: Tensor | float) -> bool:
    if isinstance(rate, Tensor) and rate.device.type != "cpu":
        return True
    return float(rate) != 0


@dataclass(frozen=True)
class Schedule:
    """When parameters are retracted, and how far.

    Attributes:
        every: retract after every `every` steps.
        sweeps: None balances one class of units at a time, in turn; n balances all, n times.
        captured: how many steps are recorded in one CUDA graph, if any are.
    """

    every: int = 1
    sweeps: int | None = None
    captured: int | None = None

    def __post_init__(self) -> None:
        require_number("every=", self.every, least=1, whole=True)
        if self.sweeps is not None:
            require_number("sweeps=", self.sweeps, least=1, whole=True)
        if self.captured is not None:
            require_number("captured=", self.captured, least=1, whole=True)

    def list_turns(self, steps: int, turn_count: int) -> Sequence[int | None]:
        """Return the classes that are balanced after a step with this number; None stands for all.

        Args:
            steps: the number of the step, from 1.
            turn_count: the number of classes.
        """
        if self.sweeps is not None:
            return [None] * self.sweeps
        return [(steps // self.every - 1) % turn_count]


class Retractor:
    """Retracts the model's parameters after a step, and the tensors that move along.

    Args:
        model: whose parameters are scaled.
        scalings: its symmetries. Those that touch a parameter that is not optimized are left out.
        slice_choice: one of `SliceKind`, or a function of the scalings that chooses one.
        schedule: when to retract.
        returns_log_scales: whether `retract_by_sweeps` returns log-scales, for state that cannot
            follow by itself.

    Attributes:
        named: the model's parameters by name.
        optimized: the parameters that the optimizer moves, by id.
        slice: where the parameters are; None where no scaling is usable.
    """

    def __init__(
        self,
        model: nn.Module,
        scalings: Sequence[Scaling],
        slice_choice: str | Callable[[Sequence[Scaling]], str],
        schedule: Schedule,
        *,
        returns_log_scales: bool = False,
    ) -> None:
        self.named = dict(unwrap_model(model).named_parameters(remove_duplicate=False))
        self.optimized: set[int] = set()
        self.slice: Slice | None = None
        self._scalings = tuple(scalings)
        self._slice_choice = slice_choice
        self._schedule = schedule
        self._returns_log_scales = returns_log_scales
        self._log_scales: Tensor | None = None
        self._replay = Replay()
        self._sweep: UnitSweep | LayerSweep | None = None
        ScalingUnits(scalings, self.named)  # refuses at once what is not usable
        scaled_names: dict[str, None] = {}
        for scaling in scalings:
            scaled_names.update(dict.fromkeys(scaling.names))
        self._scaled = [self.named[name] for name in scaled_names]
        #: which scaled parameters required gradients when the scalings were chosen
        self._trainable: tuple[bool, ...] | None = None

    def set_optimized(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Choose the scalings again for the parameters in these groups."""
        self.optimized = {id(p) for group in groups for p in group["params"]}
        self._trainable = None
        self.refresh()

    def refresh(self) -> None:
        """Choose the scalings whose parameters are all optimized and not frozen.

        Nothing happens where the same parameters are frozen as before.
        """
        trainable = tuple(p.requires_grad for p in self._scaled)
        if trainable == self._trainable:
            return
        self._trainable = trainable
        self.slice = None
        self._sweep = None
        self._log_scales = None
        self._replay = Replay()
        usable = self._find_usable_scalings()
        if not usable:
            return
        slice_name = self._slice_choice
        if not isinstance(slice_name, str):
            slice_name = slice_name(usable)
        self.slice = make_slice(slice_name, usable, self.named)
        if all(prod(parameter.shape) == 1 for parameter in self.slice.units.parameters):
            self._sweep = LayerSweep(self.slice, self.named)
        else:
            self._sweep = UnitSweep(self.slice, self.named)
        captured = self._schedule.captured
        if captured is not None and captured % self.period:
            self._refuse_graph(captured)

    def _find_usable_scalings(self) -> list[Scaling]:
        """Return the scalings whose parameters are all optimized and not frozen."""
        free = set()
        for name, p in self.named.items():
            if p.requires_grad and id(p) in self.optimized:
                free.add(name)
        return [scaling for scaling in self._scalings if free.issuperset(scaling.names)]

    @torch.no_grad()
    def retract_(self, followers: Followers) -> Retraction | None:
        """Retract to round-off from any distance, followers included."""
        if self.slice is None:
            return None
        retraction = self.slice.retract_()
        t = torch.cat(retraction.scales)
        for parameter in self.slice.units.parameters:
            for follower in followers.get(parameter.name, ()):
                target = follower.tensor
                log_factor = follower.power * parameter.log_factor(t)
                target.copy_(multiply_by_exp(target.to(t.dtype), log_factor).to(target.dtype))
        return retraction

    @property
    def is_orthogonal(self) -> bool:
        """Whether the slice is orthogonal to orbits, so that gradients of a loss are tangent."""
        return not isinstance(self._sweep, LayerSweep) or self._sweep.is_orthogonal

    @property
    def period(self) -> int:
        """The number of steps after which the pattern of retractions repeats."""
        if self._sweep is None or self._schedule.sweeps is not None:
            return self._schedule.every
        return self._schedule.every * self._sweep.turns

    def should_retract(self, steps: int) -> bool:
        """Return True if a step with this number, from 1, is followed by a retraction."""
        if self._sweep is None:
            return False
        # A graph is replayed as it was recorded, whatever the number of the step.
        is_unannounced = self._schedule.captured is None and self.period > 1
        if is_unannounced and is_recording(self._scaled[0]):
            self._refuse_graph(1)
        return steps % self._schedule.every == 0

    def _refuse_graph(self, steps: int) -> NoReturn:
        plural = "s" if steps > 1 else ""
        raise PullbackError(
            f"A graph of {steps} step{plural} would leave retractions out",
            f"steps differ, and come around after {self.period}: a replay does always the same",
            f"Record {self.period} steps, or a multiple, and say so: captured={self.period}; or "
            "make them all alike: every=1, sweeps=1",
        )

    def retract_by_sweeps(self, steps: int, followers: Followers) -> Tensor | None:
        """Retract after a step with this number, in part; return the log-scales (U,) if asked."""
        sweep = self._sweep
        if sweep is None or self.slice is None:
            return None
        log_scales = self._reset_log_scales(self.slice)
        moved: list[Tensor] = [self.named[name] for name in self.slice.units.names]
        for parameter_followers in followers.values():
            moved.extend(follower.tensor for follower in parameter_followers)
        if log_scales is not None:
            moved.append(log_scales)
        for turn in self._schedule.list_turns(steps, sweep.turns):
            self._replay.run(turn, moved, lambda turn=turn: sweep.run(turn, followers, log_scales))
        return log_scales

    def _reset_log_scales(self, slice: Slice) -> Tensor | None:
        """Return zeros (U,), always the same tensor, if log-scales are asked for."""
        if not self._returns_log_scales:
            return None
        if self._log_scales is None:
            first = self.named[slice.units.names[0]]
            self._log_scales = torch.zeros(
                slice.units.total, dtype=decision_dtype(first), device=first.device
            )
        return self._log_scales.zero_()
