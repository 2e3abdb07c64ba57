"""Keeps the parameters of an optimizer on a slice, and its state in step with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..._core.capture import plain
from ..._core.checks import refuse_number
from ..._core.errors import PullbackError
from ..._core.replay import Replay, recording
from ..actions.scaling import Scaling
from ..retraction import ScalingUnits, times_exp, wide
from ..slices import Retraction, Slice, make_slice
from .sweep import Followers, LayerSweep, UnitSweep


def idle(groups: Sequence[Mapping[str, Any]]) -> bool:
    """True where all learning rates and gradients are zero, so that a step changes nothing.

    `torch.distributed.checkpoint` takes such a step to make an optimizer create its state. A rate
    on a device counts as nonzero: reading it would wait.
    """
    rates = [group.get("lr", 1.0) for group in groups]
    if any((isinstance(lr, Tensor) and lr.device.type != "cpu") or float(lr) for lr in rates):
        return False
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    return not any(g.is_sparse or bool(g.any()) for g in gradients)


class Keeper:
    """Retracts the model's parameters after a step, with what moves along.

    Args:
        model: whose parameters are scaled.
        scalings: its symmetries. Those that touch a parameter that is not optimized are left out.
        kind: of the slice, one of `SLICES`, or a function of the scalings that chooses one.
        every: retract after every `every` steps.
        sweeps: how often all units are balanced in a retraction; None: every other layer, in turn.
        captured: how many steps are recorded in one CUDA graph; None: steps are not recorded, or
            they are all alike.
        watched: whether `run` returns log-scales, for state that cannot follow by itself.
    """

    def __init__(
        self,
        model: nn.Module,
        scalings: Sequence[Scaling],
        kind: str | Callable[[Sequence[Scaling]], str],
        every: int = 1,
        sweeps: int | None = None,
        captured: int | None = None,
        watched: bool = False,
    ) -> None:
        for name, value in (("every", every), ("sweeps", sweeps), ("captured", captured)):
            if value is not None or name == "every":
                refuse_number(f"{name}=", value, least=1, whole=True)
        self.named = dict(plain(model).named_parameters(remove_duplicate=False))
        self.scalings, self.every, self.sweeps = tuple(scalings), every, sweeps
        self.captured = captured
        self._kind = kind
        #: the parameters that the optimizer moves, by id
        self.optimized: set[int] = set()
        self._seen: tuple[bool, ...] | None = None
        self._replay = Replay()
        self.slice: Slice | None = None
        self._sweep: UnitSweep | LayerSweep | None = None
        self._watched = watched
        self._far: Tensor | None = None
        ScalingUnits(scalings, self.named)  # refuses at once what is not usable
        self._own = [self.named[n] for n in dict.fromkeys(n for s in scalings for n in s.names)]

    def own(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Choose the scalings again for the parameters in these groups."""
        self.optimized = {id(p) for group in groups for p in group["params"]}
        self._seen = None
        self.refresh()

    def refresh(self) -> None:
        """Choose the scalings whose parameters are all optimized and not frozen."""
        flags = tuple(p.requires_grad for p in self._own)
        if flags == self._seen:
            return
        self._seen = flags
        free = {
            id(p)
            for p, flag in zip(self._own, flags, strict=True)
            if flag and id(p) in self.optimized
        }
        usable = [s for s in self.scalings if all(id(self.named[n]) in free for n in s.names)]
        self.slice = self._sweep = self._far = None
        self._replay = Replay()
        if usable:
            kind = self._kind if isinstance(self._kind, str) else self._kind(usable)
            self.slice = make_slice(kind, usable, self.named)
            whole = all(prod(part.shape) == 1 for part in self.slice.units.parts)
            kind_of_sweep = LayerSweep if whole else UnitSweep
            self._sweep = kind_of_sweep(self.slice, self.named)
            if self.captured is not None and self.captured % self.period:
                self._refuse_graph(self.captured)

    @torch.no_grad()
    def retract_(self, followers: Followers) -> Retraction | None:
        """Retract to round-off from any distance, followers included."""
        if self.slice is None:
            return None
        done = self.slice.retract_()
        t = torch.cat(done.scales)
        for part in self.slice.units.parts:
            for target, power in followers.get(part.name, ()):
                moved = times_exp(target.to(t.dtype), power * part.log_factor(t))
                target.copy_(moved.to(target.dtype))
        return done

    @property
    def orthogonal(self) -> bool:
        """Whether the slice is orthogonal to orbits, so that gradients of a loss are tangent."""
        return not isinstance(self._sweep, LayerSweep) or self._sweep.orthogonal

    @property
    def period(self) -> int:
        """The number of steps after which the pattern of retractions repeats."""
        turns = self._sweep.turns if self._sweep is not None and self.sweeps is None else 1
        return self.every * turns

    def due(self, steps: int) -> bool:
        """Whether a step with this number, from 1, is followed by a retraction."""
        if self._sweep is None:
            return False
        # what a graph holds is replayed as it is, whatever the number of the step
        if self.captured is None and self.period > 1 and recording(self._own[0]):
            self._refuse_graph(1)
        return steps % self.every == 0

    def _refuse_graph(self, steps: int) -> NoReturn:
        raise PullbackError(
            f"A graph of {steps} step{'s' if steps > 1 else ''} would leave retractions out",
            f"steps differ, and come around after {self.period}: a replay does always the same",
            f"Record {self.period} steps, or a multiple, and say so: captured={self.period}; or "
            "make them all alike: every=1, sweeps=1",
        )

    def run(self, steps: int, followers: Followers) -> Tensor | None:
        """Retract after a step, by sweeps; where they are watched, the log-scales (U,)."""
        sweep = self._sweep
        if sweep is None or self.slice is None:
            return None
        if self._watched and self._far is None:
            first = self.named[self.slice.units.names[0]]
            self._far = torch.zeros(self.slice.units.total, dtype=wide(first), device=first.device)
        far = self._far.zero_() if self._far is not None else None
        turns = (
            [(steps // self.every - 1) % sweep.turns]
            if self.sweeps is None
            else [None] * self.sweeps
        )
        moved = [self.named[n] for n in self.slice.units.names]
        moved += [target for found in followers.values() for target, _ in found]
        moved += [] if far is None else [far]
        for turn in turns:
            self._replay.run(turn, moved, lambda turn=turn: sweep.run(turn, followers, far))
        return far
