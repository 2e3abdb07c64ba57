"""A layer's input as the layer saw it: under autocast in half precision, and not kept twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SAVED = {"AddmmBackward0": "_saved_mat1", "MmBackward0": "_saved_self"}
_NORMS = ("NativeBatchNormBackward0", "CudnnBatchNormBackward0")
_HALF = (torch.float16, torch.bfloat16)


_AUTOGRAD: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
_PACKING = getattr(_AUTOGRAD, "_top_saved_tensors_default_hooks", None)


def seen(x: Tensor, output: Tensor) -> Tensor:
    """x in the precision of the output, if that is half of its own.

    Where the graph keeps the same for the layer's own backward pass, that is taken: autocast's copy
    of a normalization's float32 output, say, which itself nobody needs any more.
    """
    dtype = output.dtype
    if dtype not in _HALF or x.dtype == dtype or not x.is_floating_point():
        return x
    kept = _kept(output.grad_fn)
    if kept is None or kept.dtype != dtype or kept.numel() != x.numel():
        return x.detach().to(dtype)
    return kept.detach().view(x.shape) if kept.is_contiguous() else x.detach().to(dtype)


def normalized_by(output: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and 1/σ of the batch, which a batch normalization keeps for its backward pass."""
    node: Any = output.grad_fn
    if node is None or node.name() not in _NORMS or _packed():
        return None
    mean, scale = node._saved_result1.detach(), node._saved_result2.detach()
    return (mean, scale) if mean.numel() == scale.numel() == output.shape[1] else None


def _packed() -> bool:
    """Whether saved tensors are packed, as by checkpoints: they may be unpacked but once."""
    return _PACKING is None or _PACKING(True) is not None


def _kept(node: Any) -> Tensor | None:
    """The rows that a product keeps."""
    if _packed():
        return None
    for _ in range(3):  # the product itself, perhaps below a view and a copy of it
        if node is None:
            return None
        if (name := _SAVED.get(node.name())) is not None:
            return getattr(node, name)
        node = node.next_functions[0][0] if node.next_functions else None
    return None
