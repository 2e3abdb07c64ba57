"""Run an experiment where the command `pullback` is not installed.

`python -m pullback_experiments NAME FOLDER [WORKERS [SECONDS]]`
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from . import registry
from .framework import executor


def main(name: str, folder: str, workers: str = "1", seconds: str = "1e9") -> int:
    """Run an experiment; return 0 if all checks are as recorded."""
    outcome = executor.run(
        registry.find(name),
        False,
        out=Path(folder),
        workers=int(workers),
        seconds=float(seconds),
        console=Console(),
    )
    return outcome.status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
