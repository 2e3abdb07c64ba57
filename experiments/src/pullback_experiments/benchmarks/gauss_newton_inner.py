r"""Gauss–Newton above the layers: few outer steps, each an inner training of the linearized model.

    pullback bench gauss-newton-inner [--device cuda] [--task text] [--outer 20] [--inner 5 20 60]

An outer step takes a batch B of many windows and minimizes the loss of the linearized model,

    min over d of  mean_B ℓ(f(w) + J d, y),    then  w ← w + d,

by n steps of Muon or of K-FAC's spectral rule, each on one minibatch of B. J d is a forward
derivative and Jᵀ∇ℓ a backward pass, both at w. K-FAC's factors are those at w. Beside it the same
optimizers take ordinary steps with the gradient of the whole of B, in runs of one, two and four
times as many steps.

`passes` counts forward-and-backward passes over one minibatch:
a step on the linearized model counts 5/3, for it has a forward pass with its derivative (two
forward passes) before the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from pullback import KFAC

from ..framework.benchmark import RESULTS, Record, make_parser
from ..framework.timing import describe_machine
from ..learning import schedules
from ..learning.training import autocast, tensor_cores
from ..races.loop import Batch, Batches, cross_entropy
from ..races.optimizers import OPTIMIZERS
from ..races.tasks import TASKS

#: rates of the inner optimizers: those of the races, half and twice
RATES = {"muon-0.9": (8e-3, 4e-3, 1.6e-2), "kfac": (6e-3, 3e-3, 1.2e-2)}
#: forward-and-backward passes of a step on the linearized model
LINEARIZED_COST = 5 / 3


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
        return f"{self.method} {self.lr:g}, {self.outer} steps, {solve}, seed {self.seed}"

    @property
    def passes(self) -> float:
        """Return the forward-and-backward passes over one minibatch in the whole run."""
        if self.inner == 0:
            return self.outer * self.minibatches
        return self.outer * (1 + LINEARIZED_COST * (self.inner - 1))

    def train(self) -> dict[str, Any]:
        """Train, and return held-out losses after every fourth of the run."""
        torch.set_num_threads(1)
        device = torch.device(self.device)
        task = TASKS[self.task]
        batches, _ = task.batches(self.outer * self.minibatches, self.seed, device)
        torch.manual_seed(self.seed)
        model = task.model().to(device)
        settings = {}
        if self.method == "kfac" and self.inner:
            # the first step of every outer step sees the model itself
            settings = {"statistics_every": self.inner, "invert_every": self.inner}
        with ExitStack() as stack:
            stack.enter_context(tensor_cores(device))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # has forward derivatives
            optimizers = OPTIMIZERS[self.method](model, self.lr, settings)
            for optimizer in optimizers:
                if isinstance(optimizer, KFAC):
                    stack.enter_context(optimizer)
            trainer = OuterTrainer(self, model, task.model().to(device), optimizers)
            curve = trainer.run(batches, task.held_batch)
        return {**asdict(self), "passes": self.passes, "curve": curve, "final": curve[-1]}


class OuterTrainer:
    """The state of a run.

    `reference` is a second module: where the model is linearized.
    """

    def __init__(
        self, plan: OuterRun, model: nn.Module, reference: nn.Module, optimizers: list[Optimizer]
    ) -> None:
        self.plan = plan
        self.model = model
        self.reference = reference
        self.optimizers = optimizers
        self._groups = list(chain.from_iterable(o.param_groups for o in optimizers))
        self._rates = [group["lr"] for group in self._groups]
        self._schedule = schedules.add_warmup(schedules.linear, 0.05)
        self._half = None
        if torch.device(plan.device).type == "cuda":
            self._half = torch.bfloat16

    def run(self, batches: Batches, held_batch: int) -> list[float]:
        """Train to the end; return held-out losses after every fourth of it."""
        plan = self.plan
        curve = []
        for outer in range(plan.outer):
            minibatches = batches.of(
                range(outer * plan.minibatches, (outer + 1) * plan.minibatches)
            )
            share = self._schedule((outer + 1) / (plan.outer + 1))
            if plan.inner == 0:
                self._step_on_all(minibatches, share)
            else:
                self._solve_linearized(minibatches, share)
            if 4 * (outer + 1) // plan.outer > 4 * outer // plan.outer:
                curve.append(self._evaluate(batches, held_batch))
        return curve

    def _step_on_all(self, minibatches: Sequence[Batch], share: float) -> None:
        """Take an ordinary step with the mean gradient over all minibatches."""
        self._zero_grad()
        for x, y in minibatches:
            (self._loss(x, y) / len(minibatches)).backward()
        self._step(share)

    def _solve_linearized(self, minibatches: Sequence[Batch], share: float) -> None:
        """Take n steps on the linearized model; their rate falls to zero along a line."""
        self.reference.load_state_dict(self.model.state_dict())
        for i in range(self.plan.inner):
            x, y = minibatches[i % len(minibatches)]
            self._zero_grad()
            if i == 0:  # d = 0: the gradient of the model itself
                self._loss(x, y).backward()
            else:
                self._set_linearized_gradient(x, y)
            self._step(share * (1 - i / self.plan.inner))

    def _set_linearized_gradient(self, x: Tensor, y: Tensor) -> None:
        """Set every gradient to Jᵀ∇ℓ(f + J d) with f and J at the reference, d = model − it."""
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
        (cotangent,) = torch.autograd.grad(cross_entropy(linearized, y), linearized)
        with autocast(x, self._half):
            z = self.reference(x)
        gradients = torch.autograd.grad(z, list(point.values()), cotangent.to(z.dtype))
        for p, gradient in zip(self.model.parameters(), gradients, strict=True):
            p.grad = gradient

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        with autocast(x, self._half):
            return cross_entropy(self.model(x), y)

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _step(self, share: float) -> None:
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = share * rate
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def _evaluate(self, batches: Batches, held_batch: int) -> float:
        self.model.eval()
        losses = []
        counts = []
        for x, y in batches.held_out(held_batch):
            losses.append(float(self._loss(x, y)) * y.numel())
            counts.append(y.numel())
        self.model.train()
        return sum(losses) / sum(counts)


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--task", default="text")
    parser.add_argument("--outer", type=int, default=20)
    parser.add_argument("--minibatches", type=int, default=16, help="in an outer batch")
    parser.add_argument("--inner", type=int, nargs="*", default=[5, 20, 60])
    parser.add_argument("--lengths", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--methods", nargs="*", default=list(RATES))
    parser.add_argument("--rates", type=int, default=2, help="so many of each method's")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "gauss-newton-inner.json")
    asked = parser.parse_args(arguments)
    step_counts = [(inner, asked.outer) for inner in asked.inner]
    step_counts += [(0, length * asked.outer) for length in asked.lengths]
    runs = []
    for seed, number, (inner, outer), method in product(
        asked.seeds, range(asked.rates), step_counts, asked.methods
    ):
        rate = RATES[method][number]
        runs.append(
            OuterRun(asked.task, method, rate, inner, outer, asked.minibatches, seed, asked.device)
        )
    environment = describe_machine(torch.device(asked.device))
    record = Record(asked.out, {"environment": environment, "task": asked.task})
    missing = [one for one in runs if one.name not in record]
    with ProcessPoolExecutor(asked.workers, get_context("spawn")) as pool:
        jobs = {pool.submit(one.train): one for one in missing}
        for job in as_completed(jobs):
            one = jobs[job]
            error = job.exception()
            if error is None:
                result = job.result()
                record.put(one.name, result)
                print(f"{one.name:55} {result['final']:.4f} {one.passes:.0f} passes", flush=True)
            else:
                print(f"{one.name:55} {error!r}", flush=True)
