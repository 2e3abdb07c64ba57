"""K-FAC on models that others wrote: which blocks it finds, what it costs, and how it trains.

    pullback bench third-party [--only NAME ...] [--train] [--out FILE]
    pullback bench third-party --others [--only NAME ...] [--out FILE]

Models are built from small configurations with random weights. The shares are those of trained
entries by block, after two steps of natural K-FAC. The ratio is the time of ten steps of
`KFAC(model)`, statistics and inverses included, beside ten of AdamW. With --train each model learns
a small task for 30 steps on the same batches: SGD with momentum, Adam and `KFAC(model)`, at three
rates each: Adam's and K-FAC's are 1, 3 and 10 times their default. A score is the mean loss of the
last five steps at the best rate. With --others only the training, of models in no table.
Needs `pip install pullback[models] diffusers`; a model whose package is not there is left out.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pullback as pb

from ..framework.benchmark import RESULTS, Record, make_parser
from ..framework.timing import compare, first_and_later
from . import third_party_real
from .kfac import NEVER, predict_schedule_ratio
from .third_party_models import Model, models
from .third_party_others import list_other_models
from .third_party_real import shares

RATES = {"SGD": (0.01, 0.1, 1.0), "Adam": (1e-3, 3e-3, 1e-2), "KFAC": (1, 3, 10)}


@dataclass(frozen=True)
class RaceLength:
    """How long each optimizer trains, and what its score is made of."""

    #: batches of training
    steps: int = 30
    #: losses at the end whose mean is the score: single ones are noisy
    scored: int = 5


def output_of(case: Model, out: Any) -> Tensor:
    """Return the tensor that the loss is made of."""
    if isinstance(out, Tensor):
        return out
    if case.output is None:
        return out.logits
    if case.output.isdigit():
        return out[int(case.output)]
    return getattr(out, case.output)


def kfac(case: Model, model: nn.Module, lr: float | None = None, **options: Any) -> pb.KFAC:
    """K-FAC with the model's output."""
    output: str | int | None = case.output
    if case.output and case.output.isdigit():
        output = int(case.output)
    return pb.KFAC(model, lr, output=output, **options)


def natural(case: Model, model: nn.Module, statistics: int, inversion: int = NEVER) -> pb.KFAC:
    """Natural K-FAC at a rate of zero, with this schedule from the first step on."""
    rule = pb.optim.kfac.Natural(case.likelihood or pb.likelihoods.Categorical(), warmup=0)
    schedule = {"statistics_every": statistics, "invert_every": inversion}
    return kfac(case, model, 0.0, rule=rule, **schedule)


def list_trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def train(
    case: Model, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    """Return the losses of an ordinary loop, on the same batches for every optimizer."""
    losses = []
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for _ in range(steps):
        x, y = case.batch(random)
        optimizer.zero_grad()
        loss = case.loss(output_of(case, model(**x)), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def make_step(
    case: Model, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    """Return a function that makes a training step on the first batch."""
    x, y = case.batch(torch.Generator().manual_seed(0))

    def step() -> None:
        optimizer.zero_grad()
        case.loss(output_of(case, model(**x)), y).backward()
        optimizer.step()

    return step


def coverage(case: Model) -> dict[str, Any]:
    """Return the shares of trained entries by kind of block, and the reasons for diagonals."""
    torch.manual_seed(0)
    model = case.make().train()
    opt = natural(case, model, 1)
    train(case, model, opt, 2)
    rows = [r for r in opt.coverage() if r.block not in ("none", "gradient")]
    return {
        "parameters": sum(torch.Size(row.shape).numel() for row in rows),
        "shares": shares(opt),
        "diagonal": {r.name: r.reason for r in rows if r.block == "diagonal"},
    }


def costs(case: Model) -> dict[str, Any]:
    """Return CPU times within one run in multiples of a step of AdamW.

    Steps of natural K-FAC: plain ones, ones with statistics, ones that invert too, and 10/100 from
    these; the mean of `KFAC(model)` over 20 steps; the first step over a later statistics step.
    """
    torch.manual_seed(0)
    start = case.make().train()
    cpu = torch.device("cpu")
    clock = time.process_time
    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "baseline": lambda m: torch.optim.AdamW(list_trainable_parameters(m), 0.0, foreach=True),
        "kfac plain": lambda m: natural(case, m, NEVER),
        "kfac statistics": lambda m: natural(case, m, 1),
        "kfac inversion": lambda m: natural(case, m, 1, 1),
    }
    copies = {name: copy.deepcopy(start) for name in makers}
    routes = {
        name: make_step(case, copies[name], make(copies[name])) for name, make in makers.items()
    }
    seconds = compare(routes, cpu, repeats=5, warmup=2, clock=clock)
    base = seconds["baseline"]
    ratios = {
        step_type: seconds[f"kfac {step_type}"] / base
        for step_type in ("plain", "statistics", "inversion")
    }
    ratios["10/100"] = predict_schedule_ratio(seconds, "kfac", (10, 100))
    model = copy.deepcopy(start)
    step = make_step(case, model, kfac(case, model, 0.0))
    step()  # the first one sets up what the others use
    start_time = clock()
    for _ in range(20):
        step()
    ratios["default"] = (clock() - start_time) / 20 / base
    model = copy.deepcopy(start)
    first, later = first_and_later(make_step(case, model, natural(case, model, 1)), cpu, clock)
    return {"ratio": ratios, "first step": first / later}


def make_optimizer(case: Model, model: nn.Module, name: str, rate: float) -> torch.optim.Optimizer:
    """Return SGD or Adam at this rate, or K-FAC at this multiple of its default rates."""
    if name == "SGD":
        return torch.optim.SGD(list_trainable_parameters(model), rate, momentum=0.9)
    if name == "Adam":
        return torch.optim.Adam(list_trainable_parameters(model), rate)
    optimizer = kfac(case, model)
    for group in optimizer.param_groups:
        group["lr"] *= rate
    return optimizer


def race(case: Model) -> dict[str, dict[str, float | None]]:
    """Return the scores by optimizer and rate; None where a run diverged."""
    length = RaceLength()
    torch.manual_seed(0)
    start = case.make().train()
    scores: dict[str, dict[str, float | None]] = {}
    for name, rates in RATES.items():
        scores[name] = {}
        for rate in rates:
            model = copy.deepcopy(start)
            optimizer = make_optimizer(case, model, name, rate)
            losses = train(case, model, optimizer, length.steps)[-length.scored :]
            score: float | None = sum(losses) / length.scored
            if not math.isfinite(score):
                score = None
            scores[name][str(rate)] = score
    return scores


def find_best_score(scores: dict[str, float | None]) -> float:
    """The score at the best rate."""
    return min((s for s in scores.values() if s is not None), default=math.inf)


def summary(name: str, row: dict[str, Any]) -> str:
    """Return one line on a model."""
    if row["refused"]:
        return f"{name}: refused: {row['refused']}"
    phrases = []
    if "shares" in row:
        phrases += [f"{row['parameters']:,}"]
        phrases += [f"{schedule} {100 * share:.1f} %" for schedule, share in row["shares"].items()]
        phrases += [
            f"{schedule} {row['ratio'][schedule]:.2f}x" for schedule in ("10/100", "default")
        ]
        phrases += [f"first step {row['first step']:.1f}"]
    phrases += [
        f"{schedule} {find_best_score(scores):.3f}"
        for schedule, scores in row.get("scores", {}).items()
    ]
    return f"{name}: {', '.join(phrases)}"


def measure(case: Model, *, costs_too: bool, races_too: bool) -> dict[str, Any]:
    """Return what a model's entry of the record gains: coverage and costs, scores, or a refusal."""
    row: dict[str, Any] = {}
    try:
        if costs_too:
            row |= {**coverage(case), **costs(case)}
        if races_too:
            row["scores"] = race(case)
        row["refused"] = None
    except pb.PullbackError as error:
        row["refused"] = str(error)
    return row


def count_wins(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a line: on how many models K-FAC ends below SGD and Adam, tuned or by default."""
    races = [row["scores"] for row in rows.values() if "scores" in row]
    ahead_tuned = 0
    ahead_of_tuned = 0
    ahead_of_adam = 0
    for scores in races:
        rival = min(find_best_score(scores["SGD"]), find_best_score(scores["Adam"]))
        default = _as_loss(scores["KFAC"]["1"])
        ahead_tuned += find_best_score(scores["KFAC"]) < rival
        ahead_of_tuned += default < rival
        ahead_of_adam += default < _as_loss(scores["Adam"]["0.001"])
    return (
        f"of {len(races)} models ahead of SGD and Adam, all tuned: {ahead_tuned}; "
        f"at its default rate: {ahead_of_tuned}; of Adam at its own: {ahead_of_adam}"
    )


def _as_loss(score: float | None) -> float:
    """Return a score, infinite where the run diverged."""
    if score is None:
        return math.inf
    return score


def run_small_models(options: argparse.Namespace) -> None:
    """Measure the models of small configurations, and write a record of them."""
    if options.others:
        cases = list_other_models()
        path = options.out or RESULTS / "third-party-others.json"
    else:
        cases = models()
        path = options.out or RESULTS / "third-party.json"
    torch.set_num_threads(1)
    record = Record.on_device(path, "cpu")
    for name, case in cases.items():
        if options.only and name not in options.only:
            continue
        races_too = options.train or options.others
        measured = measure(case, costs_too=not options.others, races_too=races_too)
        row = record.results.get(name, {}) | measured
        print(summary(name, row), flush=True)
        record.put(name, row)
    print(count_wins(record.results))


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--others", action="store_true", help="models in no table: training alone")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--real", action="store_true", help="three models at their full sizes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="with --real: tiny sizes")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if not options.real:
        run_small_models(options)
        return
    device = torch.device(options.device)
    path = options.out or RESULTS / f"third-party-real-{device.type}.json"
    third_party_real.run(device, options.quick, path, options.only)
