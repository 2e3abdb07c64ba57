"""The gradients of a layer by itself: its own forward from what it saw, and its own backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ....maps.record import Entry


def gradients(entry: Entry, delta: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """By name, for the cotangent δ at its output; in `dtype`, or in the arithmetic of its pass."""
    held = {n: p for n, p in entry.module._parameters.items() if p is not None}
    own = {n: p.detach().to(dtype or p.dtype).requires_grad_() for n, p in held.items()}
    buffers = {n: _copy(b, dtype) for n, b in entry.module._buffers.items()}
    x = entry.input if dtype is None else entry.input.to(dtype)
    mixed = dtype is None and any(p.dtype != delta.dtype for p in held.values())
    with (
        torch.enable_grad(),
        torch.autocast(x.device.type, delta.dtype if mixed else None, enabled=mixed),
        _holding(entry.module, own, buffers),
    ):
        y = entry.module.forward(x)
    found = torch.autograd.grad(y, list(own.values()), delta.to(y.dtype), allow_unused=True)
    by_role = dict(zip(own, found, strict=True))
    pairs = [(name, by_role.get(role)) for role, name in entry.names.items()]
    return {name: g for name, g in pairs if name is not None and g is not None}


@contextlib.contextmanager
def _holding(
    module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor | None]
) -> Iterator[None]:
    """A layer with others than its own."""
    held = module._parameters, module._buffers
    module._parameters = {**held[0], **parameters}  # pyright: ignore[reportAttributeAccessIssue]
    module._buffers = {**buffers}
    try:
        yield
    finally:
        module._parameters, module._buffers = held


def _copy(buffer: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if buffer is None:
        return None
    return buffer.to(dtype, copy=True) if dtype and buffer.is_floating_point() else buffer.clone()
