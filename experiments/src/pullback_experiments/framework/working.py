"""One item at work: its random numbers, its threads, its seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .experiment import Context, Item, Paused
from .plain import Record


def worked(item: Item, context: Context) -> tuple[Record, float]:
    """The record, from random numbers that depend on the seed alone, and the seconds it took.

    Seconds before a pause count; they are kept beside the checkpoint.
    """
    begun, before = time.monotonic(), _before(context.place)
    try:
        devices = [context.device] if context.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(context.seed)
            record = dict(item.work(context))
    except Paused:
        spent = before + time.monotonic() - begun
        (context.folder() / "seconds").write_text(f"{spent:.4f}")
        raise
    return record, before + time.monotonic() - begun


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads of the CPU while it lasts; None for torch's own."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _before(place: Path) -> float:
    """Seconds that a paused item had already taken."""
    try:
        return float((place / "seconds").read_text())
    except (OSError, ValueError):
        return 0.0
