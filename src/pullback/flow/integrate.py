"""Natural and Euclidean gradient flow, θ' = −G⁺∇L and θ' = −∇L, by adaptive integrators.

The integrators are scipy's, in float64. DOP853, of order 8 with dense output of order 7, is the
default. The implicit methods are for Euclidean flows, which are stiff where the curvatures of the
loss differ much.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import Any

import scipy
import torch
from torch import Tensor, nn

from .._core.checks import refuse_number, refuse_values
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

    def __init__(self, phi: Callable[..., Any], start: Start, whole: bool) -> None:
        super().__init__()
        named = dict(start) if isinstance(start, Mapping) else {"xi": start}
        for name, value in named.items():
            refuse_values(f"The start {name!r}", value)
        self.names = tuple(named)
        self.single, self.whole, self.phi = isinstance(start, Tensor), whole, phi
        self.shape = torch.Size()
        self.coordinates = nn.ParameterList([v.detach().clone() for v in named.values()])

    def argument(self, tensors: Iterable[Tensor]) -> Any:
        """What φ is called with."""
        named = dict(zip(self.names, tensors, strict=True))
        return named["xi"] if self.single else named

    def forward(self) -> Tensor:
        """z as the metric sees it."""
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
        return z.reshape(1, -1) if self.whole else z.reshape(-1, 1) if z.ndim < 2 else z

    def restore(self, z: Tensor) -> Tensor:
        """Back to φ's own shape."""
        return z.reshape(self.shape)


class FunctionField(VectorField):
    """θ' = −G⁺∇(L∘φ) for φ: Ξ → (Z, g) and L on Z."""

    def __init__(
        self,
        phi: Callable[..., Any],
        loss: Callable[..., Any],
        start: Start,
        kind: str,
        *,
        metric: Any = None,
        **options: Any,
    ) -> None:
        module = FunctionModule(phi, start, whole=not isinstance(metric, Metric))
        self._restored = lambda: module.restore(module())
        if kind == "natural":
            options["metric"] = _metric(metric, module)
        super().__init__(module, lambda: loss(self._restored()), kind, **options)
        self.model = None  # φ has no other inputs

    def values(self, flat: Tensor) -> Tensor:
        """φ(ξ), in its own shape."""
        with self.at(flat), torch.no_grad():
            return self._restored().clone()  # φ may return ξ itself

    def like(self, flat: Tensor) -> Any:
        assert isinstance(self.module, FunctionModule)
        return self.module.argument(self.space.split(flat).values())


def _metric(metric: Any, module: FunctionModule) -> Metric:
    if metric is None or isinstance(metric, Metric):
        return Euclidean() if metric is None else metric
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
    times = _times(t, at)
    refuse_number("rtol", rtol, positive=True)
    refuse_number("atol", atol)
    refuse_number("max_evaluations", max_evaluations, least=1, whole=True)
    if kind == "natural":
        options["solver"] = PseudoInverse() if solver is None else solver
    elif options or solver is not None or metric is not None:
        given = sorted([*options, *["metric"] * (metric is not None)])
        raise PullbackError(
            "The Euclidean flow has no metric",
            f"it is −∇L, and {given or ['solver']} would not count",
            'Leave it out, or use kind="natural"',
        )
    if isinstance(events, Event):
        events = [events]
    field = _field(model, closure_or_objective, metric, kind, start, reduction, options)
    march = March(field, [*events, blow_up()], at=times[2], budget=max_evaluations)
    scheme = getattr(scipy.integrate, method)
    return march.run(scheme, times[0], times[1], rtol=rtol, atol=atol, max_step=max_step)


def _field(
    model: Any,
    target: Any,
    metric: Any,
    kind: str,
    start: Start | None,
    reduction: str | None,
    options: dict[str, Any],
) -> VectorField:
    module = isinstance(model, nn.Module)
    if (start is None) != module:
        raise PullbackError(
            "The start does not fit the model",
            "a module starts at its own parameters"
            if module
            else "a function has no parameters of its own",
            "Leave start= out" if module else "Pass start=, a tensor or a dict of tensors",
        )
    options["reduction"] = reduction or ("mean" if module else "sum")
    if not module:
        both = callable(model) and callable(target)
        require(both, "The map or its loss", (model, target), "Pass φ and a function of its values")
        assert start is not None
        return FunctionField(model, target, start, kind, metric=metric, **options)
    if kind == "natural" and not isinstance(target, Supervised):
        options["metric"] = metric
    if isinstance(target, Supervised):
        if reduction not in (None, target.reduction):
            raise PullbackError(
                "Two reductions were given",
                f"{reduction!r} here and {target.reduction!r} in Supervised",
                "Give it to Supervised, which uses it for loss and metric alike",
            )
        return SupervisedField(model, target, kind, metric=metric, **options)
    if _wants_parameters(target):
        return ObjectiveField(model, target, kind, **options)
    return VectorField(model, target, kind, **options)


def _wants_parameters(target: Any) -> bool:
    """Whether it is a function of the parameter dict, and not a closure."""
    remedy = "Pass a closure, a function of the parameter dict, or Supervised(...)"
    require(callable(target), "The loss", target, remedy)
    try:
        inspect.signature(target).bind()
    except ValueError:  # a builtin without a signature
        return False
    except TypeError:
        return True
    return False


def _times(t: Any, at: Any) -> tuple[float, float, Tensor | None]:
    try:
        first, last = (float(x) for x in t)
    except (TypeError, ValueError):
        first = last = nan
    usable = isfinite(first) and isfinite(last) and first < last
    require(usable, "The time span", t, "Pass (from, to) with from < to, finite")
    if at is None:
        return first, last, None
    times = torch.as_tensor(at, dtype=torch.float64, device="cpu").reshape(-1)
    inside = bool(((times >= first) & (times <= last)).all())
    if not len(times) or not inside or not bool((times.diff() > 0).all()):
        raise PullbackError(
            "The times of at= are not usable",
            f"got {times.tolist()[:5]}",
            f"Use increasing times between {first:g} and {last:g}",
        )
    return first, last, times
