"""The tasks of the training comparison, and one run of one optimizer on one of them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import pullback as pb
from pullback.experiments.kfac_training.networks import MNIST, autoencoder

from . import kfac_data
from .kfac import bernoulli, categorical
from .kfac_models import GPT, character_transformer, vgg16
from .timing import synchronize


@dataclass
class Task:
    """A model and its data on the device; `batch(n)` draws training pairs."""

    model: nn.Module
    batch: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    likelihood: pb.likelihoods.Likelihood
    samples: int
    size: int
    #: loss on all training data, or None: then the mean over the last batches counts
    training: Callable[[], float] | None = None
    test: Callable[[], dict[str, float]] = dict
    half: torch.dtype | None = None
    epochs: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


def _autoencoder(device: torch.device, quick: bool) -> Task:
    x = kfac_data.mnist(500 if quick else None).to(device)
    model = autoencoder((784, 64, 16) if quick else MNIST).to(device)

    @torch.no_grad()
    def training() -> float:
        parts = [bernoulli(model(b), b) * len(b) for b in x.split(20000)]
        return float(torch.stack(parts).sum()) / len(x)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        chosen = x[torch.randint(0, len(x), (n,), device=device)]
        return chosen, chosen

    size = 100 if quick else 1000
    return Task(model, batch, bernoulli, pb.likelihoods.Bernoulli(event=1), len(x), size, training)


def _vgg(device: torch.device, quick: bool) -> Task:
    (x, y), (tx, ty) = kfac_data.cifar(1000 if quick else None)
    x, y, tx, ty = x.to(device), y.to(device), tx.to(device), ty.to(device)
    model = vgg16(narrow=16 if quick else 1).to(device)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        index = torch.randint(0, len(x), (n,), device=device)
        flips = torch.rand(n, 1, 1, 1, device=device) < 0.5
        return torch.where(flips, x[index].flip(3), x[index]), y[index]

    @torch.no_grad()
    def test() -> dict[str, float]:
        model.eval()
        right = [(model(b).argmax(1) == c).sum() for b, c in _chunks(tx, ty, 1000)]
        model.train()
        return {"test accuracy": float(torch.stack(right).sum()) / len(tx)}

    half = torch.bfloat16 if device.type == "cuda" else None
    likelihood = pb.likelihoods.Categorical()
    size = 32 if quick else 512
    return Task(model, batch, categorical, likelihood, len(x), size, None, test, half)


def _chunks(x: Tensor, y: Tensor, n: int) -> Any:
    return zip(x.split(n), y.split(n), strict=True)


def _shakespeare(device: torch.device, quick: bool) -> Task:
    codes, held, kinds = kfac_data.shakespeare(20000 if quick else None)
    codes, held = codes.to(device), held.to(device)
    length = 32 if quick else 256
    if quick:
        model: nn.Module = GPT(kinds, length, 32, 1, 2, tied=False)
    else:
        model = character_transformer(kinds, length)
    model = model.to(device)
    offsets = torch.arange(length + 1, device=device)

    def pairs(source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        text = source[starts[:, None] + offsets]
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def batch(n: int) -> tuple[Tensor, Tensor]:
        return pairs(codes, torch.randint(0, len(codes) - length - 1, (n,), device=device))

    @torch.no_grad()
    def test() -> dict[str, float]:
        starts = torch.arange(0, len(held) - length - 1, length, device=device)
        losses = [categorical(model(x), y) for x, y in _chunks(*pairs(held, starts), 64)]
        return {"test loss": float(torch.stack(losses).mean())}

    half = torch.bfloat16 if device.type == "cuda" else None
    likelihood = pb.likelihoods.Categorical()
    size = 8 if quick else 64
    return Task(model, batch, categorical, likelihood, len(codes) // length, size, None, test, half)


TASKS = {"autoencoder": _autoencoder, "vgg": _vgg, "shakespeare": _shakespeare}


def _grid(optimizer: str, lrs: list[float], **more: Any) -> list[dict[str, Any]]:
    """Configurations; lists among `more` are further axes."""
    out: list[dict[str, Any]] = [{"optimizer": optimizer, "lr": lr} for lr in lrs]
    for name, value in more.items():
        values = value if isinstance(value, list) else [value]
        out = [{**c, name: v} for c in out for v in values]
    return out


def _autoencoder_grids(quick: bool) -> dict[str, list[dict[str, Any]]]:
    if quick:
        few = {"epochs": 2}
        return {
            "adam": _grid("adam", [1e-3], **few),
            "sgd": _grid("sgd", [1e-2], **few),
            "kfac": _grid("kfac", [0.2], damping=1.0, kl_clip=0.1, **few),
        }
    adam = _grid("adam", [1e-3, 2e-3, 4e-3, 8e-3], epochs=100)
    small = _grid("adam", [1e-3, 2e-3], epochs=100, batch=250)
    # a rate that falls for 100 epochs is at its best only there: what a third of them gives
    short = _grid("adam", [2e-3, 4e-3, 8e-3], epochs=33)
    kfac = _grid("kfac", [0.2], kl_clip=[0.1, 0.3], damping=[0.3, 1.0, 3.0], epochs=25)
    schedule = {"momentum": 0.8, "statistics_every": 10, "invert_every": 50}
    return {
        "adam": adam + small + short,
        "sgd": _grid("sgd", [3e-3, 1e-2, 3e-2, 1e-1], epochs=100),
        "kfac": [{**c, **schedule} for c in kfac],
    }


def _timed_grids(
    adam: list[float], sgd: list[float], damping: list[float], clip: list[float]
) -> Callable[[bool], dict[str, list[dict[str, Any]]]]:
    def grids(quick: bool) -> dict[str, list[dict[str, Any]]]:
        some = slice(1 if quick else None)
        return {
            "adamw": _grid("adamw", adam[some]),
            "sgd": _grid("sgd", sgd[some]),
            "kfac": _grid("kfac", [0.1], damping=damping[some], kl_clip=clip[some]),
        }

    return grids


GRIDS: dict[str, Callable[[bool], dict[str, list[dict[str, Any]]]]] = {
    "autoencoder": _autoencoder_grids,
    "vgg": _timed_grids([1e-3, 3e-3], [0.03, 0.1], [0.03, 0.3], [1e-3, 1e-2]),
    "shakespeare": _timed_grids([1e-3, 3e-3], [0.1, 0.3], [0.01, 0.03], [1e-3, 3e-4]),
}


def optimizer(task: Task, config: dict[str, Any]) -> torch.optim.Optimizer:
    given = {k: v for k, v in config.items() if k not in ("optimizer", "epochs", "batch")}
    params, fused = list(task.model.parameters()), next(task.model.parameters()).is_cuda
    if config["optimizer"] == "adam":
        return torch.optim.Adam(params, fused=fused, **given)
    if config["optimizer"] == "adamw":
        return torch.optim.AdamW(params, fused=fused, **given)
    if config["optimizer"] == "sgd":
        return torch.optim.SGD(params, momentum=0.9, nesterov=True, **given)
    return pb.KFAC(task.model, likelihood=task.likelihood, **given)


class Loop:
    """Steps of one optimizer; only they are on the clock."""

    def __init__(self, task: Task, config: dict[str, Any], device: torch.device) -> None:
        self.task, self.device = task, device
        self.optimizer = optimizer(task, config)
        self.lr, self.size = config["lr"], config.get("batch", task.size)
        self.seconds, self.step = 0.0, 0
        self.losses: list[Tensor] = []

    def advance(self, steps: int, total: int | None) -> None:
        """So many steps, their rate falling to zero at `total`."""
        task = self.task
        synchronize(self.device)
        start = time.perf_counter()
        half = torch.autocast(self.device.type, task.half) if task.half else None
        for _ in range(steps):
            if total is not None:
                self.optimizer.param_groups[0]["lr"] = self.lr * (1 - self.step / total)
            x, y = task.batch(self.size)
            self.optimizer.zero_grad()
            with half or contextlib.nullcontext():
                loss = task.loss(task.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.detach())
            self.step += 1
        synchronize(self.device)
        self.seconds += time.perf_counter() - start

    def recent(self, count: int = 50) -> float:
        return float(torch.stack(self.losses[-count:]).mean())


def run(
    name: str, config: dict[str, Any], seed: int, *, device: str, seconds: float, quick: bool
) -> dict[str, Any]:
    """One run: the curve of training losses over seconds, epochs and steps."""
    where = torch.device(device)
    torch.manual_seed(seed)
    task = TASKS[name](where, quick)
    loop = Loop(task, config, where)
    per_epoch = max(1, task.samples // loop.size)
    if "epochs" in config:
        total, chunk = config["epochs"] * per_epoch, per_epoch
    else:
        warm = 5 if quick else 30
        loop.advance(warm, None)
        before = loop.seconds
        loop.advance(warm, None)
        rest = (seconds - loop.seconds) / max(1e-9, (loop.seconds - before) / warm)
        total = loop.step + max(warm, int(rest))
        chunk = max(1, total // 40)
    curve = []
    while loop.step < total:
        loop.advance(min(chunk, total - loop.step), total)
        loss = task.training() if task.training is not None else loop.recent()
        epoch = loop.step / per_epoch
        curve.append({"seconds": loop.seconds, "epoch": epoch, "step": loop.step, "loss": loss})
        if not math.isfinite(loss):
            break
    finite = [p["loss"] for p in curve if math.isfinite(p["loss"])]
    good = math.isfinite(curve[-1]["loss"])
    return {
        "curve": curve,
        "best": min(finite) if good else float("inf"),
        "test": task.test() if good else {},
    }
