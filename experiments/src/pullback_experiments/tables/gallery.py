"""What the programs of the PDE gallery found, and how others fared on five of them."""

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


def pde_race() -> Rows:
    """Errors after the same CPU seconds."""
    gallery = record("pde-gallery")
    methods = list(next(iter(gallery["race"].values())))
    titles = {"Gauss–Newton": "Natural gradient"}
    rows = [["", "CPU s", *(titles.get(method, method) for method in methods)]]
    for key, by in gallery["race"].items():
        name, seconds = key.split("/")
        errors = [small(by[method]["error"]) for method in methods]
        rows.append([gallery["gallery"][name]["title"], seconds, *errors])
    return rows
