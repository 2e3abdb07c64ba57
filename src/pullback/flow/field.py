"""The vector field of natural gradient flow, and what is watched and held while it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.capture import plain
from .._core.errors import PullbackError
from .._core.space import ParameterSpace
from .._core.state import Snapshot
from ..likelihoods import Bernoulli, Categorical
from ..maps import ObjectiveMap
from ..metrics import Fisher
from ..optim import NaturalGradient, Objective
from ..optim.checks import refuse_metric


class Host:
    """The parameters of a module that require gradients, as one flat vector in float64."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise PullbackError(
                "The flow needs the model itself",
                f"got {type(model).__name__}",
                "Pass an nn.Module, or a function φ with start= and a loss on its values",
            )
        self.model = plain(model)
        self.params = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.space = ParameterSpace(self.params)
        low = sorted({str(p.dtype) for p in self.params.values() if p.dtype != torch.float64})
        if low:
            raise PullbackError(
                "A flow needs float64",
                f"some parameters are {', '.join(low)}, whose round-off is far above what the "
                "integrator's error control works with",
                "Call .double() on the model and its data",
            )

    def now(self) -> Tensor:
        """The parameters as they are, flat."""
        return self.space.flatten({n: p.detach() for n, p in self.params.items()}).clone()

    @contextmanager
    def at(self, flat: Tensor) -> Iterator[None]:
        """The module at a point, without gradients; parameters, gradients, buffers come back."""
        saved = [(p, p.detach().clone(), p.grad) for p in self.params.values()]
        before = Snapshot(self.model, self.space.device)
        try:
            self.write(flat)
            self.clear()
            yield
        finally:
            for p, value, gradient in saved:
                p.data.copy_(value)
                p.grad = gradient
            before.restore()

    def write(self, flat: Tensor) -> None:
        """Put a flat vector into the parameters."""
        for name, value in self.space.split(flat.to(self.space.device)).items():
            self.params[name].data.copy_(value)

    def clear(self) -> None:
        """Forget the gradients."""
        for p in self.params.values():
            p.grad = None

    def gradient(self) -> Tensor:
        """p.grad, flat; a copy."""
        return self.space.flatten({n: p.grad for n, p in self.params.items()}).clone()


_SURE = 1e-4  # the probability of the other classes from which on p − y is looked at
_ULPS = 4


class CotangentWatch:
    """A closure's ∂ℓ/∂z, followed while it runs, for Fisher metrics of classifiers.

    Autograd's w(p − y) has the absolute round-off of p: its digits go as p nears 1, and from logits
    of about 37 on it is zero, while the natural gradient is not (zero over zero). A gradient that
    is w(p − y) to that round-off, for the weight w of a sum or a mean, is replaced by the same in
    full precision. Where it is zero nothing is left to say which y it was.
    """

    def __init__(self, model: nn.Module, optimizer: NaturalGradient | None) -> None:
        metric = None if optimizer is None else optimizer.metric
        self._likelihood = metric.likelihood if isinstance(metric, Fisher) else None
        self._model, self._lost = model, 0
        self._hook: Any = None

    def __enter__(self) -> CotangentWatch:
        if isinstance(self._likelihood, (Bernoulli, Categorical)):
            # first, so that whoever records the cotangent receives the mended one
            self._hook = self._model.register_forward_hook(self._follow, prepend=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _follow(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        z = output.detach()

        def mend(g: Tensor) -> Tensor | None:
            if isinstance(self._likelihood, Bernoulli):
                exact, sure = _bernoulli(z, g)
                silent = g == 0
            elif z.ndim == 2 and g.shape == z.shape:
                exact, sure = _categorical(z, g)
                silent = (g == 0).all(1, keepdim=True)
            else:
                return None
            self._lost += int((sure & silent).sum())
            eps = torch.finfo(g.dtype).eps
            for count in (1, z.shape[0], z.numel()):
                near = (g - exact / count).abs() <= _ULPS * eps / count
                if bool((near | silent | ~sure).all()):
                    return torch.where(sure & ~silent, exact / count, g)
            return None

        output.register_hook(mend)

    def rounded(self) -> str:
        """The reason to stop, or nothing."""
        if not self._lost:
            return ""
        return (
            f"the loss's gradient p − y rounded to zero at {self._lost} outputs whose logits are "
            "beyond about ±37 (flow.Supervised goes on from there)"
        )


def _bernoulli(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """σ(z) − y with the y that the sign of g tells, and where it is small."""
    exact = torch.where(g < 0, -torch.sigmoid(-z), torch.sigmoid(z))
    sure = torch.where(g == 0, torch.sigmoid(z.abs()) == 1, exact.abs() < _SURE)
    return exact, sure


def _categorical(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """p − e_y with the y at which g is negative, and in which rows it is small."""
    log_p = z.log_softmax(1)
    y = g.argmin(1, keepdim=True)
    others = log_p.scatter(1, y, -torch.inf).logsumexp(1, keepdim=True).exp()
    exact = log_p.exp().scatter(1, y, -others)
    lost = z.softmax(1).amax(1, keepdim=True) == 1
    silent = (g == 0).all(1, keepdim=True)
    return exact, torch.where(silent, lost, others < _SURE).expand_as(z)


KINDS = ("natural", "euclidean")


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
        if not torch.isfinite(torch.tensor(loss)):
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


class VectorField(ABC):
    """θ' = v(θ) on flat parameters (p,)."""

    space: ParameterSpace
    start: Tensor
    #: what is evaluated at other inputs, if anything can be
    model: nn.Module | None = None

    @abstractmethod
    def local(self, flat: Tensor) -> FieldValue:
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


class ClosureField(VectorField):
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
        self._watch = CotangentWatch(self.host.model, self._optimizer)

    def local(self, flat: Tensor) -> FieldValue:
        with self.host.at(flat), torch.enable_grad():
            if self._optimizer is None:
                self._closure()
                gradient = self.host.gradient()
                return FieldValue.checked(self._loss, gradient, -gradient)
            found = self._optimizer.direction(self._closure)
            gradient = self.host.gradient()
            reason = self._watch.rounded()
            if not found.status.ok and bool(gradient.any()):
                reason = found.status.value
            if reason:
                return FieldValue.broken(flat, reason)
            return FieldValue.checked(self._loss, gradient, -found.x)

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
        with CotangentWatch(self.host.model, self._optimizer) as self._watch:
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


class ObjectiveField(VectorField):
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

    def local(self, flat: Tensor) -> FieldValue:
        leaf = flat.detach().clone().requires_grad_()
        with torch.enable_grad():
            total = self._total(self.space.split(leaf))
            (gradient,) = torch.autograd.grad(total, leaf)
        loss, gradient = float(total.detach()), gradient.detach()
        checked = FieldValue.checked(loss, gradient, -gradient)
        if self._optimizer is None or checked.reason:
            return checked
        with self.host.at(flat):
            found = self._optimizer.direction(objective=self._objective)
        if not found.status.ok and bool(gradient.any()):
            return FieldValue.broken(flat, found.status.value)
        return FieldValue.checked(loss, gradient, -found.x)

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
