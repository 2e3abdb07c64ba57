"""One run of a race: so many steps on batches that are ready, with the held-out loss on the way.

    record = run(task, "muon", 6e-3, steps=1200, seed=0, device=device)

A seed sets the initial weights and the order of batches, which is the same for every optimizer.
Seconds are those of steps alone: batches lie on the device before the clock starts, and it stops
for evaluations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback import KFAC

from ..framework.records import Record
from ..framework.timing import synchronize
from ..learning import schedules
from ..learning.training import autocast, tensor_cores
from .optimizers import OPTIMIZERS

Batch = tuple[Tensor, Tensor]


class Batches(Protocol):
    """The data of one run, on the device."""

    def of(self, steps: range) -> list[Batch]:
        """Return the batches of these steps."""
        ...

    def held_out(self, size: int) -> Iterator[Batch]:
        """Yield the held-out samples, so many at a time."""
        ...


@dataclass(frozen=True)
class RaceTask:
    """What is trained.

    Attributes:
        title: in the figure.
        model: the network at random weights.
        batches: (steps, seed, device) ↦ the data of a run, and words for its record.
        steps: of a run at full length.
        evaluations: of the held-out loss along a run.
        held_batch: samples of an evaluation at a time.
        held_batches: so many times, or all that there are.
        warm: share of the run in which the rate rises; it falls to zero along a line.
        half: whether CUDA computes in bfloat16 where it may, and float32 products in TF32.
        clip: largest norm of the gradient, or None.
        compiled: whether the network goes through `torch.compile`.
        layout: of weights and inputs.
    """

    title: str
    model: Callable[[], nn.Module]
    batches: Callable[[int, int, torch.device], tuple[Batches, Record]]
    steps: int
    evaluations: int = 24
    held_batch: int = 256
    held_batches: int | None = None
    warm: float = 0.05
    half: bool = True
    clip: float | None = None
    compiled: bool = False
    layout: torch.memory_format = torch.preserve_format

    def count_steps(self, share: float) -> int:
        """Return the steps of a run with this share of them: at least one, no more than the share.

        >>> from pullback_experiments.races.tasks import TASKS
        >>> TASKS["text"].count_steps(0.85)
        680
        """
        return max(1, math.floor(share * self.steps + 1e-9))

    def describe(self) -> Record:
        """What a run depends on beside the network and the data."""
        precision = "float32"
        if self.half:
            precision = "bfloat16 autocast and TF32 on CUDA"
        return {
            "steps": self.steps,
            "evaluations": self.evaluations,
            "warm-up": self.warm,
            "clip": self.clip,
            "compiled": self.compiled,
            "precision": precision,
        }


def run(
    task: RaceTask,
    method: str,
    lr: float,
    *,
    seed: int,
    device: torch.device,
    steps: int | None = None,
    settings: Mapping[str, Any] | None = None,
    watch: Callable[[float, str], None] = lambda share, words: None,
) -> Record:
    """Train once; lists of the record have one entry per evaluation, the first before any step.

    Args:
        task: network, data and schedule.
        method: a name of `OPTIMIZERS`.
        lr: the largest rate of the schedule.
        seed: of weights and order.
        device: where to compute.
        steps: by default the task's; the schedule is stretched to them.
        settings: of the optimizer's constructor, over those of the table.
        watch: (share done, a few words) ↦ nothing.
    """
    steps = steps or task.steps
    batches, about = task.batches(steps, seed, device)
    torch.manual_seed(seed)
    model: Any = task.model()  # whose stub does not know memory_format
    model = model.to(device=device, memory_format=task.layout)
    with ExitStack() as stack:
        if task.half:
            stack.enter_context(tensor_cores(device))
        optimizers = OPTIMIZERS[method](model, lr, settings or {})
        for optimizer in optimizers:
            if isinstance(optimizer, KFAC):
                stack.enter_context(optimizer)  # which ends its hooks
        race = _RaceState(task, model, optimizers, batches, steps, device)
        for share in race.advance():
            watch(share, f"{race.record['held-out loss'][-1]:.4g}")
    record = race.record
    spent = record["seconds"][-1] / max(record["step"][-1], 1)
    settings_of_run = {"method": method, "lr": lr, "steps": steps, "settings": dict(settings or {})}
    return {
        **settings_of_run,
        **about,
        **record,
        "final": record["held-out loss"][-1],
        "ms": 1e3 * spent,
    }


@dataclass
class _RaceState:
    """The state of a run."""

    task: RaceTask
    model: nn.Module
    optimizers: list[Optimizer]
    batches: Batches
    steps: int
    device: torch.device
    record: Record = field(default_factory=lambda: {"step": [], "seconds": [], "held-out loss": []})

    def __post_init__(self) -> None:
        self._half = None
        if self.task.half and self.device.type == "cuda":
            self._half = torch.bfloat16
        self._groups = list(chain.from_iterable(o.param_groups for o in self.optimizers))
        self._rates = [g["lr"] for g in self._groups]
        self._schedule = schedules.add_warmup(schedules.linear, self.task.warm)
        if self.task.compiled:
            self._forward = torch.compile(self.model)
        else:
            self._forward = self.model

    def advance(self) -> Iterator[float]:
        """Train to the end, or until the loss is lost; yield the share done at evaluations."""
        count = min(self.task.evaluations, self.steps)
        ends = [round(self.steps * (i + 1) / count) for i in range(count)]
        steps_done = 0
        seconds = 0.0
        self._note(0, 0.0)
        for end in ends:
            while steps_done < end:
                # a hundred batches are made at a time
                segment = range(steps_done, min(end, steps_done + 100))
                batches = [
                    (x.to(memory_format=self.task.layout), y) for x, y in self.batches.of(segment)
                ]
                seconds += self._train(segment, batches)
                steps_done = segment.stop
            self._note(steps_done, seconds)
            yield steps_done / self.steps
            if not math.isfinite(self.record["held-out loss"][-1]):
                return

    def _train(self, segment: range, batches: list[Batch]) -> float:
        """Take these steps and return their seconds."""
        self.model.train()
        synchronize(self.device)
        start = time.perf_counter()
        for i, (x, y) in zip(segment, batches, strict=True):
            factor = self._schedule((i + 1) / (self.steps + 1))  # neither end has a rate of zero
            for group, rate in zip(self._groups, self._rates, strict=True):
                group["lr"] = rate * factor
            self._step(x, y)
        synchronize(self.device)
        return time.perf_counter() - start

    def _step(self, x: Tensor, y: Tensor) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with autocast(x, self._half):
            loss = cross_entropy(self._forward(x), y)
        loss.backward()
        if self.task.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        for optimizer in self.optimizers:
            optimizer.step()

    def _note(self, step: int, seconds: float) -> None:
        entry = {"step": step, "seconds": seconds, **self._held_out()}
        for name, value in entry.items():
            self.record.setdefault(name, []).append(value)

    @torch.no_grad()
    def _held_out(self) -> dict[str, float]:
        """Return mean loss and accuracy on held-out samples, in evaluation mode."""
        self.model.eval()
        sums = torch.zeros(2, device=self.device, dtype=torch.float64)
        count = 0
        held_out = self.batches.held_out(self.task.held_batch)
        for x, y in islice(held_out, self.task.held_batches):
            with autocast(x, self._half):
                z = self.model(x)
            right = (z.argmax(-1) == y).double().sum()
            sums += torch.stack([cross_entropy(z, y).double() * y.numel(), right])
            count += y.numel()
        loss, accuracy = (sums / count).tolist()
        return {"held-out loss": loss, "accuracy": accuracy}


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Mean −log likelihood, of images (N, classes) or of all places of texts (N, T, classes)."""
    return F.cross_entropy(z.flatten(0, -2).float(), y.flatten())
