"""The tables of the benchmarks page."""

from __future__ import annotations

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


NETWORKS = {
    "mlp": "MLP 784-512-512-10",
    "conv": "conv net, 16–64 channels",
    "attention": "transformer block, width 64",
    "wide-attention": "transformer block, width 256",
}


#: numbers of inputs that the table of tangent kernels shows; records have more
SHOWN_SIZES = ("32", "128", "512")


def kernels() -> Rows:
    head = ["network", "N", "pullback", "torch.func", "ratio", "neural-tangents", "ratio"]
    rows = [head]
    other = record("kernels-neural-tangents-cpu")["results"]
    for key, one in record("kernels-cpu")["results"].items():
        sizes = {n: result for n, result in one["sizes"].items() if n in SHOWN_SIZES}
        for size_, result in sizes.items():
            costs = [
                f"{took:.2g} s, {result['peak_bytes'][route] / 2**20:.0f} MB"
                if (took := result["seconds"].get(route))
                else "–"
                for route in ("pullback", "torch.func contraction")
            ]
            best = min(other.get(key, {}).get(size_, {}).values(), default=None)
            ratio = best and best / result["seconds"]["pullback"]
            cells = [times(result["ratio"]), f"{best:.2g} s" if best else "–", times(ratio)]
            rows.append([NETWORKS[key], size_, *costs, *cells])
    return rows
