r"""Gauss–Newton above the layers: few outer steps, each an inner training of the linearized model.

    pullback bench gauss-newton-inner [--device cuda] [--outer 20] [--inner 5 20 60] [--judge]

An outer step takes a batch B of many windows and minimizes the loss of the linearized model,

    min over d of  mean_B ℓ(f(w) + J d, y),    then  w ← w + d,

by n steps of Muon or of K-FAC's spectral rule, each on its share of B (at least one minibatch). J d
is a forward derivative and Jᵀ∇ℓ a backward pass, both at w. Every inner training begins with new
optimizers; K-FAC's factors are those at w. Along it the rate falls to zero.

Beside it stand ordinary steps with the gradient of the whole of B, in runs of one, two, four and
eight times as many steps with factors of every step, and the first method's steps on single
minibatches. All runs go through the same windows in the same order. Every rate is doubled and
halved until the best is inside (`races.bracket`); the longest runs take that of the next shorter.

`passes` counts forward-and-backward passes over one minibatch: a step on the linearized model
counts 5/3, for it has a forward pass with its derivative (two forward passes) before the forward
and the backward pass. `--judge` says what a record means, without running anything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from pullback import KFAC, PullbackError

from ..framework.benchmark import (
    RESULTS,
    Record,
    exit_if_failed,
    make_parser,
    parse_count,
    parse_device,
    parse_seconds,
    refuse_unknown_names,
    write_record,
)
from ..framework.environment import environment
from ..framework.timing import describe_machine
from ..learning import schedules
from ..learning.training import autocast, tensor_cores
from ..races.bracket import bracket
from ..races.loop import Batch, Batches, cross_entropy
from ..races.optimizers import OPTIMIZERS
from ..races.tasks import TASKS
from .gauss_newton_verdict import judge, list_rows

#: forward-and-backward passes of a step on the linearized model
LINEARIZED_COST = 5 / 3


@dataclass(frozen=True)
class SearchStarts:
    """Rates at which searches begin; ordinary steps are few and want large ones."""

    linearized: float = 1.2e-2
    ordinary: float = 2.4e-2


STARTS = SearchStarts()


@dataclass(frozen=True)
class OuterRun:
    """One training.

    Attributes:
        task: a text of `TASKS`, whose batch is one minibatch of an outer batch.
        method: the optimizer.
        lr: its largest rate.
        inner: steps on the linearized model in an outer step; 0 for ordinary steps.
        outer: outer steps.
        minibatches: in an outer batch.
        seed: of weights and batches.
        device: where to compute.
    """

    task: str
    method: str
    lr: float
    inner: int
    outer: int
    minibatches: int
    seed: int
    device: str

    @property
    def name(self) -> str:
        """Return the name in the record."""
        solve = f"{self.inner} inner steps"
        if self.inner == 0:
            solve = "ordinary steps"
        batch = f"{self.outer} steps of {self.minibatches}"
        return f"{self.method} {self.lr:g}, {batch}, {solve}, seed {self.seed}"

    @property
    def share(self) -> int:
        """Return the minibatches of an inner step: all together see the batch, if they can."""
        return max(1, self.minibatches // max(self.inner, 1))

    @property
    def passes(self) -> float:
        """Return the forward-and-backward passes over one minibatch in the whole run."""
        if self.inner == 0:
            return self.outer * self.minibatches
        return self.outer * self.share * (1 + LINEARIZED_COST * (self.inner - 1))

    def settings(self) -> dict[str, int]:
        """Return the schedule of K-FAC's factors.

        They are taken at w alone, which is seen by the first inner step, or in every ordinary step
        on a large batch, to which they add little. Steps on minibatches keep the default.
        """
        if self.method != "kfac" or (self.inner == 0 and self.minibatches == 1):
            return {}
        gap = max(self.inner, 1)
        return {"statistics_every": gap, "invert_every": gap}

    def train(self) -> dict[str, Any]:
        """Train, and return held-out losses after every fourth of the run."""
        torch.set_num_threads(1)
        device = torch.device(self.device)
        task = TASKS[self.task]
        batches, _ = task.batches(self.outer * self.minibatches, self.seed, device)
        torch.manual_seed(self.seed)
        model = task.model().to(device)
        start = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(tensor_cores(device))
            if self.inner:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # has forward derivatives
            optimizers = OPTIMIZERS[self.method](model, self.lr, self.settings())
            for optimizer in optimizers:
                if isinstance(optimizer, KFAC):
                    stack.enter_context(optimizer)
            trainer = OuterTrainer(self, model, task.model().to(device), optimizers)
            trainer.run(batches, task.held_batch)
        return {
            **asdict(self),
            "passes": self.passes,
            "seconds": time.perf_counter() - start,
            "curve": trainer.curve,
            "half way": trainer.half_way,
            "final": trainer.curve[-1],
        }


class OuterTrainer:
    """The state of a run.

    `reference` is a second module: where the model is linearized. `curve` has held-out losses,
    `half_way` those at w + d/2, which the next step does not start from.
    """

    def __init__(
        self, plan: OuterRun, model: nn.Module, reference: nn.Module, optimizers: list[Optimizer]
    ) -> None:
        self.plan = plan
        self.model = model
        self.reference = reference
        self.optimizers = optimizers
        self.curve: list[float] = []
        self.half_way: list[float] = []
        self._new_states = [deepcopy(optimizer.state_dict()) for optimizer in optimizers]
        self._rates = [[group["lr"] for group in o.param_groups] for o in optimizers]
        self._schedule = schedules.add_warmup(schedules.linear, 0.05)
        self._half = None
        if torch.device(plan.device).type == "cuda":
            self._half = torch.bfloat16

    def run(self, batches: Batches, held_batch: int) -> None:
        """Train to the end; note held-out losses after every fourth of it."""
        plan = self.plan
        for outer in range(plan.outer):
            minibatches = batches.of(
                range(outer * plan.minibatches, (outer + 1) * plan.minibatches)
            )
            rate = self._schedule((outer + 1) / (plan.outer + 1))
            if plan.inner == 0:
                self._step_on_all(minibatches, rate)
            else:
                self._solve_linearized(minibatches, rate)
            if 4 * (outer + 1) // plan.outer > 4 * outer // plan.outer:
                self.curve.append(self._evaluate(self.model, batches, held_batch))
                if plan.inner:
                    self._move_reference_half_way()
                    self.half_way.append(self._evaluate(self.reference, batches, held_batch))

    def _step_on_all(self, minibatches: Sequence[Batch], rate: float) -> None:
        """Take an ordinary step with the mean gradient over all minibatches."""
        self._zero_grad()
        for x, y in minibatches:
            (self._loss(self.model, x, y) / len(minibatches)).backward()
        self._step(rate)

    def _solve_linearized(self, minibatches: Sequence[Batch], rate: float) -> None:
        """Take n steps on the linearized model with new optimizers."""
        self.reference.load_state_dict(self.model.state_dict())
        for optimizer, state in zip(self.optimizers, self._new_states, strict=True):
            optimizer.load_state_dict(state)
        share = self.plan.share
        for i in range(self.plan.inner):
            self._zero_grad()
            for j in range(i * share, (i + 1) * share):
                x, y = minibatches[j % len(minibatches)]
                if i == 0:  # d = 0: the gradient of the model itself
                    (self._loss(self.model, x, y) / share).backward()
                else:
                    self._add_linearized_gradient(x, y, 1 / share)
            self._step(rate * (1 - i / self.plan.inner))

    def _add_linearized_gradient(self, x: Tensor, y: Tensor, weight: float = 1.0) -> None:
        """Add Jᵀ∇ℓ(f + J d), with f and J at the reference and d = model − reference."""
        point = dict(self.reference.named_parameters())
        displacement: dict[str, Tensor] = {}
        for name, p in self.model.named_parameters():
            displacement[name] = p.detach() - point[name].detach()

        def outputs(params: Mapping[str, Tensor]) -> Tensor:
            with autocast(x, self._half):
                return functional_call(self.reference, dict(params), (x,))

        primal = {name: p.detach() for name, p in point.items()}
        with torch.no_grad():
            z, change = jvp(outputs, (primal,), (displacement,))
        linearized = (z.float() + change.float()).requires_grad_()
        (cotangent,) = torch.autograd.grad(weight * cross_entropy(linearized, y), linearized)
        with autocast(x, self._half):
            z = self.reference(x)
        gradients = torch.autograd.grad(z, list(point.values()), cotangent.to(z.dtype))
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad += gradient

    @torch.no_grad()
    def _move_reference_half_way(self) -> None:
        """Set the reference, which the next outer step overwrites, to w + d/2."""
        pairs = zip(self.reference.parameters(), self.model.parameters(), strict=True)
        for p, end in pairs:
            p.lerp_(end, 0.5)

    def _loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with autocast(x, self._half):
            return cross_entropy(model(x), y)

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _step(self, factor: float) -> None:
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = factor * rate
            optimizer.step()

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, batches: Batches, held_batch: int) -> float:
        model.eval()
        losses = []
        counts = []
        for x, y in batches.held_out(held_batch):
            losses.append(float(self._loss(model, x, y)) * y.numel())
            counts.append(y.numel())
        model.train()
        return sum(losses) / sum(counts)


class OutOfTimeError(Exception):
    """No time is left to begin another run."""


@dataclass
class Study:
    """Runs in several processes, each of which is put on record.

    Attributes:
        record: of finished runs, which are not repeated.
        pool: the processes.
        deadline: of `time.monotonic`, after which no run begins.
    """

    record: Record
    pool: ProcessPoolExecutor
    deadline: float
    _lock: Lock = field(default_factory=Lock)

    def train(self, plan: OuterRun) -> dict[str, Any]:
        """Return the run's result, from the record or by training."""
        if plan.name not in self.record:
            if time.monotonic() > self.deadline:
                raise OutOfTimeError
            result = self.pool.submit(plan.train).result()
            with self._lock:
                self.record.put(plan.name, result)
            print(
                f"{plan.name:60} {result['final']:.4f} {plan.passes:.0f} passes "
                f"{result['seconds']:.1f} s",
                flush=True,
            )
        return self.record.results[plan.name]

    def search(self, plan: OuterRun, seeds: Sequence[int]) -> float:
        """Return the best of a bracket of rates around the plan's, which all seeds then take."""
        runs = bracket(lambda rate: self.train(replace(plan, lr=rate)), plan.lr)
        rate = min(runs, key=lambda run: run["final"])["lr"]
        for seed in seeds:
            self.train(replace(plan, lr=rate, seed=seed))
        return rate

    def search_ordinary(self, plan: OuterRun, lengths: Sequence[int], seeds: Sequence[int]) -> None:
        """Search every length from the best rate of the one before, which the longest takes.

        A length is a multiple of the plan's steps.
        """
        rate = plan.lr
        for length in sorted(lengths):
            one = replace(plan, outer=length * plan.outer, lr=rate)
            if length == max(lengths) > 1:
                for seed in seeds:
                    self.train(replace(one, seed=seed))
            else:
                rate = self.search(one, seeds)


def list_searches(study: Study, first: OuterRun, asked: Any) -> list[Callable[[], Any]]:
    """Return all that can be done at the same time; the decisive ones come first."""
    searches: list[Callable[[], Any]] = []
    for method in asked.methods:
        plan = replace(first, method=method)
        ordinary = replace(plan, lr=STARTS.ordinary)
        if asked.lengths:
            searches.append(lambda p=ordinary: study.search_ordinary(p, asked.lengths, asked.seeds))
        for inner in asked.inner:
            one = replace(plan, inner=inner, lr=STARTS.linearized)
            searches.append(lambda p=one: study.search(p, asked.seeds))
    small = replace(first, method=asked.methods[0], lr=STARTS.ordinary, outer=1, minibatches=1)
    if asked.small:
        searches.append(lambda: study.search_ordinary(small, asked.small, asked.seeds[:1]))
    return searches


def do_all(searches: Sequence[Callable[[], Any]], workers: int) -> int:
    """Do all searches, some at a time, and return how many failed.

    One that fails or has no time left does not end others.
    """
    failures = 0
    with ThreadPoolExecutor(workers) as threads:
        jobs = [threads.submit(one) for one in searches]
        for job in as_completed(jobs):
            error = job.exception()
            if error is not None:
                print(repr(error), flush=True)
                failures += not isinstance(error, OutOfTimeError)
    return failures


def print_verdict(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Print the table and the checks, and return the checks for the record."""
    for row in list_rows(list(results.values())):
        print("  ".join(f"{cell:>12}" for cell in row))
    checks = judge(list(results.values()))
    for check in checks:
        print(check)
    return [asdict(check) for check in checks]


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", type=parse_device, default="cpu")
    parser.add_argument("--task", default="text")
    parser.add_argument("--outer", type=parse_count, default=20)
    parser.add_argument("--minibatches", type=parse_count, default=16, help="in an outer batch")
    parser.add_argument("--inner", type=parse_count, nargs="*", default=[20, 60, 5])
    parser.add_argument("--lengths", type=parse_count, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument(
        "--small", type=parse_count, nargs="*", default=[40, 80, 160, 320, 640],
        help="numbers of steps on single minibatches",
    )  # fmt: skip
    parser.add_argument("--methods", nargs="+", default=["kfac", "muon-0.9"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="the first searches")
    parser.add_argument("--workers", type=parse_count, default=1)
    parser.add_argument("--seconds", type=parse_seconds, default=1e9, help="then no run begins")
    parser.add_argument("--judge", action="store_true", help="a finished record alone")
    parser.add_argument("--out", type=Path, default=RESULTS / "gauss-newton-inner.json")
    asked = parser.parse_args(arguments)
    refuse_unknown_names("task", [asked.task], TASKS)
    refuse_unknown_names("optimizer", asked.methods, OPTIMIZERS)
    if asked.judge:
        judge_record(asked.out)
        return
    first = OuterRun(
        asked.task, "kfac", 0.0, inner=0, outer=asked.outer, minibatches=asked.minibatches,
        seed=asked.seeds[0], device=asked.device,
    )  # fmt: skip
    about = {"environment": describe_machine(torch.device(asked.device)), "task": asked.task}
    record = Record(asked.out, about, environment=environment(asked.device))
    with ProcessPoolExecutor(asked.workers, get_context("spawn")) as pool:
        study = Study(record, pool, time.monotonic() + asked.seconds)
        searches = list_searches(study, first, asked)
        failures = do_all(searches, asked.workers)
    if record.results:
        record.write(checks=print_verdict(record.results))
    exit_if_failed(failures, len(searches), "searches")


def judge_record(path: Path) -> None:
    """Print what a record means, and write the checks into it; raise if there is none."""
    if not path.is_file():
        raise PullbackError(
            f"There is no record {str(path)!r}",
            "--judge reads a finished one",
            "Run without --judge first",
        )
    contents = json.loads(path.read_text("utf-8"))
    write_record(path, {**contents, "checks": print_verdict(contents["results"])})
