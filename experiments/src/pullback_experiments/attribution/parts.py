"""What the parts of a run on a GPU share: their sizes, a record, and a clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sizes:
    """How large every part is.

    Attributes:
        samples, queries: of the ResNet-9 timing.
        width: of ResNet-9, 64 for the one in print.
        batch: samples that are linearized at once.
        sequences, length, text_queries: of the GPT-2 timing.
        decoder: words, width, layers and heads of that decoder.
        subsets, tuning: halves retrained for the score, and for the choice of settings.
        recipes: how many ways of training ResNet-9 are tried.
        rounds, tuning_rounds: how many networks are trained on each half at most, and on each half
            for the choice of settings.
        side_by_side: how many of them train at the same time on a GPU.
        images, cifar_queries: of two classes of CIFAR-10.
        epoch_factor: multiplies the epochs of ResNet-9's schedules.
        trak_models, trak_dimension: networks and projected gradients of TRAK.
        text_samples, text_length, text_epochs, text_rounds: of the small decoder.
        text_trak_dimension: of TRAK's projected gradients there.
        is_generated: whether images and text are made up.
    """

    samples: int = 25_000
    queries: int = 2_000
    width: int = 64
    batch: int = 500
    sequences: int = 1_000
    length: int = 256
    text_queries: int = 100
    decoder: tuple[int, int, int, int] = (50_257, 768, 12, 12)
    subsets: int = 50
    tuning: int = 16
    recipes: int = 4
    rounds: int = 60
    tuning_rounds: int = 4
    side_by_side: int = 4
    images: int = 5_000
    cifar_queries: int = 500
    epoch_factor: float = 1.0
    trak_models: int = 10
    trak_dimension: int = 2048
    text_samples: int = 2_000
    text_length: int = 64
    text_epochs: int = 10
    text_rounds: int = 4
    text_trak_dimension: int = 512
    is_generated: bool = False


#: as the records have them
FULL = Sizes()
#: for a minute on a CPU
TINY = Sizes(
    samples=64,
    queries=16,
    width=4,
    batch=32,
    sequences=8,
    length=16,
    text_queries=2,
    decoder=(50, 16, 2, 2),
    subsets=4,
    tuning=2,
    recipes=1,
    rounds=2,
    tuning_rounds=1,
    images=200,
    cifar_queries=20,
    epoch_factor=0.1,
    trak_models=2,
    trak_dimension=32,
    text_samples=40,
    text_length=16,
    text_epochs=1,
    text_rounds=2,
    text_trak_dimension=16,
)


class Record:
    """Numbers of one part, written whenever one comes.

    Args:
        path: the file of this part.
        seconds: how long the part may take.
        report: is called with a line for each number that comes.
    """

    def __init__(self, path: Path, seconds: float, report: Callable[[str], object] = print) -> None:
        self._path = path
        self._limit = seconds
        self._report = report
        self._start = time.monotonic()
        self.numbers: dict[str, Any] = {}

    def add(self, **numbers: Any) -> None:
        """Add numbers, write the file and print a line."""
        self.numbers.update(numbers)
        self.numbers["seconds"] = self.seconds
        self._path.write_text(json.dumps(self.numbers))
        self._report(f"{self.seconds:7.1f} s  {self._path.stem}: {json.dumps(numbers)}")

    @property
    def seconds(self) -> float:
        """Return the seconds since the part began."""
        return round(time.monotonic() - self._start, 2)

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the part is stopped."""
        return self._limit - self.seconds


@dataclass(frozen=True)
class PartContext:
    """What a part is given.

    Attributes:
        sizes: how large it is.
        device: where it runs.
        record: its numbers.
        folder: where numbers go, and files that a later part reads.
    """

    sizes: Sizes
    device: torch.device
    record: Record
    folder: Path

    def measure(self, work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        """Return what the work returns, and its seconds and its peak of memory in gigabytes."""
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        result = work()
        if is_cuda:
            torch.cuda.synchronize()
        numbers = {"seconds": round(time.monotonic() - start, 3)}
        if is_cuda:
            numbers["gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        return result, numbers


def describe_environment(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    """Return the names of the device and of torch's version, and the sizes."""
    name = str(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {"device": name, "torch": torch.__version__, "sizes": asdict(sizes)}


def cut_batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of at most `size` samples."""
    return list(zip(x.split(size), y.split(size), strict=True))
