"""The figure of an audit: a grid of verdicts, or one optimizer's mismatch against step size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .table import Audit, Row, shown
from .verdict import Verdict

INK = "#333333"
# Okabe and Ito's palette, which color-blind readers can tell apart
_LINES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_FILL = {
    Verdict.EXACT: "#9FD8C4",
    Verdict.FIRST_ORDER: "#BBDDF3",
    Verdict.NOT: "#F6C9AE",
    Verdict.UNDECIDED: "#EEEEEE",
}
_LEAST = 1e-17

Cells = Mapping[tuple[str, str], tuple[Verdict, str] | None]


def figure(audit: Audit, path: str | Path) -> Path:
    """Write the figure and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    (grid(cells(audit)) if len(audit.optimizers) > 1 else curves(audit)).savefig(path)
    return path


def cells(audit: Audit) -> Cells:
    """Verdict and mismatch of each optimizer and transformation; None where it was left out."""
    rows = {(r.optimizer, r.transformation): r for r in audit.rows}
    keys = [(o, t) for o in audit.optimizers for t in audit.transformations]
    return {key: _told(rows[key]) if key in rows else None for key in keys}


def _told(row: Row) -> tuple[Verdict, str]:
    return row.verdict, shown(row.batch.direction.mismatch)


def grid(found: Cells) -> Figure:
    """One cell per optimizer and transformation: the verdict, and the mismatch at η → 0."""
    rows, columns = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    out = _new(2.4 + 1.45 * len(columns), 1.6 + 0.55 * len(rows))
    axes = out.subplots()
    for (row, column), told in found.items():
        _cell(axes, rows.index(row), columns.index(column), told)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([j + 0.5 for j in range(len(columns))])
    axes.set_xticklabels([t.replace(" ", "\n", 1) for t in columns], size=9)
    axes.set_yticks([i + 0.5 for i in range(len(rows))])
    axes.set_yticklabels(rows, size=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    note = "verdict on the model, and the update's relative mismatch as η → 0"
    axes.set_xlabel(note, color=INK, size=9)
    return out


def _new(width: float, height: float) -> Figure:
    out = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(out)
    return out


def _cell(axes: Axes, i: int, j: int, told: tuple[Verdict, str] | None) -> None:
    color = "#FFFFFF" if told is None else _FILL[told[0]]
    axes.add_patch(Rectangle((j, i), 1, 1, facecolor=color, edgecolor="white", lw=2))
    if told is None:
        axes.text(j + 0.5, i + 0.5, "–", ha="center", va="center", color=INK, size=9)
        return
    axes.text(j + 0.5, i + 0.36, str(told[0]), ha="center", va="center", color=INK, size=9)
    axes.text(j + 0.5, i + 0.72, told[1], ha="center", va="center", color=INK, size=7.5)


def curves(audit: Audit) -> Figure:
    """m(η) per transformation, dotted the round-off that the worst of them has."""
    out = _new(7.0, 4.4)
    axes = out.subplots()
    for number, row in enumerate(audit.rows):
        color, m = _LINES[number % len(_LINES)], row.batch
        label = f"{row.transformation}: {row.verdict}"
        values = [min(max(v, _LEAST), 1e3) for v in (s.mismatch for s in m.steps)]
        axes.plot(m.sizes, values, "o-", color=color, lw=1.7, ms=4, label=label)
    if audit.rows:
        sizes = audit.rows[0].batch.sizes
        off = [max(r.batch.steps[i].roundoff for r in audit.rows) for i in range(len(sizes))]
        axes.plot(sizes, off, ":", color=INK, lw=1, label="round-off")
        axes.legend(frameon=False, fontsize=8)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("step size, in units of the lr", color=INK)
    axes.set_ylabel("relative mismatch of the update", color=INK)
    axes.set_title(", ".join(audit.optimizers), loc="left", color=INK, weight="bold", size=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, which="both")
    return out
