"""Small networks: K-FAC by default and tuned, beside tuned Adam and Muon."""

from __future__ import annotations

from .numbers import Rows, record


def small_tasks() -> Rows:
    """Held-out losses; the default's is bold where it is below tuned Adam's at equal steps."""
    columns = ["kfac, tuned", "adam, tuned", "adam, equal time", "muon, tuned"]
    head = ["task", "`KFAC(model)`", "tuned", "Adam tuned", "in equal time", "Muon tuned", "a step"]
    rows = [head]
    for task in record("small-tasks-cpu")["summary"]:
        default = f"{task['kfac']:.3g}"
        if task["kfac"] < task["adam, tuned"]["loss"]:
            default = f"**{default}**"
        best = [f"{task[column]['loss']:.3g}" for column in columns]
        ratio = task["step over Adam's"]
        rows.append([task["task"], default, *best, f"{ratio:.1f}×"])
    return rows
