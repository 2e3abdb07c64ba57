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
from ..optim.checks import refuse_metric_of_objective
from ..optim.closure import read_loss
from ..optim.outputs import as_outputs
from ..solvers import Solution


@dataclass(frozen=True)
class FieldThresholds:
    """Numbers that decide where a gradient is still usable.

    Attributes:
        lost: the probability of the other classes below which p − y has lost half of its digits:
            √ε of float64.
    """

    lost: float = 1e-8


THRESHOLDS = FieldThresholds()


def count_lost(likelihood: Any, z: Tensor, g: Tensor) -> int:
    """Count the outputs at which ∂ℓ/∂z = w(p − y) has lost its digits, for classifiers' logits z.

    Autograd's p − y has the absolute round-off of p. From logits of about 18 on half of its digits
    are gone where p is near y, at 37 all of them, while the natural gradient does not vanish.
    """
    if isinstance(likelihood, Bernoulli):
        is_certain = torch.sigmoid(-z.abs()) < THRESHOLDS.lost
        slope = g.abs()
    elif isinstance(likelihood, Categorical) and z.ndim == 2 and g.shape == z.shape:
        log_p = z.log_softmax(1)
        best = log_p.argmax(1, keepdim=True)
        others = log_p.scatter(1, best, -torch.inf).logsumexp(1).exp()
        is_certain = others < THRESHOLDS.lost
        slope = g.abs().amax(1)
    else:
        return 0
    # Where p is near 1 − y the gradient is about w, and keeps its digits.
    is_small = slope * g.numel() < THRESHOLDS.lost**0.5
    return int((is_certain & is_small).sum())


@dataclass(frozen=True)
class FieldValue:
    """The field at one point; a non-empty reason says why it has no velocity."""

    loss: float
    gradient: Tensor
    velocity: Tensor
    reason: str = ""

    @classmethod
    def check(cls, loss: float, gradient: Tensor, velocity: Tensor) -> FieldValue:
        """Return the value, with a reason if anything in it is not finite."""
        reason = ""
        if not isfinite(loss):
            reason = f"the loss is not finite ({loss})"
        elif not bool(torch.isfinite(gradient).all()):
            reason = "the gradient is not finite"
        elif not bool(torch.isfinite(velocity).all()):
            reason = "the velocity is not finite"
        return cls(loss, gradient, velocity, reason)

    @classmethod
    def without_velocity(cls, flat: Tensor, reason: str) -> FieldValue:
        """Return a value at the parameters `flat` that has no velocity for this reason."""
        nan = torch.full_like(flat, torch.nan)
        return cls(float("nan"), nan, nan, reason)


class VectorField:
    """θ' = v(θ) for a closure of a module, on its parameters that require gradients, flat (p,).

    Args:
        model: the module, in float64.
        closure: evaluates the loss, calls backward and returns it; backward is called here
            where it did not.
        is_natural: for −G⁺∇L, else −∇L.
        options: of `NaturalGradient`: metric, solver, reduction, ...
    """

    def __init__(
        self, model: nn.Module, closure: Callable[[], Any], is_natural: bool, **options: Any
    ) -> None:
        self.module = unwrap_model(model)
        #: what can be evaluated at other inputs
        self.model: nn.Module | None = self.module
        self.params = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self.space = ParameterSpace(self.params)
        dtypes = {str(p.dtype) for p in self.params.values() if p.dtype != torch.float64}
        if dtypes:
            raise PullbackError(
                "A flow needs float64",
                f"some parameters are {', '.join(sorted(dtypes))}, whose round-off is far above "
                "what the integrator's error control works with",
                "Call .double() on the model and its data",
            )
        self.start = self.space.flatten({n: p.detach() for n, p in self.params.items()}).clone()
        self._closure = closure
        self._loss = float("nan")
        #: outputs at which the last gradient has lost its digits
        self._lost_count = 0
        self._gradient = torch.zeros_like(self.start)
        self._outputs: list[Tensor] = []
        self._optimizer: NaturalGradient | None = None
        #: of the Fisher metric, if it is one
        self._likelihood = None
        if is_natural:
            outputs = as_outputs(options.pop("output", None), None)
            reduction = options.pop("reduction", outputs.reduction)
            self._optimizer = NaturalGradient(
                model, output=replace(outputs, reduction=reduction), **options
            )
            metric = self._optimizer.metric
            if isinstance(metric, Fisher):
                self._likelihood = metric.likelihood

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
            solution = self._solve()
        if solution is None:
            return FieldValue.check(self._loss, self._gradient, -self._gradient)
        if not solution.status.ok and bool(self._gradient.any()):
            return FieldValue.without_velocity(flat, solution.status.value)
        if self._lost_count:
            return FieldValue.without_velocity(flat, _describe_lost_digits(self._lost_count))
        return FieldValue.check(self._loss, self._gradient, -solution.x)

    def loss(self, flat: Tensor) -> float:
        """The loss alone."""
        with self.at(flat), torch.enable_grad():
            self._evaluate()
        return self._loss

    def values(self, flat: Tensor) -> Tensor:
        """The module's outputs while the closure ran; several calls are joined along axis 0."""
        with self.at(flat), torch.enable_grad():
            self._evaluate()
        outputs = [z.clone() for z in self._outputs]
        if not outputs:
            raise PullbackError(
                "There are no function values to show",
                "the closure did not call the model, or the model's output is not one tensor",
                "Evaluate the model yourself at trajectory.parameters(t)",
            )
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs)

    def unflatten(self, flat: Tensor) -> Any:
        """Return a flat vector in the form in which the user holds parameters."""
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
        self._outputs = []
        self._lost_count = 0
        hook = self.module.register_forward_hook(self._keep_output)
        try:
            loss = self._closure()
            self._loss = read_loss(loss)
            has_no_gradients = all(p.grad is None for p in self.params.values())
            if has_no_gradients and isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()
        finally:
            hook.remove()
        self._gradient = self.space.flatten({n: p.grad for n, p in self.params.items()}).clone()
        return loss

    def _keep_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Record the outputs of this pass, and count where their gradients lose their digits."""
        if not isinstance(output, Tensor):
            return
        z = output.detach()
        self._outputs.append(z)

        def count(g: Tensor) -> None:
            self._lost_count += count_lost(self._likelihood, z, g)

        if self._likelihood is not None and output.requires_grad:
            output.register_hook(count)


def _describe_lost_digits(count: int) -> str:
    return (
        f"the loss's gradient p − y has lost its digits at {count} outputs with logits beyond "
        "about ±18 (flow.Supervised goes on from there)"
    )


class ObjectiveField(VectorField):
    """The field of an objective: residuals as a function of the parameter dict, ½‖·‖²."""

    def __init__(
        self, model: nn.Module, objective: Callable[..., Any], is_natural: bool, **options: Any
    ) -> None:
        self._objective = objective
        self._residuals = ObjectiveMap(objective, options["reduction"])
        super().__init__(model, self._half_square, is_natural, **options)
        if self._optimizer is not None:
            refuse_metric_of_objective(self._optimizer.metric)

    def _half_square(self) -> Tensor:
        return 0.5 * self._residuals(self.params).square().sum()

    def _solve(self) -> Solution | None:
        self._evaluate()
        is_finite = isfinite(self._loss) and bool(torch.isfinite(self._gradient).all())
        if self._optimizer is None or not is_finite:
            return None
        return self._optimizer.direction(objective=self._objective)

    def values(self, flat: Tensor) -> Tensor:
        """All residuals, weighted, (n,)."""
        with torch.no_grad():
            return self._residuals(self.space.split(flat))[:, 0]
