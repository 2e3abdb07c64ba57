"""Problems of one step on several processes, each with its own samples.

The loss is the mean of what the closures return, or the sum of the objectives. Everything that
a process does by itself is wrapped so that all processes raise if one of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .._core.capture import Call, Capture
from .._core.errors import Status
from .._core.groups import unwrap_compiled
from .._core.processes import Processes
from ..grams import DistributedRowStack, RowBlock, RowStack
from ..maps import ObjectiveMap
from ..metrics import Metric
from .closure import ClosureMemory, ClosureProblem, ReplayedCall
from .objective import Objective, ObjectiveProblem
from .outputs import Outputs
from .problem import Displace, StepProblem


class DistributedProblem(StepProblem):
    """How the processes of a problem meet."""

    processes: Processes

    def stack_rows(self, row_blocks: Sequence[RowBlock]) -> RowStack:
        return DistributedRowStack(row_blocks, self.space, self.processes, self.model)

    def sum_tensors(self, *tensors: Tensor) -> list[Tensor]:
        return self.processes.sum(tensors, "gradients")

    def all_agree(self, flag: bool) -> bool:
        return self.processes.all_agree(flag)


class DistributedClosureProblem(DistributedProblem, ClosureProblem):
    """A closure on each process; single processes may have no samples."""

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        model: nn.Module,
        closure: Callable[[], Any],
        outputs: Outputs,
        memory: ClosureMemory,
        processes: Processes,
        *,
        mixes_samples: bool = False,
    ) -> None:
        self.processes = processes
        super().__init__(params, model, closure, outputs, memory, mixes_samples=mixes_samples)

    @property
    def _wrapper(self) -> nn.parallel.DistributedDataParallel | None:
        """The wrapper that averages gradients in the closure's backward(), if there is one."""
        model = unwrap_compiled(self._wrapped_model)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            return model
        return None

    def _inspect(self, capture: Capture) -> None:
        nobody_saw_a_call = self.processes.all_agree(not self._calls)
        with self.processes.raise_together():
            if self._calls or nobody_saw_a_call:
                super()._inspect(capture)

    def _average_over_processes(self, losses: list[float]) -> list[float]:
        totals = self.processes.sum_numbers(losses, "gradients")
        return [total / self.processes.size for total in totals]

    def _flatten_gradients(self) -> Tensor:
        if not self.processes.is_single and self._wrapper is None:
            self.processes.average_gradients(self.params.values())
        return super()._flatten_gradients()

    def _select_calls(self, batch: Any) -> list[Call]:
        return [call for call in super()._select_calls(batch) if not self._is_empty(call)]

    def _is_empty(self, call: Call) -> bool:
        """Return True for a call without samples, which other processes may have."""
        if self.processes.is_single or call.output is None:
            return False
        return not call.output.shape[self._outputs.batch_dim]

    def _replay(self, calls: Sequence[Call], metric: Metric) -> list[ReplayedCall]:
        with self.processes.raise_together():
            return super()._replay(calls, metric)

    def _scale_cotangent(self, cotangent: Tensor) -> Tensor:
        if self.processes.is_single:
            return cotangent
        return cotangent / self.processes.size

    def _sum_over_processes(self, samples: float) -> float:
        return self.processes.sum_numbers([samples], "gradients")[0]

    def _measure(
        self, replayed: Sequence[ReplayedCall], metric: Metric, weight: float
    ) -> tuple[list[RowBlock], list[Tensor | None]]:
        with self.processes.raise_together():
            return super()._measure(replayed, metric, weight)

    def _join_whites(self, whites: Sequence[Tensor | None]) -> Tensor | None:
        """r of this process, or None on all processes where one of them has none."""
        white = super()._join_whites(whites)
        if self.processes.all_agree(white is not None):
            return white
        for name in self.processes.gather_objects(self.whitening.name):
            if not Status[name].ok:
                self.whitening = Status[name]
                break
        return None

    def _without_averaging(self) -> Any:
        if self._wrapper is None:
            return nullcontext()
        return self._wrapper.no_sync()


class DistributedObjectiveProblem(DistributedProblem, ObjectiveProblem):
    """An objective on each process; a mean is one over the samples of all processes."""

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        objective: Objective | Callable[..., Any],
        reduction: str,
        processes: Processes,
    ) -> None:
        self.processes = processes
        super().__init__(params, objective, reduction)

    def _make_residual_map(self, function: Callable[..., Any]) -> ObjectiveMap:
        source = ObjectiveMap(function, self._reduction)
        with self.processes.raise_together(), torch.no_grad():
            own_samples = source.count_samples(self.params)
        samples: dict[str, int] = {}
        for counts in self.processes.gather_objects(own_samples):
            for name, count in counts.items():
                samples[name] = samples.get(name, 0) + count
        return ObjectiveMap(function, self._reduction, samples, rows=sum(own_samples.values()))

    def _linearize(self) -> Tensor:
        with self.processes.raise_together():
            return super()._linearize()

    def _differentiate(self) -> tuple[Tensor, Tensor]:
        with self.processes.raise_together():
            return super()._differentiate()

    def _measure_values(self, values: ObjectiveMap, metric: Metric) -> list[RowBlock]:
        with self.processes.raise_together():
            return super()._measure_values(values, metric)

    def _evaluate_local_terms(self, moves: Tensor, displace: Displace) -> Tensor:
        with self.processes.raise_together():
            return super()._evaluate_local_terms(moves, displace)
