"""Figure 3: how the entries of W₁⋯W_L move when a single one, in the middle, is observed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pullback.kernels import natural_ntk, ntk
from pullback.linear import DeepMatrix

from ..framework import plots
from ..framework.check import Check, make_checks
from ..framework.experiment import Context, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from .common import DTYPE, Repeated

if TYPE_CHECKING:
    from matplotlib.figure import Figure


METHODS = ("EGF", "EGD", "NGF", "NGD")
LONG = "NGD, 10 lr"


@dataclass(frozen=True, kw_only=True)
class Kernels(Repeated):
    """Column (5, 5) of the tangent kernels, and of what steps of finite size do.

    Attributes:
        size: of the matrix.
        depths: L.
        lr: of the steps; the observed entry is off by one.
    """

    size: int = 11
    depths: Sequence[int] = (1, 2, 3, 4)
    lr: float = 0.01

    def config(self, quick: bool) -> dict[str, Any]:
        depths = list(self.depths)
        if quick:
            depths = depths[:3]
        return {"size": self.size, "depths": depths, "lr": self.lr}

    def items(self, quick: bool) -> list[Item]:
        config = self.config(quick)
        return [
            Item((f"L={depth}",), partial(_moves, depth, self.size, self.lr))
            for depth in config["depths"]
        ]

    def line(self, record: Record) -> str:
        return ", ".join(f"{m} {record['elsewhere'][m]:.1e}" for m in METHODS) + " elsewhere"

    def judge(self, results: Results) -> list[Check]:
        depths = self.config(results.quick)["depths"]
        deep = depths[1:]

        def values(method: str, depths: Sequence[int], name: str) -> list[float]:
            records = chain.from_iterable(results.of(f"L={depth}") for depth in depths)
            return [record[name][method] for record in records]

        def worst(method: str, depths: Sequence[int], name: str = "elsewhere") -> float:
            return max(values(method, depths, name))

        def least(method: str, depths: Sequence[int], name: str) -> float:
            return min(values(method, depths, name))

        direct = worst("EGF", [1])
        ngf = worst("NGF", depths)
        ngd = worst("NGD", deep)
        typical = max(_median(results, "NGD", d) for d in deep)
        off = worst("EGD", [2], "off the cross")
        on = least("EGF", [2], "elsewhere")
        off = max(off, worst("EGF", [2], "off the cross"))
        spread = least("EGF", depths[2:], "off the cross")
        egd = least("EGD", deep, "elsewhere")
        return make_checks(
            [
                ("without depth EGF moves the observed entry only", direct == 0, f"{direct:.0e}"),
                (
                    "EGF and EGD with L = 2 move the row and the column, and nothing else",
                    off < 1e-14 and on > 0.05,
                    f"in the cross at least {on:.2f} of the entry's own move, off it {off:.0e}",
                ),
                ("deeper, EGF moves everything", spread > 1e-3, f"off the cross {spread:.2g}"),
                ("NGF moves the observed entry only, at all depths", ngf < 1e-8, f"{ngf:.0e}"),
                (
                    "so does NGD, nearly",
                    typical < 0.05 and typical < 0.2 * egd,
                    f"elsewhere {typical:.2g} of its own move, the worst median of a depth; the "
                    f"worst seed {ngd:.2g}, EGD at least {egd:.2g}",
                ),
            ],
            (True,) * 5,
        )

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for depth in self.config(results.quick)["depths"]:
            medians = [_median(results, m, depth) for m in (*METHODS, LONG)]
            rows.append([f"L = {depth}", *medians])
        title = f"Largest move elsewhere, per move of the entry; medians of {len(results.seeds)}"
        return [Table(["depth", *METHODS, LONG], rows, title)]

    def draw(self, results: Results) -> dict[str, Figure]:
        return {"": draw(results, self.config(results.quick)["depths"])}


def _median(results: Results, method: str, depth: int) -> float:
    distances = sorted(r["elsewhere"][method] for r in results.of(f"L={depth}"))
    return distances[len(distances) // 2]


def _moves(depth: int, size: int, lr: float, context: Context) -> Record:
    """dβ per unit of −∂L/∂β at the middle, for all four, scaled to 1 there."""
    model = DeepMatrix([size] * (depth + 1), seed=context.seed, dtype=DTYPE, device=context.device)
    at = torch.arange(size, device=context.device)
    rows = at.repeat_interleave(size)
    columns = at.repeat(size)
    middle = size // 2
    center = middle * size + middle
    one = rows[center : center + 1], columns[center : center + 1]
    moves = {
        "EGF": ntk(model, (rows, columns), one, layout="trace").view(size, size),
        "NGF": natural_ntk(model, (rows, columns), layout="trace")[:, center].view(size, size),
    }
    pull = torch.zeros(size, size, dtype=DTYPE, device=context.device)
    pull[middle, middle] = 1.0  # −∂L/∂β of an entry that is too small by one
    euclidean = torch.autograd.grad((model.beta * pull).sum(), list(model.factors))
    moves["EGD"] = _compute_difference_quotient(model, euclidean, lr)
    moves["NGD"] = _compute_difference_quotient(model, model.natural_gradient(pull), lr)
    moves[LONG] = _compute_difference_quotient(model, model.natural_gradient(pull), 10 * lr)
    record: Record = {"depth": depth, "elsewhere": {}, "off the cross": {}}
    for name in (*METHODS, LONG):
        kernel = moves[name].detach() / moves[name][middle, middle].detach()
        remainder = kernel.abs().clone()
        remainder[middle, middle] = 0.0
        record["elsewhere"][name] = float(remainder.max())
        remainder[middle] = 0.0
        remainder[:, middle] = 0.0
        record["off the cross"][name] = float(remainder.max())
        record[name] = kernel.cpu()
    return record


def _compute_difference_quotient(model: DeepMatrix, moves: Sequence[Tensor], lr: float) -> Tensor:
    """(β(w + lr·x) − β(w))/lr."""
    after = [w.detach() + lr * x for w, x in zip(model.factors, moves, strict=True)]
    return (DeepMatrix.of(after).beta - model.beta).detach() / lr


def draw(results: Results, depths: Sequence[int]) -> Figure:
    """Draw the moves of the first seed, blue or red by sign, relative to the observed entry's."""
    title = "How entries of an 11×11 product of L factors move when the middle one is observed"
    figure = plots.make_figure(9.6, 2.3 * len(depths) + 0.5, title)
    grid = figure.subplots(len(depths), 4, squeeze=False)
    image = None
    for row, depth in zip(grid, depths, strict=True):
        record = results.of(f"L={depth}")[0]
        for axes, method in zip(row, METHODS, strict=True):
            image = axes.imshow(record[method], cmap="RdBu_r", vmin=-1, vmax=1)
            axes.set(xticks=[], yticks=[])
            largest = record["elsewhere"][method]
            if largest < 1e-12:
                words = "0"
            else:
                words = f"{largest:.1g}"
            plots.label(axes, x=f"elsewhere ≤ {words}")
        plots.label(row[0], y=f"L = {depth}")
    for axes, method in zip(grid[0], METHODS, strict=True):
        plots.label(axes, title=method)
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.6, label="move / move of the middle entry")
    return figure
