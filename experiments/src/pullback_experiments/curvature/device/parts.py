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

from ..sizes import Sizes


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
