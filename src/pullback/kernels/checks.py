"""What is refused before a kernel is formed, with one question to the device for all of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.space import tolerance
from ..maps import Linearization


def refuse_inference() -> None:
    """Raise where no graph can be recorded."""
    if torch.is_inference_mode_enabled():
        raise PullbackError(
            "There are no derivatives here",
            "inference mode records no graph",
            "Use torch.no_grad() in place of torch.inference_mode()",
        )


def refuse_no_tensor(what: str, value: object) -> None:
    """Raise where something else was given, a list say."""
    if not isinstance(value, Tensor):
        raise PullbackError(
            f"{what} are no tensor", f"got {type(value).__name__}", "Pass a torch.Tensor"
        )


def refuse_infinite(what: str, *tensors: Tensor) -> None:
    """Raise where one of these is not finite."""
    _refuse_infinite(what, tensors, norms(tensors))


def refuse_broken(
    linear: Linearization, x: Tensor, alone: Tensor | None, params: Sequence[Tensor]
) -> None:
    """Raise where values of a model cannot be a function of each sample and of the parameters.

    An activation may hide an infinity of the inputs or parameters from the output, but not from J.

    Args:
        linear: the model at a batch.
        x: the batch.
        alone: its first values, (few, *event), as they are when these samples are run by
            themselves.
        params: parameters nobody has looked at.
    """
    z = linear.value
    if len(z) != len(x):
        raise PullbackError(
            "The model's output does not count the samples of its input",
            f"{len(x)} went in, {len(z)} came out",
            "Give input and output one entry per sample on their first axis",
        )
    coupled = alone is not None and z[: len(alone)].shape != alone.shape
    pair = [] if alone is None or coupled else [z[: len(alone)] - alone, alone]
    found = norms([*params, x, z, *pair])
    k = len(params)
    _refuse_infinite("The parameters are", params, found[:k])
    _refuse_infinite("The model's inputs or outputs are", (x, z), found[k : k + 2])
    if pair:
        computed = getattr(linear, "graph", z)
        coupled = not found[-2] <= tolerance(computed.dtype, 10) * found[-1]
    if coupled:
        raise PullbackError(
            "The model couples the samples of a batch",
            "its output for a sample depends on the others, so there is no kernel of two points",
            "Use GroupNorm or LayerNorm in place of statistics over the batch",
        )


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """‖t‖ of each, by one reading of the device; 0 for what is not a floating-point number."""
    parts: list[Any] = [torch.view_as_real(t) if t.is_complex() else t.detach() for t in tensors]
    real = [i for i, t in enumerate(parts) if t.is_floating_point()]
    out = [0.0] * len(parts)
    if real:
        found = torch._foreach_norm([parts[i] for i in real])
        if len({n.dtype for n in found}) > 1:
            found = [n.to(torch.float32) for n in found]
        for i, size in zip(real, torch.stack(list(found)).tolist(), strict=True):
            out[i] = size
    return out


def _refuse_infinite(what: str, tensors: Sequence[Tensor], sizes: Sequence[float]) -> None:
    # a norm is finite only if all entries are; one that overflows is looked at entry by entry
    doubtful = [t for t, size in zip(tensors, sizes, strict=True) if not isfinite(size)]
    if doubtful and not bool(torch.stack([torch.isfinite(t).all() for t in doubtful]).all()):
        raise PullbackError(
            f"{what} not finite",
            "they contain NaN or infinity, or the output overflows",
            "Check them with torch.isfinite",
        )
