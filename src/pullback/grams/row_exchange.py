"""Pulled-back rows of all processes: pickled without tensors, which travel as bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._core.buffers import from_bytes, to_bytes
from .._core.processes import Processes
from .._core.space import ParameterSpace
from ..maps import Pulled


def gather_pulled(
    pulled: list[Pulled], space: ParameterSpace, processes: Processes, model: nn.Module | None
) -> list[list[Pulled]]:
    """Return what the rows of every process are made of, in the order of ranks.

    The model's layers and the space are not sent: every process has its own.
    """
    shared: dict[str, object] = {"space": space}
    if model is not None:
        for name, module in model.named_modules():
            shared[f"module {name}"] = module
    stream = io.BytesIO()
    pickler = _TensorFreePickler(stream, shared)
    pickler.dump(pulled)
    tensors = [tensor.to(space.device) for tensor in pickler.tensors]
    layouts = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    buffers = processes.gather_parts([to_bytes(tensors, space.device)], "objects")[0]
    pickles = processes.gather_objects((stream.getvalue(), layouts), "objects")
    gathered: list[list[Pulled]] = []
    for (pickled, layouts), buffer in zip(pickles, buffers, strict=True):
        templates = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in layouts]
        received = from_bytes(buffer, templates)
        gathered.append(_TensorFreeUnpickler(io.BytesIO(pickled), shared, received).load())
    return gathered


class _TensorFreePickler(pickle.Pickler):
    """Writes names for shared objects and numbers for tensors, which it lists."""

    def __init__(self, stream: io.BytesIO, shared: Mapping[str, object]) -> None:
        super().__init__(stream)
        self._names = {id(value): name for name, value in shared.items()}
        self._numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> str | int | None:
        if id(obj) in self._names:
            return self._names[id(obj)]
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._numbers:  # the list keeps it alive, so that its id is its own
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _TensorFreeUnpickler(pickle.Unpickler):
    """Reads what `_TensorFreePickler` wrote, with the tensors received beside it."""

    def __init__(
        self, stream: io.BytesIO, shared: Mapping[str, object], tensors: list[Tensor]
    ) -> None:
        super().__init__(stream)
        self._shared = shared
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, str):
            return self._shared[pid]
        return self._tensors[pid]
