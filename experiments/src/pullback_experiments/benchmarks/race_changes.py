"""Which changes of `KFAC(model)` pay: the race on text with one change at a time, seed by seed.

    pullback bench race-changes [--device cuda] [--task text] [--steps 640] [--seeds 0 1 2]
    pullback bench race-changes --only unchanged "output factor too" --workers 6
    pullback bench race-changes --two-sided [--steps 680]

Every run has the default rate, the same batches and the same schedule as the unchanged optimizer,
which is the two-sided rule with `--two-sided`, and `KFAC(model)` otherwise.
A change pays if it lowers the held-out loss by at least 0.003 on every seed; one that does not has
no run on the next seed. Losses alone are recorded: runs share the device. Rows of NorMuon are
rivals with other rates for what AdamW takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback import KFAC
from pullback.optim.kfac import AdamW, Estimation, Spectral, TwoSided
from pullback.optim.kfac.rules import BlockShape, Rule, RuleState, StepContext
from pullback.optim.kfac.rules.spectral import SpectralState

from ..framework.benchmark import (
    RESULTS,
    Record,
    exit_if_failed,
    make_parser,
    parse_count,
    parse_device,
    refuse_unknown_names,
)
from ..framework.environment import environment
from ..framework.timing import describe_machine
from ..races import optimizers, two_sided_changes
from ..races.loop import run
from ..races.tasks import TASKS, VOCABULARY

#: the default rate of `KFAC(model)` for transformers
LR = Spectral.defaults.lr
UNCHANGED = "unchanged"
#: by how much a change that pays lowers the held-out loss on every seed
LEAST_GAIN = 3e-3


def _two_sided(**options: Any) -> Callable[[], Rule]:
    """Return the rule with the output factor; its momentum and AdamW's share are `Spectral`'s."""
    return lambda: TwoSided(**{"momentum": 0.9, "others": AdamW(rate=0.5), **options})


# --- the input factor on the output head ----------------------------------------------------------


@dataclass(kw_only=True)
class HeadState(SpectralState):
    """Adam's second moment of the whitened gradient beside the state of `Spectral`."""

    second: Tensor


class WhitenedHead(Spectral):
    r"""`Spectral` for hidden matrices, and for the output head Adam in whitened coordinates:

        Δ = adam(G C^(-½)) C^(-½), as long as adam(G C^(-½)), at half the rate.

    The head is known by its rows, one for each byte.
    """

    name: ClassVar = "whitened-head"

    def __init__(self) -> None:
        super().__init__(head=True)
        self.adamw = AdamW(rate=0.5)

    def init(self, shape: BlockShape) -> SpectralState:
        state = super().init(shape)
        if shape.size[1] != VOCABULARY:
            return state
        return HeadState(**vars(state), second=shape.zeros(*shape.size))

    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        if not isinstance(state, HeadState):
            return super().direction(gradient, state, step)
        beta1, beta2 = self.adamw.betas
        root = state.root.float()
        whitened = gradient @ root
        step.average(state.momentum, whitened, 1 - beta1)
        step.average(state.second, whitened.square(), 1 - beta2)
        size = (state.second / (1 - beta2**step.count)).sqrt() + self.adamw.eps
        adam = state.momentum / size / (1 - beta1**step.count)
        back = adam @ root
        length = adam.norm(dim=(1, 2), keepdim=True) / back.norm(dim=(1, 2), keepdim=True)
        return self.adamw.rate * length * back


# --- lengths of steps -----------------------------------------------------------------------------


class UncorrectedSpectral(Spectral):
    """`Spectral` without the correction of mean squares that gentle starts have."""

    name: ClassVar = "uncorrected-spectral"

    def average_squares(self, squares: Tensor, state: SpectralState, step: StepContext) -> Tensor:
        super().average_squares(squares, state, step)
        return state.square


class UncorrectedTwoSided(UncorrectedSpectral, TwoSided):
    """`TwoSided` without that correction."""

    name: ClassVar = "uncorrected-two-sided"


class FullLengthSpectral(Spectral):
    """`Spectral` with steps of full length also where momentum has few directions."""

    name: ClassVar = "full-length-spectral"

    def find_fullness(self, lengths: Tensor, shape: Sequence[int]) -> Tensor | float:
        return 1.0


class FullLengthTwoSided(FullLengthSpectral, TwoSided):
    """`TwoSided` with steps of full length too."""

    name: ClassVar = "full-length-two-sided"


# --- hooks around a step --------------------------------------------------------------------------


class CautiousDecay:
    """Weight decay of those entries alone that the step itself moves towards zero."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._decays: list[tuple[dict[str, Any], float]] = []
        for group in optimizer.param_groups:
            self._decays.append((group, group["weight_decay"]))
            group["weight_decay"] = 0.0
        self._before: list[list[Tensor]] = []
        optimizer.register_step_pre_hook(self._remember)
        optimizer.register_step_post_hook(self._decay)

    def _remember(self, *_: Any) -> None:
        self._before = []
        for group, _decay in self._decays:
            self._before.append([p.detach().clone() for p in group["params"]])

    @torch.no_grad()
    def _decay(self, *_: Any) -> None:
        for (group, decay), before in zip(self._decays, self._before, strict=True):
            if not decay:
                continue
            for p, old in zip(group["params"], before, strict=True):
                is_shrinking = (p - old) * old < 0
                p.sub_(old * is_shrinking, alpha=group["lr"] * decay)


class AveragedReadout:
    """A running mean of the weights, which takes their place while the model is evaluated."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, memory: float = 0.95) -> None:
        self._params = list(model.parameters())
        self._means = [p.detach().clone() for p in self._params]
        self._memory = memory
        self._trained: list[Tensor] | None = None
        self._set_mode = model.train
        optimizer.register_step_post_hook(self._average)
        model.train = self._train  # pyright: ignore[reportAttributeAccessIssue]

    @torch.no_grad()
    def _average(self, *_: Any) -> None:
        torch._foreach_lerp_(self._means, self._params, 1 - self._memory)

    @torch.no_grad()
    def _train(self, mode: bool = True) -> nn.Module:
        if mode and self._trained is not None:
            torch._foreach_copy_(self._params, self._trained)
            self._trained = None
        if not mode and self._trained is None:
            self._trained = [p.detach().clone() for p in self._params]
            torch._foreach_copy_(self._params, self._means)
        return self._set_mode(mode)


# --- rows -----------------------------------------------------------------------------------------


def _kfac(make_rule: Callable[[], Rule] = Spectral, **options: Any) -> optimizers.Build:
    """Return a row: `KFAC(model)` with another rule or other options."""

    def build(model: nn.Module, lr: float, settings: Any) -> list[Optimizer]:
        params = optimizers.make_decay_groups(model)
        return [KFAC(model, lr, rule=make_rule(), params=params, **options)]

    return build


def _remember_squares_of_gains(model: nn.Module, lr: float, settings: Any) -> list[Optimizer]:
    matrices, gains = optimizers.make_decay_groups(model)
    gains["betas"] = (0.9, 0.99)
    return [KFAC(model, lr, rule=Spectral(), params=[matrices, gains])]


def _decay_cautiously(model: nn.Module, lr: float, settings: Any) -> list[Optimizer]:
    (optimizer,) = _kfac()(model, lr, settings)
    CautiousDecay(optimizer)
    return [optimizer]


def _average_readout(model: nn.Module, lr: float, settings: Any) -> list[Optimizer]:
    (optimizer,) = _kfac()(model, lr, settings)
    AveragedReadout(model, optimizer)
    return [optimizer]


def _normuon(rate: float, adamw_share: float) -> optimizers.Build:
    """Return NorMuon with momentum 0.9, and a share of its rate for what AdamW takes."""
    settings = {"momentum": 0.9, "rest": adamw_share}
    return lambda model, lr, more: optimizers.normuon(model, rate, settings)


ROWS: dict[str, optimizers.Build] = {
    UNCHANGED: _kfac(),
    "output factor too": _kfac(_two_sided()),
    "output factor too, statistics and roots every 5 steps": _kfac(
        _two_sided(), statistics_every=5, invert_every=5
    ),
    "output factor too, AdamW at the whole rate": _kfac(_two_sided(others=AdamW())),
    "the two-sided rule": _kfac(TwoSided),
    "no gentle start": _kfac(partial(Spectral, gentle_start=False)),
    "gentle start": _kfac(partial(Spectral, gentle_start=True)),
    "gentle start, squares not corrected": _kfac(partial(UncorrectedSpectral, gentle_start=True)),
    "gentle start, steps of full length": _kfac(partial(FullLengthSpectral, gentle_start=True)),
    "statistics of one batch": _kfac(
        partial(Spectral, estimation=Estimation(ema=0.0)), invert_every=10
    ),
    "momentum 0.85": _kfac(partial(Spectral, momentum=0.85)),
    "statistics and roots every 5 steps": _kfac(statistics_every=5, invert_every=5),
    "statistics and roots every 2 steps": _kfac(statistics_every=2, invert_every=2),
    "refresh denser at first": _kfac(partial(Spectral, warmup=20)),
    "refresh denser at first, damping 0.05": _kfac(partial(Spectral, warmup=20, damping=0.05)),
    "damping 0.05": _kfac(partial(Spectral, damping=0.05)),
    "damping 0.02": _kfac(partial(Spectral, damping=0.02)),
    "input factor on the head": _kfac(WhitenedHead),
    "squares of gains remembered by 0.99": _remember_squares_of_gains,
    "squares of all that AdamW takes remembered by 0.99": _kfac(
        partial(Spectral, others=AdamW((0.9, 0.99), rate=0.5))
    ),
    "AdamW at a quarter of the rate": _kfac(partial(Spectral, others=AdamW(rate=0.25))),
    "AdamW at the whole rate": _kfac(partial(Spectral, others=AdamW(rate=1.0))),
    "average of the last weights": _average_readout,
    "cautious decay": _decay_cautiously,
    "momentum 0.95": _kfac(partial(Spectral, momentum=0.95)),
    "NorMuon 0.008, AdamW at half its rate": _normuon(8e-3, 0.5),
    "NorMuon 0.016, AdamW at half its rate": _normuon(1.6e-2, 0.5),
    "NorMuon 0.016, AdamW at a quarter of its rate": _normuon(1.6e-2, 0.25),
}
TWO_SIDED_ROWS: dict[str, optimizers.Build] = {
    two_sided_changes.UNCHANGED: ROWS[two_sided_changes.UNCHANGED],
    "the two-sided rule, momentum 0.8": _kfac(partial(TwoSided, momentum=0.8)),
    "the two-sided rule, damping 0.1": _kfac(partial(TwoSided, damping=0.1)),
    "the two-sided rule, AdamW at half its rate": _kfac(partial(TwoSided, others=AdamW(rate=0.5))),
    "the two-sided rule, no gentle start": _kfac(partial(TwoSided, gentle_start=False)),
    "the two-sided rule, gentle start, squares not corrected": _kfac(
        partial(UncorrectedTwoSided, gentle_start=True)
    ),
    "the two-sided rule, gentle start, steps of full length": _kfac(
        partial(FullLengthTwoSided, gentle_start=True)
    ),
    "the two-sided rule, statistics of one batch": _kfac(
        partial(TwoSided, estimation=Estimation(ema=0.0)), invert_every=10
    ),
    "the two-sided rule, roots every 40 steps, warm-up of 5": _kfac(
        partial(TwoSided, warmup=5), invert_every=40
    ),
    **two_sided_changes.ROWS,
}
ALL_ROWS = ROWS | TWO_SIDED_ROWS


@dataclass(frozen=True)
class Study:
    """Changes of one optimizer.

    Attributes:
        unchanged: the row by which the others are judged.
        rows: all of them.
        steps: of a run, if not said otherwise.
        record: the file's name, without its ending.
    """

    unchanged: str
    rows: Sequence[str]
    steps: int
    record: str


DEFAULT_STUDY = Study(UNCHANGED, list(ROWS), 640, "race-changes")
TWO_SIDED_STUDY = Study(
    two_sided_changes.UNCHANGED, list(TWO_SIDED_ROWS), 680, "race-changes-two-sided"
)


@dataclass(frozen=True)
class ChangeRun:
    """One run of a row."""

    row: str
    task: str
    steps: int
    seed: int
    device: str

    @property
    def name(self) -> str:
        """Return the name in the record."""
        return f"{self.row}, seed {self.seed}"

    def train(self) -> dict[str, Any]:
        """Train once, and return the losses."""
        torch.set_num_threads(1)
        optimizers.OPTIMIZERS[self.row] = ALL_ROWS[self.row]
        task = TASKS[self.task]
        device = torch.device(self.device)
        record = run(task, self.row, LR, seed=self.seed, device=device, steps=self.steps)
        return {"final": record["final"], "curve": record["held-out loss"], "ms": record["ms"]}


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", type=parse_device, default="cpu")
    parser.add_argument("--task", default="text")
    parser.add_argument("--steps", type=parse_count, default=None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=parse_count, default=1)
    parser.add_argument("--two-sided", action="store_true", help="changes of the two-sided rule")
    parser.add_argument("--only", nargs="+", default=None, metavar="ROW")
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args(arguments)
    study = DEFAULT_STUDY
    if asked.two_sided:
        study = TWO_SIDED_STUDY
    rows = asked.only or study.rows
    refuse_unknown_names("task", [asked.task], TASKS)
    refuse_unknown_names("row", rows, ALL_ROWS)
    steps = asked.steps or study.steps
    out = asked.out or RESULTS / f"{study.record}.json"
    machine = describe_machine(torch.device(asked.device))
    about = {"environment": machine, "task": asked.task, "steps": steps, "lr": LR}
    record = Record(out, about, environment=environment(asked.device))
    failures = 0
    count = 0
    for seed in asked.seeds:
        runs = [ChangeRun(row, asked.task, steps, seed, asked.device) for row in rows]
        missing = [one for one in runs if "final" not in record.results.get(one.name, {})]
        for finished, result in _train_all(missing, asked.workers):
            outcome = result.get("final", result.get("error"))
            print(f"{finished.name:60} {outcome}", flush=True)
            record.put(finished.name, result)
            count += 1
            failures += "error" in result
        rows = _select_paying(runs, record.results, study.unchanged)
    exit_if_failed(failures, count)


def _select_paying(
    runs: Sequence[ChangeRun], results: Mapping[str, Any], unchanged: str = UNCHANGED
) -> list[str]:
    """Return the rows of one seed that gain enough on the unchanged one, and that one."""
    finals = {one.row: results[one.name].get("final", inf) for one in runs}
    level = finals.get(unchanged, inf)
    rows = []
    for row, final in finals.items():
        if row == unchanged or final <= level - LEAST_GAIN:
            rows.append(row)
    return rows


def _train_all(
    runs: Sequence[ChangeRun], workers: int
) -> Iterator[tuple[ChangeRun, dict[str, Any]]]:
    """Yield every run with its result as it ends; one that failed has its error."""
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        jobs = {pool.submit(one.train): one for one in runs}
        for job in as_completed(jobs):
            error = job.exception()
            if error is None:
                yield jobs[job], job.result()
            else:
                yield jobs[job], {"error": repr(error)}
