"""Tensors of all forms in one buffer of bytes."""

import torch

from pullback._core.buffers import count_padded_bytes, from_bytes, to_bytes


def test_strided_and_empty_tensors_go_through_a_buffer() -> None:
    """Columns were refused: domains of one dimension have such buffers in their networks."""
    table = torch.arange(12, dtype=torch.float64).view(6, 2)
    tensors = [
        table[:, 1],
        table[:1, 0],  # contiguous to torch, with a stride of 2
        table.T,
        table[2:4, 1:].to(torch.int32),
        torch.tensor(3, dtype=torch.bool),
        torch.empty(0, 4, dtype=torch.complex64),
        torch.ones(3).expand(2, 3),
        torch.ones(1).expand(5),
    ]
    buffer = to_bytes(tensors, torch.device("cpu"))
    assert len(buffer) == count_padded_bytes(tensors)
    for tensor, received in zip(tensors, from_bytes(buffer, tensors), strict=True):
        assert received.dtype == tensor.dtype
        assert torch.equal(received, tensor)
