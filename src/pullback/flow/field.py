"""Vector fields on parameters: −G⁺∇L and −∇L, with the loss they descend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from .._core.space import ParameterSpace
from ..maps import ObjectiveMap
from ..optim import NaturalGradient, Objective
from ..optim.checks import refuse_metric
from .host import Host
from .watch import Watch

KINDS = ("natural", "euclidean")


@dataclass(frozen=True)
class Local:
    """The field at one point; a non-empty reason says why it has no velocity."""

    loss: float
    gradient: Tensor
    velocity: Tensor
    reason: str = ""

    @classmethod
    def checked(cls, loss: float, gradient: Tensor, velocity: Tensor) -> Local:
        """The same, with a reason if anything in it is not finite."""
        reason = ""
        if not torch.isfinite(torch.tensor(loss)):
            reason = f"the loss is not finite ({loss})"
        elif not bool(torch.isfinite(gradient).all()):
            reason = "the gradient is not finite"
        elif not bool(torch.isfinite(velocity).all()):
            reason = "the velocity is not finite"
        return cls(loss, gradient, velocity, reason)

    @classmethod
    def broken(cls, like: Tensor, reason: str) -> Local:
        """No velocity, and why."""
        nan = torch.full_like(like, torch.nan)
        return cls(float("nan"), nan, nan, reason)


class Field(ABC):
    """θ' = v(θ) on flat parameters (p,)."""

    space: ParameterSpace
    start: Tensor
    #: what is evaluated at other inputs, if anything can be
    model: nn.Module | None = None

    @abstractmethod
    def local(self, flat: Tensor) -> Local:
        """Loss, gradient and velocity at a point."""

    @abstractmethod
    def loss(self, flat: Tensor) -> float:
        """The loss alone."""

    @abstractmethod
    def values(self, flat: Tensor) -> Tensor:
        """The function values that the loss was computed from."""

    def like(self, flat: Tensor) -> Any:
        """A flat vector in the form in which the user holds parameters."""
        return self.space.split(flat)


class ClosureField(Field):
    """The field of an ordinary closure of a module.

    Args:
        model: the module.
        closure: evaluates the loss, calls backward and returns it; backward is called here
            where it did not.
        kind: "natural" or "euclidean".
        options: of `NaturalGradient`: metric, solver, reduction, ...
    """

    def __init__(
        self, model: nn.Module, closure: Callable[[], Any], kind: str, **options: Any
    ) -> None:
        self.host = Host(model)
        self.model, self.space, self.start = self.host.model, self.host.space, self.host.now()
        self._user, self._loss = closure, float("nan")
        self._optimizer = NaturalGradient(model, **options) if kind == "natural" else None
        self._watch = Watch(self.host.model, self._optimizer)

    def local(self, flat: Tensor) -> Local:
        with self.host.at(flat), torch.enable_grad():
            if self._optimizer is None:
                self._closure()
                gradient = self.host.gradient()
                return Local.checked(self._loss, gradient, -gradient)
            found = self._optimizer.direction(self._closure)
            gradient = self.host.gradient()
            reason = self._watch.rounded()
            if not found.status.ok and bool(gradient.any()):
                reason = found.status.value
            if reason:
                return Local.broken(flat, reason)
            return Local.checked(self._loss, gradient, -found.x)

    def loss(self, flat: Tensor) -> float:
        with self.host.at(flat), torch.enable_grad():
            self._closure()
        return self._loss

    def values(self, flat: Tensor) -> Tensor:
        """The module's outputs while the closure ran; several calls are joined along axis 0."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                seen.append(output.detach().clone())

        with self.host.at(flat), torch.enable_grad():
            hook = self.host.model.register_forward_hook(keep)
            try:
                self._closure()
            finally:
                hook.remove()
        if not seen:
            raise PullbackError(
                "There are no function values to show",
                "the closure did not call the model, or the model's output is not one tensor",
                "Evaluate the model yourself at trajectory.parameters(t)",
            )
        return seen[0] if len(seen) == 1 else torch.cat(seen)

    def _closure(self) -> Any:
        self.host.clear()
        # of this pass alone, and not of the optimizer's replays of it
        with Watch(self.host.model, self._optimizer) as self._watch:
            loss = self._user()
            _refuse_loss(loss)
            silent = all(p.grad is None for p in self.host.params.values())
            if silent and isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()
        self._loss = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        return loss


def _refuse_loss(loss: Any) -> None:
    if not isinstance(loss, (Tensor, float, int)):
        got = type(loss).__name__
        raise PullbackError("The closure did not return the loss", f"got {got}", "Return it")
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise PullbackError(
            "The loss is not one number", f"its shape is {tuple(loss.shape)}", "Reduce it to one"
        )


class ObjectiveField(Field):
    """The field of an objective: residuals as a function of the parameter dict, ½‖·‖²."""

    def __init__(
        self, model: nn.Module, objective: Callable[..., Any] | Objective, kind: str, **options: Any
    ) -> None:
        self.host = Host(model)
        self.model, self.space, self.start = self.host.model, self.host.space, self.host.now()
        self._objective = objective
        reduction = options["reduction"]
        self._residuals = (
            None if isinstance(objective, Objective) else ObjectiveMap(objective, reduction)
        )
        self._optimizer = NaturalGradient(model, **options) if kind == "natural" else None
        if self._optimizer is not None:
            refuse_metric(self._optimizer.metric)

    def local(self, flat: Tensor) -> Local:
        leaf = flat.detach().clone().requires_grad_()
        with torch.enable_grad():
            total = self._total(self.space.split(leaf))
            (gradient,) = torch.autograd.grad(total, leaf)
        loss, gradient = float(total.detach()), gradient.detach()
        checked = Local.checked(loss, gradient, -gradient)
        if self._optimizer is None or checked.reason:
            return checked
        with self.host.at(flat):
            found = self._optimizer.direction(objective=self._objective)
        if not found.status.ok and bool(gradient.any()):
            return Local.broken(flat, found.status.value)
        return Local.checked(loss, gradient, -found.x)

    def loss(self, flat: Tensor) -> float:
        with torch.no_grad():
            return float(self._total(self.space.split(flat)))

    def _total(self, params: dict[str, Tensor]) -> Tensor:
        if isinstance(self._objective, Objective):
            return self._objective.loss(params)
        assert self._residuals is not None
        return 0.5 * self._residuals(params).square().sum()

    def values(self, flat: Tensor) -> Tensor:
        """All residuals, weighted, (n,); of an `Objective` the values of its terms' maps."""
        with torch.no_grad():
            params = self.space.split(flat)
            if isinstance(self._objective, Objective):
                pieces = [term.map(params).flatten() for term in self._objective.terms]
                return torch.cat(pieces)
            assert self._residuals is not None
            return self._residuals(params)[:, 0]
