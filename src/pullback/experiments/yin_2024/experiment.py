"""An experiment of the paper: its setting, its methods, its claims, and how to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .checks import Check
from .methods import Method
from .problems import Setting
from .runs import run
from .statistics import Summary
from .store import Store

PAPER = "Yin (2024), Natural Gradient Descent with Orthogonal Greedy Approximation"


@dataclass(frozen=True)
class Experiment:
    """One figure of the paper.

    Attributes:
        name: what the command line calls it.
        figure: of the paper.
        claim: what it is said to show, in a sentence.
        setting: problem, network and points.
        methods: each with its number of steps.
        groups: methods that share a row of the figure, by title.
        judge: (summaries by method, p, recorded) ↦ the claims with their numbers.
        recorded: which of them held over seeds 0–9 when this was written.
        paper: where it comes from.
    """

    name: str
    figure: str
    claim: str
    setting: Setting
    methods: Sequence[tuple[Method, int]]
    groups: Mapping[str, Sequence[str]]
    judge: Callable[[dict[str, Summary], int, Sequence[bool]], list[Check]]
    recorded: Sequence[bool]
    paper: str = PAPER

    def run(self, quick: bool, seeds: Sequence[int], out: Path, console: Console) -> bool:
        """Do what is not done yet, write results and figure; whether the checks are as recorded.

        Some claims of the paper do not hold, and the checks know which: what counts is that the
        seeds say so again. Quick is a few steps of everything, whose numbers are not judged.
        """
        store = Store(out / f"{self.stem(quick)}.json", self.config(quick))
        for seed in seeds:
            for method, steps in self.methods:
                if store.has(method.name, seed):
                    continue
                with _one_thread():
                    record = run(self.setting, method, seed, _shortened(steps, quick))
                store.put(method.name, seed, record)
                console.print(
                    f"{self.name}, seed {seed}, {method.name}: {record.steps[-1]} steps in "
                    f"{record.seconds[-1]:.1f} s, loss {record.loss[-1]:.1e}, "
                    f"error {record.error[-1]:.1e}{'' if record.stuck is None else ', stuck'}"
                )
        found = {m.name: Summary(store.of(m.name, list(seeds))) for m, _ in self.methods}
        console.print(self._table(found))
        checks = [] if quick else self.judge(found, self.setting.size, self.recorded)
        for check in checks:
            console.print(str(check), soft_wrap=True)
        store.checks = [vars(check) for check in checks]
        store.save()
        from .figure import draw  # matplotlib is slow to import

        path = draw(self, store, list(seeds), out / f"{self.stem(quick)}.png")
        console.print(f"Figure: {path}", soft_wrap=True)
        return all(check.holds == check.recorded for check in checks)

    def stem(self, quick: bool) -> str:
        """The name of its files."""
        return f"yin-2024-{self.name}" + ("-quick" if quick else "")

    def config(self, quick: bool) -> dict[str, Any]:
        """Everything that results depend on."""
        return {
            "experiment": self.name,
            "problem": self.setting.problem().name,
            "layers": list(self.setting.layers),
            "points": dict(self.setting.points),
            "methods": {
                method.name: {"steps": _shortened(steps, quick), "settings": method.described()}
                for method, steps in self.methods
            },
        }

    def _table(self, found: dict[str, Summary]) -> Table:
        table = Table(title=f"{self.name}: {self.paper}, {self.figure}", title_justify="left")
        table.add_column("method", no_wrap=True)
        for column in ("loss", "error", "best", "worst", "stuck", "ms/step"):
            table.add_column(column, justify="right")
        for name, s in found.items():
            table.add_row(
                name,
                f"{s.loss:.0e}",
                f"{s.error:.0e}",
                f"{min(s.errors):.0e}",
                f"{max(s.errors):.0e}",
                f"{s.stuck}/{len(s)}",
                f"{1e3 * s.per_step:.0f}",
            )
        return table


@contextmanager
def _one_thread() -> Iterator[None]:
    """CPU seconds mean most on one thread, and such small matrices gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shortened(steps: int, quick: bool) -> int:
    return min(steps, 3) if quick else steps
