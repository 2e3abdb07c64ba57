"""What a benchmark uses: its record, its options, and the precision of its products.

    pullback bench                             # the benchmarks, with a line about each
    pullback bench exact --device cuda         # run one; --help shows its options

A benchmark is a module of `benchmarks/` with a docstring and a function `main(arguments)`. It
parses its arguments by `make_parser` and keeps its results in a `Record`: a JSON file that is
written after every result, so that a run which was interrupted goes on where it stopped. Tables of
the documentation are drawn from the records (`python -m pullback_experiments.tables`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pullback.cli import files

from .checkout import RESULTS
from .timing import describe_machine

__all__ = [
    "RESULTS", "Record", "find_default_device", "make_parser", "use_tensor_cores", "write_record",
    "write_results",
]  # fmt: skip


class Record:
    """Results by name in a JSON file, under what they depend on.

    Args:
        path: where they are written; None for nowhere.
        about: the environment and other facts on which results depend. Results on record under
            the same facts stay; under others they are dropped.
        key: the entry of the file that holds the results.
        resume: whether to keep what is on record; False starts anew.
    """

    def __init__(
        self,
        path: Path | None,
        about: Mapping[str, Any],
        *,
        key: str = "results",
        resume: bool = True,
    ) -> None:
        self.path = path
        self._about = dict(about)
        self._key = key
        self.results: dict[str, Any] = {}
        if resume and path is not None and path.exists():
            saved = json.loads(path.read_text("utf-8"))
            if all(saved.get(name) == value for name, value in self._about.items()):
                self.results = saved.get(key, {})

    @classmethod
    def on_device(
        cls, path: Path | None, device: torch.device | str, *, resume: bool = True
    ) -> Record:
        """Return a record of results that depend on the machine alone."""
        about = {"environment": describe_machine(torch.device(device))}
        return cls(path, about, resume=resume)

    def __contains__(self, name: str) -> bool:
        return name in self.results

    def put(self, name: str, result: Any) -> None:
        """Add a result and write the file."""
        self.results[name] = result
        self.write()

    def write(self, **more: Any) -> None:
        """Write the file, with further entries beside the results."""
        if self.path is None:
            return
        write_record(self.path, {**self._about, self._key: self.results, **more})


def write_results(path: Path, device: torch.device, results: Sequence[Any]) -> None:
    """Write a list of results that are found at once."""
    write_record(path, {"environment": describe_machine(device), "results": results})


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON; the old file stays until the new one is complete."""
    files.write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the benchmark's docstring."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def find_default_device() -> str:
    """Return "cuda" if there is a GPU, and otherwise "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu"


def use_tensor_cores(device: torch.device) -> None:
    """On a GPU multiply float32 matrices as TF32; on a CPU exactly."""
    precision = "highest"
    if device.type == "cuda":
        precision = "high"
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = True
