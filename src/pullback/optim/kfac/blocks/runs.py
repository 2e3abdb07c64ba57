"""Tensors that lie side by side in one piece of memory, and to a kernel are a single one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def runs(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Which of them follow each other in memory without a gap, first to last.

    Those of a run have one shape and one dtype, are contiguous and belong to one storage.
    """
    out: list[list[int]] = []
    run, shape, dtype, size, end, limit = [-1], None, None, 0, -1, -1
    for at, i in sorted([(t.data_ptr(), i) for i, t in enumerate(tensors)]):
        t = tensors[i]
        if at == end < limit and t.dtype == dtype and t.shape == shape and t.is_contiguous():
            run.append(i)
        else:
            out.append(run := [i])
            shape, dtype, size, end, limit = t.shape, t.dtype, t.nbytes, at, at
            if size and shape and t.is_contiguous():  # whatever begins in its storage belongs there
                limit += _room(t)
        end += size
    return out


def in_a_row(tensors: Sequence[Tensor]) -> bool:
    """Whether they are a run as they come."""
    first = tensors[0]
    start, size, count = first.data_ptr(), first.nbytes, len(tensors)
    if not 0 < size * count <= _room(first):
        return False
    if [t.data_ptr() for t in tensors] != [*range(start, start + size * count, size)]:
        return False
    shape, dtype = first.shape, first.dtype
    return all([t.shape == shape and t.dtype == dtype and t.is_contiguous() for t in tensors])


def joined(run: Sequence[Tensor]) -> Tensor:
    """A run as one tensor, along the first axis."""
    first = run[0]
    if len(run) == 1:
        return first
    count, *rest = first.shape
    steps = (first.numel() // count, *first.stride()[1:])
    return first.as_strided((len(run) * count, *rest), steps)


def in_runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All runs of these, each as one tensor."""
    return [joined([tensors[i] for i in run]) for run in runs(tensors)]


def apart(t: Tensor) -> Tensor:
    """The same numbers in memory that no other tensor has a part of."""
    return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t


def _room(t: Tensor) -> int:
    """Bytes of its storage from its first entry on."""
    memory = t.untyped_storage()
    return memory.nbytes() - (t.data_ptr() - memory.data_ptr())
