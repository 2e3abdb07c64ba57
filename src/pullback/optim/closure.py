"""An ordinary PyTorch closure as a problem: what it did is recorded and replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._core.capture import Call, Capture, Selector, find_first_input, unwrap_model
from .._core.errors import PullbackError, Status
from .._core.factor import Scaled
from .._core.graph import find_leaf_names
from .._core.processes import Processes
from .._core.state import RandomState, Snapshot
from ..grams import RowBlock
from ..maps import Linearization, ModuleMap
from ..maps.module import ModuleLinearization
from ..metrics import Metric
from .checks import loss_of, refuse_sparse, warn_derivatives, warn_mismatch
from .problem import Place, StepProblem


class ClosureProblem(StepProblem):
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
        processes: Processes | None = None,
        coupled: bool = False,
    ) -> None:
        super().__init__(params, processes)
        self.model = unwrap_model(model)
        self._model, self._closure, self._reduction = model, closure, reduction
        self._output, self._batch_dim, self._memory = output, batch_dim, memory
        self._how: Any = {"output": output, "batch_dim": batch_dim, "coupled": coupled}
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
        unseen = self.processes.all_agree(not self._calls)  # a single process may have no samples
        with self.processes.raise_together():
            if unseen:
                self._refuse_unseen(capture)
            if capture.has_input_derivatives and "derived" not in self._memory:
                self._memory["derived"] = True
                warn_derivatives(stacklevel=6)
            self._refuse_chained()
            self._after = Snapshot(self._model, self.space.device)
            gradients = self._collect()
        self.loss = self._mean([loss])[0]
        self.gradient = self._synchronized(gradients)
        return self.broken()

    def _refuse_chained(self) -> None:
        """Raise where a recorded input was itself computed from the optimized parameters."""
        names = {id(p): n for n, p in self.params.items()}
        for name in find_leaf_names([t for call in self._calls for t in call.sources], names):
            raise PullbackError(
                "The model's input depends on the model's own parameters",
                f"{name!r} reached it through an earlier call, whose share of J would be lost",
                "Put both calls into one module and give that to the optimizer",
            )

    def _run(self) -> float:
        return loss_of(self._closure())

    def _mean(self, losses: Sequence[float]) -> list[float]:
        """The means over processes of what their closures returned."""
        return [x / self.processes.size for x in self.processes.sum_numbers(losses, "gradients")]

    def _synchronized(self, gradients: dict[str, Tensor | None]) -> Tensor:
        """∇L, the mean over processes, flat; a wrapper has taken it in the closure's backward()."""
        if not self.processes.is_single and self._wrapper is None:
            self.processes.average_gradients(self.params.values())
            gradients = {n: p.grad for n, p in self.params.items()}
        return self.space.flatten(gradients)

    @property
    def _wrapper(self) -> nn.parallel.DistributedDataParallel | None:
        model = getattr(self._model, "_orig_mod", self._model)
        return model if isinstance(model, nn.parallel.DistributedDataParallel) else None

    def _refuse_unseen(self, capture: Capture) -> None:
        if capture.call_count == 0:
            raise PullbackError(
                "The closure never called the model with gradients enabled",
                "no forward pass of the module given to the optimizer was seen",
                "Call that module in the closure (with torch.compile, give the optimizer the "
                "compiled module)",
            )
        if capture.has_input_derivatives:
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

    def _collect(self) -> dict[str, Tensor | None]:
        gradients = {n: p.grad for n, p in self.params.items()}
        for name, gradient in gradients.items():
            refuse_sparse(name, gradient)
        silent = [n for n, g in gradients.items() if g is None]
        if not self.processes.is_single and not self._calls:
            return gradients
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
        return gradients

    def parts(self, metric: Metric, batch: Any) -> tuple[list[RowBlock], Tensor | None]:
        calls = self._calls
        if batch is not None:
            call = as_call(batch)
            calls = [replace(call, random=call.random or RandomState(self.space.device))]
        if not self.processes.is_single:
            calls = [c for c in calls if c.output is None or c.output.shape[self._batch_dim]]
        self._recorded, self._pulled, self.whitening = [], None, Status.OK
        with self.processes.raise_together():
            linears, masks, cotangents = self._linearized(calls, metric)
            shares = [1.0 if mask is None else float(mask.double().mean()) for mask in masks]
            counts = [metric.samples(x.value) for x in linears]
            samples = sum(n * share for n, share in zip(counts, shares, strict=True))
        weight = 1.0
        if self._reduction == "mean":  # over the samples of all processes
            weight /= max(self.processes.sum_numbers([samples], "gradients")[0], 1.0)
        with self.processes.raise_together():
            parts, whites = self._measured(calls, linears, masks, cotangents, metric, weight)
        known = all(r is not None for r in whites)
        if not self.processes.all_agree(known):
            # where r is missing on one process, none can use it
            found = map(Status.__getitem__, self.processes.gather_objects(self.whitening.name))
            self.whitening = next((status for status in found if not status.ok), self.whitening)
            return parts, None
        return parts, torch.cat([self.space.zeros(0), *(r.flatten() for r in whites)])

    def _linearized(
        self, calls: Sequence[Call], metric: Metric
    ) -> tuple[list[ModuleLinearization], list[Tensor | None], list[Tensor | None]]:
        """The calls replayed, which of their samples count, and ∂L/∂z at their outputs."""
        plans = self._memory.setdefault("plans", {})
        linears, masks, cotangents = [], [], []
        for call in calls:
            source = ModuleMap(self._model, call, **self._how, plans=plans)
            linear = source.linearize(self.params)
            linears.append(linear)
            cotangent = None
            if call.cotangent is not None:
                cotangent = source.arranged(call.cotangent).to(linear.value.dtype)
                if not self.processes.is_single:  # L is the mean over processes
                    cotangent = cotangent / self.processes.size
                self._recorded.append((linear, cotangent))
            cotangents.append(cotangent)
            masks.append(None if cotangent is None else metric.counted(linear.value, cotangent))
            if cotangent is not None and "checked" not in self._memory:
                self._memory["checked"] = True
                z = linear.value.to(linear.graph.dtype)  # its own precision
                warn_mismatch(metric, z, cotangent, stacklevel=9)
        self._warn_unmeasured(linears)
        return linears, masks, cotangents

    def _measured(
        self,
        calls: Sequence[Call],
        linears: Sequence[ModuleLinearization],
        masks: Sequence[Tensor | None],
        cotangents: Sequence[Tensor | None],
        metric: Metric,
        weight: float,
    ) -> tuple[list[RowBlock], list[Any]]:
        """The rows of each call, and r where it is representable."""
        parts, whites = [], []
        for call, linear, mask, cotangent in zip(calls, linears, masks, cotangents, strict=True):
            z = linear.value
            factor = metric.factor(
                z, inputs=find_first_input(call.tensors, len(z), self._batch_dim)
            )
            scale = weight if mask is None else mask.to(z.dtype) * weight
            factor = Scaled(factor, scale, tuple(z.shape[1:]))
            parts.append(RowBlock(linear, factor))
            if cotangent is not None:
                whitened = factor.whiten(cotangent, torch.finfo(linear.graph.dtype).eps)
                whites.append(whitened.value)
                self.whitening = whitened.status if not whitened.status.ok else self.whitening
            else:
                whites.append(None)
        return parts, whites

    def _warn_unmeasured(self, linears: Sequence[ModuleLinearization]) -> None:
        """Warn once where the loss moves parameters that no measured output depends on."""
        if not linears:  # a process without samples
            return
        measured: set[str] = self._memory.setdefault("measured", set())
        gradients = {n: p.grad for n, p in self.params.items() if n not in measured}
        if "unmeasured" in self._memory or all(g is None for g in gradients.values()):
            return
        for linear in linears:
            names = {id(p): n for n, p in linear.leaves.items()}
            measured |= find_leaf_names([linear.graph], names)
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
                stacklevel=9,
            )

    def pulled(self) -> Tensor:
        if self._pulled is None:
            shares = [linear.vjp(u) for linear, u in self._recorded]
            first, *others = shares or [self.space.zeros(self.space.size)]
            self._pulled = self.summed(sum(others, first))[0]
        return self._pulled

    def refuse_stochastic(self) -> None:
        """Raise where the closure, run again at the same parameters, gives another loss."""
        if "repeatable" in self._memory:
            return
        with self._trials() as origin:
            repeated = self._mean([self._trial(origin)])[0]
        tolerance = torch.finfo(self.space.dtype).eps ** 0.5
        if abs(repeated - self.loss) > tolerance * max(abs(self.loss), tolerance):
            raise PullbackError(
                "The closure is stochastic",
                f"evaluated twice at the same parameters it gave {self.loss!r} and {repeated!r}, "
                "so trial losses cannot be compared",
                "Fix the batch outside the closure, or use steps.Constant",
            )
        self._memory["repeatable"] = True

    def losses(self, moves: Tensor, place: Place) -> Tensor:
        self.refuse_stochastic()
        with self._trials() as origin:
            values = self._mean([self._trial(place(origin, move)) for move in moves])
        # as the closure gave them: a loss in double precision may come from a model in single
        return torch.tensor(values, dtype=torch.float64, device=moves.device)

    @contextmanager
    def _trials(self) -> Iterator[dict[str, Tensor]]:
        """Give the parameters as they are; put them, gradients and random state back afterwards."""
        origin = {n: p.detach().clone() for n, p in self.params.items()}
        gradients = [(p, p.grad) for p in self._model.parameters()]
        for p, _ in gradients:
            p.grad = None  # zeroing gradients in place must not reach those of the step
        try:
            yield origin
        finally:
            self._write(origin)
            self._after.restore()
            for p, gradient in gradients:
                p.grad = gradient

    def _trial(self, point: Mapping[str, Tensor]) -> float:
        self._write(point)
        self._before.restore()
        # gradients of a trial are dropped, so that a wrapper need not average them
        silent = nullcontext() if self._wrapper is None else self._wrapper.no_sync()
        with torch.enable_grad(), self._autocast(), silent:
            return self._run()

    def _write(self, point: Mapping[str, Tensor]) -> None:
        for name, p in self.params.items():
            p.data.copy_(point[name])  # unseen by autograd: the linearization's graph lives on
        torch.clear_autocast_cache()  # an autocast around the step would go on with old weights

    def rollback(self) -> None:
        self._before.restore()


def as_call(batch: Any) -> Call:
    """Other inputs for the metric: a tensor, a tuple of arguments, or a dict of keywords."""
    if isinstance(batch, Call):
        return batch
    if isinstance(batch, Mapping):
        return Call.of(**batch)
    return Call.of(*batch) if isinstance(batch, tuple) else Call.of(batch)
