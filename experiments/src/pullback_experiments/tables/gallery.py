"""What the programs of the PDE gallery found."""

from __future__ import annotations

from .numbers import Rows, record, small


def pde_gallery() -> Rows:
    """Every program of the gallery."""
    head = ["", "parameters", "CPU s", "error", "estimated", "verdict"]
    rows = [head]
    for name, program in record("pde-gallery")["gallery"].items():
        row = [f"[{program['title']}](#{name})", str(program["parameters"])]
        row += [f"{program['cpu_seconds']:.0f}", small(program["error"])]
        rows.append([*row, small(program["estimated"], 0), program["verdict"]])
    return rows
