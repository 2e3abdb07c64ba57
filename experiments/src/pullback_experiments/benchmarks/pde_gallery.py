"""The programs of docs/pde-gallery.md, run as they stand there.

    pullback bench pde-gallery [--only NAME ...]
    pullback bench pde-gallery --draw    # the picture again, from the record

Every python fence under a third-level heading of the page is one program. It is executed with the
page's first fence before it, in the order of the page, and leaves `problem`, `network` and
`solution`. Errors are relative L² errors against what the program knows, or against a reference of
this file. Results are kept by name, so that --only adds to what is on record. The solutions on a
grid lie beside the record, in pde-gallery.arrays; the picture is drawn from them.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from scipy.integrate import solve_bvp, solve_ivp
from torch import Tensor, nn

from pullback import pde

from ..framework import plots
from ..framework.benchmark import make_parser, write_record
from ..framework.checkout import REPOSITORY, RESULTS
from ..framework.timing import describe_machine
from ..tables.numbers import small

PAGE = REPOSITORY / "docs" / "pde-gallery.md"
RECORD = RESULTS / "pde-gallery.json"
FIGURE = REPOSITORY / "docs" / "figures" / "pde-gallery.png"
PANELS = RECORD.with_suffix(".arrays")
_PART = re.compile(r"^### (?P<title>.+?)$.*?^```python\n(?P<code>.*?)^```$", re.M | re.S)
Field = Callable[[Tensor], Tensor]
_TRUE = {"eigenvalue": {"lam": 2 * math.pi**2}, "unknown-coefficient": {"k": 0.2}}


@dataclass(frozen=True)
class Program:
    """One program of the page."""

    title: str
    code: str

    @property
    def name(self) -> str:
        """Return the name as it stands in a link to its heading."""
        return re.sub(r"[^\w -]", "", self.title.lower()).replace(" ", "-")

    @property
    def lines(self) -> int:
        """Return the number of lines that are not empty."""
        return sum(bool(line.strip()) for line in self.code.splitlines())

    def run(self, **options: Any) -> dict[str, Any]:
        """Execute the program and return its names; options replace those passed to `solve`."""
        solve = pde.solve

        def solve_with_options(
            problem: pde.Problem, network: nn.Module, **solve_options: Any
        ) -> pde.PDESolution:
            return solve(problem, network, **{**solve_options, "progress": False, **options})

        names: dict[str, Any] = {}
        with patch.object(pde, "solve", solve_with_options):
            exec(f"{_first()}\n{self.code}", names)
        return names


def _first() -> str:
    match = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert match is not None
    return match[1]


def programs() -> dict[str, Program]:
    """Return all programs of the page, by name."""
    programs_of_page = [Program(m["title"], m["code"]) for m in _PART.finditer(PAGE.read_text())]
    return {program.name: program for program in programs_of_page}


# --- what is true ---------------------------------------------------------------------------------


def reaction(solution: Field) -> float:
    """Against cosines in space (a cell-centered grid of 64) and an implicit integrator."""
    n = 64
    x = (np.arange(n) + 0.5) / n
    modes = np.cos(np.pi * np.outer(x, np.arange(n)))
    second = modes @ np.diag(-((np.pi * np.arange(n)) ** 2)) @ np.linalg.inv(modes)

    def rates(t: float, z: np.ndarray) -> np.ndarray:
        u = z[:n]
        v = z[n:]
        return np.concatenate([0.05 * second @ u + u - u**3 - v, 0.1 * second @ v + u - v])

    times = np.linspace(0, 2, 41)
    start = np.concatenate([np.cos(np.pi * x), np.zeros(n)])
    known = solve_ivp(rates, (0, 2), start, "Radau", times, rtol=1e-10, atol=1e-12).y
    points = torch.cartesian_prod(torch.from_numpy(times), torch.from_numpy(x)).flip(1)
    truth = torch.from_numpy(known.reshape(2, n, len(times)).transpose(2, 1, 0).reshape(-1, 2))
    return float((solution(points) - truth).norm() / truth.norm())


def operator(solution: Field) -> float:
    """Against a boundary value solver, for 20 random sources."""
    draws = 2 * torch.rand(20, 2, generator=torch.Generator().manual_seed(1)).double() - 1
    mesh = np.linspace(0, 1, 101)
    values = []
    truth = []
    for a, b in draws.tolist():

        def rates(x: np.ndarray, z: np.ndarray, a: float = a, b: float = b) -> np.ndarray:
            source = 10 * (a * np.sin(np.pi * x) + b * np.sin(2 * np.pi * x))
            return np.stack([z[1], z[0] ** 3 - source])

        known = solve_bvp(
            rates, lambda left, right: np.array([left[0], right[0]]), mesh, np.zeros((2, 101)),
            tol=1e-10, max_nodes=20_000,
        )  # fmt: skip
        truth.append(torch.from_numpy(known.sol(mesh)[0]))
        x = torch.from_numpy(mesh)
        values.append(
            solution(torch.stack([x, torch.full_like(x, a), torch.full_like(x, b)], 1))[:, 0]
        )
    return float((torch.cat(values) - torch.cat(truth)).norm() / torch.cat(truth).norm())


def eigenfunction(solution: pde.PDESolution) -> float:
    """Against 2 sin πx sin πy, of either sign."""
    points = solution.problem.domain.quadrature(2500)
    truth = 2 * torch.sin(math.pi * points.x).prod(1)
    values = solution(points.x)[:, 0]
    sign = torch.sign(points.weights @ (values * truth))
    return float((points.weights @ (sign * values - truth) ** 2).sqrt())  # ‖u‖ = 1


REFERENCES: dict[str, Callable[[Any], float]] = {
    "reaction-and-diffusion": reaction,
    "operator": operator,
    "eigenvalue": eigenfunction,
}


def measure_error(name: str, solution: pde.PDESolution) -> float:
    """Return the relative L² error of a program's solution."""
    if name in REFERENCES:
        return REFERENCES[name](solution)
    return solution.error


# --- the gallery ----------------------------------------------------------------------------------


def measure(program: Program) -> dict[str, Any]:
    """Run a program and judge what it found."""
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = program.run()
    seconds = time.process_time() - start
    solution: pde.PDESolution = names["solution"]
    check = solution.check()
    estimated = None
    spread: dict[str, float] = {}
    if check.estimate is not None:
        estimated = check.estimate.error
        spread = dict(check.estimate.spread)
    errors: dict[str, float] = {}
    if solution.problem.known:
        errors = solution.errors
    error = measure_error(program.name, solution)
    save_panel(program.name, solution)
    return {
        "title": program.title,
        "lines": program.lines,
        "parameters": sum(p.numel() for p in solution.network.parameters()),
        "steps": len(solution.history),
        "cpu_seconds": round(seconds, 1),
        "loss": solution.loss,
        "error": error,
        "errors": errors,
        "unknowns": dict(solution.unknowns),
        "true": _TRUE.get(program.name, {}),
        "estimated": estimated,
        "spread": spread,
        "residual": max(r.relative for r in check.residuals.values()),
        "verdict": solution.verdict.name,
        "warned": [str(w.message) for w in caught if issubclass(w.category, UserWarning)],
    }


def save_panel(name: str, solution: pde.PDESolution) -> None:
    """The first field on a grid over the first two coordinates, others held in the middle."""
    domain = solution.problem.domain
    count = 61  # pixels along a side
    if domain.dim == 1:
        count = 244  # points of a line
    ticks = [
        torch.linspace(a, b, count, dtype=torch.float64)
        for a, b in zip(domain.low[:2].tolist(), domain.high[:2].tolist(), strict=True)
    ]
    grid = torch.stack(torch.meshgrid(*ticks, indexing="ij"), -1).reshape(-1, len(ticks))
    middle = (0.3 * domain.low + 0.7 * domain.high)[2:]
    x = torch.cat([grid, middle.expand(len(grid), -1)], 1)
    values = solution(x).double()
    values[~domain.contains(x)] = torch.nan
    PANELS.mkdir(exist_ok=True)
    shape = [len(t) for t in ticks]
    np.savez_compressed(
        PANELS / f"{name}.npz",
        values=values.reshape(*shape, -1).numpy().astype(np.float32),
        ends=np.array([[t[0].item(), t[-1].item()] for t in ticks]),
        names=np.array(domain.names[:2]),
        fields=np.array(solution.problem.fields),
    )


def draw(results: dict[str, Any]) -> None:
    """One sheet of all solutions whose panels are on record."""
    drawn = {n: r for n, r in results.items() if (PANELS / f"{n}.npz").exists()}
    columns = 4
    rows = math.ceil(len(drawn) / columns)
    figure = plots.make_figure(2.75 * columns, 2.8 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax, (name, result) in zip(axes, drawn.items(), strict=False):
        panel = np.load(PANELS / f"{name}.npz")
        values = panel["values"]
        ends = panel["ends"]
        names = panel["names"]
        if len(ends) == 1:
            x = np.linspace(ends[0, 0], ends[0, 1], len(values))
            for color, field, line in zip(plots.PALETTE, panel["fields"], values.T, strict=False):
                ax.plot(x, line, color=color, lw=1.8, label=str(field))
            ax.legend(frameon=False)
        else:
            ax.imshow(
                values[:, :, 0].T, origin="lower", extent=ends.flatten(), aspect="auto",
                cmap="viridis", interpolation="bilinear",
            )  # fmt: skip
            ax.set_ylabel(str(names[1]), labelpad=1)
        ax.set_xlabel(str(names[0]), labelpad=1)
        ax.set_title(f"{result['title']}\n{small(result['error'], 0)}", size=11)
        ax.locator_params(nbins=3)
    for ax in axes[len(drawn) :]:
        ax.set_visible(False)
    figure.savefig(FIGURE)


# --- the record ----------------------------------------------------------------------------------


@dataclass
class GalleryRecord:
    """The file of results by program; each change is written at once."""

    path: Path
    order: Sequence[str]
    entries: dict[str, Any]

    @classmethod
    def read(cls, path: Path, order: Sequence[str]) -> GalleryRecord:
        """Return what is on record from this machine; an empty record for another one."""
        machine = describe_machine(torch.device("cpu"))
        machine += f" of {os.cpu_count()}, {platform.machine()}"
        entries: dict[str, Any] = {}
        if path.exists():
            entries = json.loads(path.read_text())
        if entries.get("environment") != machine:
            entries = {"environment": machine, "gallery": {}}
        return cls(path, order, entries)

    @property
    def gallery(self) -> dict[str, Any]:
        """Return the results of the programs, by name."""
        return self.entries["gallery"]

    def put(self, name: str, result: Any) -> None:
        """Add the result of a program; programs stay in the order of the page."""
        self.gallery[name] = result
        self.entries["gallery"] = {n: self.gallery[n] for n in self.order if n in self.gallery}
        write_record(self.path, self.entries)


def format_result(name: str, result: dict[str, Any]) -> str:
    """Return a program's numbers in a line."""
    keys = ("cpu_seconds", "steps", "error", "estimated", "residual")
    words = ", ".join(f"{k} {result[k]:.3g}" for k in keys if result[k] is not None)
    return f"{name:32} {words}, {result['verdict']}"


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    by_name = programs()
    parser.add_argument("--only", nargs="*", default=list(by_name), choices=list(by_name))
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is on record")
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    if options.draw:
        draw(json.loads(options.out.read_text())["gallery"])
        return
    torch.set_num_threads(1)
    record = GalleryRecord.read(options.out, list(by_name))
    by_name["polygon"].run(steps=1)  # what is imported then is not counted
    for name in options.only:
        result = measure(by_name[name])
        print(format_result(name, result), flush=True)
        record.put(name, result)
    if record.gallery:
        draw(record.gallery)
