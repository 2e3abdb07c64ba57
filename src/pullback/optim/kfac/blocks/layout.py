"""Gradients of a block's parameters in the block's own coordinates, and back."""

from __future__ import annotations

from collections.abc import Sequence

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
