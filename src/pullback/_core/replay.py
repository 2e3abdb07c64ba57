"""Many small kernels as one launch: CUDA graphs of work on tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

_MOST = 16


def is_recording(t: Tensor) -> bool:
    """Whether work on this tensor would be recorded in a CUDA graph, and not be done."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


class Replay:
    """Runs work on a GPU as a recorded graph from the third time on; eagerly on other devices.

    A graph is recorded for each key and each set of addresses. Where recording is not possible, or
    addresses keep changing, the work is run kernel by kernel.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: dict[Hashable, int] = {}
        #: whether recording was given up
        self.off = False

    def run(self, key: Hashable, tensors: Sequence[Tensor], work: Callable[[], None]) -> None:
        """Do the work, which touches these tensors and no others that outlive it."""
        if self.off or not tensors or any(t.device.type != "cuda" for t in tensors):
            work()
            return
        if is_recording(tensors[0]):
            work()  # into the graph that somebody else records
            return
        place = (key, tuple(t.data_ptr() for t in tensors))
        graph = self._graphs.get(place)
        if graph is not None:
            graph.replay()
            return
        if len(self._seen) > _MOST:  # nothing comes back: a rate that changes with every step, say
            self._seen.clear()
        self._seen[place] = self._seen.get(place, 0) + 1
        if self._seen[place] < 3:  # the first times load kernels and make workspaces
            work()
            return
        self._record(place, tensors[0].device, work)

    def _record(self, place: Hashable, device: torch.device, work: Callable[[], None]) -> None:
        if len(self._graphs) >= _MOST:
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
        self._graphs[place] = graph
        graph.replay()
