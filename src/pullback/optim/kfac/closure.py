"""Where a step's loss and gradients come from, and steps that look at the loss again.

An ordinary loop has called backward already. A closure or an objective can be evaluated once more:
by adaptive damping, which compares the actual reduction of the loss with the predicted one, and by
the rules of `steps/` (see `step_rule`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ..._core.shards import Groups, ModelParameters
from ...metrics import Metric
from ..checks import refuse_uncallable
from ..closure import ClosureMemory, read_loss
from ..distributed import DistributedClosureProblem
from ..objective import Objective, ObjectiveProblem
from ..outputs import Outputs
from ..problem import StepProblem
from .block_stack import Tensors
from .factors.damping import Damping
from .options import Options
from .replicas import Replicas
from .report import KFACInfo
from .statistics.capture import StatisticsCapture
from .update import GroupUpdate, apply_updates


class ControlledClosure(DistributedClosureProblem):
    """A closure whose gradients `KFAC` averages, and whose trials give no statistics."""

    #: what the closure returned
    returned: Any = None
    #: keeps the model's calls out of the statistics
    unwatched: Any = contextlib.nullcontext

    def _run(self) -> float:
        """Call the closure, keep what it returned, and return its loss."""
        self.returned = self._closure()
        return read_loss(self.returned)

    def _evaluate_trial(self, point: Tensors) -> float:
        with self.unwatched():
            return super()._evaluate_trial(point)

    def _flatten_gradients(self) -> Tensor:
        return self.space.flatten({name: p.grad for name, p in self.params.items()})


def evaluate(problem: StepProblem | None, closure: Callable[[], Any] | None) -> Any:
    """Compute the loss, set `p.grad`, and return what `step` is to return.

    Without a problem and a closure, the loop has called backward already: return None.
    """
    if problem is None:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()
    problem.evaluate()
    if isinstance(problem, ControlledClosure):
        return problem.returned
    if not isfinite(problem.loss):
        return problem.loss  # there is no gradient, and `KFAC` rejects the step
    pieces = problem.space.split(problem.gradient)
    for name, p in problem.params.items():
        p.grad = pieces[name].to(p.dtype).clone()
    return problem.loss


def make_problem(
    closure: Any,
    objective: Any,
    options: Options,
    capture: StatisticsCapture,
    params: ModelParameters,
    groups: Groups,
    replicas: Replicas,
    memory: ClosureMemory,
) -> StepProblem | None:
    """Return the problem of an objective, or of a controlled step, which looks at the loss again.

    Other steps have none: return None. Raise where an argument of `step` cannot be used, or one is
    missing.
    """
    refuse_uncallable(closure)
    if objective is None and not options.is_controlled:
        return None
    trained = {n: p for n, p in params.in_groups(groups).items() if p.requires_grad}
    if objective is not None:
        _refuse_objective(objective, closure, options, replicas)
        return ObjectiveProblem(trained, objective, options.reduction)
    if closure is None:
        raise PullbackError(
            "This step needs a closure",
            "adaptive damping and rules of steps/ look at the loss again",
            "Call step(closure), with a closure that returns the loss",
        )
    outputs = Outputs(options.output, options.batch_dim, options.reduction)
    problem = ControlledClosure(
        trained, capture.model, closure, outputs, memory, replicas.processes, mixes_samples=True
    )
    problem.unwatched = capture.watch.pause_all
    return problem


def _refuse_objective(objective: Any, closure: Any, options: Options, replicas: Replicas) -> None:
    """Raise for an objective that is none, or does not go with what else was given."""
    if options.others is not None:
        raise PullbackError(
            f"An objective does not go with the rule {type(options.rule).__name__}",
            "the metric of its terms is read by the natural gradient alone",
            "Use rule='natural', or call backward() and step() without an objective",
        )
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
    replicas.refuse_several(
        "An objective does not go with several processes",
        "its terms have counts of their own, which are not joined",
        "Use NaturalGradient or pde.solve on several processes",
    )


# --- controlled moves -------------------------------------------------------------------------


def _loss_now(problem: StepProblem) -> float:
    """Return the loss at the parameters as they are now, and change nothing."""
    current = {n: p.detach() for n, p in problem.params.items()}
    zero = problem.space.zeros(problem.space.size)[None]
    return float(problem.losses(zero, lambda origin, move: current)[0])


def compute_gram_inner_products(problem: StepProblem, metric: Metric, vectors: Tensor) -> Tensor:
    """Return x_iᵀ G x_j with the exact Gram, (k, k), for flat vectors (k, p)."""
    with _unfused_recurrence(problem.model):
        row_blocks, _ = problem.row_blocks(metric, None)
        rows: list[Tensor] = []
        for vector in vectors:
            pushed = [block.push(vector) for block in row_blocks]
            rows.append(torch.cat([problem.space.zeros(0), *pushed]))
    white = torch.stack(rows).double()
    return problem.sum_tensors(white @ white.mT)[0]


@contextlib.contextmanager
def _unfused_recurrence(model: nn.Module | None) -> Iterator[None]:
    """Leave out fused kernels of recurrent layers, which have no second reverse pass."""
    if model is None or not any(isinstance(m, nn.RNNBase) for m in model.modules()):
        yield
        return
    with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
        yield


@dataclass(frozen=True)
class _Snapshot:
    """The parameters and momenta of updates, with copies of their values before the move."""

    params: dict[str, Tensor]
    before: dict[str, Tensor]
    momenta: list[Tensor]
    momenta_before: list[Tensor]

    @classmethod
    def of(cls, updates: Sequence[GroupUpdate]) -> _Snapshot:
        """Copy the parameters and momenta as they are now."""
        params: dict[str, Tensor] = {}
        momenta: list[Tensor] = []
        for update in updates:
            params |= zip(update.names, update.params, strict=True)
            momenta += update.momenta
        before = {name: p.clone() for name, p in params.items()}
        return cls(params, before, momenta, [m.clone() for m in momenta])

    def compute_move(self) -> dict[str, Tensor]:
        """Return how far parameters have moved, as w_before − w."""
        return {name: self.before[name] - p for name, p in self.params.items()}

    def restore_params(self) -> None:
        """Put the parameters back."""
        for name, p in self.params.items():
            p.copy_(self.before[name])

    def restore_momenta(self) -> None:
        """Put the momenta back."""
        for momentum, before in zip(self.momenta, self.momenta_before, strict=True):
            momentum.copy_(before)

    def clear_momenta(self) -> None:
        """Set the momenta to zero."""
        for momentum in self.momenta:
            momentum.zero_()


def try_move(
    updates: Sequence[GroupUpdate],
    problem: StepProblem,
    metric: Metric,
    damping: Damping,
    value: float,
    gradients: Tensors,
) -> KFACInfo:
    """Move, compare the loss with its prediction, and take the move back if the loss rose.

    Momenta are zero then. Decay is left out of the comparison: the loss knows nothing of it.
    """
    if isinstance(problem, ControlledClosure):
        problem.refuse_stochastic()
    snapshot = _Snapshot.of(updates)
    apply_updates([replace(update, decay=0.0) for update in updates])
    displacement = snapshot.compute_move()
    actual = problem.loss - _loss_now(problem)
    snapshot.restore_params()  # the quadratic model is that of the point before
    predicted = _predict_reduction(displacement, problem, metric, gradients)
    ratio = float("nan")
    if predicted:
        ratio = actual / predicted
    if not actual >= 0:
        snapshot.clear_momenta()  # no damping makes these shorter
        return KFACInfo(False, "the loss rose", damping.next(value, -1.0), ratio=ratio)
    snapshot.restore_momenta()
    apply_updates(updates)  # once more, with the decay
    return KFACInfo(True, "", damping.next(value, ratio), ratio=ratio)


def _predict_reduction(
    displacement: Tensors, problem: StepProblem, metric: Metric, gradients: Tensors
) -> float:
    """Return ⟨g, x⟩ − ½xᵀGx of a displacement x."""
    flat = problem.space.flatten({n: displacement.get(n) for n in problem.params})
    squared_length = float(compute_gram_inner_products(problem, metric, flat[None])[0, 0])
    return float(_inner(displacement, gradients)) - 0.5 * squared_length


def _inner(x: Tensors, y: Tensors) -> Tensor:
    """Return ⟨x, y⟩ over all parameters of x."""
    return torch.stack([torch.sum(x[n].double() * y[n].double()) for n in x]).sum()
