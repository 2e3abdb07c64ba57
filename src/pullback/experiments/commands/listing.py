"""What there is to solve and to run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ... import pde
from ..._core.errors import PullbackError
from .. import registry
from ..framework import store
from ..framework.experiment import Experiment
from ..framework.progress import clocked
from .pace import expected
from .record import described, parameters

_WIDE = 120  # characters, from which on columns leave room for sentences


def setups(width: int) -> RenderableType:
    """The set-ups that `solve` knows, for a terminal of this width."""
    rows: list[tuple[str, str, str, str]] = []
    for name in pde.SETUPS:
        found = pde.setup(name)
        network, slabs = found.network(0), found.options.get("slabs", 1)
        words = f"{slabs} × {described(network)}" if slabs > 1 else described(network)
        equation = getattr(found.problem, "equation", "")
        rows += [(name, equation, words, f"{slabs * parameters(network):,}")]
    if width < _WIDE:
        below = ((n, [], f"{e}; {net}, {p} parameters") for n, e, net, p in rows)
        return _blocks("set-up", below)
    table = _bare("name", "equation", "network")
    table.add_column("parameters", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def experiments(out: Path, width: int) -> RenderableType:
    """The experiments that `run` knows; seconds and verdicts where the folder holds results."""
    rows: list[tuple[str, str, str, str, str]] = []
    for experiment in map(registry.find, registry.names()):
        authors, year, _ = experiment.paper.partition(")")  # "Author (2000", and a title behind
        of = f"{authors}{year}, {experiment.figure}"
        rows += [(experiment.name, of, experiment.claim, *known(experiment, out))]
    if width < _WIDE:
        return _blocks("experiment", ((n, [t, f], f"{of}: {c}") for n, of, c, t, f in rows))
    table = _bare("experiment")
    table.add_column("of", max_width=38)
    table.add_column("claim")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("found", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def known(experiment: Experiment, out: Path) -> tuple[str, str]:
    """How long the full run took here, else the quick one or may take, and what it found."""
    for quick in (False, True):
        path = out / f"{experiment.stem(quick)}.json"
        if not path.exists():
            continue
        try:
            took, word = _told(store.read(path))
        except (PullbackError, AttributeError, TypeError, ValueError, ArithmeticError):
            return "–", "unreadable"
        return f"{took}{' (quick)' if quick and took != '–' else ''}", word
    soon = expected(experiment.name)
    return "–" if soon is None else f"about {clocked(soon)} (quick)", ""


def _told(state: dict[str, Any]) -> tuple[str, str]:
    took = [run["took"] for run in state["runs"] if run["took"] is not None]
    done, total = state["summary"].get("items") or (0, 1)
    verdict = state["summary"].get("verdict") or {}
    word = "unfinished" if done < total else verdict.get("outcome", "")
    return clocked(sum(took)) if took else "–", str(word)


def _blocks(heading: str, rows: Iterable[tuple[str, list[str], str]]) -> Group:
    """(name, what is known, sentence) as a line and a paragraph each."""
    parts: list[RenderableType] = [Text(f"{heading}s", style="bold underline")]
    for name, known, words in rows:
        told = ", ".join(word for word in known if word not in ("", "–"))
        parts += [Text.assemble((name, "bold"), f"   {told}".rstrip())]
        parts += [Padding(Text(words), (0, 0, 0, 3))]
    return Group(*parts)


def _bare(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column(first, style="bold", no_wrap=True)
    for column in others:
        table.add_column(column, no_wrap=True)
    return table
