"""Where a step's loss and gradients come from, and steps that look at the loss again.

An ordinary loop has called backward already. A closure or an objective can be evaluated once more:
by adaptive damping, which compares the actual reduction of the loss with the predicted one, and by
`QuadraticModel`, which finds learning rate and momentum from products with the exact Gram.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.capture import Call, Capture, first_input
from ..._core.errors import PullbackError
from ..._core.processes import Processes
from ..._core.shards import Groups, Parameters
from ..._core.state import Snapshot
from ...grams import Part
from ...maps import ModuleMap
from ...metrics import Metric
from ...steps import QuadraticModel
from ...steps.trust import best_factors
from ..checks import loss_of, refuse_uncallable
from ..objective import Objective, ObjectiveProblem
from .factors.damping import Damping
from .options import Options
from .report import KFACInfo
from .state import KFACState
from .statistics.capture import StatisticsCapture
from .update import Share, State, Tensors, buffer_of, move


class Source:
    """Where loss and gradients come from; this one is a loop that has already called backward."""

    #: the loss, where it is known
    loss: float | None = None

    def evaluate(self) -> Any:
        """Compute loss and gradients; return what `step` is to return."""

    def parts(self) -> list[Part] | None:
        """Return the terms of an objective, whose maps give statistics of their own."""

    def again(self) -> float:
        """Return the loss at the parameters as they are now, and change nothing."""
        raise NotImplementedError

    def restore(self) -> None:
        """Put back what `evaluate` has changed beside gradients."""

    def products(self, span: Sequence[Tensors]) -> list[list[Tensor]]:
        """Return x_iᵀ G x_j with the exact Gram."""
        raise NotImplementedError


class ClosureSource(Source):
    """A closure that evaluates the loss and calls backward.

    Where the step is `controlled`, the model's calls are recorded, and `plans` keeps what is known
    of its derivatives. The loss is the mean of those of all processes.
    """

    def __init__(
        self,
        closure: Callable[[], Any],
        options: Options,
        capture: StatisticsCapture,
        params: Mapping[str, nn.Parameter],
        processes: Processes,
        plans: dict[Any, Any],
    ) -> None:
        self._closure, self._params, self._processes = closure, params, processes
        self._model, self._options, self._plans = capture.model, options, plans
        self._unwatched = capture.watch.paused
        self._calls: list[Call] = []
        self._device = next(iter(params.values())).device
        self._before = Snapshot(self._model, self._device) if options.controlled else None

    def evaluate(self) -> Any:
        with torch.enable_grad():
            if not self._options.controlled:
                return self._closure()
            with Capture(self._model, self._options.output, self._device) as capture:
                loss = self._closure()
            self._calls = capture.calls
        self.loss = self._mean(loss_of(loss))
        return loss

    def _mean(self, loss: float) -> float:
        """Return the mean of the processes' losses, whose gradient is the mean of theirs."""
        return self._processes.total([loss], "losses")[0] / self._processes.size

    def restore(self) -> None:
        if self._before is not None:
            self._before.restore()

    def again(self) -> float:
        assert self._before is not None
        after = Snapshot(self._model, self._device)
        grads = [(p, p.grad) for p in self._params.values()]
        try:
            for p, _ in grads:
                p.grad = None
            self._before.restore()
            with torch.enable_grad(), self._unwatched():
                return self._mean(loss_of(self._closure()))
        finally:
            after.restore()
            for p, g in grads:
                p.grad = g

    def products(self, span: Sequence[Tensors]) -> list[list[Tensor]]:
        params = {n: p for n, p in self._params.items() if p.requires_grad and n in span[0]}
        total = next(iter(span[0].values())).new_zeros((len(span), len(span)), dtype=torch.float64)
        samples = total.new_zeros(())
        for call in self._calls:
            if call.output is not None and not call.output.numel():  # a process without samples
                continue
            white, count = self._whitened(call, params, span)
            rows = [torch.stack([(a * b).sum() for b in white]) for a in white]
            total, samples = total + torch.stack(rows), samples + count
        total, samples = self._processes.sum([total, samples], "losses")
        scale = 1.0 if self._options.reduction == "sum" else 1 / samples.clamp(min=1.0)
        return [list(row) for row in total * scale]

    def _whitened(
        self, call: Call, params: Mapping[str, Tensor], span: Sequence[Tensors]
    ) -> tuple[list[Tensor], float]:
        """Return SᵀJx for each x of the span, M = SSᵀ the metric, and how many samples count."""
        model, metric, axis = self._model, self._options.metric, self._options.batch_dim
        selected = {"output": self._options.output, "batch_dim": axis}
        source = ModuleMap(model, call, **selected, plans=self._plans, coupled=True)
        with _unfused_recurrence(model):
            linear = source.linearize(params)
            z = linear.value
            tangents = [linear.jvp(linear.space.flatten(x)) for x in span]
        count = float(metric.samples(z))
        if call.cotangent is not None:
            mask = metric.counted(z, source.arranged(call.cotangent).to(z.dtype))
            if mask is not None:
                tangents = [t * mask for t in tangents]
                count *= float(mask.to(z.dtype).mean())
        factor = metric.factor(z, inputs=first_input(call.tensors, len(z), axis))
        return [factor.transpose(t) for t in tangents], count


@contextlib.contextmanager
def _unfused_recurrence(model: nn.Module) -> Iterator[None]:
    """Leave out fused kernels of recurrent layers, which have no second reverse pass."""
    if not any(isinstance(m, nn.RNNBase) for m in model.modules()):
        yield
        return
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        yield


class ObjectiveSource(Source):
    """An objective, as given to `step(objective=...)`: terms with derivatives of the network."""

    def __init__(
        self, params: dict[str, nn.Parameter], objective: Any, metric: Metric, reduction: str
    ) -> None:
        self._metric = metric
        self._problem = ObjectiveProblem(params, objective, reduction)

    def evaluate(self) -> Any:
        self._problem.evaluate()
        self.loss = self._problem.loss
        pieces = self._problem.space.split(self._problem.gradient)
        for name, p in self._problem.params.items():
            p.grad = pieces[name].to(p.dtype).clone()
        return self.loss

    def parts(self) -> list[Part]:
        return self._problem.parts(self._metric, None)[0]

    def again(self) -> float:
        space = self._problem.space
        zero = torch.zeros(1, space.size, dtype=space.dtype, device=space.device)
        here = {n: p.detach() for n, p in self._problem.params.items()}
        return float(self._problem.losses(zero, lambda origin, move: here)[0])

    def products(self, span: Sequence[Tensors]) -> list[list[Tensor]]:
        parts, flat = self.parts(), [self._problem.space.flatten(x) for x in span]
        pushed = [torch.cat([part.push(v) for part in parts]) for v in flat]
        return [[a @ b for b in pushed] for a in pushed]


def source_of(
    closure: Any,
    objective: Any,
    options: Options,
    capture: StatisticsCapture,
    params: Parameters,
    groups: Groups,
    processes: Processes,
    plans: dict[Any, Any],
) -> Source:
    """Return what `step` was given; raise where it cannot be used, or something is lacking."""
    refuse_uncallable(closure)
    if objective is not None:
        _refuse_objective(objective, closure, options, processes)
        own = {n: p for n, p in params.of(groups).items() if p.requires_grad}
        return ObjectiveSource(own, objective, options.metric, options.reduction)
    if closure is not None:
        return ClosureSource(closure, options, capture, params.by_name, processes, plans)
    if options.controlled:
        raise PullbackError(
            "This step needs a closure",
            "adaptive damping and steps from the quadratic model look at the loss again",
            "Call step(closure), with a closure that returns the loss",
        )
    return Source()


def _refuse_objective(objective: Any, closure: Any, options: Options, processes: Processes) -> None:
    """Raise for an objective that is none, or does not go with what else was given."""
    what = "An objective does not go with"
    if options.rule.matrices:
        what += f" {options.rule!r}"
        why = "the metric of its terms is read by the natural gradient alone"
        remedy = "Use rule='natural', or call backward() and step() without an objective"
    elif closure is not None:
        what = "step() was given a closure and an objective"
        why, remedy = "each of them is a loss", "Give one of them"
    elif not isinstance(objective, Objective) and not callable(objective):
        what, why = "The objective is not usable", f"got {type(objective).__name__}"
        remedy = "Give an optim.Objective, or a function of the parameter dict"
    elif not processes.alone:
        what += " several processes"
        why = "its terms have counts of their own, which are not joined"
        remedy = "Use NaturalGradient or pde.solve on several processes"
    else:
        return
    raise PullbackError(what, why, remedy)


# --- controlled moves -------------------------------------------------------------------------


def best_combination(
    shares: Sequence[Share],
    source: Source,
    step: QuadraticModel,
    gradients: Tensors,
    damping: float,
) -> tuple[float, float | None]:
    """Replace directions by the best αΔ + βm in the plane of Δ and the last move m.

    Buffers become the new move. Returns α and β, by the exact quadratic model.
    """
    directions = {n: d for s in shares for n, d in zip(s.names, s.directions, strict=True)}
    last = {n: m for s in shares for n, m in zip(s.names, s.buffers, strict=True)}
    moving = step.momentum and any(bool(m.any()) for m in last.values())
    span = [directions, last] if moving else [directions]
    lengths = [[_inner(x, y) for y in span] for x in span]
    slopes = [_inner(gradients, x) for x in span]
    alpha, *beta = best_factors(slopes, source.products(span), lengths, damping)
    for share in shares:
        best = [alpha * d for d in share.directions]
        if beta:
            best = [d + beta[0] * m for d, m in zip(best, share.buffers, strict=True)]
        share.directions = [d.to(p) for d, p in zip(best, share.directions, strict=True)]
        for m, d in zip(share.buffers, share.directions, strict=True):
            m.copy_(d)
        share.buffers, share.momentum = [], 0.0
    return float(alpha), float(beta[0]) if beta else None


def trial_move(
    shares: Sequence[Share], source: Source, damping: Damping, value: float, gradients: Tensors
) -> KFACInfo:
    """Move, compare the loss with its prediction, and take the move back if the loss rose.

    Decay is left out of the comparison: the loss knows nothing of it.
    """
    params = {n: p for share in shares for n, p in zip(share.names, share.params, strict=True)}
    buffers = [m for share in shares for m in share.buffers]
    before, momenta = {n: p.clone() for n, p in params.items()}, [m.clone() for m in buffers]
    move([replace(share, decay=0.0) for share in shares])
    moved = {n: before[n] - p for n, p in params.items()}
    assert source.loss is not None
    actual = source.loss - source.again()
    for name, p in params.items():  # the quadratic model is that of the point before
        p.copy_(before[name])
    predicted = float(_inner(moved, gradients)) - 0.5 * float(source.products([moved])[0][0])
    ratio = actual / predicted if predicted else float("nan")
    if not actual >= 0:
        for m in buffers:
            m.zero_()  # which no damping makes shorter
        return KFACInfo(False, "the loss rose", damping.next(value, -1.0), ratio=ratio)
    for m, momentum in zip(buffers, momenta, strict=True):
        m.copy_(momentum)
    move(shares)  # once more, with the decay
    return KFACInfo(True, "", damping.next(value, ratio), ratio=ratio)


def _inner(x: Tensors, y: Tensors) -> Tensor:
    """⟨x, y⟩ over all parameters of x."""
    return torch.stack([torch.sum(x[n].double() * y[n].double()) for n in x]).sum()


class Undo:
    """Everything that a step may change, to be put back after an exception.

    A step that is not `learning` renews neither statistics nor inverses.
    """

    def __init__(
        self, state: KFACState, params: Iterable[Tensor], published: State, *, learning: bool
    ) -> None:
        params = list(params)
        buffers = [buffer_of(published, p) for p in params if "momentum" in published[p]]
        own = self._preconditioner = state.preconditioner
        held: list[Any] = [state.schedule, state.averages, state.learned, state.reserved]
        held += [own.inverses, own.spectra, own.ready, own.notes, own.absent]
        self._collections = [(one, copy(one)) for one in held]
        self._tensors = [(t, t.detach().clone()) for t in (*params, *buffers)]
        records = [*state.averages.values(), *own.spectra.values(), *own.inverses.values()]
        self._records = [vars(record) for record in records if learning]
        self._fields = deepcopy(self._records)  # at once: inverses may be views of one stack

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back into the same objects."""
        for held, before in self._collections:
            held.clear()
            held.update(before)
        for t, before in self._tensors:
            t.copy_(before)
        for record, fields in zip(self._records, self._fields, strict=True):
            record.update(fields)
        self._preconditioner.regroup()
