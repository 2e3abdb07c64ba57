"""Support vectors, section 3: all samples for NGD as soon as D > N, for EGD only far beyond."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pullback.linear import logistic_natural_gradient

from ..framework.check import Check, make_checks
from ..framework.curves import Chart
from ..framework.experiment import Context, Item
from ..framework.records import Record
from ..framework.store import Results
from ..framework.tabular import Table
from . import figures
from .common import DTYPE, Repeated, angle, generator, normal
from .solutions import l2_max_margin

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Support(Repeated):
    """The share of samples with the smallest margin, N fixed, D growing; y is random.

    Attributes:
        samples: N.
        ratios: D/N.
    """

    samples: int = 50
    ratios: Sequence[float] = (1.02, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 40)

    def config(self, quick: bool) -> dict[str, Any]:
        if quick:
            return {"samples": 20, "ratios": list(self.ratios[::3])}
        return {"samples": self.samples, "ratios": list(self.ratios)}

    def items(self, quick: bool) -> list[Item]:
        config = self.config(quick)
        return [
            Item((f"D/N={r:g}",), partial(_shares, config["samples"], r)) for r in config["ratios"]
        ]

    def line(self, record: Record) -> str:
        return f"{100 * record['margin']:.0f}% and {100 * record['natural']:.0f}%"

    def judge(self, results: Results) -> list[Check]:
        config = self.config(results.quick)
        n = config["samples"]
        ratios = config["ratios"]
        natural = min(min(_values(results, r, "natural")) for r in ratios)
        near = max(max(_values(results, r, "margin")) for r in ratios if r <= 1.5)
        far = min(_mean(_values(results, r, "margin")) for r in ratios if r > 3 * log(n))
        least = max(max(_values(results, r, "angle")) for r in ratios)
        claims = [
            (
                "NGD makes every sample a support vector as soon as D > N",
                natural == 1,
                f"at least {100 * natural:.0f}%",
            ),
            ("NGD goes to least squares", least < 0.1, f"at most {least:.1g}° from it"),
            ("the ℓ2 margin, EGD's limit, has fewer there", near < 1, f"at most {100 * near:.0f}%"),
            (
                "the difference disappears for D well above N log N",
                far > 0.98,
                f"on average at least {100 * far:.1f}% for D > 3 N log N",
            ),
        ]
        return make_checks(claims, (True,) * 4)

    def curves(self, results: Results) -> list[Chart]:
        return figures.support(results, self.config(results.quick)["ratios"])

    def tables(self, results: Results) -> list[Table]:
        rows = []
        for ratio in self.config(results.quick)["ratios"]:
            margin = 100 * _mean(_values(results, ratio, "margin"))
            natural = 100 * _mean(_values(results, ratio, "natural"))
            rows.append([f"{ratio:g}", margin, natural])
        title = f"Support vectors, percent of samples, means over {len(results.seeds)} seeds"
        return [Table(["D/N", "ℓ2 margin", "NGD"], rows, title)]

    def draw(self, results: Results) -> dict[str, Figure]:
        from ..framework import plots

        config = self.config(results.quick)
        n = config["samples"]
        ratios = config["ratios"]
        figure = plots.make_figure(6.4, 4.2, f"Support vectors of N = {n} samples")
        axes = figure.subplots()
        for color, what, name in (
            (plots.PALETTE[1], "margin", "ℓ2 margin (EGD)"),
            (plots.PALETTE[0], "natural", "NGD = least squares"),
        ):
            shares = np.array([_values(results, r, what) for r in ratios])  # (ratios, seeds)
            xs = [ratios] * len(results.seeds)
            plots.plot_band(axes, xs, (100 * shares.T).tolist(), color, name)
        axes.axvline(log(n), color=plots.INK, lw=0.7)
        axes.text(log(n), 22, " D = N log N", color=plots.INK, size=8)
        plots.format_axes(axes, logy=False)
        axes.set_ylim(0, 105)
        axes.legend(frameon=False, loc="lower right")
        plots.label(axes, "D / N", "samples that are support vectors, %")
        return {"": figure}


def _shares(samples: int, ratio: float, context: Context) -> Record:
    """Return the shares of samples of least margin, by ℓ2 margin and by NGD after 400 steps."""
    source = generator(context.seed)
    dim = round(ratio * samples)
    x = normal((samples, dim), source, context.device)
    y = normal((samples,), source, context.device).sign()
    beta = torch.zeros(dim, dtype=DTYPE, device=context.device)
    for _ in range(400):
        beta = beta - logistic_natural_gradient(x, y, beta)
    u = y * (x @ beta)
    squares = x.T @ torch.linalg.solve(x @ x.T, y)
    return {
        "margin": len(l2_max_margin(x, y).support) / samples,
        "natural": float((u < u.min() * (1 + 1e-6)).double().mean()),
        "angle": angle(beta, squares),
    }


def _values(results: Results, ratio: float, entry: str) -> list[float]:
    """Return an entry of the records at a ratio D/N, seed by seed."""
    return [record[entry] for record in results.of(f"D/N={ratio:g}")]


def _mean(values: Any) -> float:
    return float(torch.tensor(list(values), dtype=DTYPE).mean())
