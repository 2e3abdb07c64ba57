"""What K-FAC sends, counted by the library."""

from __future__ import annotations

from .numbers import Rows, record

RULES = {
    "natural": "natural, no clip",
    "natural, kl_clip": "natural",
    "eigenbasis": "eigenbasis",
    "spectral": "spectral",
}
MODELS = {"ResNet-50": "resnet50", "GPT-2": "gpt2"}


def _find_row(model: str, rule: str, processes: int) -> dict[str, float]:
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
        counts = [_find_row(model, rule, 8) for rule in RULES]
        gradients = counts[0]["gradients"]
        cells = [f"{r['total'] / 1e6:.1f} MB ({r['total'] / gradients:.1%})" for r in counts]
        rows.append([model, f"{gradients / 1e6:.1f} MB", *cells])
    return rows
