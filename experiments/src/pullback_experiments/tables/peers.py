"""The tables of the benchmarks page."""

from __future__ import annotations

import statistics
from math import inf

from .costs import EXACT
from .numbers import Rows, memory, record, seconds, size, small, times


def exact() -> Rows:
    peers = ["naive", "NNGeometry", "curvlinops (CG)"]
    rows = [["problem", "parameters", "rows", "naive", "NNGeometry", "curvlinops"]]
    for name, one in record("exact_cpu")["results"].items():
        cells = [times(one["ratio"][p]) if p in one["ratio"] else "fails" for p in peers]
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
    head = ["set-up", "seed", "parameters", "error", "target", "to target", "steps", "seconds"]
    rows = [[*head, "runs at a time"]]
    for one in sorted(record("pde-cuda")["runs"].values(), key=lambda r: (r["name"], r["seed"])):
        reached = one["seconds to target"]
        target = one["target"]
        if reached is None:
            to = "**missed**"
        else:
            to = f"{seconds(reached)} s"
        to, bar = ("–", "–") if target is None else (to, small(target))
        took = seconds(one["seconds"]) + (", budget" if "budget of" in one["stopped"] else "")
        row = [f"`{one['name']}`", str(one["seed"]), f"{one['parameters']:,}", small(one["error"])]
        rows.append([*row, bar, to, str(one["steps"]), took, str(one["parallel"])])
    return rows


def pde_large() -> Rows:
    rows = [["problem", "parameters", "residuals", "error", "steps", "seconds", "a step"]]
    for name, one in record("pde-large")["runs"].items():
        sizes = [f"{one['parameters']:,}", f"{one['residuals']:,}", small(one["error"])]
        if one.get("shared"):
            each = "–"
        else:
            each = f"{one['seconds'] / one['steps']:.2f} s"
        rows.append([f"Poisson {name}", *sizes, str(one["steps"]), seconds(one["seconds"]), each])
    return rows


CHOSEN = ("burgers-smooth", "heat1d", "burgers", "poisson10d", "kdv")


def pde_chosen() -> Rows:
    """Five problems from easy to hard: seed 0, and how many of its seeds are below the target."""
    rows = [["problem", "parameters", "error", "elsewhere", "seconds to that", "seeds"]]
    runs = record("pde-cuda")["runs"].values()
    for name in CHOSEN:
        seeds = [one for one in runs if one["name"] == name]
        one = next(s for s in seeds if s["seed"] == 0)
        has_reached = [s["seconds to target"] is not None for s in seeds]
        cells = [f"{one['parameters']:,}", small(one["error"]), small(one["target"])]
        cells += [seconds(one["seconds to target"]), f"{sum(has_reached)}/{len(has_reached)}"]
        rows.append([one["problem"], *cells])
    return rows


def poisson() -> Rows:
    rows = [["", "median error", "worst", "seeds at 1e-6", "at 1e-9", "CPU s to 1e-6", "ms/step"]]
    for key, name in (("ours", "`pde.solve`"), ("reference", "reference")):
        one = record("poisson")["summary"][key]
        least = [f"{one['at most'][bar]} of {one['runs']}" for bar in ("1e-06", "1e-09")]
        spent = one["median CPU seconds to 1e-06"]
        step = one["CPU ms per step"]
        row = [name, small(one["median error"]), small(one["worst error"]), *least]
        rows.append([*row, f"{spent:.1f}", f"{step:.0f}"])
    return rows


#: the variants of the study that settled the defaults; the record has all of them
_DECIDING_VARIANTS = (
    "0.075",
    "0.15",
    "0.003",
    "0.01, lowest loss within 2",
    "0.01, rcond max(n, p)·ε",
    "0.01, rcond 5e-14 (the defaults)",
)


def trust() -> Rows:
    rows = [["`TargetRatio`", "seeds", "median error", "worst", "steps to 1e-9", "missed"]]
    variants = record("trust")["runs"]
    for name in _DECIDING_VARIANTS:
        runs = variants[name]
        errors = [run["error"] for run in runs.values()]
        to = [run["to 1e-9"] for run in runs.values()]
        middle = statistics.median_high(inf if t is None else t for t in to)
        cells = [small(statistics.median(errors)), small(max(errors))]
        cells += ["–" if middle == inf else f"{middle:.0f}", str(to.count(None))]
        rows.append([f"target {name}", str(len(runs)), *cells])
    return rows


def spectrum() -> Rows:
    rows = [["rows × parameters", "precision", "one CPU thread", "H200"]]
    ratios: dict[tuple[int, int, str], dict[str, float]] = {}
    for device in ("cpu", "cuda"):
        for one in record(f"spectrum-{device}")["results"]:
            key = (one["rows"], one["parameters"], one["dtype"])
            ratios.setdefault(key, {})[device] = one["ratio"]
    for (n, p, dtype), by_device in ratios.items():
        cells = [f"{by_device[k]:.1f}×" if k in by_device else "–" for k in ("cpu", "cuda")]
        rows.append([f"{n:,} × {p:,}", dtype, *cells])
    return rows


def greedy() -> Rows:
    rows = [["Gram", "floor", "`OrthogonalGreedy(500)`", "with `block=10`", "naive"]]
    for name, one in record("greedy")["results"].items():
        cells = [one["seconds"].get(k) for k in ("floor", "greedy", "greedy, block of 10", "naive")]
        if name == "dense":
            label = name
        else:
            label = f"{name}, {one['rows']:,} rows".replace("rows, ", "")
        rows.append([label, *("–" if c is None else f"{c:.1f} s" for c in cells)])
    return rows


NETWORKS = {
    "mlp": "MLP 784-512-512-10",
    "conv": "conv net, 16–64 channels",
    "attention": "transformer block, width 64",
    "wide-attention": "transformer block, width 256",
}


def kernels() -> Rows:
    head = ["network", "N", "pullback", "torch.func", "ratio", "neural-tangents", "ratio"]
    rows = [head]
    other = record("kernels-neural-tangents-cpu")["results"]
    for key, one in record("kernels-cpu")["results"].items():
        for size_, result in one["sizes"].items():
            both = [
                f"{took:.2g} s, {result['peak_bytes'][route] / 2**20:.0f} MB"
                if (took := result["seconds"].get(route))
                else "–"
                for route in ("pullback", "torch.func contraction")
            ]
            best = min(other.get(key, {}).get(size_, {}).values(), default=None)
            ratio = best and best / result["seconds"]["pullback"]
            cells = [times(result["ratio"]), f"{best:.2g} s" if best else "–", times(ratio)]
            rows.append([NETWORKS[key], size_, *both, *cells])
    return rows
