"""What each part of the spectral rule is worth: the race on text with one choice changed at a time.

    pullback bench race-ablation [--device cuda] [--quick] [--workers N] [--out FILE]

Every run has the same batches, rate, schedule and seed. `Powered` is the rule with factors of any
power, whitened in their eigenbases: those of the inputs, of the inputs and the loss's own
cotangents, of sampled ones, or Shampoo's GᵀG and GGᵀ of the gradient. Losses alone are recorded:
runs share the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback.grams.kronecker import Pair, factor_matrix
from pullback.grams.kronecker.blocks import from_bases, to_bases
from pullback.likelihoods import Categorical
from pullback.optim.kfac import AdamW, Estimation, Spectral, Statistics
from pullback.optim.kfac.rules import (
    BlockShape,
    FactorAverages,
    RefreshReport,
    RuleState,
    StepContext,
)
from pullback.optim.kfac.rules.base import REFRESHED
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
from ..races import optimizers
from ..races.loop import run
from ..races.tasks import TASKS

REST = {"rest": 0.25}  # of the rate, for embeddings, head and gains


@dataclass(frozen=True)
class AblationRun:
    """What all rows of the ablation share.

    Attributes:
        task, steps: which race, and for how long.
        lr: the learning rate.
        seed: of the initial weights and the batches.
    """

    task: str = "text"
    steps: int = 300
    lr: float = 8e-3
    seed: int = 0


@dataclass(frozen=True)
class ShampooMoments:
    """How Shampoo's moments of the gradient are averaged."""

    #: the weight of the past in the averages
    beta: float = 0.95
    #: steps between two computations of the inverse roots
    root_every: int = 10

    def new_weight(self, count: int) -> float:
        """Return the weight of the newest gradient at a step; the first one is all there is."""
        if count == 1:
            return 1.0
        return 1 - self.beta


SHAMPOO = ShampooMoments()


@dataclass(kw_only=True)
class PoweredState(SpectralState):
    """Eigenbases and eigenvalues of both factors, and Shampoo's moments of the gradient.

    `row_moment` is the mean of GGᵀ, `column_moment` that of GᵀG; roots are their inverse powers.
    """

    row_basis: Tensor = field(metadata=REFRESHED)
    column_basis: Tensor = field(metadata=REFRESHED)
    row_values: Tensor = field(metadata=REFRESHED)
    column_values: Tensor = field(metadata=REFRESHED)
    row_moment: Tensor
    column_moment: Tensor
    row_root: Tensor
    column_root: Tensor


class Powered(Spectral):
    r"""The polar factor of L^(-p) M C^(-p), with every side damped by a share of its mean.

    Blocks are refreshed one by one, so that this rule is for a single process.

    Args:
        power: p.
        both_sides: whether the output side L takes part.
        gradient: whether sides are those of the gradient, GᵀG and GGᵀ, averaged every step.
        whitens_twice: whether C^(-p) is applied to the polar factor once more: the steepest
            descent for the operator norm of ΔC^p.
        share: λ.
        sampled: whether cotangents are sampled.
    """

    name: ClassVar = "powered"
    reads: ClassVar = Statistics.INPUTS_AND_OUTPUTS

    def __init__(
        self, power: float = 0.5, *, both_sides: bool = False, gradient: bool = False,
        whitens_twice: bool = False, share: float = 0.2, sampled: bool = False,
    ) -> None:  # fmt: skip
        if sampled:
            estimation = Estimation(ema=0.8).with_metric(Categorical(), None, fisher="mc")
        else:
            estimation = Estimation(ema=0.8).with_metric(None, None, fisher="empirical")
        super().__init__(estimation=estimation, others=AdamW(rate=REST["rest"]))
        self.power = power
        self.both_sides = both_sides
        self.gradient = gradient
        self.whitens_twice = whitens_twice
        self.share = share

    def init(self, shape: BlockShape) -> PoweredState:
        blocks, rows, columns = shape.size
        rows_square = (blocks, rows, rows)
        columns_square = (blocks, columns, columns)
        return PoweredState(
            **vars(super().init(shape)),
            row_basis=shape.zeros(*rows_square),
            column_basis=shape.zeros(*columns_square),
            row_values=shape.zeros(blocks, rows),
            column_values=shape.zeros(blocks, columns),
            row_moment=shape.zeros(*rows_square),
            column_moment=shape.zeros(*columns_square),
            row_root=shape.zeros(*rows_square),
            column_root=shape.zeros(*columns_square),
        )

    def refresh(self, averages: FactorAverages, state: RuleState) -> RefreshReport:
        assert isinstance(state, PoweredState)
        pair = averages.normalize()
        assert isinstance(pair, Pair)
        state.row_values, state.row_basis = decompose(pair.output_factor)
        state.column_values, state.column_basis = decompose(pair.input_factor)
        return RefreshReport()

    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        assert isinstance(state, PoweredState)
        if self.gradient:
            self._average_moments(state, gradient, step)
        d = super().direction(gradient, state, step)
        if self.whitens_twice:
            d = self._apply_powers(d, state)
            d = d * (0.2 * d[0].numel() ** 0.5 / d.norm(dim=(1, 2), keepdim=True))
        return d

    def _average_moments(self, state: PoweredState, g: Tensor, step: StepContext) -> None:
        """Average GᵀG and GGᵀ, and find their inverse powers at every tenth step."""
        weight = SHAMPOO.new_weight(step.count)
        step.average(state.column_moment, g.mT @ g, weight)
        step.average(state.row_moment, g @ g.mT, weight)
        if step.count % SHAMPOO.root_every == 1:
            state.column_root.copy_(_root(state.column_moment, self.power, self.share))
            state.row_root.copy_(_root(state.row_moment, self.power, self.share))

    def whiten(self, momentum: Tensor, squares: Tensor, state: SpectralState) -> Tensor:
        assert isinstance(state, PoweredState)
        return self._apply_powers(momentum, state)

    def _apply_powers(self, momentum: Tensor, state: PoweredState) -> Tensor:
        """Return L^(-p) M C^(-p), up to a number."""
        m = momentum.float()
        if self.gradient:
            m = m @ state.column_root
            if self.both_sides:
                m = state.row_root @ m
            return m
        m = to_bases(state.row_basis, m, state.column_basis)
        m = m * self._raise_to_power(state.column_values)[:, None]
        if self.both_sides:
            m = m * self._raise_to_power(state.row_values)[..., None]
        return from_bases(state.row_basis, m, state.column_basis)

    def _raise_to_power(self, values: Tensor) -> Tensor:
        return (values / values.mean(1, keepdim=True) + self.share) ** -self.power


def decompose(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of factors (B, n, n), or (B, n) of diagonal ones."""
    values, basis = factor_matrix.eigendecompose(factor)
    if basis is None:
        basis = torch.eye(values.shape[1], dtype=values.dtype, device=values.device)
        basis = basis.expand(len(values), -1, -1)
    return values, basis


def _root(s: Tensor, power: float, share: float) -> Tensor:
    values, basis = torch.linalg.eigh(s)
    values = (values / values.mean(-1, keepdim=True)).clamp(min=0) + share
    return (basis * values[:, None] ** -power) @ basis.mT


@dataclass
class GraftedState(SpectralState):
    """Adam's second moment beside the state of `Spectral`."""

    second: Tensor = field(default_factory=lambda: torch.zeros(0))


class Grafted(Spectral):
    """The direction of `Spectral`, matrix by matrix as long as Adam's."""

    name: ClassVar = "grafted"

    def __init__(self) -> None:
        super().__init__(others=AdamW(rate=REST["rest"]))

    def init(self, shape: BlockShape) -> GraftedState:
        return GraftedState(**vars(super().init(shape)), second=shape.zeros(*shape.size))

    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        assert isinstance(state, GraftedState)
        d = super().direction(gradient, state, step)
        step.average(state.second, gradient.square(), SHAMPOO.new_weight(step.count))
        adam = state.momentum / (state.second.sqrt() + 1e-8)
        length = adam.norm(dim=(1, 2), keepdim=True)
        return d * (length / d.norm(dim=(1, 2), keepdim=True).clamp(min=1e-8))


class Sphere(Optimizer):
    """Brings hidden matrices back to the length that they began with, after every step."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__(params, {"lr": 0.0})
        self._lengths = [p.detach().norm() for p in params]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for p, length in zip(self.param_groups[0]["params"], self._lengths, strict=True):
            p.mul_(length / p.norm())


def _with(rule: Callable[[], Spectral], **more: Any) -> optimizers.Build:
    return lambda model, lr, settings: [
        optimizers._make_kfac(model, lr, rule, {**more, **settings})
    ]


def _on_a_sphere(model: nn.Module, lr: float, settings: Any) -> list[Optimizer]:
    (optimizer,) = optimizers.spectral(model, lr, {**REST, **settings})
    params = optimizers.hidden(model)
    hidden_ids = {id(p) for p in params}
    for group in optimizer.param_groups:
        if any(id(p) in hidden_ids for p in group["params"]):
            group["weight_decay"] = 0.0
    return [optimizer, Sphere(params)]


def _vary_spectral(**settings: Any) -> optimizers.Build:
    return lambda model, lr, more: optimizers.spectral(model, lr, {**REST, **settings, **more})


ROWS: dict[str, optimizers.Build] = {
    "Spectral, unchanged": _vary_spectral(),
    "no factor: Muon with its rows made even": _vary_spectral(damping=1e4),
    "inputs, power ½, by eigh": _with(Powered),
    "inputs, power ¼": _with(lambda: Powered(0.25)),
    "inputs, power 1": _with(lambda: Powered(1.0)),
    "inputs and own cotangents, power ½": _with(lambda: Powered(both_sides=True)),
    "inputs and own cotangents, power ¼": _with(lambda: Powered(0.25, both_sides=True)),
    "inputs and sampled cotangents, power ½": _with(lambda: Powered(both_sides=True, sampled=True)),
    "GᵀG of the gradient, power ½": _with(lambda: Powered(gradient=True)),
    "GᵀG and GGᵀ of the gradient, power ¼": _with(
        lambda: Powered(0.25, both_sides=True, gradient=True)
    ),
    "the factor again after the polar factor": _with(lambda: Powered(whitens_twice=True)),
    "damping 0.02": _vary_spectral(damping=0.02),
    "damping 1": _vary_spectral(damping=1.0),
    "statistics and roots at every step": _vary_spectral(statistics_every=1, invert_every=1),
    "statistics every 20, roots every 100 steps": _vary_spectral(
        statistics_every=20, invert_every=100
    ),
    "the head follows the rule too": _vary_spectral(rule_head=True),
    "as long as Adam's step": _with(Grafted),
    "weights on a sphere, no decay": _on_a_sphere,
}


def _run(name: str, ablation: AblationRun, device: str) -> dict[str, Any]:
    """Train by the rule of one row, and return its losses."""
    torch.set_num_threads(1)
    optimizers.OPTIMIZERS[name] = ROWS[name]
    record = run(
        TASKS[ablation.task], name, ablation.lr, seed=ablation.seed, device=torch.device(device),
        steps=ablation.steps,
    )  # fmt: skip
    return {"final": record["final"], "curve": record["held-out loss"], "steps": record["steps"]}


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", type=parse_device, default="cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny decoder, nothing written")
    parser.add_argument("--workers", type=parse_count, default=1)
    parser.add_argument("--only", nargs="+", default=list(ROWS))
    parser.add_argument("--out", type=Path, default=RESULTS / "race-ablation.json")
    asked = parser.parse_args(arguments)
    refuse_unknown_names("row", asked.only, ROWS)
    ablation = AblationRun()
    path = asked.out
    if asked.quick:
        ablation = AblationRun("text-quick", steps=20)
        path = None
    about = {"environment": describe_machine(torch.device(asked.device)), **asdict(ablation)}
    record = Record(path, about, resume=False, environment=environment(asked.device))
    with ProcessPoolExecutor(asked.workers, get_context("spawn")) as pool:
        jobs = {pool.submit(_run, n, ablation, asked.device): n for n in asked.only}
        failures = 0
        for job in as_completed(jobs):
            name = jobs[job]
            error = job.exception()
            if error:
                result = {"error": str(error)}
                failures += 1
            else:
                result = job.result()
            print(f"{name:45} {result.get('final', error)}", flush=True)
            record.put(name, result)
    exit_if_failed(failures, len(jobs))
