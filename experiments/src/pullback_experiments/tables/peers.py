"""The tables of the benchmarks page."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from .costs import EXACT
from .numbers import Rows, memory, record, seconds, size, small, times


def exact() -> Rows:
    peers = ["naive", "NNGeometry", "curvlinops (CG)"]
    rows = [["problem", "parameters", "rows", "naive", "NNGeometry", "curvlinops"]]
    for name, one in record("exact_cpu")["results"].items():
        ratios = {peer: times(ratio) for peer, ratio in one["ratio"].items()}
        cells = [ratios.get(peer, "fails") for peer in peers]
        rows.append([name, f"{one['parameters']:,}", f"{one['rows']:,}", *cells])
    return rows


def scale() -> Rows:
    names = {**EXACT, "wide-mlp": ("MLP 3072-5120⁴-10, ReLU", "512")}
    names["wide-mlp-tanh"] = ("the same with tanh", "512")
    head = ["model", "parameters", "rows", "J would take", "SGD", "natural gradient", "ratio"]
    rows = [[*head, "peak memory", "error"]]
    for key, one in record("scale_h200")["results"].items():
        label, batch = names[key]
        sgd, ours = (one["milliseconds"][k] for k in ("SGD", "natural gradient"))
        jacobian = memory(4 * one["parameters"] * one["rows"])
        if key == "resnet18":
            error = "–"
        else:
            error = small(one["error_same_pattern"], 0)
        row = [f"{label}, batch {batch}", size(one["parameters"]), f"{one['rows']:,}", jacobian]
        row += [f"{sgd:.1f} ms", f"{ours:.0f} ms", times(one["ratio"])]
        rows.append([*row, memory(one["peak_bytes"]["natural gradient"]), error])
    return rows


def pde() -> Rows:
    """Set-ups on seeds 0 and perhaps 1; `pde_seeds` has those on more."""
    rows = [["set-up", "parameters", "error", "target", "to target", "seconds"]]
    with_many_seeds = {one["name"] for one in record("pde-seeds")["runs"].values()}
    runs = [
        one for one in record("pde-cuda")["runs"].values() if one["name"] not in with_many_seeds
    ]
    for one in sorted(runs, key=lambda run: (run["name"], run["seed"])):
        reached = one["seconds to target"]
        if one["target"] is None:
            to_target = "–"
        elif reached is None:
            to_target = "**missed**"
        else:
            to_target = f"{seconds(reached)} s"
        took = seconds(one["seconds"])
        if "budget of" in one["stopped"]:
            took += ", budget"
        name = f"`{one['name']}`"
        if one["seed"]:
            name += f", seed {one['seed']}"
        row = [name, f"{one['parameters']:,}", small(one["error"])]
        rows.append([*row, small(one["target"]), to_target, took])
    return rows


@dataclass(frozen=True)
class Reported:
    """An error that others report for a problem, and where."""

    name: str
    error: float
    source: str


#: set-ups that ran on five seeds or more, and one with the best error that is reported for it
REPORTED = (
    Reported("poisson5d", 3.5e-8, "ENGD (2023)"),
    Reported("heat4d", 4.0e-7, "ENGD (2023)"),
    Reported("kdv", 2.2e-6, "SSBroyden + vRBA (2025)"),
    Reported("burgers-smooth", 8.0e-14, "DSGNAR (2026)"),
    Reported("burgers-single", 3.9e-7, "DSGNAR (2026)"),
)


def pde_chosen() -> Rows:
    """Problems with errors that others report, and how many of our seeds are below these."""
    rows = [["problem", "our median", "elsewhere", "seeds below"]]
    runs = [*record("pde-seeds")["runs"].values()]
    names = {one["name"] for one in runs}
    runs += [one for one in record("pde-cuda")["runs"].values() if one["name"] not in names]
    for reported in REPORTED:
        records = [one for one in runs if one["name"] == reported.name]
        errors = [one["error"] for one in records]
        below = sum(error <= reported.error for error in errors)
        elsewhere = f"{small(reported.error)}, {reported.source}"
        cells = [small(statistics.median(errors)), elsewhere, f"{below}/{len(errors)}"]
        label = records[0]["problem"]
        if "single" in reported.name:
            label = f"{label}, float32"
        rows.append([label, *cells])
    return rows


NETWORKS = {
    "mlp": "MLP 784-512-512-10",
    "conv": "conv net, 16–64 channels",
    "attention": "transformer block, width 64",
    "wide-attention": "transformer block, width 256",
}


#: numbers of inputs that the table of tangent kernels shows; records have more
SHOWN_SIZES = ("128",)


def _format_cost(result: dict[str, Any], route: str) -> str:
    """Return the seconds and megabytes of a route; a dash where it was left out."""
    took = result["seconds"].get(route)
    if took is None:
        return "–"
    return f"{took:.2g} s, {result['peak_bytes'][route] / 2**20:.0f} MB"


def kernels() -> Rows:
    head = ["network", "N", "pullback", "torch.func", "ratio", "neural-tangents", "ratio"]
    rows = [head]
    other = record("kernels-neural-tangents-cpu")["results"]
    for key, one in record("kernels-cpu")["results"].items():
        sizes = {n: result for n, result in one["sizes"].items() if n in SHOWN_SIZES}
        for size_, result in sizes.items():
            costs = [_format_cost(result, r) for r in ("pullback", "torch.func contraction")]
            best = min(other.get(key, {}).get(size_, {}).values(), default=None)
            theirs = ["–", "–"]
            if best is not None:
                theirs = [f"{best:.2g} s", times(best / result["seconds"]["pullback"])]
            rows.append([NETWORKS[key], size_, *costs, times(result["ratio"]), *theirs])
    return rows
