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
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch

from pullback import PullbackError
from pullback._core.errors import describe_nearest_names
from pullback.cli import files
from pullback.cli.environment import require_device

from .checkout import RESULTS
from .timing import describe_machine

__all__ = [
    "RESULTS", "Record", "exit_if_failed", "find_default_device", "make_parser", "parse_count",
    "parse_device", "parse_rate", "parse_seconds", "refuse_unknown_names", "use_tensor_cores",
    "write_record", "write_results",
]  # fmt: skip


class Record:
    """Results by name in a JSON file, under what they depend on.

    Args:
        path: where they are written; None for nowhere.
        about: the environment and other facts on which results depend. Results on record under
            the same facts stay; under others they are dropped.
        key: the entry of the file that holds the results.
        resume: whether to keep what is on record; False starts anew.
        environment: what `framework.environment` says of new results, which are mappings. The file
            lists environments as those of experiments do, and every result has the number of its
            own: results of several commits may stand in one file. Those of older files have none.
    """

    def __init__(
        self,
        path: Path | None,
        about: Mapping[str, Any],
        *,
        key: str = "results",
        resume: bool = True,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self._about = dict(about)
        self._key = key
        self._environment = environment
        self._environments: list[Mapping[str, Any]] = []
        self.results: dict[str, Any] = {}
        if resume and path is not None and path.exists():
            saved = json.loads(path.read_text("utf-8"))
            if all(saved.get(name) == value for name, value in self._about.items()):
                self.results = saved.get(key, {})
                self._environments = saved.get("environments", [])

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
        if self._environment is not None:
            if self._environment not in self._environments:
                self._environments.append(self._environment)
            result = {**result, "environment": self._environments.index(self._environment)}
        self.results[name] = result
        self.write()

    def write(self, **more: Any) -> None:
        """Write the file, with further entries beside the results."""
        if self.path is None:
            return
        head = dict(self._about)
        if self._environments:
            head["environments"] = self._environments
        write_record(self.path, {**head, self._key: self.results, **more})


def write_results(path: Path, device: torch.device, results: Sequence[Any]) -> None:
    """Write a list of results that are found at once."""
    write_record(path, {"environment": describe_machine(device), "results": results})


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON; the old file stays until the new one is complete."""
    files.write_text(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def make_parser(file: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the benchmark in this file; its help is the benchmark's docstring.

    Usage lines name `pullback bench NAME`, where argparse by itself knows `pullback` alone.
    """
    name = Path(file).stem.replace("_", "-")
    return argparse.ArgumentParser(
        prog=f"pullback bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_count(text: str) -> int:
    """Return the whole number ≥ 1 that an option of a command line says."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def parse_rate(text: str) -> float:
    """Return the learning rate, finite and ≥ 0, that an option of a command line says."""
    try:
        rate = float(text)
    except ValueError:
        rate = inf
    if not 0 <= rate < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no learning rate, a number from 0 on")
    return rate


def parse_seconds(text: str) -> float:
    """Return the seconds, more than 0, that an option of a command line says."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def parse_device(text: str) -> str:
    """Return the device that an option of a command line names; raise if it does not work."""
    return str(require_device(text))


def refuse_unknown_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise for the first name that is not known, before anything runs."""
    known_names = list(known)
    for name in names:
        if name not in known_names:
            raise PullbackError(
                f"There is no {kind} {name!r}",
                describe_nearest_names(name, known_names),
                f"Use one of: {'; '.join(known_names)}",
            )


def exit_if_failed(failures: int, count: int, counted: str = "runs") -> None:
    """End the command with status 1 and a line that says how many of the runs failed, if any."""
    if failures:
        print(f"{failures} of {count} {counted} failed", file=sys.stderr)
        raise SystemExit(1)


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
