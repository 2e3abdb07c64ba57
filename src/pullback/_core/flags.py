"""Questions about many tensors at once, answered on their device: finite? the same bits?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor


def are_finite(tensors: Sequence[Tensor], *, squares: bool = False) -> Tensor:
    """Return a flag on the device: whether all entries, or their sums of `squares`, are finite.

    The Euclidean norm may overflow where no entry does, since it sums squares. The largest entry
    is certain, but takes several times as long on a CPU: it is computed only if the norms are not
    finite.
    """
    nonempty = [t for t in tensors if t.numel()]
    if not nonempty:
        nonempty = [tensors[0].new_zeros(1)]
    if squares:
        promoted = [t.float() if t.dtype == torch.float16 else t for t in nonempty]
        return _largest_norm(promoted, 2).square() < inf
    if all(t.device.type == "cpu" for t in nonempty):
        flag = torch.isfinite(_largest_norm(nonempty, 2))
        if bool(flag):
            return flag
    return torch.isfinite(_largest_norm(nonempty, inf))


def are_finite_in_place(tensors: Sequence[Tensor]) -> Tensor:
    """Return `are_finite` of tensors that may be overwritten with their own values.

    On a GPU one kernel reads many of them; it multiplies each by one and writes it back.
    """
    first = tensors[0]
    is_uniform = all(t.dtype == first.dtype and t.device == first.device for t in tensors)
    if not first.is_cuda or not is_uniform or not all(t.is_contiguous() for t in tensors):
        return are_finite(tensors)
    found_inf = torch.zeros(1, device=first.device, dtype=torch.float32)
    inverse_scale = torch.ones(1, device=first.device, dtype=torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found_inf, inverse_scale)
    return found_inf[0] == 0


def _largest_norm(tensors: list[Tensor], order: float) -> Tensor:
    norms = torch._foreach_norm(tensors, order)
    if len({(n.dtype, n.device) for n in norms}) > 1:
        norms = [n.to(norms[0].device, torch.float64) for n in norms]
    return torch.stack(list(norms)).amax()


@dataclass
class Guard:
    """Whether a step goes on: asked at once, or by a flag on the device that guards every change.

    Where it is deferred, the host does not wait: `is_void` is 1 where nothing may change.
    """

    is_deferred: bool
    #: the conditions so far, where they are deferred
    is_good: Tensor | None = None

    def copy(self) -> Guard:
        """Return a guard with the conditions so far; what one is asked next the other is not."""
        return Guard(self.is_deferred, self.is_good)

    def holds(self, flag: Tensor) -> bool:
        """Ask for one more condition; False where it is known to fail."""
        if not self.is_deferred:
            return bool(flag)
        if self.is_good is None:
            self.is_good = flag
        else:
            self.is_good = self.is_good & flag
        return True

    def holds_finite(self, tensors: Sequence[Tensor], *, squares: bool = False) -> bool:
        """Ask that all entries, or their sums of `squares`, be finite."""
        return self.holds(are_finite(tensors, squares=squares))

    @property
    def is_void(self) -> Tensor | None:
        """A float32 flag, or None where nothing is deferred."""
        if self.is_good is None:
            return None
        return (~self.is_good).float()


#: item size in bytes ↦ the integers that show the bits of such items
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class ChecksumLimits:
    """Sizes in `checksum`."""

    #: tensors of fewer entries are joined before they are summed: a GPU copies 256 KiB in less
    #: than a microsecond, and a launch takes several
    joined_below: int = 2**16
    #: checksums are remainders modulo this number, so that their negatives fit into int64 too
    modulus: int = 2**62


_LIMITS = ChecksumLimits()


def checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number that changes with the bits of any entry, on the device of the first tensor.

    Integers are added, so that the result does not depend on the order of the additions.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.int64)
    small: dict[object, list[Tensor]] = {}
    summands = []
    for tensor in tensors:
        bits = _view_bits(tensor)
        if bits.numel() < _LIMITS.joined_below:
            small.setdefault((bits.dtype, bits.device), []).append(bits.flatten())
        else:
            summands.append(bits)
    summands += [torch.cat(pieces) for pieces in small.values()]
    codes = [bits.sum(dtype=torch.int64).to(tensors[0].device) for bits in summands]
    # odd weights, so that two tensors that were swapped change the sum
    weights = torch.arange(1, 2 * len(codes), 2, device=tensors[0].device)
    return (torch.stack(codes) * weights).sum() % _LIMITS.modulus


def _view_bits(tensor: Tensor) -> Tensor:
    real = tensor.detach()
    if real.is_complex():
        real = torch.view_as_real(real)
    return real.view(_INTEGERS[real.itemsize])


def lerp_unless(
    found_inf: Tensor | None, values: list[Tensor], news: list[Tensor], weight: float
) -> None:
    """Set v ← v + weight·(new − v) in place, except where the float32 flag on the device is 1."""
    if found_inf is None:
        torch._foreach_lerp_(values, news, weight)
        return
    # v − weight·(v − new), by the one kernel that reads a flag on the device
    torch._fused_sgd_(
        values, news, [], weight_decay=1.0, momentum=0.0, lr=weight, dampening=0.0,
        nesterov=False, maximize=True, is_first_step=False, grad_scale=None,
        found_inf=found_inf.to(values[0].device),
    )  # fmt: skip


class DeferredFlags:
    """Flags that are copied to the host, which waits for the device only when it reads them.

    Those of a step say whether parameters moved and, where `takes_statistics` is True, whether the
    statistics entered the averages.
    """

    def __init__(self, flags: Tensor, *, takes_statistics: bool = False) -> None:
        self.takes_statistics = takes_statistics
        self._flags = torch.empty(
            flags.shape, dtype=flags.dtype, device="cpu", pin_memory=flags.is_cuda
        )
        self._flags.copy_(flags, non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if flags.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(flags.device))

    def flags(self) -> list[bool]:
        """Return the flags, after the device has computed them."""
        if self._event is not None:
            self._event.synchronize()
        return self._flags.tolist()
