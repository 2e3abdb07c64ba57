"""What there is to run, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text
from torch import nn

from pullback import PullbackError
from pullback.cli.terminal import make_table

from .. import registry
from ..framework import store
from ..framework.experiment import Experiment
from ..framework.progress import format_duration


def experiments(out: Path, width: int, least_table_width: int = 120) -> RenderableType:
    """The experiments that `run` knows; seconds and verdicts where the folder holds results.

    Args:
        least_table_width: characters from which on columns leave room for sentences.
    """
    heading = "experiments: pullback run NAME"
    rows: list[tuple[str, str, str, str, str]] = []
    for experiment in map(registry.find, registry.names()):
        authors, year, _ = experiment.paper.partition(")")  # "Author (2000", and a title behind
        of = f"{authors}{year}, {experiment.figure}"
        rows += [(experiment.name, of, experiment.claim, *describe_results(experiment, out))]
    if width < least_table_width:
        return paragraphs(heading, ((n, [t, f], f"{of}: {c}") for n, of, c, t, f in rows))
    table = make_table("name", heading=heading)
    table.add_column("of", max_width=38)
    table.add_column("claim")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("found", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def paragraphs(heading: str, rows: Iterable[tuple[str, list[str], str]]) -> Group:
    """Return (name, status, sentence) as a line and a paragraph each, for narrow terminals."""
    lines: list[RenderableType] = [Text(heading, style="bold underline")]
    for name, known, words in rows:
        facts = ", ".join(word for word in known if word not in ("", "–"))
        lines += [Text.assemble((name, "bold"), f"   {facts}".rstrip())]
        lines += [Padding(Text(words), (0, 0, 0, 3))]
    return Group(*lines)


def describe_results(experiment: Experiment, out: Path) -> tuple[str, str]:
    """How long the full run took here, else the quick one or may take, and what it found."""
    for quick in (False, True):
        path = out / f"{experiment.stem(quick)}.json"
        if not path.exists():
            continue
        try:
            took, word = _read_outcome(store.read(path))
        except (PullbackError, AttributeError, TypeError, ValueError, ArithmeticError):
            return "–", "unreadable"
        if quick and took != "–":
            took = f"{took} (quick)"
        return took, word
    soon = expected(experiment.name)
    if soon is None:
        return "–", ""
    return f"about {format_duration(soon)} (quick)", ""


def _read_outcome(state: dict[str, Any]) -> tuple[str, str]:
    took = [run["took"] for run in state["runs"] if run["took"] is not None]
    finished, total = state["summary"].get("items") or (0, 1)
    verdict = state["summary"].get("verdict") or {}
    if finished < total:
        word = "unfinished"
    else:
        word = verdict.get("outcome", "")
    if not took:
        return "–", str(word)
    return format_duration(sum(took)), str(word)


#: seconds that the quick versions took on one core of another machine
QUICK: dict[str, float] = {
    "kerekes-2022-figure2": 9,
    "kerekes-2022-figure3": 1.0,
    "kerekes-2022-figure4": 10,
    "kerekes-2022-figure5": 14,
    "kerekes-2022-figure6": 4,
    "kerekes-2022-theorems": 15,
    "kerekes-2022-support": 1.3,
    "bai-2024-projection": 2,
    "bai-2024-slices-figure2": 47,
    "bai-2024-slices-rescaled": 10,
    "bai-2024-sobolev-cifar10": 16,
    "bai-2024-sobolev-cifar100": 16,
    "bai-2024-sobolev-digits": 26,
    "van-oostrum-2023-examples": 1.6,
    "invariance-audit": 40,
    "luk-grosse-2018": 22,
    "demo": 6,
    "kfac-autoencoder": 46,
    "kfac-convnet": 67,
    "kfac-vgg": 29,
    "kfac-shakespeare": 42,
    "race-text": 60,
    "race-text-large": 50,
    "race-text-largest": 50,
    "race-text-short": 50,
    "race-images": 120,
    "vision-recipe": 8,
    "pde-benchmarks": 69,
    "influence-mnist": 11,
    "influence-cifar": 60,
    "influence-text": 30,
    "influence-scale": 16,
    "laplace-uci": 10,
    "laplace-rotation": 60,
    "pde-honesty": 20,
    "pde-quasi-newton": 5,
    "pde-stuck": 40,
    "pde-unseen-seeds": 20,
    "vmc-spins": 25,
    "yin-2024-shallow": 10,
    "yin-2024-deep": 22,
    "yin-2024-poisson": 24,
}


def expected(name: str) -> float | None:
    """Return the approximate seconds of an experiment's quick version."""
    if name in QUICK:
        return QUICK[name] * _measure_slowdown()
    return None


@lru_cache(maxsize=1)
def _measure_slowdown() -> float:
    """How many times longer a short piece of work takes here: the best of three."""

    def once() -> float:
        start = time.perf_counter()
        _do_reference_work()
        return time.perf_counter() - start

    seconds_there = 0.037  # of `_do_reference_work`, where the times above were taken
    return min(once() for _ in range(3)) / seconds_there


def _do_reference_work() -> None:
    """Do a few steps of a small network and some linear algebra, as quick versions do."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10)).double()
        x = torch.randn(64, 20).double()
        eye = torch.eye(200).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for _ in range(40):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        torch.linalg.cholesky(eye + 1e-3 * eye @ eye)
