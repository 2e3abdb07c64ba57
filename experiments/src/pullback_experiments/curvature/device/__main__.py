"""Influence at scale on one GPU: `python -m pullback_experiments.curvature.device FOLDER`.

It needs torch alone. Every part is a process of its own with a limit of seconds, so that one that
fails or hangs costs itself alone. Numbers are in FOLDER/curvature.json as they come.

    cifar2      linear datamodeling score of ResNet-9 on two classes of CIFAR-10
    resnet9     seconds and memory to fit ResNet-9 and to score 2,000 × 25,000
    gpt2        a decoder of GPT-2 small's size, 1,000 sequences
    text        linear datamodeling score of a small decoder on text
    trak        TRAK with one and with ten networks on the halves of cifar2
    dampings    EK-FAC with eight dampings on the halves of cifar2
    growth      seconds and memory for other numbers of samples and parameters

`cifar2` and `text` choose their settings on retrained networks that the score does not see. The
data are `cifar2.pt` (see `two_classes.save_two_classes`) and `tiny_shakespeare.txt.gz` in the
folder that PULLBACK_DATA names.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..sizes import TINY, Sizes
from .images import score_cifar, score_dampings, score_trak
from .parts import PartContext, Record, describe_environment
from .text import score_text
from .timing import time_decoder, time_growth, time_resnet


@dataclass(frozen=True)
class Part:
    """A piece of work, and the seconds after which it is stopped."""

    work: Callable[[PartContext], None]
    seconds: float


PARTS: dict[str, Part] = {
    "cifar2": Part(score_cifar, 250.0),
    "resnet9": Part(time_resnet, 75.0),
    "gpt2": Part(time_decoder, 110.0),
    "text": Part(score_text, 45.0),
    "trak": Part(score_trak, 45.0),
    "dampings": Part(score_dampings, 30.0),
    "growth": Part(time_growth, 55.0),
}
#: seconds before its end at which a part that still runs writes where it is
TRACE_SECONDS = 3.0


def run_part(name: str, seconds: float, sizes: Sizes, folder: Path) -> None:
    """Run one part; its error, if any, is in its record."""
    faulthandler.dump_traceback_later(max(1.0, seconds - TRACE_SECONDS), exit=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = Record(folder / f"{name}.json", seconds, partial(print, flush=True))
    record.add(environment=describe_environment(sizes, device))
    try:
        PARTS[name].work(PartContext(sizes, device, record, folder))
    except Exception as error:
        record.add(error=f"{type(error).__name__}: {error}")
        raise


def collect_records(folder: Path, names: Sequence[str], notes: dict[str, str]) -> None:
    """Write the numbers of all parts to one file, with a note where a part did not end."""
    numbers: dict[str, Any] = {}
    for name in names:
        path = folder / f"{name}.json"
        if path.exists():
            numbers[name] = json.loads(path.read_text())
            numbers["environment"] = numbers[name].pop("environment")
        if name in notes:
            numbers.setdefault(name, {})["note"] = notes[name]
    (folder / "curvature.json").write_text(json.dumps(numbers, indent=1))


def run_parts(names: Sequence[str], seconds: float, sizes: Sizes, folder: Path) -> None:
    """Run parts one after another until the seconds are over."""
    # the parent never touches the GPU, so that its children may
    processes = multiprocessing.get_context("fork")
    start = time.monotonic()
    notes: dict[str, str] = {}
    for name in names:
        left = seconds - (time.monotonic() - start)
        limit = min(PARTS[name].seconds, left)
        if limit < 5:
            notes[name] = "there was no time left"
            continue
        print(f"== {name}, at most {limit:.0f} s", flush=True)
        process = processes.Process(target=run_part, args=(name, limit, sizes, folder))
        process.start()
        process.join(limit)
        if process.is_alive():
            notes[name] = f"stopped after {limit:.0f} s"
            process.kill()
        process.join()
        collect_records(folder, names, notes)
    collect_records(folder, names, notes)


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description="Influence at scale on one GPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tiny", action="store_true", help="Sizes that take a minute on a CPU.")
    parser.add_argument("--seconds", type=float, default=410.0, help="All parts end after this.")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sizes = TINY if options.tiny else Sizes()
    run_parts(options.parts.split(","), options.seconds, sizes, options.folder)


if __name__ == "__main__":
    main()
