"""The vector field of natural gradient flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from .._core.capture import unwrap_model
from .._core.errors import PullbackError
from .._core.space import ParameterSpace
from .._core.state import Snapshot
from ..likelihoods import Bernoulli, Categorical
from ..maps import ObjectiveMap
from ..metrics import Fisher
from ..optim import NaturalGradient
from ..optim.checks import loss_of, refuse_metric
from ..optim.outputs import as_outputs
from ..solvers import Solution

_LOST = 1e-8  # the probability of the other classes below which p − y has lost half of its digits


def count_lost(likelihood: Any, z: Tensor, g: Tensor) -> int:
    """Count the outputs at which ∂ℓ/∂z = w(p − y) has lost its digits, for classifiers' logits z.

    Autograd's p − y has the absolute round-off of p. From logits of about 18 on half of its digits
    are gone where p is near y, at 37 all of them, while the natural gradient does not vanish.
    """
    if isinstance(likelihood, Bernoulli):
        sure, slope = torch.sigmoid(-z.abs()) < _LOST, g.abs()
    elif isinstance(likelihood, Categorical) and z.ndim == 2 and g.shape == z.shape:
        log_p = z.log_softmax(1)
        best = log_p.argmax(1, keepdim=True)
        others = log_p.scatter(1, best, -torch.inf).logsumexp(1).exp()
        sure, slope = others < _LOST, g.abs().amax(1)
    else:
        return 0
    # where p is near 1 − y the gradient is about w, and keeps its digits
    return int((sure & (slope * g.numel() < _LOST**0.5)).sum())


@dataclass(frozen=True)
class FieldValue:
    """The field at one point; a non-empty reason says why it has no velocity."""

    loss: float
    gradient: Tensor
    velocity: Tensor
    reason: str = ""

    @classmethod
    def checked(cls, loss: float, gradient: Tensor, velocity: Tensor) -> FieldValue:
        """The same, with a reason if anything in it is not finite."""
        reason = ""
        if not isfinite(loss):
            reason = f"the loss is not finite ({loss})"
        elif not bool(torch.isfinite(gradient).all()):
            reason = "the gradient is not finite"
        elif not bool(torch.isfinite(velocity).all()):
            reason = "the velocity is not finite"
        return cls(loss, gradient, velocity, reason)

    @classmethod
    def broken(cls, like: Tensor, reason: str) -> FieldValue:
        """No velocity, and why."""
        nan = torch.full_like(like, torch.nan)
        return cls(float("nan"), nan, nan, reason)


class VectorField:
    """θ' = v(θ) for a closure of a module, on its parameters that require gradients, flat (p,).

    Args:
        model: the module, in float64.
        closure: evaluates the loss, calls backward and returns it; backward is called here
            where it did not.
        kind: "natural" or "euclidean".
        options: of `NaturalGradient`: metric, solver, reduction, ...
    """

    def __init__(
        self, model: nn.Module, closure: Callable[[], Any], kind: str, **options: Any
    ) -> None:
        self.module = unwrap_model(model)
        #: what can be evaluated at other inputs
        self.model: nn.Module | None = self.module
        self.params = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.space = ParameterSpace(self.params)
        low = sorted({str(p.dtype) for p in self.params.values() if p.dtype != torch.float64})
        if low:
            raise PullbackError(
                "A flow needs float64",
                f"some parameters are {', '.join(low)}, whose round-off is far above what the "
                "integrator's error control works with",
                "Call .double() on the model and its data",
            )
        self.start = self.space.flatten({n: p.detach() for n, p in self.params.items()}).clone()
        self._user, self._loss, self._lost = closure, float("nan"), 0
        self._gradient = torch.zeros_like(self.start)
        self._outputs: list[Tensor] = []
        self._optimizer = None
        self._likelihood = None
        if kind == "natural":
            outputs = as_outputs(options.pop("output", None), None)
            reduction = options.pop("reduction", outputs.reduction)
            self._optimizer = NaturalGradient(
                model, output=replace(outputs, reduction=reduction), **options
            )
            if isinstance(self._optimizer.metric, Fisher):
                self._likelihood = self._optimizer.metric.likelihood

    @contextmanager
    def at(self, flat: Tensor) -> Iterator[None]:
        """The module at a point; parameters, gradients and buffers come back."""
        saved = [(p, p.detach().clone(), p.grad) for p in self.params.values()]
        before = Snapshot(self.module, self.space.device)
        try:
            for name, value in self.space.split(flat.to(self.space.device)).items():
                self.params[name].data.copy_(value)
            yield
        finally:
            for p, value, gradient in saved:
                p.data.copy_(value)
                p.grad = gradient
            before.restore()

    def local(self, flat: Tensor) -> FieldValue:
        """Loss, gradient and velocity at a point."""
        with self.at(flat), torch.enable_grad():
            found = self._solve()
        if found is None:
            return FieldValue.checked(self._loss, self._gradient, -self._gradient)
        if not found.status.ok and bool(self._gradient.any()):
            return FieldValue.broken(flat, found.status.value)
        if self._lost:
            return FieldValue.broken(flat, _ROUNDED.format(self._lost))
        return FieldValue.checked(self._loss, self._gradient, -found.x)

    def loss(self, flat: Tensor) -> float:
        """The loss alone."""
        with self.at(flat), torch.enable_grad():
            self._evaluate()
        return self._loss

    def values(self, flat: Tensor) -> Tensor:
        """The module's outputs while the closure ran; several calls are joined along axis 0."""
        with self.at(flat), torch.enable_grad():
            self._evaluate()
        seen = [z.clone() for z in self._outputs]
        if not seen:
            raise PullbackError(
                "There are no function values to show",
                "the closure did not call the model, or the model's output is not one tensor",
                "Evaluate the model yourself at trajectory.parameters(t)",
            )
        return seen[0] if len(seen) == 1 else torch.cat(seen)

    def like(self, flat: Tensor) -> Any:
        """A flat vector in the form in which the user holds parameters."""
        return self.space.split(flat)

    def _solve(self) -> Solution | None:
        """Evaluate the closure, and find G⁺∇L; None for the Euclidean flow."""
        if self._optimizer is not None:
            return self._optimizer.direction(self._evaluate)
        self._evaluate()
        return None

    def _evaluate(self) -> Any:
        """Run the closure once; keep its loss, its gradient and the module's outputs."""
        for p in self.params.values():
            p.grad = None
        self._outputs, self._lost = [], 0
        hook = self.module.register_forward_hook(self._follow)
        try:
            loss = self._user()
            self._loss = loss_of(loss)
            silent = all(p.grad is None for p in self.params.values())
            if silent and isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()
        finally:
            hook.remove()
        self._gradient = self.space.flatten({n: p.grad for n, p in self.params.items()}).clone()
        return loss

    def _follow(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep the outputs of this pass, and count where their gradients lose their digits."""
        if not isinstance(output, Tensor):
            return
        z = output.detach()
        self._outputs.append(z)

        def count(g: Tensor) -> None:
            self._lost += count_lost(self._likelihood, z, g)

        if self._likelihood is not None and output.requires_grad:
            output.register_hook(count)


_ROUNDED = (
    "the loss's gradient p − y has lost its digits at {} outputs with logits beyond about ±18 "
    "(flow.Supervised goes on from there)"
)


class ObjectiveField(VectorField):
    """The field of an objective: residuals as a function of the parameter dict, ½‖·‖²."""

    def __init__(
        self, model: nn.Module, objective: Callable[..., Any], kind: str, **options: Any
    ) -> None:
        self._objective = objective
        self._residuals = ObjectiveMap(objective, options["reduction"])
        super().__init__(model, self._total, kind, **options)
        if self._optimizer is not None:
            refuse_metric(self._optimizer.metric)

    def _total(self) -> Tensor:
        return 0.5 * self._residuals(self.params).square().sum()

    def _solve(self) -> Solution | None:
        self._evaluate()
        finite = isfinite(self._loss) and bool(torch.isfinite(self._gradient).all())
        if self._optimizer is None or not finite:
            return None
        return self._optimizer.direction(objective=self._objective)

    def values(self, flat: Tensor) -> Tensor:
        """All residuals, weighted, (n,)."""
        with torch.no_grad():
            return self._residuals(self.space.split(flat))[:, 0]
