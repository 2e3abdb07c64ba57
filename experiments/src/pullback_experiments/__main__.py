"""Run an experiment where the command `pullback` is not installed.

`python -m pullback_experiments NAME FOLDER [WORKERS [SECONDS]]`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pullback import PullbackError

from . import registry
from .framework import executor
from .framework.benchmark import parse_count, parse_seconds


def main(arguments: Sequence[str]) -> int:
    """Run an experiment; return 0 if all checks are as recorded."""
    parser = argparse.ArgumentParser("python -m pullback_experiments", description="Run it whole.")
    parser.add_argument("name", help="an experiment, such as race-text")
    parser.add_argument("folder", type=Path, help="of results")
    parser.add_argument("workers", type=parse_count, nargs="?", default=1, help="processes")
    parser.add_argument(
        "seconds", type=parse_seconds, nargs="?", default=1e9, help="stop after so long"
    )
    asked = parser.parse_args(arguments)
    try:
        outcome = executor.run(
            registry.find(asked.name),
            False,
            out=asked.folder,
            workers=asked.workers,
            seconds=asked.seconds,
            console=Console(),
        )
    except (PullbackError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return outcome.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
