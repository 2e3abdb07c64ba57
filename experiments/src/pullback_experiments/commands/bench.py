"""How long one step of each method takes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback import KFAC, NaturalGradient
from pullback.likelihoods import Categorical
from pullback.metrics import Fisher
from pullback.solvers import Cholesky
from pullback.steps import Constant

from ..framework.tabular import Cell, Table
from ..framework.timing import synchronize

#: layers of the networks
SIZES: tuple[tuple[int, ...], ...] = ((64, 32, 10), (64, 256, 256, 10), (784, 1024, 1024, 10))


@dataclass(frozen=True)
class BenchLimits:
    """What one method is timed on, and for how long."""

    #: samples of a batch
    batch: int = 256
    #: steps that are averaged, at most
    steps: int = 100
    #: seconds for one method on one network, so that the whole table takes half a minute
    patience: float = 2.0


LIMITS = BenchLimits()
Build = Callable[[nn.Module], torch.optim.Optimizer]


def methods() -> dict[str, Build]:
    """Return the optimizers to time. K-FAC twice: by its defaults, and refreshed at every step."""
    return {
        "SGD": lambda m: torch.optim.SGD(m.parameters(), 1e-3, momentum=0.9),
        "Adam": lambda m: torch.optim.Adam(m.parameters(), 1e-3),
        "K-FAC": lambda m: KFAC(m, 1e-3, likelihood=Categorical()),
        "K-FAC, every step": lambda m: KFAC(
            m, 1e-3, likelihood=Categorical(), statistics_every=1, invert_every=1
        ),
        "Natural gradient": lambda m: NaturalGradient(
            m, metric=Fisher(Categorical()), solver=Cholesky(1e-2), step=Constant(1e-3)
        ),
    }


def table(device: torch.device, sizes: tuple[tuple[int, ...], ...] = SIZES) -> Table:
    """Milliseconds per step: the mean of 100, or of those that two seconds allow."""
    rows: list[list[Cell]] = []
    for layers in sizes:
        row: list[Cell] = ["-".join(map(str, layers)), f"{_count(layers):,}"]
        for build in methods().values():
            row.append(1e3 * measure_step_seconds(build, layers, device))
        rows.append(row)
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = "CPU"
    title = f"Milliseconds per step, batch {LIMITS.batch}, float32, {where}"
    return Table(["network", "parameters", *methods()], rows, title)


def measure_step_seconds(build: Build, layers: tuple[int, ...], device: torch.device) -> float:
    """Seconds of one step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network(layers).to(device)
        x = torch.randn(LIMITS.batch, layers[0]).to(device)
        y = torch.randint(layers[-1], (LIMITS.batch,)).to(device)
    optimizer = build(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    take: Callable[[], Any] = partial(optimizer.step, closure)  # pyright: ignore[reportCallIssue]
    take()
    synchronize(device)
    start = time.perf_counter()
    steps = 0
    while steps < LIMITS.steps and time.perf_counter() - start < LIMITS.patience:
        take()
        steps += 1
    synchronize(device)
    spent = time.perf_counter() - start
    if isinstance(optimizer, KFAC):
        optimizer.close()
    return spent / steps


def network(layers: tuple[int, ...]) -> nn.Sequential:
    """Linear layers with tanh between them."""
    modules: list[nn.Module] = []
    for a, b in pairwise(layers):
        modules += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def _count(layers: tuple[int, ...]) -> int:
    return sum((a + 1) * b for a, b in pairwise(layers))
