"""Does `pb.KFAC(model)` suit small networks? Sixteen tasks beside tuned Adam and Muon.

    pullback bench small-tasks [--tasks aside] [--seeds 3] [--parallel 14] [--resume] [--out FILE]

Rates are constant. Every method has a grid of rates that are multiples of one number; "tuned" is
the rate with the least median of held-out losses over the seeds, and a best rate at the edge of
its grid is marked. Adam runs for as many steps as K-FAC, and again for the CPU time of the default
run: Adam and K-FAC train in turn in one process, and the ratio of their process times multiplies
Adam's steps. Both have the same share of a loaded machine, and losses do not depend on time. Five
of the tasks are kept aside (`--tasks aside`): nothing is chosen by them. The sixteenth trains with
the Trainer of transformers, where that is installed.

The file is written after each task and seed. `--resume` keeps what it holds and runs the rest. The
folder PULLBACK_DATA must hold digits8x8.npz and tiny_shakespeare.txt.gz.

`--again` runs K-FAC and what depends on its time, and keeps from the file the runs of Adam and Muon
for equal steps, and all of the tasks and seeds that are not chosen. `--again --same-time`, after a
change that leaves the time of a step as it is, keeps that and Adam's longer runs too.

`--variants` also runs other schedules and memories of K-FAC. `rank_settings` compares them with the
default on the open tasks, by loss and by time.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import chain
from math import isfinite, log
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import pullback as pb

from ..framework.benchmark import RESULTS, make_parser, write_record
from ..framework.timing import describe_machine
from .small_models import ASIDE_TASKS, OPEN_TASKS, TASKS, Task

ADAM_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
MUON_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
#: multiples of K-FAC's default rate
MULTIPLES = (0.5, 1.0, 2.0)
#: tasks that take longest: they are begun first, so that no process is left with one at the end
SLOW_TASKS = ("character-decoder", "transformer", "character-gru")
#: its losses differ by orders of magnitude between seeds, so it is not part of a mean of logs
UNRANKED_TASKS = ("adversarial",)


@dataclass(frozen=True)
class Scoring:
    """How losses and times of settings become one number."""

    #: stands for a loss that is not finite
    diverged_loss: float = 1e9
    #: log of a loss that a log of time is worth: tuned Adam gained 0.26 by 2.4 times the steps
    time_weight: float = 0.3


SCORING = Scoring()


@dataclass(frozen=True)
class Outcome:
    """The held-out loss at the end of a run, and the CPU time of a step in seconds."""

    loss: float
    step_seconds: float


def make_adam(rate: float, model: nn.Module) -> list[Optimizer]:
    """Return Adam for all parameters."""
    return [torch.optim.Adam(model.parameters(), rate)]


def make_muon(rate: float, model: nn.Module) -> list[Optimizer]:
    """Return Muon for the hidden matrices and AdamW for the rest, at one rate of Adam's scale."""
    matrices = list_hidden_matrices(model)
    hidden = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in hidden]
    adamw = torch.optim.AdamW(others, rate, weight_decay=0.0)
    if not matrices:
        return [adamw]
    muon = torch.optim.Muon(
        matrices, rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", momentum=0.9
    )
    return [muon, adamw]


def list_hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices that are neither embeddings nor the weight of the last linear layer."""
    excluded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if linear:
        excluded.add(id(linear[-1].weight))
    return [p for p in model.parameters() if p.ndim == 2 and id(p) not in excluded]


def make_kfac(multiple: float, model: nn.Module, **options: Any) -> list[Optimizer]:
    """Return K-FAC as it is by default, at a multiple of its rate."""
    optimizer = pb.KFAC(model, **options)
    for group in optimizer.param_groups:
        group["lr"] *= multiple
    return [optimizer]


def make_kfac_long(multiple: float, model: nn.Module) -> list[Optimizer]:
    """Return K-FAC with memories of (0.9, 0.99), both as long as Adam's or longer."""
    rule = pb.KFAC(model).rule
    if isinstance(rule, pb.optim.kfac.Eigenbasis):
        return make_kfac(multiple, model, rule=pb.optim.kfac.Eigenbasis((0.9, 0.99)))
    others = pb.optim.kfac.AdamW((0.9, 0.99), rate=0.5)
    rule = pb.optim.kfac.Spectral(0.9, 0.99, head=rule.takes_head, others=others)
    return make_kfac(multiple, model, rule=rule)


def make_kfac_often(multiple: float, model: nn.Module) -> list[Optimizer]:
    """Return K-FAC with statistics and refreshes every five steps."""
    return make_kfac(multiple, model, statistics_every=5, invert_every=5)


def make_kfac_seldom(multiple: float, model: nn.Module) -> list[Optimizer]:
    """Return K-FAC with statistics and refreshes every twenty steps."""
    return make_kfac(multiple, model, statistics_every=20, invert_every=20)


def make_kfac_warm(multiple: float, model: nn.Module) -> list[Optimizer]:
    """Return K-FAC that takes statistics and refreshes on each of the first ten steps."""
    rule = pb.KFAC(model).rule
    rule.warmup = 10
    return make_kfac(multiple, model, rule=rule)


class Together(Optimizer):
    """Several optimizers that step together."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


METHODS: dict[str, Callable[[float, nn.Module], list[Optimizer]]] = {
    "adam": make_adam,
    "muon": make_muon,
    "kfac": make_kfac,
    "kfac-long": make_kfac_long,
    "kfac-often": make_kfac_often,
    "kfac-seldom": make_kfac_seldom,
    "kfac-warm": make_kfac_warm,
}
#: other settings of K-FAC, tried where `--variants` asks for them
VARIANTS = ("kfac-long", "kfac-often", "kfac-seldom", "kfac-warm")
VARIANT_MULTIPLES = (1.0, 2.0)


@dataclass
class Training:
    """A task with its optimizers, and the random numbers that draw its batches."""

    task: Task
    optimizers: Sequence[Optimizer]
    draws: torch.Generator

    def take_steps(self, steps: int) -> float:
        """Train, and return the CPU time in seconds, without that of drawing the batches."""
        seconds = 0.0
        for _ in range(steps):
            rows = torch.randperm(self.task.samples, generator=self.draws)[: self.task.batch]
            begin = time.process_time()
            self.task.train(self.optimizers, rows)
            seconds += time.process_time() - begin
        return seconds


def _start_training(name: str, method: str, rate: float, seed: int = 0) -> Training:
    torch.manual_seed(seed)
    task = TASKS[name]()
    optimizers = [Together(METHODS[method](rate, model)) for model in task.models]
    return Training(task, optimizers, torch.Generator().manual_seed(seed))


def run(name: str, seed: int, method: str, rate: float, longer: float = 1.0) -> Outcome:
    """Train a task by one method at one rate; `longer` multiplies the steps."""
    training = _start_training(name, method, rate, seed)
    steps = max(1, round(training.task.steps * longer))
    looks = _choose_evaluations(steps)
    losses: list[float] = []
    seconds = 0.0
    for step in range(steps):
        step_seconds = training.take_steps(1)
        if step:  # the first step prepares
            seconds += step_seconds
        if step in looks:
            losses.append(_judge(training.task))
    return Outcome(statistics.median(losses), seconds / max(1, steps - 1))


def _choose_evaluations(steps: int, count: int = 5) -> set[int]:
    """Return the steps, over the last tenth of a run, whose median loss is its result."""
    last = max(count, steps // 10)
    return {steps - 1 - i * last // count for i in range(count)}


def _judge(task: Task) -> float:
    loss = task.judge()
    if isfinite(loss):
        return loss
    return SCORING.diverged_loss


@dataclass(frozen=True)
class Job:
    """All runs of one task and seed."""

    task: str
    seed: int
    has_variants: bool
    #: an earlier row, whose runs of Adam and Muon for equal steps are kept
    earlier_row: dict[str, Any] | None = None
    #: whether the time of a step and what depends on it are kept too
    has_same_time: bool = False


def run_job(job: Job) -> dict[str, Any]:
    """Return all runs of one task and seed, by method and rate."""
    name = job.task
    seed = job.seed
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    grids: dict[str, tuple[float, ...]] = {"kfac": MULTIPLES}
    if job.earlier_row is None:
        grids |= {"adam": ADAM_RATES, "muon": MUON_RATES}
    if job.has_variants:
        grids |= dict.fromkeys(VARIANTS, VARIANT_MULTIPLES)
    outcomes: dict[str, Outcome] = {}
    for method, rates in grids.items():
        for rate in rates:
            outcomes[f"{method} {rate:g}"] = run(name, seed, method, rate)
    if job.earlier_row is not None and job.has_same_time:
        ratio = job.earlier_row["step over Adam's"]
    else:
        ratio = measure_step_ratio(name)
        for rate in ADAM_RATES:
            outcomes[f"adam-longer {rate:g}"] = run(name, seed, "adam", rate, ratio)
    runs = _list_kept_runs(job) | {key: asdict(outcome) for key, outcome in outcomes.items()}
    return {"task": name, "seed": seed, "step over Adam's": ratio, "runs": runs}


def _list_kept_runs(job: Job) -> dict[str, Any]:
    """Return the runs of the earlier row that are not done again."""
    if job.earlier_row is None:
        return {}
    methods = ["adam", "muon"]
    if job.has_same_time:
        methods.append("adam-longer")
    return {k: run for k, run in job.earlier_row["runs"].items() if k.split()[0] in methods}


def measure_step_ratio(name: str, portion: int = 20) -> float:
    """Return the CPU time of a default run of K-FAC over Adam's for as many steps.

    Adam and K-FAC train in turn, a portion of the steps each, so that both have the same share of
    the machine. The first step of each prepares, and does not count.
    """
    adam = _start_training(name, "adam", 1e-3)
    kfac = _start_training(name, "kfac", 1.0)
    adam.take_steps(1)
    kfac.take_steps(1)
    adam_seconds = 0.0
    kfac_seconds = 0.0
    for begin in range(1, adam.task.steps, portion):
        steps = min(portion, adam.task.steps - begin)
        adam_seconds += adam.take_steps(steps)
        kfac_seconds += kfac.take_steps(steps)
    return kfac_seconds / adam_seconds


@dataclass(frozen=True)
class Best:
    """The best rate of a method: its median loss, the rate, and whether the grid ends there."""

    loss: float
    rate: float
    is_edge: bool


def find_best(seeds: Sequence[dict[str, Any]], method: str, rates: Iterable[float]) -> Best:
    """Return the rate with the least median over the seeds of one task."""
    grid = sorted(rates)
    medians = {rate: _median(seeds, f"{method} {rate:g}") for rate in grid}
    rate = min(grid, key=medians.__getitem__)
    return Best(medians[rate], rate, rate in (grid[0], grid[-1]))


def _median(seeds: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(seed["runs"][key]["loss"] for seed in seeds)


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for every task: medians over seeds, and the rates that were best."""
    table: list[dict[str, Any]] = []
    for name in dict.fromkeys(row["task"] for row in rows):
        seeds = [row for row in rows if row["task"] == name]
        entries: dict[str, Any] = {"task": name, "seeds": len(seeds)}
        entries["kfac"] = _median(seeds, "kfac 1")
        entries["step over Adam's"] = statistics.median(s["step over Adam's"] for s in seeds)
        contests = {
            "kfac, tuned": ("kfac", MULTIPLES),
            "adam, tuned": ("adam", ADAM_RATES),
            "adam, equal time": ("adam-longer", ADAM_RATES),
            "muon, tuned": ("muon", MUON_RATES),
        }
        for variant in VARIANTS:
            key = f"{variant} {VARIANT_MULTIPLES[0]:g}"
            if all(key in seed["runs"] for seed in seeds):
                contests[variant] = (variant, VARIANT_MULTIPLES)
        for label, (method, rates) in contests.items():
            entries[label] = asdict(find_best(seeds, method, rates))
        table.append(entries)
    return table


@dataclass(frozen=True)
class Setting:
    """A variant of K-FAC at a multiple of the default rate, beside the default.

    Attributes:
        loss: mean over open tasks of log(median loss / median loss of the default).
        seconds: the same mean for the time of a step.
        score: loss + SCORING.time_weight * seconds; the default has 0, and less is better.
    """

    method: str
    multiple: float
    loss: float
    seconds: float
    score: float


def rank_settings(rows: Sequence[dict[str, Any]]) -> list[Setting]:
    """Return all settings that every open task has run, the best first."""
    seeds_by_task: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["task"] in OPEN_TASKS and row["task"] not in UNRANKED_TASKS:
            seeds_by_task.setdefault(row["task"], []).append(row)
    if not seeds_by_task:
        return []
    settings: list[Setting] = []
    for method in ("kfac", *VARIANTS):
        multiples = VARIANT_MULTIPLES
        if method == "kfac":
            multiples = MULTIPLES
        for multiple in multiples:
            key = f"{method} {multiple:g}"
            if all(key in row["runs"] for row in chain.from_iterable(seeds_by_task.values())):
                settings.append(_compare(list(seeds_by_task.values()), method, multiple))
    return sorted(settings, key=lambda setting: setting.score)


def _compare(tasks: Sequence[list[dict[str, Any]]], method: str, multiple: float) -> Setting:
    key = f"{method} {multiple:g}"
    losses: list[float] = []
    seconds: list[float] = []
    for seeds in tasks:
        losses.append(log(_median(seeds, key) / _median(seeds, "kfac 1")))
        seconds.append(log(_median_seconds(seeds, method) / _median_seconds(seeds, "kfac")))
    loss = statistics.fmean(losses)
    time_of_step = statistics.fmean(seconds)
    score = loss + SCORING.time_weight * time_of_step
    return Setting(method, multiple, loss, time_of_step, score)


def _median_seconds(seeds: Sequence[dict[str, Any]], method: str) -> float:
    """Return the median time of a step over the multiples that every method has run."""
    times: list[float] = []
    for row in seeds:
        times += [row["runs"][f"{method} {m:g}"]["step_seconds"] for m in VARIANT_MULTIPLES]
    return statistics.median(times)


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--tasks", default="open", help="open, aside, all, or names with commas")
    parser.add_argument("--seeds", default=3, type=int)
    parser.add_argument("--parallel", default=1, type=int, help="processes, one core each")
    parser.add_argument("--variants", action="store_true", help="also other settings of K-FAC")
    parser.add_argument(
        "--resume", action="store_true", help="run only what the file does not hold"
    )
    parser.add_argument(
        "--again", action="store_true", help="keep the runs of others for equal steps"
    )
    parser.add_argument("--same-time", action="store_true", help="with --again: K-FAC's runs alone")
    parser.add_argument("--out", type=Path, default=RESULTS / "small-tasks-cpu.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    about = {"environment": describe_machine(torch.device("cpu")), "parallel": options.parallel}
    rows: list[dict[str, Any]] = []
    if options.again or (options.resume and options.out.exists()):
        rows = _read_rows(options.out, about["environment"], any_machine=options.again)
    jobs, rows = _choose_jobs(options, rows)
    with ProcessPoolExecutor(options.parallel, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run_job, job) for job in jobs]):
            rows.append(future.result())
            settings = [asdict(setting) for setting in rank_settings(rows)]
            record = about | {"summary": summarize(rows), "settings": settings, "rows": rows}
            write_record(options.out, record)
    for line in summarize(rows):
        print(json.dumps(line), flush=True)


def _read_rows(path: Path, environment: str, *, any_machine: bool) -> list[dict[str, Any]]:
    """Return the rows on record; refuse those of another machine or version of torch."""
    record = json.loads(path.read_text())
    if not any_machine and record["environment"] != environment:
        raise pb.PullbackError(
            f"{path} cannot be resumed",
            f"its runs are of {record['environment']}, and this is {environment}",
            "Give another --out, or leave out --resume",
        )
    return record["rows"]


def _choose_jobs(
    options: Namespace, rows: list[dict[str, Any]]
) -> tuple[list[Job], list[dict[str, Any]]]:
    """Return what is to be run, and the rows that stay as they are."""
    earlier_rows = {(row["task"], row["seed"]): row for row in rows}
    names = _choose_tasks(options.tasks)
    jobs: list[Job] = []
    for seed in range(options.seeds):
        for name in names:
            earlier_row = earlier_rows.get((name, seed))
            if options.again:
                jobs.append(Job(name, seed, options.variants, earlier_row, options.same_time))
            elif earlier_row is None:
                jobs.append(Job(name, seed, options.variants))
    jobs.sort(key=lambda job: job.task not in SLOW_TASKS)
    chosen_rows = {(job.task, job.seed) for job in jobs}
    return jobs, [row for key, row in earlier_rows.items() if key not in chosen_rows]


def _choose_tasks(tasks: str) -> list[str]:
    """Return the names of a set of tasks, or those in a list with commas."""
    sets = {"open": OPEN_TASKS, "aside": ASIDE_TASKS, "all": TASKS}
    if tasks in sets:
        return list(sets[tasks])
    return tasks.split(",")
