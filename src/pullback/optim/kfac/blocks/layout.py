"""Gradients of a block's parameters in the block's own coordinates, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ..statistics.sums import Key


def arranged(key: Key, gradients: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The gradients of a block in its own coordinates."""
    if key.kind == "kronecker":
        groups = shape[0]
        rows = gradients[0].numel() if key.bias else len(gradients[0])  # some are (1, 1, O)
        pieces = [gradients[0].reshape(groups, rows // groups, -1)]
        if key.joint:
            pieces.append(gradients[1].reshape(groups, -1, 1))
        v = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)
    else:
        v = torch.stack([g.flatten() for g in gradients], 1)
    refuse_shape(key, v.shape, shape)
    return v


def refuse_shape(key: Key, found: Sequence[int], wanted: Sequence[int]) -> None:
    """Raise where a parameter is no longer what its block was built for."""
    if tuple(found) != tuple(wanted):
        raise PullbackError(
            f"Parameter {key.names[0]!r} changed its shape",
            f"its block was built for {tuple(wanted)}, the gradient gives {tuple(found)}",
            "Build the optimizer again after changing the model",
        )


def scattered(key: Key, v: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Back from the block's coordinates to the parameters' shapes."""
    if key.kind == "kronecker":
        if not key.joint:
            return [v.reshape(like[0].shape)]
        return [v[..., :-1].reshape(like[0].shape), v[..., -1].reshape(like[1].shape)]
    return [v[:, i].reshape(p.shape) for i, p in enumerate(like)]


def together(copies: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same copies as fewer ones: what lies at even distances on both sides is one."""
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for pair in copies:
        kind = [(t.dtype, t.device, t.untyped_storage().data_ptr(), t.stride()) for t in pair]
        alike.setdefault((*kind, pair[0].shape), []).append(pair)
    out = []
    for some in alike.values():
        some.sort(key=lambda pair: pair[0].storage_offset())
        starts = [(int(held.storage_offset()), int(new.storage_offset())) for held, new in some]
        steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(starts)]
        first = 0
        while first < len(some):
            end, step = first + 1, steps[first] if first < len(steps) else (0, 0)
            while min(step) > 0 and end < len(some) and steps[end - 1] == step:
                end += 1
            held, new = some[first]
            count = end - first
            out.append((_repeated(held, count, step[0]), _repeated(new, count, step[1])))
            first = end
    return out


def _repeated(t: Tensor, count: int, step: int) -> Tensor:
    """So many tensors like this one, each a step further on in its memory."""
    return t if count == 1 else t.as_strided((count, *t.shape), (step, *t.stride()))
