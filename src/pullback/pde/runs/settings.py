"""How a problem is solved: the options of `solve`, grouped and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..._core.errors import PullbackError, require_type
from ...optim import StepInfo
from ...solvers import Solver
from ...steps import Step
from ..arguments import is_integer, is_number, require
from ..discretization.plan import Refine, SamplingPlan
from ..domains.sampling import Sampler
from ..problem.problem import Problem

#: called with the `Run` and what its last step did; stops the run by returning True
Callback = Callable[[Any, StepInfo], Any]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How many points there are, how they are drawn, and when they move."""

    points: int | Mapping[str, int] | None
    sampler: str | Sampler | None
    seed: int
    resample: int | None
    refine: Refine | str | None

    def __post_init__(self) -> None:
        usable = self.refine in ("auto", None) or isinstance(self.refine, Refine)
        require(usable, "The refinement", self.refine, 'Use Refine(…), "auto" or None')

    def plan(self, problem: Problem, parameters: int) -> SamplingPlan:
        """Return the points of a problem, for a network of so many parameters."""
        return SamplingPlan(
            problem,
            parameters,
            points=self.points,
            sampler=self.sampler,
            seed=self.seed,
            resample=self.resample,
            refine=self.refine,
        )


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What takes the steps: stages of the natural gradient, or another optimizer."""

    solver: Solver | None
    step: Step | None
    gram: str
    memory: int
    optimizer: Callable[[nn.Module], Optimizer] | None

    def __post_init__(self) -> None:
        require_type("solver", self.solver, Solver)
        require_type("step", self.step, Step)
        require(
            self.optimizer is None or callable(self.optimizer),
            "optimizer=",
            self.optimizer,
            "Give a function of the module: lambda m: torch.optim.Adam(m.parameters())",
        )
        if self.optimizer is not None and (self.solver is not None or self.step is not None):
            raise PullbackError(
                "solve() was given an optimizer and stages of another",
                "solver and step belong to the NaturalGradient that it would replace",
                "Give these to the optimizer",
            )
        require(is_integer(self.memory, 1), "The memory", self.memory, "Use bytes, an integer ≥ 1")

    @property
    def map_memory(self) -> int | None:
        """Bytes that the network's derivatives may take; None for other optimizers."""
        if self.optimizer is not None:
            return None
        return self.memory

    @property
    def chooses_step(self) -> bool:
        """Return True if the run chooses the lengths of its steps, and not the caller."""
        return self.step is None and self.optimizer is None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run ends: steps, tolerance, steps without progress, seconds."""

    steps: int
    tol: float | None
    patience: int | None
    budget: float | None

    def __post_init__(self) -> None:
        require(is_integer(self.steps, 0), "steps=", self.steps, "Use an integer steps ≥ 0")
        usable = self.tol is None or (is_number(self.tol) and self.tol > 0)
        require(usable, "The tolerance tol", self.tol, "Use a finite number > 0, or None")
        usable = self.budget is None or (is_number(self.budget) and self.budget >= 0)
        require(usable, "The budget", self.budget, "Use finite seconds ≥ 0, or None")
        usable = self.patience is None or is_integer(self.patience, 1)
        require(usable, "The patience", self.patience, "Use an integer ≥ 1, or None")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `solve`, which explains them."""

    sampling: SamplingOptions
    method: MethodOptions
    limits: Limits
    causal: bool
    measure: int
    callbacks: Sequence[Callback]
    device: str | torch.device | None
    progress: bool
    group: Any

    def __post_init__(self) -> None:
        remedy = "Use an integer measure ≥ 1"
        require(is_integer(self.measure, 1), "measure=", self.measure, remedy)
        require(isinstance(self.causal, bool), "causal=", self.causal, "Use True or False")
        listed = isinstance(self.callbacks, (list, tuple)) and all(map(callable, self.callbacks))
        remedy = "Put functions of (run, info) in a list: callbacks=[function]"
        require(listed, "callbacks=", self.callbacks, remedy)
        if self.device is not None:
            refuse_unusable_device(self.device)

    def with_budget(self, budget: float) -> Settings:
        """Return these settings with another budget, in seconds."""
        return replace(self, limits=replace(self.limits, budget=budget))

    def with_smaller_tolerance(self, share: float) -> Settings:
        """Return these settings with a share of the tolerance, if there is one."""
        if self.limits.tol is None:
            return self
        return replace(self, limits=replace(self.limits, tol=share * self.limits.tol))


def refuse_unusable_device(device: object) -> None:
    """Raise for a device that torch cannot use here."""
    try:
        used_device = torch.empty(0, device=torch.device(device)).device  # pyright: ignore[reportArgumentType, reportCallIssue]
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise PullbackError(
            f"The device {device!r} cannot be used",
            str(error).splitlines()[0].rstrip("."),
            "Use 'cpu', or None for where the network is",
        ) from None
    if used_device.type == "meta":
        raise PullbackError(
            "The device 'meta' cannot be used", "its tensors have no values", "Use 'cpu'"
        )
