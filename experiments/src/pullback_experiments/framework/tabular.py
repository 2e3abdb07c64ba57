"""A table that a terminal, a web page and a file can all show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

#: what a table shows in one place
Cell = str | int | float | None


@dataclass(frozen=True)
class Table:
    """Rows under a heading; the first column names the row.

    Attributes:
        columns: their names.
        rows: one cell for each column; numbers are written with three digits.
        title: above it.
        text: how many columns from the left hold words and are set flush left.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    text: int = 1

    def lines(self) -> list[list[str]]:
        """The cells as they are shown.

        >>> Table(["net", "loss"], [["a", 0.00012345], ["b", None]]).lines()
        [['a', '0.000123'], ['b', '–']]
        """
        return [[shown(cell) for cell in row] for row in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """For a terminal: where a cell would be cut off, rows stand one below the other."""
        table = self.rich()
        drawn = console.render_lines(table, options)
        cut = "".join(segment.text for line in drawn for segment in line).count("…")
        words = [self.title, *self.columns, *(cell for line in self.lines() for cell in line)]
        if cut == "".join(words).count("…"):
            yield table
            return
        if self.title:
            yield Text(self.title, style="italic")
        for first, *others in self.lines():
            named = zip(self.columns[1:], others, strict=True)
            yield Text(f"{self.columns[0]} {first}", style="bold")
            yield Padding(Text("; ".join(f"{name}: {cell}" for name, cell in named)), (0, 0, 0, 3))

    def rich(self) -> RichTable:
        """Columns and rules, at any width."""
        # as texts, since brackets in a string would be markup
        table = RichTable(title=Text(self.title) if self.title else None, title_justify="left")
        for column, name in enumerate(self.columns):
            words = column < self.text
            table.add_column(Text(name), justify="left" if words else "right", no_wrap=column == 0)
        for line in self.lines():
            table.add_row(*(Text(cell) for cell in line))
        return table

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, to save."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": self.lines(),
            "text": self.text,
        }


def shown(cell: Cell) -> str:
    """A cell in a few characters."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.3g}"
    return str(cell)
