"""K-FAC's cost in two versions of the library, taking turns on one machine.

    git worktree add ../before COMMIT
    pullback bench kfac-versions ../before [--device cuda] [--rounds 2] [--out FILE]

How much a step costs over the baseline's depends on the host that launches its kernels: the same
code had ratios 0.2 apart on two hosts. Here each version runs in processes of its own, one after
the other, each beside a baseline of its own; all rounds are shown.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[4]
KINDS = {"plain": (10**9, 10**9), "statistics": (1, 10**9), "inversion": (1, 1)}
SCHEDULES = {"10/100": (10, 100), "25/250": (25, 250)}


def import_benchmark(name: str) -> Any:
    """Return the module of a benchmark; trees of 0.1 have them in a folder of their own."""
    try:
        return importlib.import_module(f"pullback_experiments.benchmarks.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(f"benchmarks.{name}")


def milliseconds(name: str, device: torch.device, repeats: int) -> dict[str, float]:
    """Of a step of each kind, by the library that lies in the current folder."""
    kfac = import_benchmark("kfac")
    bench = kfac.Bench(kfac.cases(device, False)[name], device)
    routes = {"baseline": bench.route(bench.baseline)}
    for kind, (statistics, inversion) in KINDS.items():
        routes[kind] = bench.route(
            lambda model, s=statistics, i=inversion: unclipped(
                model, bench.case.likelihood(), statistics_every=s, invert_every=i
            )
        )
    row = 4 if device.type == "cuda" else 1
    in_rows = {kind: kfac.repeated(step, row) for kind, step in routes.items()}
    found = kfac.compare(in_rows, device, repeats=repeats, warmup=3, patience=60)
    return {kind: 1e3 * seconds / row for kind, seconds in found.items()}


def unclipped(model: Any, likelihood: Any, **every: int) -> Any:
    """Natural K-FAC at a rate of almost zero without a clip, in the present version or an older."""
    import pullback as pb
    from pullback.optim import kfac

    if hasattr(kfac, "Estimation"):  # options of a rule live on the rule
        rule: Any = kfac.Natural
        return pb.KFAC(model, 1e-30, rule=rule(likelihood, kl_clip=None, warmup=0), **every)
    older: Any = {"likelihood": likelihood, "kl_clip": None}
    return pb.KFAC(model, 1e-30, **older, **every)


def ratios(times: dict[str, float]) -> dict[str, float]:
    """Steps over the baseline's, by kind and by schedule."""
    out = {kind: times[kind] / times["baseline"] for kind in ("plain", "statistics")}
    for schedule, (statistics, inversion) in SCHEDULES.items():
        extra = (times["statistics"] - times["plain"]) / statistics
        extra += max(0.0, times["inversion"] - times["statistics"]) / inversion
        out[schedule] = (times["plain"] + extra) / times["baseline"]
    return out


def apart(tree: Path, name: str, device: str, repeats: int) -> dict[str, float]:
    """The times in a process whose library and benchmarks are those of `tree`."""
    call = [sys.executable, __file__, "--measure", name, "--device", device]
    paths = [tree, tree / "src", tree / "experiments" / "src"]
    done = subprocess.run(
        [*call, "--repeats", str(repeats)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, nargs="?", help="a tree of the other version")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--measure", default=None, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    torch.backends.cudnn.allow_tf32 = True
    if given.measure:
        print(json.dumps(milliseconds(given.measure, device, given.repeats)))
        return

    from pullback_experiments.framework.timing import describe_machine

    if device.type == "cuda":
        names = ("resnet50", "gpt2")
    else:
        names = ("autoencoder", "convnet")
    trees = {"before": given.before.resolve(), "now": ROOT}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}
    path = given.out or ROOT / "experiments" / "results" / f"kfac-versions-{device.type}.json"
    for _, name in itertools.product(range(given.rounds), given.only or names):
        for version, tree in trees.items():
            times = apart(tree, name, given.device, given.repeats)
            runs.setdefault(name, {}).setdefault(version, []).append(times)
            shown = "  ".join(f"{k} {r:.2f}" for k, r in ratios(times).items())
            print(f"{name:12s} {version:7s} {times['baseline']:7.1f} ms  {shown}", flush=True)
        record: dict[str, Any] = {"environment": describe_machine(device), "results": runs}
        path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
