"""Training by K-FAC, Adam and momentum SGD: loss against wall time.

    python -m benchmarks.kfac_train {autoencoder,vgg,shakespeare} [--device cuda] [--seconds S]
        [--seeds 0 1 2] [--workers K] [--quick] [--out FILE]

Every optimizer has a grid of learning rates (K-FAC of dampings and KL clips), decayed linearly to
zero. The grid is searched with the first seed; the best of each by training loss is then run alone,
for every seed, and timed without its evaluations. The autoencoder is given epochs (Adam and SGD
100), the others seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from .kfac_tasks import GRIDS, run
from .timing import environment

RESULTS = Path(__file__).parent / "results"


def label(config: dict[str, Any]) -> str:
    return " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in config.items())


def _job(packed: tuple[Any, ...]) -> dict[str, Any]:
    task, config, seed, options = packed
    if options["device"] == "cpu":
        torch.set_num_threads(1)
    return run(task, config, seed, **options)


def search(
    task: str, configs: list[dict[str, Any]], seed: int, options: dict[str, Any], workers: int
) -> list[dict[str, Any]]:
    """Final losses of a grid; several processes share the device."""
    jobs = [(task, c, seed, options) for c in configs]
    if workers <= 1:
        found = [_job(j) for j in jobs]
    else:
        context = multiprocessing.get_context("spawn")
        with context.Pool(min(workers, len(jobs))) as pool:
            found = pool.map(_job, jobs, chunksize=1)
    for config, record in zip(configs, found, strict=True):
        seconds = record["curve"][-1]["seconds"]
        print(f"  {label(config):60} loss {record['best']:9.4f}  {seconds:6.1f} s", flush=True)
    return found


def reached(record: dict[str, Any], target: float) -> dict[str, float] | None:
    """The first point of the curve that is as low as the target."""
    return next((p for p in record["curve"] if p["loss"] <= target), None)


def compare(task: str, options: dict[str, Any], seeds: list[int], workers: int) -> dict[str, Any]:
    """Tune, then time."""
    grids = GRIDS[task](options["quick"])
    flat = [c for grid in grids.values() for c in grid]
    print(f"{task}: grid of {len(flat)}")
    found = search(task, flat, seeds[0], options, workers)
    tuned: dict[str, dict[str, Any]] = {}
    for config, record in zip(flat, found, strict=True):
        name = config["optimizer"]
        if math.isfinite(record["best"]) and (
            name not in tuned or record["best"] < tuned[name]["best"]
        ):
            tuned[name] = {"config": config, "best": record["best"]}
    runs: dict[str, list[dict[str, Any]]] = {}
    if workers > 1:  # this process has not touched the device yet
        for choice in tuned.values():
            run(task, {**choice["config"], "epochs": 1}, seeds[0], **options)
    for name, choice in tuned.items():
        # a run that shared the device with others is timed again
        first = [] if workers > 1 else [found[flat.index(choice["config"])]]
        rest = seeds[len(first) :]
        runs[name] = first + [run(task, choice["config"], s, **options) for s in rest]
    rivals = [n for n in runs if n != "kfac"]
    target = min(statistics.median(r["best"] for r in runs[n]) for n in rivals)
    print(f"  target {target:.4f}: the best that {' and '.join(rivals)} reach, tuned")
    times: dict[str, Any] = {}
    for name, records in runs.items():
        points = [reached(r, target) for r in records]
        times[name] = [None if p is None else p["seconds"] for p in points]
        shown = ["–" if t is None else f"{t:.2f}" for t in times[name]]
        last = records[0]["curve"][-1]
        losses = " ".join(f"{r['best']:.4f}" for r in records)
        print(
            f"  {label(tuned[name]['config']):60} loss {losses}  to target {' '.join(shown)} s of "
            f"{last['seconds']:.2f} s, {1e3 * last['seconds'] / last['step']:.2f} ms a step"
            + "".join(f", {k} {v:.4f}" for k, v in records[0]["test"].items())
        )
    return {
        "grid": [
            {**c, "loss": r["best"], "steps": r["curve"][-1]["step"]}
            for c, r in zip(flat, found, strict=True)
        ],
        "tuned": tuned,
        "target": target,
        "seconds_to_target": times,
        "runs": runs,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=sorted(GRIDS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args([] if arguments is None else arguments)
    print(environment(torch.device(given.device)))
    options = {"device": given.device, "seconds": given.seconds, "quick": given.quick}
    record = compare(given.task, options, given.seeds, given.workers)
    if not given.quick:
        path = given.out or RESULTS / f"kfac-train-{given.task}.json"
        record["environment"] = environment(torch.device(given.device))
        path.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
