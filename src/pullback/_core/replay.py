"""Many small kernels as one launch: CUDA graphs of work on tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ReplayLimits:
    """When work is recorded."""

    #: graphs that are kept, and calls that are counted: more of them mean that keys or addresses
    #: change with every step, a learning rate in the key for instance
    most_graphs: int = 16
    #: the run that is recorded: the first two load kernels and allocate workspaces, which a
    #: recording must not do
    recorded_run: int = 3


_LIMITS = ReplayLimits()


def is_recording(t: Tensor) -> bool:
    """Return True if work on this tensor would be recorded in a CUDA graph, and not be done."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


class Replay:
    """Runs work on a GPU as a recorded graph from the third time on; eagerly on other devices.

    A graph is recorded for each key and each set of addresses. Where recording is not possible, or
    addresses keep changing, the work is run kernel by kernel.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._run_counts: dict[Hashable, int] = {}
        #: whether recording was given up
        self.off = False

    def run(self, key: Hashable, tensors: Sequence[Tensor], work: Callable[[], None]) -> None:
        """Do the work, which touches these tensors and no others that outlive it."""
        if self.off or not tensors or any(t.device.type != "cuda" for t in tensors):
            work()
            return
        if is_recording(tensors[0]):
            work()  # into the graph of a caller that is recording
            return
        graph_key = (key, tuple(t.data_ptr() for t in tensors))
        graph = self._graphs.get(graph_key)
        if graph is not None:
            graph.replay()
            return
        if len(self._run_counts) > _LIMITS.most_graphs:
            self._run_counts.clear()
        self._run_counts[graph_key] = self._run_counts.get(graph_key, 0) + 1
        if self._run_counts[graph_key] < _LIMITS.recorded_run:
            work()
            return
        self._record(graph_key, tensors[0].device, work)

    def _record(self, graph_key: Hashable, device: torch.device, work: Callable[[], None]) -> None:
        """Record the work in a graph and run it; switch off if that fails or there are too many."""
        if len(self._graphs) >= _LIMITS.most_graphs:
            self._graphs.clear()
            self.off = True
            work()
            return
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads, which pin the next batch's memory, say, may go on meanwhile
            with (
                torch.cuda.device(device),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                work()
        except RuntimeError:  # a kernel that cannot be recorded; nothing was run
            self.off = True
            torch.cuda.synchronize(device)
            work()
            return
        self._graphs[graph_key] = graph
        graph.replay()
