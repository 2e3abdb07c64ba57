"""An ordinary PyTorch closure as a problem: what it did is recorded and replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._core.capture import Call, Capture, Selector, first_input
from .._core.errors import PullbackError, Status
from .._core.factor import Scaled
from .._core.state import RandomState, Snapshot
from ..grams import Part
from ..maps import Linearization, ModuleMap
from ..maps.module import ModuleLinearization
from ..metrics import Metric
from .checks import gradient_of, loss_of, refuse_chained, warn_derivatives, warn_mismatch
from .problem import Place, Problem


class ClosureProblem(Problem):
    """An ordinary closure: zero_grad, forward, backward, return the loss."""

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        model: nn.Module,
        closure: Callable[[], Any],
        *,
        reduction: str,
        output: Selector,
        batch_dim: int,
        memory: dict[str, Any],
    ) -> None:
        super().__init__(params)
        self._model, self._closure, self._reduction = model, closure, reduction
        self._output, self._batch_dim, self._memory = output, batch_dim, memory
        self._calls: list[Call] = []
        self._recorded: list[tuple[Linearization, Tensor]] = []
        self._pulled: Tensor | None = None
        self._before = Snapshot(model, self.space.device)

    def evaluate(self) -> str:
        kind = self.space.device.type
        self._autocast = partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        )
        with torch.enable_grad(), Capture(self._model, self._output, self.space.device) as capture:
            loss = self._run()
        self._calls = capture.calls
        self._refuse_unseen(capture)
        if capture.derived and "derived" not in self._memory:
            self._memory["derived"] = True
            warn_derivatives(stacklevel=6)
        names = {id(p): n for n, p in self.params.items()}
        refuse_chained(names, [t for call in self._calls for t in call.sources])
        self._after = Snapshot(self._model, self.space.device)
        self.loss = loss
        self.gradient = self._collect()
        return self.broken()

    def _run(self) -> float:
        return loss_of(self._closure())

    def _refuse_unseen(self, capture: Capture) -> None:
        if self._calls:
            return
        if capture.seen == 0:
            raise PullbackError(
                "The closure never called the model with gradients enabled",
                "no forward pass of the module given to the optimizer was seen",
                "Call that module in the closure (with torch.compile, give the optimizer the "
                "compiled module)",
            )
        if capture.derived:
            raise PullbackError(
                "The loss is made of derivatives of the model's output alone",
                "the metric is that of the output itself, which the loss does not reach",
                "Use step(objective=...) with a function of the parameters, or pde.solve",
            )
        raise PullbackError(
            "No gradient reached the model's output",
            "the closure did not call backward(), or its loss does not depend on the output",
            "Call loss.backward() in the closure",
        )

    def _collect(self) -> Tensor:
        gradients = {n: gradient_of(n, p) for n, p in self.params.items()}
        silent = [n for n, g in gradients.items() if g is None]
        if len(silent) == len(gradients):
            raise PullbackError(
                "The loss does not depend on any optimized parameter",
                "every gradient is None after backward()",
                "Check that the closure uses these parameters",
            )
        if silent and "silent" not in self._memory:
            self._memory["silent"] = True
            warnings.warn(
                f"The loss does not depend on {', '.join(silent)}: their gradient counts as zero. "
                "Freeze them (requires_grad_(False)) to leave them out.",
                stacklevel=6,
            )
        return self.space.flatten(gradients)

    def parts(self, metric: Metric, batch: Any) -> tuple[list[Part], Tensor | None]:
        calls = self._calls
        if batch is not None:
            call = as_call(batch)
            calls = [replace(call, random=call.random or RandomState(self.space.device))]
        plans = self._memory.setdefault("plans", {})
        self._recorded, self._pulled, self.whitening = [], None, Status.OK
        linears, masks, cotangents = [], [], []
        for call in calls:
            source = ModuleMap(
                self._model, call, output=self._output, batch_dim=self._batch_dim, plans=plans
            )
            linear = source.linearize(self.params)
            linears.append(linear)
            cotangent = None
            if call.cotangent is not None:
                cotangent = source.arranged(call.cotangent).to(linear.value.dtype)
                self._recorded.append((linear, cotangent))
            cotangents.append(cotangent)
            masks.append(None if cotangent is None else metric.counted(linear.value, cotangent))
            if cotangent is not None and "checked" not in self._memory:
                self._memory["checked"] = True
                z = linear.value.to(linear.graph.dtype)  # its own precision
                warn_mismatch(metric, z, cotangent, stacklevel=8)
        self._warn_unmeasured(linears)
        weight = self._weight(metric, [x.value for x in linears], masks)
        parts, whites = [], []
        for call, linear, mask, cotangent in zip(calls, linears, masks, cotangents, strict=True):
            z = linear.value
            factor = metric.factor(z, inputs=first_input(call.tensors, len(z), self._batch_dim))
            scale = weight if mask is None else mask.to(z.dtype) * weight
            factor = Scaled(factor, scale, tuple(z.shape[1:]))
            parts.append(Part(linear, factor))
            if cotangent is not None:
                whitened = factor.whiten(cotangent, torch.finfo(linear.graph.dtype).eps)
                whites.append(whitened.value)
                self.whitening = whitened.status if not whitened.status.ok else self.whitening
            else:
                whites.append(None)
        if any(r is None for r in whites):
            return parts, None
        return parts, torch.cat([r.flatten() for r in whites if r is not None])

    def _warn_unmeasured(self, linears: Sequence[ModuleLinearization]) -> None:
        """Warn once where the loss moves parameters that no measured output depends on."""
        measured: set[str] = self._memory.setdefault("measured", set())
        gradients = {n: p.grad for n, p in self.params.items() if n not in measured}
        if "unmeasured" in self._memory or all(g is None for g in gradients.values()):
            return
        for linear in linears:
            measured |= dependencies(linear.graph, linear.leaves)
        moved = [
            n for n, g in gradients.items() if n not in measured and g is not None and bool(g.any())
        ]
        if moved:
            self._memory["unmeasured"] = True
            warnings.warn(
                f"The loss depends on {', '.join(moved)}, but the measured output does not: the "
                "metric is zero there, so they move by their gradient divided by the damping. "
                "Freeze them (requires_grad_(False)), leave them to another optimizer (params=), "
                "or let output= return what they compute as well.",
                RuntimeWarning,
                stacklevel=8,
            )

    def pulled(self) -> Tensor:
        if self._pulled is None:
            first, *others = [linear.vjp(u) for linear, u in self._recorded]
            self._pulled = sum(others, first)
        return self._pulled

    def _weight(
        self, metric: Metric, values: Sequence[Tensor], masks: Sequence[Tensor | None]
    ) -> float:
        if self._reduction == "sum":
            return 1.0
        total = 0.0
        for z, mask in zip(values, masks, strict=True):
            share = 1.0 if mask is None else float(mask.double().mean())
            total += metric.samples(z) * share
        return 1.0 / max(total, 1.0)

    def losses(self, moves: Tensor, place: Place) -> Tensor:
        origin = {n: p.detach().clone() for n, p in self.params.items()}
        grads = [(p, None if p.grad is None else p.grad.clone()) for p in self._model.parameters()]
        try:
            if "repeatable" not in self._memory:
                self._refuse_stochastic(self._trial(origin))
                self._memory["repeatable"] = True
            values = [self._trial(place(origin, move)) for move in moves]
        finally:
            self._write(origin)
            self._after.restore()
            for p, g in grads:
                p.grad = g
        # as the closure gave them: a loss in double precision may come from a model in single
        return torch.tensor(values, dtype=torch.float64, device=moves.device)

    def _trial(self, point: Mapping[str, Tensor]) -> float:
        self._write(point)
        self._before.restore()
        with torch.enable_grad(), self._autocast():
            return self._run()

    def _write(self, point: Mapping[str, Tensor]) -> None:
        for name, p in self.params.items():
            p.data.copy_(point[name])  # unseen by autograd: the linearization's graph lives on
        torch.clear_autocast_cache()  # an autocast around the step would go on with old weights

    def _refuse_stochastic(self, again: float) -> None:
        tolerance = torch.finfo(self.space.dtype).eps ** 0.5
        if abs(again - self.loss) > tolerance * max(abs(self.loss), tolerance):
            raise PullbackError(
                "The closure is stochastic",
                f"evaluated twice at the same parameters it gave {self.loss!r} and {again!r}, so "
                "trial losses cannot be compared",
                "Fix the batch outside the closure, or use steps.Constant",
            )

    def rollback(self) -> None:
        self._before.restore()


def as_call(batch: Any) -> Call:
    """Other inputs for the metric: a tensor, a tuple of arguments, or a dict of keywords."""
    if isinstance(batch, Call):
        return batch
    if isinstance(batch, Mapping):
        return Call.of(**batch)
    return Call.of(*batch) if isinstance(batch, tuple) else Call.of(batch)


def dependencies(z: Tensor, leaves: Mapping[str, Tensor]) -> set[str]:
    """The names of the leaves that z was computed from, read off its graph."""
    names = {id(p): n for n, p in leaves.items()}
    seen, stack, found = set(), [z.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(names.get(id(getattr(node, "variable", None))))
            stack.extend(following for following, _ in node.next_functions)
    return found - {None}
