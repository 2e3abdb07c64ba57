"""Options that commands share, the terminal, error messages, and tables without rules."""

from __future__ import annotations

import io
import sys
import warnings
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


def make_console() -> Console:
    """Return rich's console, wide enough for a table where the output is no terminal."""
    if sys.stdout.isatty():
        return Console()
    return Console(width=140)


def replace_unknown_characters() -> None:
    """Write "?" for a character that the output's encoding lacks, instead of breaking off."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def show_plain_warnings() -> None:
    """Print warnings as one line each, without the file and the source line they came from."""

    def show(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        text = f"warning: {message}"
        Console(stderr=True, soft_wrap=True).print(text, style="yellow", markup=False)

    warnings.showwarning = show


@contextmanager
def exit_on_refusal() -> Iterator[None]:
    """Exit with the error's message and status 1, without a traceback, if the body refuses."""
    try:
        yield
    except (PullbackError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(str(error), style="red", markup=False)
        raise typer.Exit(1) from None


def make_fact_table(rows: Mapping[str, str]) -> Table:
    """Return a table of names and values, one below the other."""
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def make_table(first: str, *others: str, heading: str = "") -> Table:
    """Return an empty table without rules; the first column names the row."""
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0), title=heading or None)
    table.title_justify = "left"
    table.title_style = "bold underline"
    table.add_column(first, style="bold", no_wrap=True)
    for column in others:
        table.add_column(column, no_wrap=True)
    return table
