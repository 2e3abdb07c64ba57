"""What K-FAC sends, counted by the library, and what that takes on paper."""

from __future__ import annotations

import math

from .numbers import Rows, record

RULES = {
    "natural": "natural, no clip",
    "natural, kl_clip": "natural",
    "eigenbasis": "eigenbasis",
    "spectral": "spectral",
}
MODELS = {"ResNet-50": "resnet50", "GPT-2": "gpt2"}
BANDWIDTH = 40e9  # bytes a second that one GPU sends: 400 Gb/s at four fifths
LATENCY = 10e-6  # seconds a hop; a call is up and down a tree
BACKWARD = 2 / 3  # of a first-order step


def _counted(model: str, rule: str, processes: int) -> dict[str, float]:
    """Every inverse is held by all."""
    return next(
        row
        for row in record("traffic")["results"]
        if (row["model"], row["rule"]) == (model, rule)
        and row["processes"] == row["workers"] == processes
    )


def traffic() -> Rows:
    """Bytes per step of one of eight processes."""
    rows = [["", "gradients (DDP)", *RULES.values()]]
    for model in MODELS:
        counts = [_counted(model, rule, 8) for rule in RULES]
        gradients = counts[0]["gradients"]
        cells = [f"{r['total'] / 1e6:.1f} MB ({r['total'] / gradients:.1%})" for r in counts]
        rows.append([model, f"{gradients / 1e6:.1f} MB", *cells])
    return rows


def _exposed(row: dict[str, float], rule: str, processes: int, backward: float) -> float:
    """Seconds per step that are not behind a backward pass of this length.

    Of the natural and the spectral rule the sums of statistics are under way when it begins, and
    share the link with the gradients. Averages are summed before inversions, when it has ended.
    """
    if rule != "eigenbasis":
        room = max(0.0, backward - row["gradients"] / BANDWIDTH)
    else:
        room = 0.0
    averages = row["inversion"] - row["statistics"]
    sums = max(0.0, row["statistics"] / BANDWIDTH - room) / row["statistics_every"]
    sums += averages / BANDWIDTH / row["inversion_every"]
    calls = row["calls"] * 2 * math.log2(processes) * LATENCY
    return sums + row["inverses"] / BANDWIDTH + calls


def on_paper() -> Rows:
    """Milliseconds of K-FAC's own messages, and their share of the step of one H200."""
    rows = [["", "GPUs", *RULES.values()]]
    for model, key in MODELS.items():
        measured = record("kfac-cuda")["results"][key]
        baseline = measured["milliseconds"]["baseline"] / 1e3
        ratio = measured["ratio"]
        for processes in (8, 64, 256, 1024):
            cells = []
            for rule in RULES:
                row = _counted(model, rule, processes)
                spent = _exposed(row, rule, processes, BACKWARD * baseline)
                step = baseline * ratio["10/100" if "natural" in rule else f"{rule}, run"]
                cells.append(f"{1e3 * spent:.1f} ms, {spent / step:.1%}")
            rows.append([model, str(processes), *cells])
    return rows


def in_collectives() -> Rows:
    """Milliseconds of a step that two processes on CPUs spend in K-FAC's own collectives."""
    names = {"convnet": "convnet, 16 images each", "decoder": "decoder, 4 × 32 tokens each"}
    rules = {"natural, kl_clip": "natural", "eigenbasis": "eigenbasis", "spectral": "spectral"}
    by_case = {(row["model"], row["rule"]): row for row in record("traffic-time")["results"]}
    rows = [["", "SGD", *rules.values()]]
    for model, name in names.items():
        of_model = [by_case[model, rule] for rule in rules]
        step = f"{1e3 * by_case[model, 'SGD']['seconds']:.0f} ms"
        cells = [(1e3 * r["collectives"], 1e3 * r["seconds"], r["share"]) for r in of_model]
        rows.append([name, step, *(f"{a:.1f} of {b:.0f} ms, {share:.1%}" for a, b, share in cells)])
    return rows
