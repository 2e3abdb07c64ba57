"""What there is to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import RenderableType

from pullback import PullbackError
from pullback.cli.terminal import WIDE, columns, paragraphs

from .. import registry
from ..framework import store
from ..framework.experiment import Experiment
from ..framework.progress import clocked
from .pace import expected


def experiments(out: Path, width: int) -> RenderableType:
    """The experiments that `run` knows; seconds and verdicts where the folder holds results."""
    rows: list[tuple[str, str, str, str, str]] = []
    for experiment in map(registry.find, registry.names()):
        authors, year, _ = experiment.paper.partition(")")  # "Author (2000", and a title behind
        of = f"{authors}{year}, {experiment.figure}"
        rows += [(experiment.name, of, experiment.claim, *known(experiment, out))]
    if width < WIDE:
        return paragraphs("experiments", ((n, [t, f], f"{of}: {c}") for n, of, c, t, f in rows))
    table = columns("experiment")
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
