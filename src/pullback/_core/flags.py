"""Flags on a device: whether tensors are finite, which bits they have, and when flags are read."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor


def are_finite(tensors: Sequence[Tensor], *, squares: bool = False) -> Tensor:
    """Return whether all entries, or their sums of `squares`, are finite: a flag on the device.

    Norms may overflow by their squares where no entry does. The largest entry tells for sure, but
    on a CPU takes several times as long: it is asked for only where norms are not finite.
    """
    some = [t for t in tensors if t.numel()] or [tensors[0].new_zeros(1)]
    if squares:
        some = [t.float() if t.dtype == torch.float16 else t for t in some]
        return torch.isfinite(_largest_norm(some, 2).square())
    if all(t.device.type == "cpu" for t in some):
        flag = torch.isfinite(_largest_norm(some, 2))
        if bool(flag):
            return flag
    return torch.isfinite(_largest_norm(some, inf))


def are_finite_in_place(tensors: Sequence[Tensor]) -> Tensor:
    """Return `are_finite` of tensors that may be overwritten with their own values.

    One kernel looks at many of them on a GPU, and writes what it has read.
    """
    first = tensors[0]
    plain = all(t.dtype == first.dtype and t.is_contiguous() for t in tensors)
    if not plain or not all(t.device == first.device for t in tensors) or not first.is_cuda:
        return are_finite(tensors)
    like = {"device": first.device, "dtype": torch.float32}
    broken, one = torch.zeros(1, **like), torch.ones(1, **like)
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), broken, one)
    return broken[0] == 0


def _largest_norm(tensors: list[Tensor], order: float) -> Tensor:
    norms = torch._foreach_norm(tensors, order)
    if len({(n.dtype, n.device) for n in norms}) > 1:
        norms = [n.to(norms[0].device, torch.float64) for n in norms]
    return torch.stack(list(norms)).amax()


_SMALL = 2**16  # entries of tensors whose bits are added up together
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHECKSUM = 2**62  # which checksums are less than


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number that other bits in any entry change, on the device of the first tensor.

    Integers are added, so that the order in which a machine does so is of no consequence.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.int64)
    small: dict[object, list[Tensor]] = {}
    parts = []
    for t in tensors:
        own = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
        bits = own.view(_BITS[own.itemsize])
        if bits.numel() < _SMALL:
            small.setdefault((bits.dtype, bits.device), []).append(bits.flatten())
        else:
            parts.append(bits)
    parts += [torch.cat(some) for some in small.values()]
    codes = [bits.sum(dtype=torch.int64).to(tensors[0].device) for bits in parts]
    weights = torch.arange(1, 2 * len(codes), 2, device=tensors[0].device)  # they may be swapped
    return (torch.stack(codes) * weights).sum() % _CHECKSUM


def lerp_unless(
    broken: Tensor | None, values: list[Tensor], news: list[Tensor], weight: float
) -> None:
    """Set v ← v + weight·(new − v) in place; nothing where the float32 flag on the device is 1."""
    if broken is None:
        torch._foreach_lerp_(values, news, weight)
        return
    # v − weight·(v − new), by the one kernel that reads a flag on the device
    torch._fused_sgd_(
        values, news, [], weight_decay=1.0, momentum=0.0, lr=weight, dampening=0.0,
        nesterov=False, maximize=True, is_first_step=False, grad_scale=None,
        found_inf=broken.to(values[0].device),
    )  # fmt: skip


class DeferredFlags:
    """Flags of a step that are copied to the host, which waits for them only when it reads them.

    They say whether parameters moved and statistics were taken up, if it was `takes_statistics`.
    """

    def __init__(self, flags: Tensor, takes_statistics: bool) -> None:
        self.takes_statistics = takes_statistics
        self._flags = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=flags.is_cuda)
        self._flags.copy_(flags, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(flags.device))

    def flags(self) -> list[bool]:
        """Return the flags, as soon as the device has come so far."""
        self._event.synchronize()
        return self._flags.tolist()
