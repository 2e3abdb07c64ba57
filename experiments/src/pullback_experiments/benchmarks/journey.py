"""How far a reader travels through the library to follow one step.

    pullback bench journey [--files]

Counts, for a small network, the files of pullback that one call enters, and how often control moves
from a function of one file to a function of another: a K-FAC step that takes statistics, a plain
K-FAC step, and a step of `NaturalGradient`. Steps are counted after the first ones, when what is
established once is established.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pullback as pb

from ..framework.benchmark import make_parser

ROOT = str(Path(pb.__file__).parent)


@dataclass
class Journey:
    """The files and functions that a call enters, and its moves between files."""

    files: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    moves: int = 0

    def follow(self, call: Callable[[], Any]) -> Journey:
        """Run a call and count."""
        sys.setprofile(self._enter)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self

    def _enter(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(ROOT):
            return
        self.files.add(file)
        self.functions.add((file, frame.f_code.co_qualname))
        caller = _find_caller(frame)
        if caller is not None and caller != file:
            self.moves += 1

    def __str__(self) -> str:
        return f"{len(self.files)} files, {len(self.functions)} functions, {self.moves} moves"


def _find_caller(frame: FrameType) -> str | None:
    """Return the file of pullback from which a function was reached; None if from this one."""
    caller = frame.f_back
    while caller is not None and caller.f_code.co_filename != __file__:
        if caller.f_code.co_filename.startswith(ROOT):
            return caller.f_code.co_filename
        caller = caller.f_back
    return None


def network() -> nn.Module:
    """Return a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and classes."""
    return torch.randn(16, 6), torch.randint(0, 3, (16,))


def follow_kfac(statistics_every: int) -> Journey:
    """Count the 22nd step of K-FAC, forward and backward pass included.

    The natural rule takes statistics in each of the first twenty steps, whatever its schedule.
    """
    model = network()
    x, y = batch()
    likelihood = pb.likelihoods.Categorical()
    optimizer = pb.KFAC(model, likelihood=likelihood, statistics_every=statistics_every)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(21):
        step()
    return Journey().follow(step)


def follow_natural_gradient() -> Journey:
    """Count the fourth step of the exact natural gradient."""
    model = network()
    x, y = batch()
    metric = pb.metrics.Fisher(pb.likelihoods.Categorical())
    solver = pb.solvers.Cholesky(damping=1e-3)
    optimizer = pb.NaturalGradient(model, metric=metric, solver=solver)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return Journey().follow(lambda: optimizer.step(closure))


def main(arguments: Sequence[str] = ()) -> None:
    """Print the three journeys."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--files", action="store_true", help="list the files of each journey")
    options = parser.parse_args(arguments)
    journeys = {
        "K-FAC, statistics step": follow_kfac(statistics_every=1),
        "K-FAC, plain step": follow_kfac(statistics_every=100),
        "NaturalGradient.step": follow_natural_gradient(),
    }
    for name, journey in journeys.items():
        print(f"{name}: {journey}")
        if options.files:
            print("   ", *sorted(file.removeprefix(ROOT) for file in journey.files))


if __name__ == "__main__":
    main(sys.argv[1:])
