"""Embeddings that all samples share, such as positions looked up once for a whole batch.

Many models look positions up for indices (T,) or (1, T) and add the result to (N, T, D). The
cotangent of such an output is a sum over samples, from which no sample's part can be read. An
output that is repeated for every sample before it is added has the same effect, and a cotangent
for each sample.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from .._core.graph import collect_reachable_nodes


def is_shared(module: nn.Module, indices: Tensor, samples: int) -> bool:
    """Return True if an embedding looks up indices (T,) or (1, T) for a batch of other size."""
    if not isinstance(module, nn.Embedding) or samples < 2:
        return False
    if indices.ndim == 1:
        return indices.shape[0] != samples
    return indices.ndim == 2 and indices.shape[0] == 1


def repeat_for_samples(tensor: Tensor, samples: int, features: int) -> Tensor:
    """Return a tensor (T, ...) or (1, T, ...) as (N, T, ...); `features` axes follow T.

    A tensor that was repeated stays as it is: a module's output comes from a function that was
    recorded before.
    """
    if tensor.ndim == 2 + features and tensor.shape[0] == samples:
        return tensor
    if tensor.ndim == 1 + features:
        tensor = tensor.unsqueeze(0)
    return tensor.expand(samples, *tensor.shape[1:])


def are_added_to_samples(root: Tensor, shared: Collection[Any]) -> bool:
    """Return True if repeated outputs are used in sums with tensors of their own shape alone.

    There it makes no difference whether they are repeated. `shared` holds their graph nodes.
    """
    for node in collect_reachable_nodes(root.grad_fn):
        operands = [(operand, number) for operand, number in node.next_functions]
        repeated = [operand for operand, _ in operands if operand in shared]
        if not repeated:
            continue
        others = [pair for pair in operands if pair[0] is not None and pair[0] not in shared]
        if node.name() != "AddBackward0" or len(others) != 1:
            return False
        other, number = others[0]
        if list(other._input_metadata[number].shape) != list(repeated[0]._input_metadata[0].shape):
            return False
    return True
