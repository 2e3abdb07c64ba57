"""A whole experiment in a few lines, for the tests of the framework."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console

from pullback_experiments import Check, Context, Experiment, Item, Results, Table
from pullback_experiments.framework import plots


def quiet() -> Console:
    return Console(file=io.StringIO(), width=150)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@dataclass(frozen=True, kw_only=True)
class Small(Experiment):
    """w ← (1 − rate) w from a random start: the loss ½w² falls faster at a higher rate."""

    name: str = "small"
    paper: str = "Nobody (2000), On <b>decay</b>"
    figure: str = "Figure 1"
    claim: str = "a higher rate is faster & better"
    seeds: Sequence[int] = (0, 1, 2)
    rates: Sequence[float] = (0.1, 0.5)
    steps: int = 4
    once: bool = False
    bad: bool = False
    drawn: bool = False
    before: Callable[[str, Context], None] = lambda key, context: None
    finished: list[tuple[str, int]] = field(default_factory=list)

    def config(self, quick: bool) -> dict[str, Any]:
        steps = 2 if quick else self.steps
        return {"steps": steps, "methods": {f"lr {r}": {"rate": r} for r in self.rates}}

    def items(self, quick: bool) -> list[Item]:
        steps = self.config(quick)["steps"]
        out = [Item((f"lr {r}",), partial(self._descend, r, steps)) for r in self.rates]
        if self.once:
            return [Item(("reference",), self._reference, once=True), *out]
        return out

    def _reference(self, context: Context) -> Mapping[str, Any]:
        self.finished.append(("reference", context.seed))
        return {"start": 3.0}

    def _descend(self, rate: float, steps: int, context: Context) -> Mapping[str, Any]:
        self.before(f"lr {rate}", context)
        self.finished.append((f"lr {rate}", context.seed))
        w = torch.rand(1, device=context.device, dtype=torch.float64) + 1
        if self.once:
            w = w * context.finished.once("reference")["start"]
        path = [w.item()]
        for _ in range(steps):
            path.append(path[-1] * (1 - rate))
        loss = [0.5 * v * v for v in path]
        return {"step": list(range(steps + 1)), "loss": loss, "path": torch.tensor(path)}

    def judge(self, results: Results) -> list[Check]:
        slow, fast = (
            max(r["loss"][-1] for r in results.of(f"lr {rate}"))
            for rate in (self.rates[0], self.rates[-1])
        )
        holds = (fast < slow) != self.bad
        return [Check("faster <i>indeed</i>", holds, f"{fast:.1e} & {slow:.1e}")]

    def draw(self, results: Results) -> dict[str, Any]:
        if not self.drawn:  # most tests need none, and they take time
            return {}
        figure = plots.make_figure(4, 3, "Decay")
        axes = figure.subplots()
        for color, rate in zip(plots.PALETTE, self.rates, strict=False):
            runs = results.of(f"lr {rate}")
            plots.plot_band(
                axes, [r["step"] for r in runs], [r["loss"] for r in runs], color, f"{rate}"
            )
        plots.format_axes(axes)
        plots.label(axes, "step", "loss", "all")
        return {"": figure, "again": figure}

    def tables(self, results: Results) -> list[Table]:
        rows = [[f"lr {r}", results.of(f"lr {r}")[0]["loss"][-1]] for r in self.rates]
        return [Table(["<method>", "loss"], rows, "Ends [of] runs")]


def slow(key: str, context: Context) -> None:
    """An item that takes a while."""
    time.sleep(0.05)
