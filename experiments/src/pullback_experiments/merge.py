"""Results of several folders in one: an experiment whose seeds ran in processes of their own.

    pullback run NAME --seeds 0 --out parts/0 &  pullback run NAME --seeds 1 --out parts/1 &  wait
    python -m pullback_experiments.merge NAME parts/0 parts/1 --out results
    pullback run NAME --seeds 0-1 --out results          # nothing is missing: it judges and draws

Processes of one machine may share a folder too: they save one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pullback import PullbackError
from pullback.cli.files import make_folder

from . import registry
from .framework import store
from .framework.experiment import Experiment


def merge(
    experiment: Experiment, sources: Sequence[Path], out: Path, *, quick: bool = False
) -> list[int]:
    """Copy finished items into `out`; those already there stay. The seeds that it now knows of."""
    merged = experiment.open_store(quick, make_folder(out))
    seeds: set[int] = set()
    for source in sources:
        path = source / merged.path.name
        if not path.is_file():
            raise PullbackError(
                f"There are no results of {experiment.name} in {source}",
                f"{path.name} is not there",
                "Pass the --out of the runs",
            )
        other = experiment.open_store(quick, source)
        state = store.read(path)
        for run in state["runs"]:
            if run["seed"] is None:
                seed = None
            else:
                seed = int(run["seed"])
            name = (tuple(map(str, run["key"])), seed)
            if seed is not None:
                seeds.add(seed)
            if name not in merged:
                environment = state["environments"][run["environment"]]
                merged.put(name, other.record(name), run["took"] or 0.0, environment)
    return sorted(seeds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Merge what the arguments name."""
    parser = argparse.ArgumentParser(description="Results of several folders in one.")
    parser.add_argument("name", help="an experiment")
    parser.add_argument("sources", nargs="+", type=Path, help="folders of its runs")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--quick", action="store_true", help="results of the short version")
    options = parser.parse_args(arguments)
    try:
        seeds = merge(
            registry.find(options.name), options.sources, options.out, quick=options.quick
        )
    except PullbackError as error:
        raise SystemExit(str(error)) from None
    print(f"{options.out} has items of the seeds {', '.join(map(str, seeds))}")


if __name__ == "__main__":
    main()
