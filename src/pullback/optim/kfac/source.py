"""Where a step's loss, gradients and statistics come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._core.capture import Call, Capture
from ..._core.errors import PullbackError
from ..._core.state import Snapshot
from ..checks import loss_of, refuse_uncallable
from ..objective import ObjectiveProblem
from ..terms import Objective
from .blocks.damping import Adaptive
from .blocks.exact import products
from .statistics.pulled import statistics_of
from .statistics.sums import Key
from .statistics.watch import trainable

if TYPE_CHECKING:
    from .optimizer import KFAC


class Source:
    """A loop that has already called backward."""

    #: the loss, where it is known
    loss: float | None = None
    #: whether the step looks at the loss or the model again
    controlled = False

    def evaluate(self) -> Any:
        """Compute loss and gradients; returns what `step` is to return."""
        return None

    def found(self) -> dict[Key, dict[str, Tensor]] | None:
        """Statistics of its own; None for those that the hooks gathered."""
        return None

    def again(self) -> float:
        """The loss at the parameters as they are now, which leaves everything else as it was."""
        raise NotImplementedError

    def restore(self) -> None:
        """Put back what `evaluate` has disturbed beside gradients."""

    def products(self, span: Sequence[Mapping[str, Tensor]]) -> list[list[Tensor]]:
        """x_iᵀ G x_j with the exact Gram."""
        raise NotImplementedError


class ClosureSource(Source):
    """A closure, recorded where the step looks at the loss again."""

    def __init__(self, optimizer: KFAC, closure: Callable[[], Any], controlled: bool) -> None:
        self._opt, self._closure, self.controlled = optimizer, closure, controlled
        self._calls: list[Call] = []
        self._device = next(iter(optimizer._by_name.values())).device
        self._before = Snapshot(optimizer.model, self._device) if controlled else None

    def evaluate(self) -> Any:
        opt = self._opt
        with torch.enable_grad():
            if not self.controlled:
                loss = self._closure()
            else:
                with Capture(opt.model, opt.output, self._device) as capture:
                    loss = self._closure()
                self._calls = capture.calls
        if self.controlled:
            self.loss = loss_of(loss)
        return loss

    def restore(self) -> None:
        if self._before is not None:
            self._before.restore()

    def again(self) -> float:
        assert self._before is not None
        after = Snapshot(self._opt.model, self._device)
        grads = [(p, p.grad) for p in self._opt._by_name.values()]
        gatherer, due = self._opt._gatherer, self._opt._gatherer.due
        try:
            for p, _ in grads:
                p.grad = None
            gatherer.due = False
            self._before.restore()
            with torch.enable_grad():
                return loss_of(self._closure())
        finally:
            gatherer.due = due
            after.restore()
            for p, g in grads:
                p.grad = g

    def products(self, span: Sequence[Mapping[str, Tensor]]) -> list[list[Tensor]]:
        opt = self._opt
        params = {n: p for n, p in trainable(opt.model).items() if n in span[0]}
        return products(
            opt.model, self._calls, opt.metric, params, span,
            output=opt.output, batch_dim=opt.batch_dim, reduction=opt.reduction,
        )  # fmt: skip


class ObjectiveSource(Source):
    """An objective: losses with derivatives of the network, whose terms know their structure."""

    def __init__(self, optimizer: KFAC, objective: Any, controlled: bool) -> None:
        self._opt, self.controlled = optimizer, controlled
        params: Any = {
            optimizer._names[id(p)]: p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }
        self._problem = ObjectiveProblem(params, objective, optimizer.reduction)

    def evaluate(self) -> Any:
        self._problem.evaluate()
        self.loss = self._problem.loss
        pieces = self._problem.space.split(self._problem.gradient)
        for name, p in self._problem.params.items():
            p.grad = pieces[name].to(p.dtype).clone()
        return self.loss

    def found(self) -> dict[Key, dict[str, Tensor]] | None:
        if not self._opt._due():
            return {}
        parts, _ = self._problem.parts(self._opt.metric, None)
        generator = self._opt._gatherer.random(self._problem.space.device)
        return statistics_of(parts, self._opt.fisher, self._opt._gatherer.recipe, generator)

    def again(self) -> float:
        zero = torch.zeros(1, self._problem.space.size, **self._like())
        here = {n: p.detach() for n, p in self._problem.params.items()}
        return float(self._problem.losses(zero, lambda origin, move: here)[0])

    def _like(self) -> dict[str, Any]:
        return {"dtype": self._problem.space.dtype, "device": self._problem.space.device}

    def products(self, span: Sequence[Mapping[str, Tensor]]) -> list[list[Tensor]]:
        parts, _ = self._problem.parts(self._opt.metric, None)
        flat = [self._problem.space.flatten(x) for x in span]
        pushed = [torch.cat([part.push(v) for part in parts]) for v in flat]
        return [[a @ b for b in pushed] for a in pushed]


def source_of(optimizer: KFAC, closure: Any, objective: Any) -> Source:
    """What a call of `step` was given."""
    refuse_uncallable(closure)
    controlled = isinstance(optimizer.damping, Adaptive) or optimizer.rule is not None
    if objective is not None:
        if closure is not None:
            raise PullbackError(
                "step() was given a closure and an objective",
                "each of them is a loss",
                "Give one of them",
            )
        if not isinstance(objective, Objective) and not callable(objective):
            raise PullbackError(
                "The objective is not usable",
                f"got {type(objective).__name__}",
                "Give an optim.Objective, or a function of the parameter dict",
            )
        return ObjectiveSource(optimizer, objective, controlled)
    if closure is None and controlled:
        raise PullbackError(
            "This step needs a closure",
            "adaptive damping and steps from the quadratic model look at the loss again",
            "Call step(closure), with a closure that returns the loss",
        )
    return Source() if closure is None else ClosureSource(optimizer, closure, controlled)
