"""Objects that hold tensors, gathered from all processes: the tensors travel in one flat buffer."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from .processes import Processes, from_bytes, to_bytes

T = TypeVar("T")


def gather_objects(
    processes: Processes, value: T, own: Mapping[str, object], device: torch.device
) -> list[T]:
    """Return every process's value, with its tensors on this device.

    Args:
        processes: which all call this.
        value: what can be pickled.
        own: objects that a value refers to and every process has its own of, by name.
        device: of the buffer that is sent.
    """
    if processes.alone:
        return [value]
    stream = io.BytesIO()
    packer = _Packer(stream, own)
    packer.dump(value)
    given = [t.to(device) for t in packer.tensors]
    kinds = [(tuple(t.shape), t.dtype) for t in given]
    buffers = processes.parts([to_bytes(given, device)], "objects")[0]
    found = processes.values((stream.getvalue(), kinds), "objects")
    out = []
    for (code, kinds), buffer in zip(found, buffers, strict=True):
        like = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in kinds]
        out.append(_Unpacker(io.BytesIO(code), own, from_bytes(buffer, like)).load())
    return out


class _Packer(pickle.Pickler):
    """Leaves tensors, and what every process has, out of the pickle."""

    def __init__(self, stream: io.BytesIO, own: Mapping[str, object]) -> None:
        super().__init__(stream)
        self._names = {id(value): name for name, value in own.items()}
        self._index: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> str | int | None:
        if id(obj) in self._names:
            return self._names[id(obj)]
        if not isinstance(obj, Tensor):
            return None
        if id(obj) not in self._index:  # the list keeps it alive, so that its id is its own
            self._index[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index[id(obj)]


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, own: Mapping[str, object], tensors: list[Tensor]
    ) -> None:
        super().__init__(stream)
        self._own, self._tensors = own, tensors

    def persistent_load(self, pid: Any) -> Any:
        return self._own[pid] if isinstance(pid, str) else self._tensors[pid]
