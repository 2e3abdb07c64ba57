"""One way to define a benchmark, to run it and to record what it found.

    pullback bench                             # the benchmarks, with a line about each
    pullback bench exact --device cuda         # run one; --help shows its options

A benchmark is a module of this folder with a docstring and a function `main(arguments)`. It parses
its arguments by `make_parser` and keeps its results in a `Record`: a JSON file that is written
after every result, so that a run which was interrupted goes on where it stopped. Tables of the
documentation are drawn from the records (`python -m benchmarks.table`).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .timing import environment

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"


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
        """A record of results that depend on the machine alone."""
        about = {"environment": environment(torch.device(device))}
        return cls(path, about, resume=resume)

    def __contains__(self, name: str) -> bool:
        return name in self.results

    def put(self, name: str, result: Any) -> None:
        """Keep a result, and write the file."""
        self.results[name] = result
        self.write()

    def write(self, **more: Any) -> None:
        """Write the file, with further entries beside the results."""
        if self.path is None:
            return
        record = {**self._about, self._key: self.results, **more}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=1, ensure_ascii=False)
        self.path.write_text(text + "\n", "utf-8")


def write_results(path: Path, device: torch.device, results: Sequence[Any]) -> None:
    """Write a list of results that are found at once."""
    record = {"environment": environment(device), "results": results}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's docstring, as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def use_tensor_cores(device: torch.device) -> None:
    """On a GPU multiply float32 matrices as TF32; on a CPU exactly."""
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    torch.backends.cudnn.allow_tf32 = True


def list_benchmarks() -> dict[str, str]:
    """Return the names of all benchmarks with the first lines of their docstrings."""
    summaries: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in functions and not path.stem.startswith("_"):
            docstring = ast.get_docstring(tree) or ""
            summaries[path.stem.replace("_", "-")] = docstring.partition("\n")[0]
    return summaries


def run_benchmark(name: str, arguments: Sequence[str] = ()) -> None:
    """Run a benchmark by name; the name is one of `list_benchmarks`."""
    module = importlib.import_module(f"{__package__}.{name.replace('-', '_')}")
    module.main(arguments)
