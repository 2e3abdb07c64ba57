"""How a problem is solved: the options of `solve`, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..._core.errors import PullbackError, require_type
from ...optim import StepInfo
from ...solvers import Solver
from ...steps import Step
from ..arguments import is_integer, is_number, require
from ..discretization.plan import Refine
from ..domains.sampling import Sampler

#: called with the `Run` and what its last step did; stops the run by returning True
Callback = Callable[[Any, StepInfo], Any]


@dataclass(frozen=True)
class Settings:
    """The options of `solve`, which explains them."""

    steps: int
    points: int | Mapping[str, int] | None
    sampler: str | Sampler | None
    seed: int
    resample: int | None
    refine: Refine | str | None
    solver: Solver | None
    step: Step | None
    gram: str
    memory: int
    causal: bool
    tol: float | None
    patience: int | None
    budget: float | None
    measure: int
    callbacks: Sequence[Callback]
    device: str | torch.device | None
    progress: bool
    optimizer: Callable[[nn.Module], Optimizer] | None = None
    group: Any = None

    def __post_init__(self) -> None:
        self._check_length()
        self._check_stages()
        listed = isinstance(self.callbacks, (list, tuple)) and all(map(callable, self.callbacks))
        remedy = "Put functions of (run, info) in a list: callbacks=[function]"
        require(listed, "callbacks=", self.callbacks, remedy)
        if self.device is not None:
            check_device(self.device)

    def _check_length(self) -> None:
        for name, least in (("steps", 0), ("measure", 1)):
            n = getattr(self, name)
            require(is_integer(n, least), f"{name}=", n, f"Use an integer {name} ≥ {least}")
        tol, budget, patience = self.tol, self.budget, self.patience
        usable = tol is None or (is_number(tol) and tol > 0)
        require(usable, "The tolerance tol", tol, "Use a finite number > 0, or None")
        usable = budget is None or (is_number(budget) and budget >= 0)
        require(usable, "The budget", budget, "Use finite seconds ≥ 0, or None")
        usable = patience is None or is_integer(patience, 1)
        require(usable, "The patience", patience, "Use an integer ≥ 1, or None")

    def _check_stages(self) -> None:
        require_type("solver", self.solver, Solver)
        require_type("step", self.step, Step)
        require(isinstance(self.causal, bool), "causal=", self.causal, "Use True or False")
        usable = self.refine in ("auto", None) or isinstance(self.refine, Refine)
        require(usable, "The refinement", self.refine, 'Use Refine(…), "auto" or None')
        if self.optimizer is not None and (self.solver is not None or self.step is not None):
            raise PullbackError(
                "solve() was given an optimizer and stages of another",
                "solver and step belong to the NaturalGradient that it would replace",
                "Give these to the optimizer",
            )
        require(is_integer(self.memory, 1), "The memory", self.memory, "Use bytes, an integer ≥ 1")


def check_device(device: object) -> None:
    """Refuse a device that torch cannot use here."""
    try:
        found = torch.empty(0, device=torch.device(device)).device  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise PullbackError(
            f"The device {device!r} cannot be used",
            str(error).splitlines()[0].rstrip("."),
            "Use 'cpu', or None for where the network is",
        ) from None
    if found.type == "meta":
        raise PullbackError(
            "The device 'meta' cannot be used", "its tensors have no values", "Use 'cpu'"
        )
