"""How a problem is solved: the options of `solve`, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .._core.errors import PullbackError
from ..optim import StepInfo
from ..solvers import Solver
from ..steps import Step
from .plan import Refine
from .sampling import Sampler

if TYPE_CHECKING:
    from .run import Run

#: told after every step; stops the run by returning True
Callback = Callable[["Run", StepInfo], Any]


@dataclass(frozen=True)
class Settings:
    """The options of `solve`, which explains them."""

    steps: int
    points: int | Mapping[str, int] | None
    sampler: str | Sampler | None
    seed: int
    resample: int | None
    refine: Refine | None
    solver: Solver | None
    step: Step | None
    gram: str
    memory: int
    single: int
    tol: float | None
    patience: int | None
    budget: float | None
    measure: int
    callbacks: Sequence[Callback]
    device: str | torch.device | None
    progress: bool

    def __post_init__(self) -> None:
        least = {"steps": 0, "single": 0, "measure": 1}
        given = {name: getattr(self, name) for name in least}
        if any(not isinstance(n, int) or n < least[name] for name, n in given.items()):
            raise PullbackError(
                "The run's length is not usable",
                f"got {', '.join(f'{name}={n!r}' for name, n in given.items())}",
                "Use integers steps ≥ 0, single ≥ 0, measure ≥ 1",
            )
