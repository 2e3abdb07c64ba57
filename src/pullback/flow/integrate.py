"""Natural and Euclidean gradient flow, θ' = −G⁺∇L and θ' = −∇L, by adaptive integrators.

The integrators are scipy's, in float64. DOP853, of order 8 with dense output of order 7, is the
default. The implicit methods are for Euclidean flows, which are stiff where the curvatures of the
loss differ much.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import scipy
import torch
from torch import Tensor, nn

from .._core.checks import require_finite_tensor, require_number
from .._core.errors import PullbackError, refuse_unknown, require
from ..metrics import Euclidean, Metric, MetricFunction
from ..solvers import PseudoInverse, Solver
from .field import ObjectiveField, VectorField
from .march import March
from .supervised import Supervised, SupervisedField
from .trajectory import Event, Trajectory, blow_up

Start = Tensor | Mapping[str, Tensor]


class FunctionModule(nn.Module):
    """φ as a module: the coordinates are its parameters, the values its output.

    Entries of z that a matrix may couple are one sample, (1, n).
    """

    def __init__(self, phi: Callable[..., Any], start: Start, is_one_sample: bool) -> None:
        super().__init__()
        named = dict(start) if isinstance(start, Mapping) else {"xi": start}
        for name, value in named.items():
            require_finite_tensor(f"The start {name!r}", value)
        self.names = tuple(named)
        self.has_one_argument = isinstance(start, Tensor)
        self.is_one_sample = is_one_sample
        self.phi = phi
        self.shape = torch.Size()
        self.coordinates = nn.ParameterList([v.detach().clone() for v in named.values()])

    def argument(self, tensors: Iterable[Tensor]) -> Any:
        """Return the argument that φ is called with."""
        named = dict(zip(self.names, tensors, strict=True))
        if self.has_one_argument:
            return named["xi"]
        return named

    def forward(self) -> Tensor:
        """Return z in the shape that the metric sees, samples first."""
        z = self.phi(self.argument(self.coordinates))
        if not isinstance(z, Tensor) or not z.is_floating_point() or not z.numel():
            raise PullbackError(
                "φ does not give a point of Z",
                f"got {type(z).__name__}",
                "Return one real, non-empty floating-point tensor",
            )
        if z.dtype != torch.float64:
            raise PullbackError(
                "A flow needs float64",
                f"φ gives {z.dtype}, whose round-off is far above what the integrator's error "
                "control works with",
                "Keep the dtype of the coordinates in φ",
            )
        self.shape = z.shape
        if self.is_one_sample:
            return z.reshape(1, -1)
        if z.ndim < 2:
            return z.reshape(-1, 1)
        return z

    def restore(self, z: Tensor) -> Tensor:
        """Return z in φ's own shape."""
        return z.reshape(self.shape)


class FunctionField(VectorField):
    """θ' = −G⁺∇(L∘φ) for φ: Ξ → (Z, g) and L on Z."""

    def __init__(
        self,
        phi: Callable[..., Any],
        loss: Callable[..., Any],
        start: Start,
        is_natural: bool,
        *,
        metric: Any = None,
        **options: Any,
    ) -> None:
        module = FunctionModule(phi, start, is_one_sample=not isinstance(metric, Metric))
        self._evaluate_phi = lambda: module.restore(module())
        if is_natural:
            options["metric"] = _read_metric(metric, module)
        super().__init__(module, lambda: loss(self._evaluate_phi()), is_natural, **options)
        self.model = None  # φ has no other inputs

    def values(self, flat: Tensor) -> Tensor:
        """Return φ(ξ), in its own shape."""
        with self.at(flat), torch.no_grad():
            return self._evaluate_phi().clone()  # φ may return ξ itself

    def unflatten(self, flat: Tensor) -> Any:
        assert isinstance(self.module, FunctionModule)
        return self.module.argument(self.space.split(flat).values())


def _read_metric(metric: Any, module: FunctionModule) -> Metric:
    """Return a user's metric on the values of φ as a metric object."""
    if metric is None:
        return Euclidean()
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, Tensor):
        return MetricFunction(lambda z: metric.to(z)[None])
    remedy = "Pass a matrix over the entries of z, a function z -> matrix, or a metric object"
    require(callable(metric), "The metric", metric, remedy)
    return MetricFunction(lambda z: metric(module.restore(z))[None])


METHODS = ("DOP853", "RK45", "LSODA", "Radau", "BDF")


def integrate(
    model: nn.Module | Callable[..., Tensor],
    closure_or_objective: Callable[..., Any] | Supervised,
    metric: Metric | Tensor | Callable[[Tensor], Tensor] | None = None,
    t: tuple[float, float] = (0.0, 10.0),
    *,
    kind: str = "natural",
    start: Start | None = None,
    method: str = "DOP853",
    rtol: float = 1e-9,
    atol: float = 1e-11,
    events: Iterable[Event] | Event = (),
    at: Sequence[float] | Tensor | None = None,
    max_evaluations: int = 20_000,
    max_step: float = float("inf"),
    solver: Solver | None = None,
    reduction: str | None = None,
    **options: Any,
) -> Trajectory:
    r"""Integrate the flow from the model's parameters, without changing them.

    Args:
        model: a module in float64; or a function φ of a tensor or a dict of tensors.
        closure_or_objective: for a module, a closure of no arguments (backward is called
            for it, if it does not), a function of the parameter dict that returns residuals (as
            `NaturalGradient.step(objective=...)` takes), or `Supervised`, which stays exact where
            logits diverge. For a function φ, a loss on its values.
        metric: as in `NaturalGradient`; for a function φ a matrix over the entries of z, a
            function z ↦ matrix, or a metric object.
        t: from and to.
        kind: "natural" for −G⁺∇L, "euclidean" for −∇L.
        start: the coordinates φ starts from.
        method: one of "DOP853", "RK45", "LSODA", "Radau", "BDF".
        rtol: the error of one step, relative to θ.
        atol: and absolute.
        events: what to look for, such as `Event(lambda state: 1e-8 - state.loss)`; a flow whose
            parameters reach 10¹² ends in any case.
        at: the times to keep; without it the flow is known at every time, which keeps several
            copies of the parameters per step.
        max_evaluations: of the velocity, before it gives up.
        max_step: the longest step.
        solver: how G⁺∇L is found; `PseudoInverse()` by default.
        reduction: "mean" or "sum" over the samples of the metric: by default the mean with
            a module, the sum with a function. It is not applied to the loss.
        options: further ones of `NaturalGradient`, such as output or gram.

    Returns:
        What was reached and why it ended there. A flow that cannot go on (a step below round-off, a
        loss that is not finite, an exhausted budget) ends with its reason, before anything
        that is not finite; only requests that make no sense raise.
    """
    refuse_unknown("kind", kind, ("natural", "euclidean"))
    refuse_unknown("method", method, METHODS)
    span = _read_span(t)
    times = None if at is None else _read_times(at, span)
    require_number("rtol", rtol, positive=True)
    require_number("atol", atol)
    require_number("max_evaluations", max_evaluations, least=1, whole=True)
    if kind == "natural":
        options["solver"] = PseudoInverse() if solver is None else solver
    else:
        _refuse_natural_options(metric, solver, options)
    if isinstance(events, Event):
        events = [events]
    choices = _FieldChoices(kind == "natural", metric, reduction, options)
    if isinstance(model, nn.Module):
        field = _make_module_field(model, closure_or_objective, start, choices)
    else:
        field = _make_function_field(model, closure_or_objective, start, choices)
    march = March(field, [*events, blow_up()], at=times, budget=max_evaluations)
    scheme = getattr(scipy.integrate, method)
    return march.run(scheme, *span, rtol=rtol, atol=atol, max_step=max_step)


def _refuse_natural_options(metric: Any, solver: Any, options: dict[str, Any]) -> None:
    """Raise where options of the natural flow were given to the Euclidean one."""
    if not options and solver is None and metric is None:
        return
    names = list(options)
    if metric is not None:
        names.append("metric")
    raise PullbackError(
        "The Euclidean flow has no metric",
        f"it is −∇L, and {sorted(names) or ['solver']} would not count",
        'Leave it out, or use kind="natural"',
    )


@dataclass(frozen=True)
class _FieldChoices:
    """A user's choices of a field.

    Attributes:
        is_natural: for −G⁺∇L, else −∇L.
        metric: on function values.
        reduction: over the samples of the metric.
        options: of `NaturalGradient`.
    """

    is_natural: bool
    metric: Any
    reduction: str | None
    options: dict[str, Any]


def _make_function_field(
    phi: Any, loss: Any, start: Start | None, choices: _FieldChoices
) -> FunctionField:
    """Return the field of a function φ and a loss on its values."""
    if start is None:
        raise PullbackError(
            "The start does not fit the model",
            "a function has no parameters of its own",
            "Pass start=, a tensor or a dict of tensors",
        )
    are_callable = callable(phi) and callable(loss)
    remedy = "Pass φ and a function of its values"
    require(are_callable, "The map or its loss", (phi, loss), remedy)
    reduction = choices.reduction or "sum"
    return FunctionField(
        phi,
        loss,
        start,
        choices.is_natural,
        metric=choices.metric,
        reduction=reduction,
        **choices.options,
    )


def _make_module_field(
    model: nn.Module, target: Any, start: Start | None, choices: _FieldChoices
) -> VectorField:
    """Return the field of a module and a closure, an objective or data."""
    if start is not None:
        raise PullbackError(
            "The start does not fit the model",
            "a module starts at its own parameters",
            "Leave start= out",
        )
    options = {**choices.options, "reduction": choices.reduction or "mean"}
    if isinstance(target, Supervised):
        if choices.reduction not in (None, target.reduction):
            raise PullbackError(
                "Two reductions were given",
                f"{choices.reduction!r} here and {target.reduction!r} in Supervised",
                "Give it to Supervised, which uses it for loss and metric alike",
            )
        options["metric"] = choices.metric
        return SupervisedField(model, target, choices.is_natural, **options)
    if choices.is_natural:
        options["metric"] = choices.metric
    if _takes_parameters(target):
        return ObjectiveField(model, target, choices.is_natural, **options)
    return VectorField(model, target, choices.is_natural, **options)


def _takes_parameters(target: Any) -> bool:
    """Return True for a function of the parameter dict, False for a closure."""
    remedy = "Pass a closure, a function of the parameter dict, or Supervised(...)"
    require(callable(target), "The loss", target, remedy)
    try:
        inspect.signature(target).bind()
    except ValueError:  # a builtin without a signature
        return False
    except TypeError:
        return True
    return False


def _read_span(t: Any) -> tuple[float, float]:
    """Return the first and the last time."""
    try:
        first, last = (float(x) for x in t)
    except (TypeError, ValueError):
        first = last = nan
    is_usable = isfinite(first) and isfinite(last) and first < last
    require(is_usable, "The time span", t, "Pass (from, to) with from < to, finite")
    return first, last


def _read_times(at: Any, span: tuple[float, float]) -> Tensor:
    """Return the times to keep."""
    first, last = span
    times = torch.as_tensor(at, dtype=torch.float64, device="cpu").reshape(-1)
    are_inside = bool(((times >= first) & (times <= last)).all())
    if not len(times) or not are_inside or not bool((times.diff() > 0).all()):
        raise PullbackError(
            "The times of at= are not usable",
            f"got {times.tolist()[:5]}",
            f"Use increasing times between {first:g} and {last:g}",
        )
    return times
