"""An ordinary PyTorch closure as a problem: what it did is recorded and replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from .._core.capture import Call, Capture, find_first_input, unwrap_model
from .._core.errors import PullbackError, Status
from .._core.factor import Scaled
from .._core.graph import find_leaf_names
from .._core.state import RandomState, Snapshot
from ..grams import RowBlock
from ..maps import Linearization, ModuleMap
from ..maps.layers import find_layer
from ..maps.module import ModuleLinearization
from ..maps.record import ModelLayers
from ..metrics import Metric
from .checks import (
    find_user_stacklevel,
    refuse_sparse,
    warn_derivatives,
)
from .loss_checks import warn_mismatch, warn_missing_batch_axis
from .outputs import Outputs
from .problem import Displace, StepProblem


class ClosureWarning(Enum):
    """What is said once about a closure."""

    INPUT_DERIVATIVES = auto()
    UNUSED_PARAMETERS = auto()
    METRIC_MISMATCH = auto()
    UNMEASURED_PARAMETERS = auto()


def read_loss(returned: object) -> float:
    """Return the loss that a closure returned as a number; raise if it is none."""
    if not isinstance(returned, (Tensor, float, int)):
        raise PullbackError(
            "The closure did not return the loss",
            f"got {type(returned).__name__}",
            "End it with `return loss`",
        )
    if not isinstance(returned, Tensor):
        return float(returned)
    if returned.numel() != 1 or returned.is_complex():
        raise PullbackError(
            "The loss is not one number",
            f"the closure returned shape {tuple(returned.shape)} of {returned.dtype}",
            "Reduce it over the batch, and call backward() on what you return",
        )
    return float(returned.detach())


@dataclass
class ClosureMemory:
    """What the problems of one optimizer's closures keep from step to step."""

    #: structures of the model that were proven, by the signature of a call
    plans: dict[Any, Any] = field(default_factory=dict)
    #: the layers of the model, as long as its modules stay the same
    layers: ModelLayers | None = None
    #: parameters that a measured output depends on
    measured_names: set[str] = field(default_factory=set)
    #: whether the closure gave the same loss twice
    is_repeatable: bool = False
    warned: set[ClosureWarning] = field(default_factory=set)

    def find_layers(self, model: nn.Module) -> ModelLayers:
        """Return the layers of the optimizer's model, found anew where its modules changed."""
        if self.layers is None or not self.layers.is_current:
            self.layers = ModelLayers(model, find_layer)
        return self.layers

    def should_warn(self, warning: ClosureWarning) -> bool:
        """Return True the first time."""
        is_first = warning not in self.warned
        self.warned.add(warning)
        return is_first


@dataclass
class ReplayedCall:
    """A recorded forward call, replayed with its tangent."""

    call: Call
    linearization: ModuleLinearization
    #: ∂L/∂z, samples first; None for inputs that the loss did not see
    cotangent: Tensor | None
    #: which entries of z the loss counted, as a mask that broadcasts; None for all
    is_counted: Tensor | None

    def count_samples(self, metric: Metric) -> float:
        """Return how many samples a mean over this call counts."""
        samples = metric.samples(self.linearization.value)
        if self.is_counted is None:
            return float(samples)
        return samples * float(self.is_counted.double().mean())


class ClosureProblem(StepProblem):
    """An ordinary closure: zero_grad, forward, backward, return the loss.

    Args:
        params: the parameters that take part, by name.
        model: whose forward calls are recorded.
        closure: as `torch.optim.LBFGS` takes it.
        outputs: what the metric measures.
        memory: shared by the problems of one optimizer.
        mixes_samples: whether the model may mix the samples of a batch, as a batch norm does;
            otherwise such a model is refused.
    """

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        model: nn.Module,
        closure: Callable[[], Any],
        outputs: Outputs,
        memory: ClosureMemory,
        *,
        mixes_samples: bool = False,
    ) -> None:
        super().__init__(params)
        self.model = unwrap_model(model)
        self._wrapped_model = model
        self._closure = closure
        self._outputs = outputs
        self._memory = memory
        self._mixes_samples = mixes_samples
        self._calls: list[Call] = []
        self._with_cotangents: list[tuple[Linearization, Tensor]] = []
        self._pulled_gradient: Tensor | None = None
        self._before = Snapshot(model, self.space.device)

    # --- the loss and its gradient --------------------------------------------------------------

    def evaluate(self) -> str:
        device = self.space.device
        self._autocast = partial(
            torch.autocast,
            device.type,
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
        )
        capture = Capture(self._wrapped_model, self._outputs.select, device)
        with torch.enable_grad(), capture:
            loss = self._run()
        self._calls = capture.calls
        self._inspect(capture)
        self._after = Snapshot(self._wrapped_model, device)
        self.loss = self._average_over_processes([loss])[0]
        self.gradient = self._flatten_gradients()
        return self.find_fault()

    def _run(self) -> float:
        return read_loss(self._closure())

    def _average_over_processes(self, losses: list[float]) -> list[float]:
        """Return losses averaged over processes; alone, as they are."""
        return losses

    def _flatten_gradients(self) -> Tensor:
        """Return ∇L as one vector."""
        return self.space.flatten({name: p.grad for name, p in self.params.items()})

    def _inspect(self, capture: Capture) -> None:
        """Raise or warn where the recorded calls or the gradients cannot be used."""
        if not self._calls:
            _refuse_unseen(capture)
        if capture.has_input_derivatives and self._memory.should_warn(
            ClosureWarning.INPUT_DERIVATIVES
        ):
            warn_derivatives(find_user_stacklevel())
        self._refuse_chained()
        self._inspect_gradients()

    def _refuse_chained(self) -> None:
        """Raise where a recorded input was itself computed from the optimized parameters."""
        sources: list[Tensor] = []
        for call in self._calls:
            sources += call.differentiable_inputs
        if not sources:
            return
        names = {id(p): name for name, p in self.params.items()}
        for name in find_leaf_names(sources, names):
            raise PullbackError(
                "The model's input depends on the model's own parameters",
                f"{name!r} reached it through an earlier call, whose share of J would be lost",
                "Put both calls into one module and give that to the optimizer",
            )

    def _inspect_gradients(self) -> None:
        """Raise for gradients that are sparse or all missing, and warn of single ones."""
        unused = []
        for name, p in self.params.items():
            if p.grad is None:
                unused.append(name)
            elif p.grad.layout != torch.strided:
                refuse_sparse(name, p.grad)
        if len(unused) == len(self.params):
            raise PullbackError(
                "The loss does not depend on any optimized parameter",
                "every gradient is None after backward()",
                "Check that the closure uses these parameters",
            )
        if unused and self._memory.should_warn(ClosureWarning.UNUSED_PARAMETERS):
            warnings.warn(
                f"The loss does not depend on {', '.join(unused)}: their gradient counts as zero. "
                "Freeze them (requires_grad_(False)) to leave them out.",
                stacklevel=find_user_stacklevel(),
            )

    # --- the rows of A --------------------------------------------------------------------------

    def row_blocks(self, metric: Metric, batch: Any) -> tuple[list[RowBlock], Tensor | None]:
        self._with_cotangents = []
        self._pulled_gradient = None
        self.whitening = Status.OK
        replayed = self._replay(self._select_calls(batch), metric)
        weight = self._weigh_sample(replayed, metric)
        row_blocks, whites = self._measure(replayed, metric, weight)
        return row_blocks, self._join_whites(whites)

    def _select_calls(self, batch: Any) -> list[Call]:
        """Return the recorded calls; a call with other inputs where the metric has some."""
        if batch is None:
            return self._calls
        call = as_call(batch)
        return [replace(call, random=call.random or RandomState(self.space.device))]

    def _replay(self, calls: Sequence[Call], metric: Metric) -> list[ReplayedCall]:
        """Return the calls replayed, with ∂L/∂z at their outputs and which samples count."""
        assert self.model is not None
        layers = self._memory.find_layers(self.model)
        replayed = []
        for call in calls:
            source = ModuleMap(
                self._wrapped_model,
                call,
                output=self._outputs.select,
                batch_dim=self._outputs.batch_dim,
                coupled=self._mixes_samples,
                plans=self._memory.plans,
                layers=layers,
            )
            linearization = source.linearize(self.params)
            cotangent = None
            is_counted = None
            if call.cotangent is not None:
                cotangent = self._scale_cotangent(
                    source.arrange(call.cotangent).to(linearization.value.dtype)
                )
                is_counted = metric.counted(linearization.value, cotangent)
                self._with_cotangents.append((linearization, cotangent))
                self._check_metric(metric, call, linearization, cotangent)
            replayed.append(ReplayedCall(call, linearization, cotangent, is_counted))
        self._warn_unmeasured([each.linearization for each in replayed])
        return replayed

    def _scale_cotangent(self, cotangent: Tensor) -> Tensor:
        """Return ∂L/∂z for the L that is averaged over processes; alone, as it is."""
        return cotangent

    def _check_metric(
        self, metric: Metric, call: Call, linearization: ModuleLinearization, cotangent: Tensor
    ) -> None:
        """Warn once where the first cotangent is certainly that of another loss."""
        if not self._memory.should_warn(ClosureWarning.METRIC_MISMATCH):
            return
        z = linearization.value.to(linearization.graph.dtype)  # in its own precision
        loss = None
        if len(self._calls) == 1:
            loss = self.loss
        stacklevel = find_user_stacklevel()
        warn_mismatch(metric, z, cotangent, self._outputs.reduction or "mean", stacklevel, loss)
        if call.output is not None:
            warn_missing_batch_axis(call.output, call.tensors, stacklevel)

    def _weigh_sample(self, replayed: Sequence[ReplayedCall], metric: Metric) -> float:
        """Return the weight of one sample in the metric: 1, or 1 over all samples for a mean."""
        if self._outputs.reduction == "sum":
            return 1.0
        samples = self._sum_over_processes(sum(each.count_samples(metric) for each in replayed))
        return 1 / max(samples, 1.0)

    def _sum_over_processes(self, samples: float) -> float:
        """Return the number of samples of all processes; alone, the number given."""
        return samples

    def _measure(
        self, replayed: Sequence[ReplayedCall], metric: Metric, weight: float
    ) -> tuple[list[RowBlock], list[Tensor | None]]:
        """Return the rows of each call, and its r, or None where r is not representable."""
        row_blocks = []
        whites = []
        for each in replayed:
            z = each.linearization.value
            inputs = find_first_input(each.call.tensors, len(z), self._outputs.batch_dim)
            scale: Tensor | float = weight
            if each.is_counted is not None:
                scale = each.is_counted.to(z.dtype) * weight
            factor = Scaled(metric.factor(z, inputs=inputs), scale, tuple(z.shape[1:]))
            row_blocks.append(RowBlock(each.linearization, factor))
            white = None
            if each.cotangent is not None:
                eps = torch.finfo(each.linearization.graph.dtype).eps
                whitened = factor.whiten(each.cotangent, eps)
                white = whitened.value
                if white is None:
                    self.whitening = whitened.status
            whites.append(white)
        return row_blocks, whites

    def _join_whites(self, whites: Sequence[Tensor | None]) -> Tensor | None:
        """Return r of all calls as one vector, or None where one of them has none."""
        vectors = [white.flatten() for white in whites if white is not None]
        if len(vectors) < len(whites):
            return None
        if not vectors:  # a process without samples
            return self.space.zeros(0)
        return torch.cat(vectors)

    def _warn_unmeasured(self, linearizations: Sequence[ModuleLinearization]) -> None:
        """Warn once where the loss moves parameters that no measured output depends on."""
        if ClosureWarning.UNMEASURED_PARAMETERS in self._memory.warned or not linearizations:
            return
        moved = self._find_unmeasured(linearizations)
        if not moved:
            return
        self._memory.warned.add(ClosureWarning.UNMEASURED_PARAMETERS)
        warnings.warn(
            f"The loss depends on {', '.join(moved)}, but the measured output does not: the "
            "metric is zero there, so they move by their gradient divided by the damping. "
            "Freeze them (requires_grad_(False)), leave them to another optimizer (params=), "
            "or let output= return what they compute as well.",
            RuntimeWarning,
            stacklevel=find_user_stacklevel(),
        )

    def _find_unmeasured(self, linearizations: Sequence[ModuleLinearization]) -> list[str]:
        """Return the parameters with a gradient on which none of these outputs depends."""
        measured = self._memory.measured_names
        with_gradient = {name for name, p in self.params.items() if p.grad is not None}
        if with_gradient <= measured:
            return []
        for linearization in linearizations:
            names = {id(p): name for name, p in linearization.leaves.items()}
            measured |= find_leaf_names([linearization.graph], names)
        unmeasured = with_gradient - measured
        return [n for n, p in self.params.items() if n in unmeasured and _has_nonzero_gradient(p)]

    def pulled_gradient(self) -> Tensor:
        if self._pulled_gradient is None:
            gradients = [linear.vjp(cotangent) for linear, cotangent in self._with_cotangents]
            if gradients:
                total = reduce(torch.add, gradients)
            else:
                total = self.space.zeros(self.space.size)
            self._pulled_gradient = self.sum_tensors(total)[0]
        return self._pulled_gradient

    # --- trial points ---------------------------------------------------------------------------

    def refuse_stochastic(self) -> None:
        """Raise where the closure, run again at the same parameters, gives another loss."""
        if self._memory.is_repeatable:
            return
        with self._trials() as origin:
            repeated = self._average_over_processes([self._evaluate_trial(origin)])[0]
        tolerance = torch.finfo(self.space.dtype).eps ** 0.5
        if abs(repeated - self.loss) > tolerance * max(abs(self.loss), tolerance):
            raise PullbackError(
                "The closure is stochastic",
                f"evaluated twice at the same parameters it gave {self.loss!r} and {repeated!r}, "
                "so trial losses cannot be compared",
                "Fix the batch outside the closure, or use steps.Constant and a fixed damping",
            )
        self._memory.is_repeatable = True

    def losses(self, moves: Tensor, displace: Displace) -> Tensor:
        self.refuse_stochastic()
        with self._trials() as origin:
            values = self._average_over_processes(
                [self._evaluate_trial(displace(origin, move)) for move in moves]
            )
        # as the closure gave them: a loss in double precision may come from a model in single
        return torch.tensor(values, dtype=torch.float64, device=moves.device)

    @contextmanager
    def _trials(self) -> Iterator[dict[str, Tensor]]:
        """Give the parameters as they are; put them, gradients and random state back afterwards."""
        origin = {name: p.detach().clone() for name, p in self.params.items()}
        gradients = [(p, p.grad) for p in self._wrapped_model.parameters()]
        for p, _ in gradients:
            p.grad = None  # zeroing gradients in place must not reach those of the step
        try:
            yield origin
        finally:
            self._write(origin)
            self._after.restore()
            for p, gradient in gradients:
                p.grad = gradient

    def _evaluate_trial(self, point: Mapping[str, Tensor]) -> float:
        """Return the closure's loss at other parameters, which the model holds from then on."""
        self._write(point)
        self._before.restore()
        with torch.enable_grad(), self._autocast(), self._without_averaging():
            return self._run()

    def _without_averaging(self) -> Any:
        """Return a context in which no wrapper averages gradients: those of a trial are dropped."""
        return nullcontext()

    def _write(self, point: Mapping[str, Tensor]) -> None:
        """Copy these values into the model's parameters."""
        for name, p in self.params.items():
            p.data.copy_(point[name])  # unseen by autograd: the linearization's graph lives on
        torch.clear_autocast_cache()  # an autocast around the step would go on with old weights

    def rollback(self) -> None:
        self._before.restore()


def _has_nonzero_gradient(p: nn.Parameter) -> bool:
    """Return True if the parameter has a gradient that is not zero."""
    return p.grad is not None and bool(p.grad.any())


def _refuse_unseen(capture: Capture) -> None:
    """Raise for a closure that recorded no call, with the reason."""
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


def as_call(batch: Any) -> Call:
    """Return the call with these inputs: a tensor, a tuple of arguments, or a dict of keywords."""
    if isinstance(batch, Call):
        return batch
    if isinstance(batch, Mapping):
        return Call.of(**batch)
    if isinstance(batch, tuple):
        return Call.of(*batch)
    return Call.of(batch)
