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
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback.grams.kronecker.inverse import Inverse
from pullback.likelihoods import Categorical
from pullback.optim.kfac import Spectral
from pullback_experiments.races import optimizers
from pullback_experiments.races.loop import run
from pullback_experiments.races.tasks import TASKS

from .laboratory import RESULTS, Record, make_parser
from .timing import environment

LR = 8e-3
SEED = 0
STEPS = 300
# of Shampoo's factors
BETA = 0.95
EVERY = 10
REST = {"rest": 0.25}  # of the rate, for embeddings, head and gains


class Powered(Spectral):
    r"""The polar factor of L^(-p) M C^(-p), with every side damped by a share of its mean.

    Args:
        power: p.
        both: whether the output side L takes part.
        gradient: whether sides are those of the gradient, GᵀG and GGᵀ, averaged every step.
        again: whether C^(-p) is applied to the polar factor once more: the steepest descent for
            the operator norm of ΔC^p.
        share: λ.
        rest: as for `Spectral`.
    """

    needs = "eigenbasis"
    moments: ClassVar = {}
    defaults: ClassVar = {**Spectral.defaults, "fisher": "empirical", "damping": 1e-30}

    def __init__(
        self, power: float = 0.5, *, both: bool = False, gradient: bool = False,
        again: bool = False, share: float = 0.2, rest: float = 0.25,
    ) -> None:  # fmt: skip
        super().__init__(rest=rest)
        self.power = power
        self.both = both
        self.gradient = gradient
        self.again = again
        self.share = share
        self.inputs = not both or gradient
        self._moments: dict[Any, dict[str, Tensor]] = {}
        self._steps: dict[Any, int] = {}

    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        (g,) = given
        held = self._moments.setdefault(
            g.shape, {"first": torch.zeros_like(g), "second": torch.zeros_like(g[..., :1])}
        )
        if self.gradient:
            self._average(held, g)
        (d,) = super().directions(replace(prepared, **_only(held, "first", "second")), given, good)
        if self.again:
            d = self.whitened(d, prepared)
            d = d * (0.2 * d[0].numel() ** 0.5 / d.norm(dim=(1, 2), keepdim=True))
        return [d]

    def _average(self, held: dict[str, Tensor], g: Tensor) -> None:
        step = self._steps[g.shape] = self._steps.get(g.shape, 0) + 1
        for side, new in (("columns", g.mT @ g), ("rows", g @ g.mT)):
            held[side] = new if step == 1 else held[side].lerp_(new, 1 - BETA)
            if step % EVERY == 1:
                held[f"{side} root"] = _root(held[side], self.power, self.share)

    def whitened(self, m: Tensor, prepared: Inverse) -> Tensor:
        if self.gradient:
            held = self._moments[m.shape]
            m = m.float() @ held["columns root"]
            if self.both:
                return held["rows root"] @ m
            return m
        left = prepared.left
        right = prepared.right
        scale = prepared.scale
        assert right is not None
        assert scale is not None
        values = 1 / scale
        m = m.float()
        if left is None:
            m = m
        else:
            m = left.mT @ m
        m = (m @ right) * self._reduced(values.mean(1, keepdim=True))
        if self.both:
            m = m * self._reduced(values.mean(2, keepdim=True))
        m = m @ right.mT
        if left is None:
            return m
        return left @ m

    def _reduced(self, values: Tensor) -> Tensor:
        return (values / values.mean((1, 2), keepdim=True) + self.share) ** -self.power


def _only(held: dict[str, Tensor], *names: str) -> dict[str, Any]:
    return {n: held[n] for n in names}


def _root(s: Tensor, power: float, share: float) -> Tensor:
    values, basis = torch.linalg.eigh(s)
    values = (values / values.mean(-1, keepdim=True)).clamp(min=0) + share
    return (basis * values[:, None] ** -power) @ basis.mT


class Grafted(Spectral):
    """The direction of `Spectral`, matrix by matrix as long as Adam's."""

    def __init__(self, rest: float = 0.25) -> None:
        super().__init__(rest=rest)
        self._squares: dict[Any, Tensor] = {}

    def directions(
        self, prepared: Inverse, given: Sequence[Tensor], good: Tensor | None = None
    ) -> list[Tensor]:
        (d,) = super().directions(prepared, given, good)
        (g,) = given
        v = self._squares.setdefault(g.shape, g.square()).lerp_(g.square(), 1 - BETA)
        assert prepared.first is not None
        adam = prepared.first / (v.sqrt() + 1e-8)
        length = adam.norm(dim=(1, 2), keepdim=True)
        return [d * (length / d.norm(dim=(1, 2), keepdim=True).clamp(min=1e-8))]


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
    return lambda model, lr, some: [optimizers._ruled(model, lr, rule, {**more, **some})]


def _on_a_sphere(model: nn.Module, lr: float, some: Any) -> list[Optimizer]:
    (own,) = optimizers.spectral(model, lr, {**REST, **some})
    params = optimizers.hidden(model)
    ids = {id(p) for p in params}
    (matrices,) = [g for g in own.param_groups if any(id(p) in ids for p in g["params"])]
    matrices["weight_decay"] = 0.0
    return [own, Sphere(params)]


def _changed(**some: Any) -> optimizers.Build:
    return lambda model, lr, more: optimizers.spectral(model, lr, {**REST, **some, **more})


OWN = {}
SAMPLED = {"fisher": "mc", "likelihood": Categorical()}
ROWS: dict[str, optimizers.Build] = {
    "Spectral, unchanged": _changed(),
    "no factor: Muon with its rows made even": _changed(damping=1e4),
    "inputs, power ½, by eigh": _with(Powered),
    "inputs, power ¼": _with(lambda: Powered(0.25)),
    "inputs, power 1": _with(lambda: Powered(1.0)),
    "inputs and own cotangents, power ½": _with(lambda: Powered(both=True)),
    "inputs and own cotangents, power ¼": _with(lambda: Powered(0.25, both=True)),
    "inputs and sampled cotangents, power ½": _with(lambda: Powered(both=True), **SAMPLED),
    "GᵀG of the gradient, power ½": _with(lambda: Powered(gradient=True)),
    "GᵀG and GGᵀ of the gradient, power ¼": _with(lambda: Powered(0.25, both=True, gradient=True)),
    "the factor again after the polar factor": _with(lambda: Powered(again=True)),
    "damping 0.02": _changed(damping=0.02),
    "damping 1": _changed(damping=1.0),
    "statistics and roots at every step": _changed(statistics_every=1, invert_every=1),
    "statistics every 20, roots every 100 steps": _changed(statistics_every=20, invert_every=100),
    "the head follows the rule too": _changed(rule_head=True),
    "as long as Adam's step": _with(Grafted),
    "weights on a sphere, no decay": _on_a_sphere,
}


def _run(name: str, task: str, steps: int | None, device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    optimizers.OPTIMIZERS[name] = ROWS[name]
    found = run(TASKS[task], name, LR, seed=SEED, device=torch.device(device), steps=steps)
    return {"final": found["final"], "curve": found["held-out loss"], "steps": found["steps"]}


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny decoder, nothing written")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--out", type=Path, default=RESULTS / "race-ablation.json")
    asked = parser.parse_args(arguments)
    task, steps = ("text-quick", 20) if asked.quick else ("text", STEPS)
    about = {"environment": environment(torch.device(asked.device))}
    about |= {"lr": LR, "seed": SEED, "steps": STEPS, "task": task}
    record = Record(None if asked.quick else asked.out, about, resume=False)
    with ProcessPoolExecutor(asked.workers, get_context("spawn")) as pool:
        jobs = {pool.submit(_run, n, task, steps, asked.device): n for n in asked.only}
        for job in as_completed(jobs):
            name = jobs[job]
            error = job.exception()
            result = {"error": str(error)} if error else job.result()
            print(f"{name:45} {result.get('final', error)}", flush=True)
            record.put(name, result)
