"""What there is to solve and to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from ... import pde
from ..._core.errors import PullbackError
from .. import registry
from ..framework import store
from ..framework.experiment import Experiment
from ..framework.progress import clocked
from .record import described, parameters


def setups() -> Table:
    """The set-ups that `solve` knows."""
    table = _bare("name", "equation", "network")
    table.add_column("parameters", justify="right", no_wrap=True)
    for name in pde.SETUPS:
        found = pde.setup(name)
        network = found.network(0)
        equation = found.problem.equation
        table.add_row(name, equation, described(network), f"{parameters(network):,}")
    return table


def experiments(out: Path) -> Table:
    """The experiments that `run` knows; seconds and verdicts where the folder holds results."""
    table = _bare("experiment")
    table.add_column("of", max_width=38)
    table.add_column("claim")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("found", no_wrap=True)
    for experiment in map(registry.find, registry.names()):
        authors, year, _ = experiment.paper.partition(")")  # "Author (2000", and a title behind
        of = f"{authors}{year}, {experiment.figure}"
        table.add_row(experiment.name, of, experiment.claim, *known(experiment, out))
    return table


def known(experiment: Experiment, out: Path) -> tuple[str, str]:
    """How long the full run took here, else the quick one, and what it found."""
    for quick in (False, True):
        path = out / f"{experiment.stem(quick)}.json"
        if not path.exists():
            continue
        try:
            took, word = _told(store.read(path))
        except (PullbackError, AttributeError, TypeError, ValueError, ArithmeticError):
            return "–", "unreadable"
        return f"{took}{' (quick)' if quick and took != '–' else ''}", word
    return "–", ""


def _told(state: dict[str, Any]) -> tuple[str, str]:
    took = [run["took"] for run in state["runs"] if run["took"] is not None]
    done, total = state["summary"].get("items") or (0, 1)
    verdict = state["summary"].get("verdict") or {}
    word = "unfinished" if done < total else verdict.get("outcome", "")
    return clocked(sum(took)) if took else "–", str(word)


def _bare(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column(first, style="bold", no_wrap=True)
    for column in others:
        table.add_column(column, no_wrap=True)
    return table
