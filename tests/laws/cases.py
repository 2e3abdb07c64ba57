"""What one line of a law table says, and how a case is built and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import pullback as pb
from pullback.testing import Oracle, oracle


@dataclass(frozen=True)
class ModelCase:
    """A model and a batch for it; z has shape `shape` once samples are first."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    kwargs: Callable[[], dict[str, Any]] = dict
    batch_dim: int = 0

    def make(self) -> Built:
        torch.manual_seed(7)
        args = _double(self.inputs())
        kwargs = {k: _double((v,))[0] for k, v in self.kwargs().items()}
        model = self.build().double()
        torch.manual_seed(11)
        with torch.no_grad():  # lazy layers
            model(*args, **kwargs)
        return Built(model.double(), args, kwargs, self.batch_dim)


@dataclass
class Built:
    """A model with its batch."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_dim: int = 0
    seed: int = field(default=3)

    def value(self) -> Tensor:
        """z, samples first, with a graph; the same random numbers every time."""
        torch.manual_seed(self.seed)
        z = self.model(*self.args, **self.kwargs).movedim(self.batch_dim, 0)
        if z.ndim == 1:
            return z.unsqueeze(-1)
        return z

    @property
    def first(self) -> Tensor:
        """The input a metric may look at, samples first."""
        return self.args[0].movedim(self.batch_dim, 0)

    def oracle(self, metric: MetricCase) -> Oracle:
        torch.manual_seed(self.seed)
        return oracle(
            self.model,
            self.args,
            lambda z: metric.matrix(z, self.first),
            metric.loss,
            kwargs=self.kwargs,
            batch_dim=self.batch_dim,
            count=1,
        )

    def step(self, metric: Any, loss: Callable[[Tensor], Tensor], **options: Any) -> pb.StepInfo:
        """One step of a fresh optimizer on this batch."""
        opt = pb.NaturalGradient(
            self.model, metric, output=pb.optim.Outputs(batch_dim=self.batch_dim), **options
        )

        def closure() -> Tensor:
            opt.zero_grad()
            value = loss(self.value())
            value.backward()
            return value

        return opt.step(closure)


@dataclass(frozen=True)
class MetricCase:
    """A metric, its matrix by an independent closed form (mean taken), and a loss to go with it."""

    name: str
    metric: Any
    matrix: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor], Tensor]
    fits: Callable[[Tensor, Tensor], bool] = lambda z, x: True


@dataclass(frozen=True)
class SolverCase:
    """A solver that is exact once damped, and the forms it works from."""

    name: str
    make: Callable[[float], pb.solvers.Solver]
    forms: tuple[str, ...] = ("rows", "kernel", "dense", "matrix_free")


class Probe(pb.steps.Step):
    """Solves at each damping from one factorization, keeps the answers, and rejects the move."""

    def __init__(self, *dampings: float | None) -> None:
        self.dampings = dampings

    def take(self, local: pb.steps.Local) -> pb.steps.Move:
        self.directions = [local.direction(d) for d in self.dampings]
        self.gradient = local.gradient
        return pb.steps.Move(self.directions[0].x, 0.0, self.directions[0], accepted=False)


def _double(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values
    )
