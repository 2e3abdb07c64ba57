"""The experiment: every network and its twin, trained by every method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .checks import Found, claims
from .methods import GROUPS, INVARIANT, METHODS, TIKHONOV, UNDAMPED, Method
from .nets import EXHIBITS, NETS, Net
from .run import STEPS, Record, run
from .store import Store

PAPER = "Luk and Grosse (2018), A Coordinate-Free Construction of Scalable Natural Gradient"
_QUICK_STEPS, _QUICK_SEEDS = 3, 2


@dataclass(frozen=True)
class Experiment:
    """Networks and twins side by side.

    Attributes:
        paper, figure, claim: what it repeats.
        nets: on which all methods are compared.
        exhibits: on which only K-FAC runs, undamped and invariantly damped, in two variants each.
    """

    paper: str = PAPER
    figure: str = "Theorems 2.1, 4.2, 5.2"
    claim: str = "K-FAC trains a network and its affinely reparametrized twin alike"
    nets: Sequence[Net] = field(default=NETS)
    exhibits: Sequence[Net] = field(default=EXHIBITS)

    def run(self, quick: bool, seeds: Sequence[int], out: Path, console: Console) -> bool:
        """Run everything, write record and figure; whether the checks are as recorded.

        Quick is three steps of the first two seeds.
        """
        steps = _QUICK_STEPS if quick else STEPS
        seeds = list(seeds)[:_QUICK_SEEDS] if quick else list(seeds)
        stem = "luk-grosse-2018" + ("-quick" if quick else "")
        store = Store(out / f"{stem}.json", self.config(steps))
        for seed in seeds:
            if self._fill(store, seed, steps):
                console.print(f"seed {seed}: done")
        found: dict[tuple[str, str], list[Record]] = {}
        for net, method in self._work():
            runs = [store.runs[net.name, method.name, seed] for seed in seeds]
            found.setdefault((net.name, method.group), []).extend(runs)
        console.print(main_table(found, self.nets))
        console.print(exhibit_table(found, self.exhibits))
        checks = claims(found)
        for check in checks:
            console.print(str(check), soft_wrap=True)
        store.save(checks)
        from .figure import draw  # matplotlib is slow to import

        path = draw(found, self.nets, out / f"{stem}.png")
        console.print(f"Figure: {path}", soft_wrap=True)
        return all(check.holds == check.recorded for check in checks)

    def config(self, steps: int) -> dict[str, Any]:
        """Everything that results depend on."""
        return {
            "steps": steps,
            "nets": {n.name: n.about for n in (*self.nets, *self.exhibits)},
            "methods": {m.name: m.about for m in METHODS},
        }

    def _fill(self, store: Store, seed: int, steps: int) -> bool:
        """Do what this seed lacks; whether it lacked anything."""
        missing = [w for w in self._work() if (w[0].name, w[1].name, seed) not in store.runs]
        with _one_thread():
            for net, method in missing:
                store.runs[net.name, method.name, seed] = run(net.make(seed), method, steps)
        if missing:
            store.save()
        return bool(missing)

    def _work(self) -> Iterator[tuple[Net, Method]]:
        for net in self.nets:
            yield from ((net, method) for method in METHODS)
        for net in self.exhibits:
            yield from ((net, method) for method in METHODS if method.plain)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: the matrices are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main_table(found: Found, nets: Sequence[Net]) -> Table:
    """The largest mismatch over steps, seeds and variants, and the worst condition."""
    table = Table(title="Largest mismatch of network and twin", title_justify="left")
    table.add_column("network", no_wrap=True)
    for column in (*GROUPS, "condition"):
        table.add_column(column, justify="right")
    for net in nets:
        worst = [f"{max(r.worst for r in found[net.name, g]):.0e}" for g in GROUPS]
        table.add_row(net.name, *worst, f"{_condition(found, net):.0e}")
    return table


def exhibit_table(found: Found, nets: Sequence[Net]) -> Table:
    """Where theory says no, or yes by a hair."""
    table = Table(title="At the edges of the theorems", title_justify="left")
    table.add_column("pair", no_wrap=True)
    table.add_column("what is special")
    for column in ("before", UNDAMPED, INVARIANT):
        table.add_column(column, justify="right")
    for net in nets:
        before = max(r.mismatch[0] for r in found[net.name, UNDAMPED])
        worst = [max(r.worst for r in found[net.name, g]) for g in (UNDAMPED, INVARIANT)]
        table.add_row(net.name, net.about, f"{before:.0e}", *(f"{w:.0e}" for w in worst))
    return table


def _condition(found: Found, net: Net) -> float:
    groups = (UNDAMPED, INVARIANT, TIKHONOV)
    return max(r.condition or 1.0 for g in groups for r in found[net.name, g])
