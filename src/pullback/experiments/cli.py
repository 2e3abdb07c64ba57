"""The command `pullback`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from .. import pde
from .._core.errors import PullbackError
from . import kfac_invariance, yin_2024
from .record import described, parameters, report, summary, write
from .yin_2024 import seed_range

#: what `run` knows, by paper and name
EXPERIMENTS = {
    **{f"yin-2024-{name}": e for name, e in yin_2024.EXPERIMENTS.items()},
    **kfac_invariance.EXPERIMENTS,
}

app = typer.Typer(
    help="Natural gradients for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def _group() -> None:
    """Natural gradients for PyTorch."""


@contextmanager
def refusing() -> Iterator[None]:
    """A request that cannot be met ends with its message and status 1, without a traceback."""
    try:
        yield
    except PullbackError as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None


@app.command("list")
def list_all() -> None:
    """Show the set-ups that `solve` knows and the experiments of `run`."""
    console = _console()
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("name", style="bold", no_wrap=True)
    for column in ("equation", "network"):
        table.add_column(column, no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    for name in pde.SETUPS:
        found = pde.setup(name)
        network = found.network(0)
        equation = found.problem.equation
        table.add_row(name, equation, described(network), f"{parameters(network):,}")
    console.print(table)
    papers = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    papers.add_column("experiment", style="bold", no_wrap=True)
    papers.add_column("of", no_wrap=True)
    papers.add_column("claim")
    for name, experiment in EXPERIMENTS.items():
        papers.add_row(name, f"{experiment.paper}, {experiment.figure}", experiment.claim)
    console.print()
    console.print(papers)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="An experiment; `pullback list` shows them.")],
    quick: Annotated[bool, typer.Option("--quick", help="A few steps of everything.")] = False,
    seeds: Annotated[str, typer.Option(help="Such as 0-9 or 0,3,5.")] = "0-9",
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path("results"),
) -> None:
    """Repeat a paper's experiment; finished seeds are kept, and the status says if it agrees."""
    with refusing():
        if name not in EXPERIMENTS:
            raise PullbackError(
                f"There is no experiment {name!r}",
                f"there are {', '.join(EXPERIMENTS)}",
                "Name one of these",
            )
        folder(out)
        agrees = EXPERIMENTS[name].run(quick, seed_range(seeds), out, _console())
    raise typer.Exit(0 if agrees else 1)


@app.command()
def solve(
    name: Annotated[str, typer.Argument(help="A set-up; `pullback list` shows them.")],
    seed: Annotated[int, typer.Option(help="Of the network and the points.")] = 0,
    steps: Annotated[int | None, typer.Option(min=0, help="At most so many.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after so long.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path("results"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over.")] = False,
) -> None:
    """Solve a set-up: a table here; NAME.png, NAME.json and a checkpoint in the folder.

    Called again, the run goes on from its checkpoint.
    """
    with refusing():
        _solve(name, seed, steps, seconds, device, out, fresh)


def _solve(
    name: str,
    seed: int,
    steps: int | None,
    seconds: float | None,
    device: str,
    out: Path,
    fresh: bool,
) -> None:
    found, console = pde.setup(name), _console()
    usable(device)
    folder(out)
    kept = out / f"{name}-seed{seed}.pt"
    if fresh:
        for file in checkpoints(kept):
            file.unlink()
    elif checkpoints(kept):
        console.print(f"Going on from {kept} (--fresh starts over)", highlight=False)
    given = {"steps": steps, "budget": seconds}
    options = {**found.options, **{k: v for k, v in given.items() if v is not None}}
    try:
        solution = found.solve(seed, **options, device=device, checkpoint=kept)
    except KeyboardInterrupt:
        where = f"The run so far is in {kept}; the same command goes on from there."
        left = where if checkpoints(kept) else "Nothing was saved yet."
        console.print(f"Interrupted. {left}", highlight=False)
        raise typer.Exit(130) from None
    console.print(summary(solution))
    picture, record = out / f"{name}.png", out / f"{name}.json"
    solution.plot(picture)
    write(record, report(name, found, seed, device, options, solution))
    console.print(f"Written: {picture}, {record}, {kept}", highlight=False, soft_wrap=True)


def checkpoints(path: Path) -> list[Path]:
    """The files of a run: slabs of time have one each, with their number behind the name."""
    return [p for p in path.parent.glob(f"{path.name}*") if p.suffix != ".part"]


def folder(out: Path) -> None:
    """Make the folder, or refuse what cannot be one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(f"nothing can be written to {out}")
    except OSError as error:
        raise PullbackError(
            f"{out} cannot be the folder of the results", str(error), "Pass another --out"
        ) from None


def usable(device: str) -> None:
    """Refuse a device that torch cannot use here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise PullbackError(
            f"The device {device!r} cannot be used", why, "Use --device cpu"
        ) from None


def _console() -> Console:
    """Rich's; wide enough for a table where the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 140)


def main() -> None:
    """Run the command."""
    app()


if __name__ == "__main__":
    main()
