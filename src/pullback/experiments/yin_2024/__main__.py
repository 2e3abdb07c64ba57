"""`python -m pullback.experiments.yin_2024`: the paper's three figures over ten seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from . import EXPERIMENTS, run, seed_range


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(EXPERIMENTS)}; all by default.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A few steps of everything.")] = False,
    seeds: Annotated[str, typer.Option(help="Such as 0-9 or 0,3,5.")] = "0-9",
    out: Annotated[Path, typer.Option(help="Folder of results and figures.")] = Path("yin-2024"),
) -> None:
    """Run what is not done yet; exit with 1 where a claim does not hold."""
    console = Console(highlight=False)
    if not run(quick, seed_range(seeds), out, console, names=names):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
