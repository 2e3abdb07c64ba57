"""What commands share: their options, the terminal, refusals, plain tables."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .._core.errors import PullbackError

RESULTS = Path("results")
Out = Annotated[Path, typer.Option(help="Folder of results.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]


def console() -> Console:
    """Rich's; wide enough for a table where the output is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 140)


def forgiving() -> None:
    """Write "?" for a character that the output's encoding lacks, instead of breaking off."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


@contextmanager
def refusing() -> Iterator[None]:
    """A request that cannot be met ends with its message and status 1, without a traceback."""
    try:
        yield
    except (PullbackError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None


def facts(rows: Mapping[str, str]) -> Table:
    """Names and what is known of them, one below the other."""
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def columns(first: str, *others: str, heading: str = "") -> Table:
    """An empty table without rules; the first column names the row."""
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0), title=heading or None)
    table.title_justify, table.title_style = "left", "bold underline"
    table.add_column(first, style="bold", no_wrap=True)
    for column in others:
        table.add_column(column, no_wrap=True)
    return table
