"""Single runs of the races, for searches: one JSON line per run.

pullback bench race-probe --size small --methods adamw,muon --lr 1.5e-3,6e-3 --seed 0,1
pullback bench race-probe --methods kfac-spectral --lr 4e-3 --set damping=1e-2 --parallel 4

Every method runs with every rate, seed and number of steps; `--pairs adamw:1.5e-3,muon:6e-3` names
method and rate together instead. `--parallel N` runs N processes on one device, whose milliseconds
are then not those of a run alone. A run that fails has its error in its line, and the others go on;
the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from ast import literal_eval
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from pullback import PullbackError

from ..framework.benchmark import (
    exit_if_failed,
    find_default_device,
    make_parser,
    parse_count,
    parse_device,
    parse_rate,
    refuse_unknown_names,
)
from ..races.loop import RaceTask, run
from ..races.optimizers import OPTIMIZERS
from ..races.tasks import TASKS, TextData, python_files

SIZES = {"quick": "text-quick", "small": "text", "large": "text-large"}


def main(arguments: Sequence[str] = ()) -> None:
    asked = _parser().parse_args(arguments)
    jobs = list(_jobs(asked))
    _refuse_unknown_jobs(jobs)
    failures = 0
    for record in _run_all(jobs, asked):
        print(json.dumps(record), flush=True)
        if "error" in record:
            failures += 1
    exit_if_failed(failures, len(jobs))


def _run_all(jobs: Sequence[dict[str, Any]], asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of every run as it ends."""
    if asked.parallel <= 1:
        yield from map(_run_job, jobs)
        return
    spawned = get_context("spawn")
    with ProcessPoolExecutor(asked.parallel, spawned, _share_corpus, (_corpus(asked),)) as pool:
        for future in as_completed([pool.submit(_run_job, job) for job in jobs]):
            yield future.result()


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--size", default="small", help=f"{', '.join(SIZES)}, or a task's name")
    parser.add_argument("--methods", default="", type=_words)
    parser.add_argument("--lr", default="1e-3", type=_rates)
    parser.add_argument("--pairs", default="", type=_pairs, help="method:lr,…")
    parser.add_argument("--steps", default="", type=_counts)
    parser.add_argument("--seed", default="0", type=_seeds)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="argument of the optimizer; KEY=A|B runs both")  # fmt: skip
    parser.add_argument("--task", action="append", default=[], metavar="KEY=VALUE",
                        help="field of the task: clip=1.0, compiled=True")  # fmt: skip
    parser.add_argument("--parallel", type=parse_count, default=1)
    parser.add_argument("--threads", type=parse_count, default=1, help="of the CPU")
    parser.add_argument("--device", type=parse_device, default=find_default_device())
    return parser


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _rates(text: str) -> list[float]:
    return [parse_rate(word) for word in _words(text)]


def _counts(text: str) -> list[int]:
    return [parse_count(word) for word in _words(text)]


def _seeds(text: str) -> list[int]:
    """Return whole numbers; raise for a word that is none."""
    for word in _words(text):
        if not word.isdecimal():
            raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 0 on")
    return [int(word) for word in _words(text)]


def _pairs(text: str) -> list[tuple[str, float]]:
    """Return methods with their rates, of words METHOD:LR."""
    pairs = []
    for word in _words(text):
        method, colon, rate = word.partition(":")
        if not colon:
            raise argparse.ArgumentTypeError(f"{word!r} is no METHOD:LR")
        pairs.append((method, parse_rate(rate)))
    return pairs


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word


def _parse_choices(word: str) -> tuple[str, list[Any]]:
    """Return the name and the values of KEY=A|B."""
    key, _, values = word.partition("=")
    return key, [_value(value) for value in values.split("|")]


def _jobs(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    pairs = [*asked.pairs, *product(asked.methods, asked.lr)]
    choices = dict(_parse_choices(word) for word in asked.set)
    changes = {}
    for word in asked.task:
        key, _, text = word.partition("=")
        changes[key] = _value(text)
    lengths = asked.steps or [None]
    for (method, lr), seed, steps, settings in product(
        pairs, asked.seed, lengths, product(*choices.values())
    ):
        yield {
            "task": SIZES.get(asked.size, asked.size),
            "changes": changes,
            "method": method,
            "lr": lr,
            "seed": seed,
            "steps": steps,
            "settings": dict(zip(choices, settings, strict=True)),
            "device": asked.device,
            "threads": asked.threads,
            "parallel": asked.parallel,
        }


def _refuse_unknown_jobs(jobs: Sequence[dict[str, Any]]) -> None:
    """Raise where there is nothing to run, or for a task, a field of it or a method unknown."""
    if not jobs:
        raise PullbackError(
            "There is nothing to run",
            "no optimizer was named",
            "Give --methods adamw,muon with --lr, or --pairs adamw:1.5e-3",
        )
    names_of_fields = [field.name for field in fields(RaceTask)]
    for job in jobs:
        refuse_unknown_names("task", [job["task"]], TASKS)
        refuse_unknown_names("field of a task", job["changes"], names_of_fields)
        refuse_unknown_names("optimizer", [job["method"]], OPTIMIZERS)


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Return a short record of the run, or its error."""
    torch.set_num_threads(job["threads"])
    task = replace(TASKS[job["task"]], **job["changes"])
    said = {k: job[k] for k in ("task", "method", "lr", "seed", "settings", "parallel")}
    device = torch.device(job["device"])
    try:
        outcome = run(
            task, job["method"], job["lr"], seed=job["seed"], device=device, steps=job["steps"],
            settings=job["settings"],
        )  # fmt: skip
    except Exception as error:  # the other runs go on
        traceback.print_exc(file=sys.stderr)
        return said | {"error": f"{type(error).__name__}: {error}"}
    curve = [
        [s, round(v, 5)] for s, v in zip(outcome["step"], outcome["held-out loss"], strict=True)
    ]
    lists = ("step", "seconds", "held-out loss", "accuracy", "settings")
    short = {k: v for k, v in outcome.items() if k not in lists}
    short |= {"seconds": round(outcome["seconds"][-1], 3), "ms": round(outcome["ms"], 3)}
    if device.type == "cuda":
        short["peak GB"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 3)
        torch.cuda.reset_peak_memory_stats(device)
    return said | short | {"accuracy": round(outcome["accuracy"][-1], 4), "curve": curve}


# --- the corpus is read once and shared -----------------------------------------------------


def _corpus(asked: argparse.Namespace) -> tuple[tuple[int, bool], Any] | None:
    data = TASKS[SIZES.get(asked.size, asked.size)].batches
    if not isinstance(data, TextData):
        return None
    key = (data.most, data.packages)
    files = python_files(*key)
    files.train.share_memory_()
    files.held_out.share_memory_()
    return key, files


def _share_corpus(shared: tuple[tuple[int, bool], Any] | None) -> None:
    from ..races import tasks

    if shared is not None:
        key, files = shared
        read = tasks.python_files

        def read_shared(*asked: Any) -> Any:
            if asked == key:
                return files
            return read(*asked)

        tasks.python_files = read_shared
