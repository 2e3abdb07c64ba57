"""A table that a terminal, a web page and a file can all show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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
        return [list(map(format_cell, row)) for row in self.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a table for a terminal; one that is too wide is written row below row."""
        table = self.rich()
        drawn = console.render_lines(table, options)
        cut = "".join(segment.text for segment in chain.from_iterable(drawn)).count("…")
        words = [self.title, *self.columns, *chain.from_iterable(self.lines())]
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
        """Return columns and rules, at any width."""
        # as texts, since brackets in a string would be markup
        table = RichTable(title_justify="left")
        if self.title:
            table.title = Text(self.title)
        for column, name in enumerate(self.columns):
            justify = "right"
            if column < self.text:
                justify = "left"
            table.add_column(Text(name), justify=justify, no_wrap=column == 0)
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


def count_of(number: int, noun: str) -> str:
    """Return a number of things in words.

    >>> count_of(1, "seed"), count_of(3, "seed")
    ('1 seed', '3 seeds')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def format_cell(cell: Cell) -> str:
    """Return a cell in a few characters."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:.3g}"
    return str(cell)
