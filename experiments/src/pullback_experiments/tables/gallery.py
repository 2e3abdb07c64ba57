"""What the programs of the PDE gallery found, and how others fared on four of them."""

from __future__ import annotations

from .numbers import Rows, record, small


def pde_gallery() -> Rows:
    """Every program of the gallery."""
    head = ["", "parameters", "CPU s", "error", "estimated", "verdict"]
    return [
        head,
        *(
            [
                f"[{r['title']}](#{name})",
                str(r["parameters"]),
                f"{r['cpu_seconds']:.0f}",
                small(r["error"]),
                "–" if r["estimated"] is None else small(r["estimated"], 0),
                r["verdict"],
            ]
            for name, r in record("pde-gallery")["gallery"].items()
        ),
    ]


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
