"""Does `pb.KFAC(model)` train without settings? Five tasks beside Adam, five seeds, many rates.

    pullback bench defaults [--device cuda] [--tasks mlp,cnn,...] [--parallel N] [--out FILE]

Every run has a constant learning rate and no decay. For each task and seed: Adam at four rates;
`KFAC(model, lr=...)` at its default rate times 1/10, 1/3, 1, 3 and 10; and Adam at 1e-3 for as
many steps as fit into the time of the default run. What is compared is the loss on a fixed set of
training data at the end, the median over the last five evaluations; the held-out one is beside it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

from ..framework.benchmark import RESULTS, find_default_device, make_parser, write_record
from ..framework.timing import describe_machine, synchronize
from ..learning.data import DataSet, cifar10, digits
from ..races.networks import Decoder, ResNet
from ..races.tasks import python_files

ADAM = (3e-4, 1e-3, 3e-3, 1e-2)
FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
SEEDS = range(5)
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """A network, its data, and how long it is trained."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    #: training data, of which batches are drawn, and held-out data
    train: Pair
    held_out: Pair
    batch: int
    steps: int


def _classes(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), y.flatten())


def _pairs(data: DataSet) -> tuple[Pair, Pair]:
    return (data.x, data.y), (data.test_x, data.test_y)


def mlp() -> Problem:
    """Digits, 64-128-128-10."""
    layers = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    return Problem(model, _classes, *_pairs(digits(1500)), 128, 300)


def cnn() -> Problem:
    """Digits, two convolutions and two linear layers."""
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers += [nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)]
    return Problem(nn.Sequential(*layers), _classes, *_pairs(digits(1500)), 128, 300)


def regression() -> Problem:
    """A smooth function of eight variables, 8-64-64-1, tanh."""
    x = 2 * torch.rand(1536, 8, generator=torch.Generator().manual_seed(0)) - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:3] ** 2 - torch.cos(2 * x[:, 3:4] * x[:, 4:5])
    layers = (nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    train, held_out = ((x[rows], y[rows]) for rows in (slice(1024), slice(1024, None)))
    return Problem(nn.Sequential(*layers), F.mse_loss, train, held_out, 128, 500)


def characters() -> Problem:
    """Bytes of Python's standard library, a decoder of two layers of width 96, windows of 64."""
    text = python_files(4_000_000, False)
    windows = [t[: len(t) // 65 * 65].view(-1, 65).long() for t in (text.train, text.held_out)]
    train, held_out = ((w[:, :-1], w[:, 1:]) for w in windows)
    return Problem(Decoder(256, 64, 96, 2, 4), _classes, train, held_out, 32, 300)


def resnet() -> Problem:
    """8,000 images of CIFAR-10, a residual network of width 16 with three blocks."""
    model = ResNet(10, 16, (1, 1, 1))
    return Problem(model, _classes, *_pairs(cifar10(16, ("a",))), 128, 400)


TASKS = {"mlp": mlp, "cnn": cnn, "regression": regression, "characters": characters,
         "resnet": resnet}  # fmt: skip


def adam(lr: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


def kfac(factor: float, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = pb.KFAC(model)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return optimizer


def train(
    task: str, seed: int, build: Callable[[nn.Module], Any], device: str, longer: float = 1.0
) -> dict[str, Any]:
    """Run one optimizer on a task; `longer` multiplies its steps."""
    torch.manual_seed(seed)
    problem = TASKS[task]()
    model = problem.model.to(device)
    x, y = (t.to(device) for t in problem.train)
    held_out = tuple(t.to(device) for t in problem.held_out)
    optimizer = build(model)
    draws = torch.Generator().manual_seed(seed)
    steps = max(1, round(problem.steps * longer))
    first_rows = slice(0, 2000)

    def judge(data: Any) -> float:
        model.eval()
        with torch.no_grad():
            value = float(problem.loss(model(data[0][first_rows]), data[1][first_rows]))
        model.train()
        return value

    start = judge((x, y))
    ends = []
    times = []
    for i in range(steps):
        index = torch.randint(len(x), (problem.batch,), generator=draws).to(device)
        synchronize(torch.device(device))
        began = time.perf_counter()
        loss = problem.loss(model(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        synchronize(torch.device(device))
        times.append(time.perf_counter() - began)
        if i >= steps - 5:
            ends.append((judge((x, y)), judge(held_out)))
    fitted, others = (statistics.median(e) for e in zip(*ends, strict=True))
    seconds = sum(times[1:]) / max(1, steps - 1)  # the first step prepares kernels
    return {"start": start, "train": fitted, "held-out": others, "seconds a step": seconds}


def one_seed(job: tuple[str, int, str]) -> dict[str, Any]:
    """All runs of one task and seed."""
    task, seed, device = job
    torch.set_num_threads(1)
    run = partial(train, task, seed, device=device)
    runs = {f"adam {lr:g}": run(partial(adam, lr)) for lr in ADAM}
    runs |= {f"kfac ×{factor:g}": run(partial(kfac, factor)) for factor in FACTORS}
    ratio = runs["kfac ×1"]["seconds a step"] / runs["adam 0.001"]["seconds a step"]
    runs["adam 0.001, equal time"] = run(partial(adam, 1e-3), longer=ratio)
    return {"task": task, "seed": seed, "time of a step over Adam's": ratio, "runs": runs}


def verdicts(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what holds for each task: counts of seeds, and medians of losses."""
    for task in dict.fromkeys(row["task"] for row in rows):
        yield judge_task(task, [row["runs"] for row in rows if row["task"] == task])


def judge_task(task: str, runs_by_seed: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians of losses of K-FAC and Adam, and the counts of seeds where K-FAC is below."""

    def value(name: str, what: str = "train") -> float:
        return statistics.median(runs[name][what] for runs in runs_by_seed)

    rates = [f"adam {lr:g}" for lr in ADAM]
    best = min(rates, key=value)
    return {
        "task": task,
        "seeds": len(runs_by_seed),
        "start": value("kfac ×1", "start"),
        "kfac": value("kfac ×1"),
        "kfac, held-out": value("kfac ×1", "held-out"),
        "adam 1e-3": value("adam 0.001"),
        "adam 1e-3, held-out": value("adam 0.001", "held-out"),
        "adam's best": value(best),
        "at": best,
        "its held-out": value(best, "held-out"),
        "adam 1e-3, equal time": value("adam 0.001, equal time"),
        "seeds below start at all rates": sum(map(is_safe_at_all_rates, runs_by_seed)),
        "seeds below adam 1e-3": count_below(runs_by_seed, ["adam 0.001"]),
        "seeds below adam's best": count_below(runs_by_seed, rates),
        "seeds below adam at equal time": count_below(runs_by_seed, ["adam 0.001, equal time"]),
    }


def is_safe_at_all_rates(runs: dict[str, Any]) -> bool:
    """Return True if K-FAC ends below its start at every multiple of the default rate."""
    ours = [runs[f"kfac ×{factor:g}"] for factor in FACTORS]
    return all(run["train"] < run["start"] for run in ours)


def count_below(runs_by_seed: list[dict[str, Any]], rivals: Sequence[str]) -> int:
    """Return for how many seeds K-FAC ends below all of the rival runs."""
    count = 0
    for runs in runs_by_seed:
        count += runs["kfac ×1"]["train"] < min(runs[rival]["train"] for rival in rivals)
    return count


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default=find_default_device())
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", default=len(SEEDS), type=int)
    parser.add_argument("--parallel", default=1, type=int)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    jobs = list(product(asked.tasks.split(","), range(asked.seeds), [asked.device]))
    spawned = get_context("spawn")
    with ProcessPoolExecutor(asked.parallel, spawned) as pool:
        rows = list(pool.map(one_seed, jobs))
    table = list(verdicts(rows))
    for line in table:
        print(json.dumps(line), flush=True)
    device_type = torch.device(asked.device).type
    out = asked.out or RESULTS / f"defaults-{device_type}.json"
    record = {
        "environment": describe_machine(torch.device(asked.device)),
        "parallel": asked.parallel,
    }
    write_record(out, record | {"verdicts": table, "rows": rows})
