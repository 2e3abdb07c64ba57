"""The methods that are compared: each is a composition of the library's stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pullback import NaturalGradient
from pullback.solvers import Damping, OrthogonalGreedy, Solution, Solver
from pullback.steps import GridLineSearch, Local, Move, Step, TargetRatio, Wrapper

from .problems import Fit

#: numbers about one step, by name
StepNumbers = dict[str, float]


class Stepper(ABC):
    """One optimizer at work on one fit."""

    @abstractmethod
    def step(self) -> StepNumbers:
        """Take one step and return what is cheap to measure about it."""

    def probe(self) -> StepNumbers:
        """Return what is expensive to measure; its time does not count as that of the method."""
        return {}

    @property
    def stuck(self) -> bool:
        """Return True if every further step would repeat the last one."""
        return False


@dataclass(frozen=True)
class DescentMethod(ABC):
    """Something to compare.

    Attributes:
        name: what tables and figures call it.
        about: one line on what it is.
    """

    name: str
    about: str

    @abstractmethod
    def on(self, fit: Fit) -> Stepper:
        """Return the running method."""

    @abstractmethod
    def describe(self) -> str:
        """Return its settings, for the record."""


@dataclass(frozen=True)
class FirstOrder(DescentMethod):
    """One of torch's optimizers; lr is the best of `tried` by the mean loss of seeds 100, 101."""

    build: Callable[..., Optimizer]
    lr: float
    tried: tuple[float, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def on(self, fit: Fit) -> Stepper:
        return _Gradient(fit, self.build(fit.model.parameters(), lr=self.lr, **self.options))

    def describe(self) -> str:
        tried = ", ".join(f"{lr:g}" for lr in self.tried)
        return f"{self.build.__name__}(lr={self.lr:g}), best of {tried}"


class _Gradient(Stepper):
    def __init__(self, fit: Fit, optimizer: Optimizer) -> None:
        self._fit = fit
        self._optimizer = optimizer

    def step(self) -> StepNumbers:
        self._optimizer.zero_grad()
        self._fit.loss().backward()
        self._optimizer.step()
        return {}


@dataclass(frozen=True)
class NaturalMethod(DescentMethod):
    """A natural gradient.

    Attributes:
        solver, rule: how the system is solved, and how far to go.
        l2: measure moves of u in L² instead of the loss's own Gauss–Newton metric.
        gram: the form of the Gram; "dense" is the paper's.
        pretrain: Adam steps before the first natural one.
        greedy: where given, probes compare the direction's energy with that of so many vectors.
    """

    solver: Callable[[], Solver]
    rule: Callable[[], Step]
    l2: bool = False
    gram: str = "dense"
    pretrain: int = 0
    greedy: int = 0

    def on(self, fit: Fit) -> Stepper:
        return _NaturalStepper(fit, self)

    def describe(self) -> str:
        metric = "Gauss–Newton"
        if self.l2:
            metric = "L² of u"
        if self.pretrain:
            before = f", after {self.pretrain} Adam steps"
        else:
            before = ""
        solver = type(self.solver()).__name__
        rule = repr(self.rule()).replace("inner=", "step=")  # as records made earlier have it
        return f"{self.about}; {metric}, {self.gram} Gram, {solver}, {rule}{before}"


class _NaturalStepper(Stepper):
    def __init__(self, fit: Fit, method: NaturalMethod) -> None:
        self._fit = fit
        self._method = method
        rule = method.rule()
        self._memoryless = not isinstance(rule, TargetRatio)
        if self._memoryless:
            self._watch = DirectionProbe(rule)
        else:
            self._watch = None
        self._optimizer = self._build_optimizer(method.solver(), self._watch or rule)
        self._options: dict[str, Any] = {"objective": fit.objective, "metric_batch": None}
        if method.l2:
            self._options["metric_batch"] = fit.values
        self._warm = torch.optim.Adam(fit.model.parameters(), lr=1e-2)
        self._steps_taken = 0
        self._rejected = 0

    def _build_optimizer(self, solver: Solver, rule: Step | None = None) -> NaturalGradient:
        return NaturalGradient(self._fit.model, solver=solver, step=rule, gram=self._method.gram)

    def step(self) -> StepNumbers:
        self._steps_taken += 1
        if self._steps_taken <= self._method.pretrain:
            return _Gradient(self._fit, self._warm).step()
        info = self._optimizer.step(**self._options)
        if info.accepted:
            self._rejected = 0
        else:
            self._rejected = self._rejected + 1
        numbers = {"rank": float(info.rank or 0), "size": info.step_size}
        if self._watch is not None:
            numbers |= {"largest": self._watch.largest}
        return numbers

    def probe(self) -> StepNumbers:
        """∇Lᵀh of a greedy choice over ∇Lᵀx of the method's own direction.

        It exceeds 1 once the cutoff of the dense Gram hides most of the gradient from x.
        """
        if not self._method.greedy:
            return {}
        full = self._build_optimizer(self._method.solver()).direction(**self._options)
        few = self._build_optimizer(OrthogonalGreedy(self._method.greedy)).direction(
            **self._options
        )
        gradient = torch.autograd.grad(self._fit.loss(), list(self._fit.model.parameters()))
        g = torch.cat([tensor.flatten() for tensor in gradient])
        return {"share": float(g @ few.x) / float(g @ full.x)}

    @property
    def stuck(self) -> bool:
        if self._memoryless:  # points are fixed: it would reject the same step for ever
            return self._rejected >= 1
        return self._rejected >= 30


class ArgMin(GridLineSearch):
    """The best of the grid even where the loss rises: there is no accept test.

    Any loss is a fall from ∞.
    """

    def take(self, local: Local) -> Move:
        return super().take(replace(local, loss=float("inf")))


class DirectionProbe(Wrapper):
    """Keeps two numbers of the direction x before anything cuts it.

    Attributes:
        largest: max |x_i|.
        energy: ∇Lᵀx, the squared length of the projected gradient.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.largest = float("nan")
        self.energy = float("nan")

    def solution(self, local: Local, damping: Damping | None, center: Tensor | None) -> Solution:
        solution = local.solve(damping, center)
        self.largest = float(solution.x.abs().max())
        self.energy = float(local.gradient @ solution.x)
        return solution
