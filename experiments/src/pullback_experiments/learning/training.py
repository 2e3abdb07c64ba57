"""The one training loop of the experiments with networks: epochs over tensors on the device.

    options = TrainingOptions(epochs=20, batch=128)
    record = fit(model, optimizer, data, F.cross_entropy, context, options)

Records loss and accuracy on both sets, and seconds of training alone, after every epoch; the
order of batches depends on the context's seed; a checkpoint makes the run go on to the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback import PullbackError
from pullback.cli import files

from ..framework.experiment import Context, Paused
from ..framework.records import Record
from ..framework.timing import synchronize
from . import schedules
from .cuda_graph import capture_step
from .data import DataSet

#: (outputs, targets) ↦ a mean over the samples
Measure = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class CheckpointIntervals:
    """How often a run is saved."""

    #: seconds between two checkpoints, at least
    least_seconds: float = 30.0
    #: times what saving takes, at least: factors of K-FAC are large
    times_saving: float = 20.0

    def choose(self, saving_seconds: float) -> float:
        """Return the seconds until the next checkpoint."""
        return max(self.least_seconds, self.times_saving * saving_seconds)


INTERVALS = CheckpointIntervals()


@dataclass(frozen=True)
class TrainingOptions:
    """How a network is trained, and what is recorded after every epoch.

    Attributes:
        epochs: of training.
        batch: samples of a step; None is all samples. An incomplete last batch is left out.
        schedule: factor on each group's rate, set before every step.
        measures: what else to record, by name; accuracy where none is given and y has classes.
        augment: (images, generator) ↦ images.
        half: a dtype for autocast.
        evaluated: at most so many training samples are measured on, and at a time.
        graphed: on CUDA, capture gradients in a graph, and at constant rates the step with them:
            for optimizers that neither take a closure nor, then, look at values from the host.
    """

    epochs: int
    batch: int | None = None
    schedule: schedules.Schedule = schedules.constant
    measures: Mapping[str, Measure] | None = None
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    half: torch.dtype | None = None
    evaluated: int = 10_000
    graphed: bool = False

    def choose_measures(self, loss: Measure, data: DataSet) -> dict[str, Measure]:
        """Return the functions that are evaluated on both sets, by name; the loss is the first."""
        if self.measures is not None:
            return {"loss": loss, **self.measures}
        if data.y.is_floating_point():
            return {"loss": loss}
        return {"loss": loss, "accuracy": accuracy}


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    data: DataSet,
    loss: Measure,
    context: Context,
    options: TrainingOptions,
) -> Record:
    """Train; the record has one entry per epoch in every list, entry 0 before the first.

    Args:
        model, data: on the context's device.
        optimizer: any; it is given a closure, so those with line searches work too.
        loss: what is trained, a mean over the batch.
        context: device, seed and folder of the run.
        options: epochs, batches, rates and precision.

    Raises:
        Paused: the time is over; called again it goes on from the checkpoint.
    """
    _refuse_nothing_to_do(options, data)
    measures = options.choose_measures(loss, data)
    evaluation = Evaluation(model, data, measures, options.evaluated, options.half)
    loop = _Loop(model, optimizer, data, loss, context, options)
    if not loop.restore():
        loop.note(evaluation, 0.0)
    while loop.epoch < options.epochs and not loop.lost:
        start = time.monotonic()
        seconds = loop.advance()
        loop.note(evaluation, seconds)
        loop.save(time.monotonic() - start)
        status = f"epoch {loop.epoch}, loss {loop.record['train loss'][-1]:.3g}"
        context.watch(loop.epoch / options.epochs, status)
    return loop.record


def _refuse_nothing_to_do(options: TrainingOptions, data: DataSet) -> None:
    has_batches = options.batch is None or options.batch >= 1
    if options.epochs < 0 or not has_batches or not len(data.x):
        raise PullbackError(
            "There is nothing to train on",
            f"got {options.epochs} epochs, batches of {options.batch}, {len(data.x)} samples",
            "Pass at least one of each",
        )


@dataclass
class _Loop:
    """The state of a run."""

    model: nn.Module
    optimizer: Optimizer
    data: DataSet
    loss: Measure
    context: Context
    options: TrainingOptions
    epoch: int = 0
    step: int = 0
    record: Record = field(default_factory=dict)

    def __post_init__(self) -> None:
        samples = len(self.data.x)
        self._size = min(self.options.batch or samples, samples)
        self._count = samples // self._size
        self._draw = torch.Generator(self.data.x.device).manual_seed(self.context.seed)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._saved = time.monotonic()
        self._wait = INTERVALS.least_seconds
        self._replayed = None
        if self.options.graphed and self.context.device.type == "cuda":
            fixed = self.options.schedule is schedules.constant
            self._replayed = capture_step(self.optimizer, self._gradient, fixed=fixed)

    @property
    def lost(self) -> bool:
        """Return True if the loss is no longer a number."""
        return not math.isfinite(self.record["train loss"][-1])

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        x = self.data.x
        y = self.data.y
        if self._count == 1 and self._size == len(x):
            chosen = [slice(None)]
        else:
            order = torch.randperm(len(x), generator=self._draw, device=x.device)
            chosen = order[: self._count * self._size].split(self._size)
        for index in chosen:
            images = x[index]
            if self.options.augment is not None:
                images = self.options.augment(images, self._draw)
            yield images, y[index]

    def advance(self) -> float:
        """Train for one epoch and return its seconds."""
        self.model.train()
        total = self.options.epochs * self._count
        synchronize(self.context.device)
        start = time.perf_counter()
        for x, y in self._batches():
            factor = self.options.schedule(self.step / total)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
            if self._replayed is None:
                self.optimizer.step(partial(self._gradient, x, y))
            else:
                self._replayed(x, y)
            self.step += 1
        synchronize(self.context.device)
        self.epoch += 1
        return time.perf_counter() - start

    def _gradient(self, x: Tensor, y: Tensor) -> Any:  # torch's closures return a float
        self.optimizer.zero_grad()
        with autocast(x, self.options.half):
            value = self.loss(self.model(x), y)
        value.backward()
        return value

    def note(self, evaluation: Evaluation, seconds: float) -> None:
        """Record the measures after an epoch."""
        before = self.record.get("seconds", [0.0])[-1]
        rate = self.optimizer.param_groups[0]["lr"]
        entry = {"epoch": self.epoch, "step": self.step, "seconds": before + seconds, "lr": rate}
        for name, value in {**entry, **evaluation.now()}.items():
            self.record.setdefault(name, []).append(value)

    # --- checkpoints -------------------------------------------------------------------------

    def save(self, last: float) -> None:
        """Write a checkpoint from time to time; if the next epoch would not fit, write one and
        pause.
        """
        over = self.epoch < self.options.epochs and self.context.left < last
        if not over and time.monotonic() - self._saved < self._wait:
            return
        start = time.monotonic()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "record": self.record,
            "at": [self.epoch, self.step],
            "rates": self._rates,
            "draw": self._draw.get_state(),
            "random": torch.get_rng_state(),
        }
        if self.context.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.context.device)
        path = self.context.folder() / "training.pt"
        files.write(path, lambda file: torch.save(state, file))
        self._saved = time.monotonic()
        self._wait = INTERVALS.choose(self._saved - start)
        if over:
            raise Paused

    def restore(self) -> bool:
        """Load the checkpoint; return False if there is none."""
        path = self.context.checkpoint_folder / "training.pt"
        if not path.exists():
            return False
        try:
            state = torch.load(path, map_location=self.context.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch, self.step = state["at"]
            self.record = state["record"]
            self._rates = state["rates"]
            self._draw.set_state(state["draw"].cpu())
            torch.set_rng_state(state["random"].cpu())
            if "cuda" in state and self.context.device.type == "cuda":
                torch.cuda.set_rng_state(state["cuda"].cpu(), self.context.device)
        except Exception as error:
            raise PullbackError(
                f"The checkpoint {path} cannot be used", str(error), "Delete it to start over"
            ) from error
        return True


def accuracy(z: Tensor, y: Tensor) -> Tensor:
    """Return the share of samples, or of their positions, whose largest output is the right one."""
    return (z.argmax(-1) == y).double().mean()


@dataclass(frozen=True)
class Evaluation:
    """Means over both sets in evaluation mode; not on the clock."""

    model: nn.Module
    data: DataSet
    measures: Mapping[str, Measure]
    most: int
    half: torch.dtype | None = None

    @torch.no_grad()
    def now(self) -> dict[str, float]:
        """Return every measure on the training and the test set."""
        training = self.model.training
        self.model.eval()
        d = self.data
        most = self.most
        sets = {"train": (d.x[:most], d.y[:most]), "test": (d.test_x, d.test_y)}
        measured = {}
        for side, (x, y) in sets.items():
            if len(x):
                measured |= {f"{side} {k}": v for k, v in self._means(x, y).items()}
        self.model.train(training)
        return measured

    def _means(self, x: Tensor, y: Tensor) -> dict[str, float]:
        sums = dict.fromkeys(self.measures, 0.0)
        for batch, truth in zip(x.split(self.most), y.split(self.most), strict=True):
            with autocast(batch, self.half):
                z = self.model(batch)
            if self.half:
                z = z.float()
            for name, measure in self.measures.items():
                sums[name] += float(measure(z, truth)) * len(batch)
        return {name: total / len(x) for name, total in sums.items()}


def autocast(x: Tensor, half: torch.dtype | None) -> Any:
    """Return a context of lower precision, if a dtype is given."""
    if half:
        return torch.autocast(x.device.type, half)
    return nullcontext()


@contextmanager
def tensor_cores(device: torch.device) -> Iterator[None]:
    """On CUDA, form products of float32 matrices in TF32 inside."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
