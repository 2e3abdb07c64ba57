"""Several tensors in one flat buffer, so that one call between processes sends all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

#: bytes to which every tensor in a byte buffer is padded: the widest dtype, complex128, has 16
ALIGNMENT = 16


def group_by_dtype_and_device(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """Return the positions of the tensors, one list for each pair of dtype and device."""
    positions: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        positions.setdefault((tensor.dtype, tensor.device), []).append(i)
    return positions.values()


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Return the entries of tensors of one dtype, one after the other, as one flat tensor."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def split_into_shapes(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of the flat tensor in these shapes; entries beyond the last are padding."""
    counts = [shape.numel() for shape in shapes]
    pieces = flat[: sum(counts)].split(counts)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def count_padded_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the length of the buffer that `to_bytes` makes of these tensors."""
    return sum(_align(tensor.nbytes) for tensor in tensors)


def to_bytes(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of tensors of any dtypes, one after the other, each padded to 16 bytes."""
    pieces = [torch.empty(0, dtype=torch.uint8, device=device)]
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.stride(0) != 1:  # a column, say; one of a single entry counts as contiguous
            flat = flat.clone(memory_format=torch.contiguous_format)
        flat = flat.view(torch.uint8)
        padding = flat.new_zeros(_align(len(flat)) - len(flat))
        pieces += [flat, padding]
    return torch.cat(pieces)


def from_bytes(buffer: Tensor, templates: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a buffer of `to_bytes`, with the shapes and dtypes of the templates."""
    tensors = []
    start = 0
    for template in templates:
        content = buffer[start : start + template.nbytes]
        tensors.append(content.view(template.dtype).view(template.shape))
        start += _align(template.nbytes)
    return tensors


def _align(count: int) -> int:
    """Return the bytes that a tensor takes in a buffer where a tensor of any dtype may follow."""
    return -(-count // ALIGNMENT) * ALIGNMENT
