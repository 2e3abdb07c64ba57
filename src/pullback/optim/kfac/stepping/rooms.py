"""Memory that gradients are brought to and directions are written to: one piece, known addresses.

What inverses of one kind are applied to lies side by side, in the parameters' own layout, so that
it is read as one stack and the result can be moved along as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..blocks.group import Group

_APART = 64  # entries that stacks start at multiples of: whole cache lines
_LONGEST = 2**30  # entries of one inner product


@dataclass(frozen=True)
class Slot:
    """Where a parameter's entries lie in the memory of this dtype."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def count(self) -> int:
        """Entries."""
        return prod(self.shape)

    @property
    def plain(self) -> bool:
        """Whether they lie row by row."""
        wanted, step = [], 1
        for n in reversed(self.shape):
            wanted.append(step)
            step *= n
        pairs = zip(self.shape, self.stride, reversed(wanted), strict=True)
        return all(n == 1 or s == w for n, s, w in pairs)


class Plan:
    """Who lies where: stacks one after the other, those of one param group together if possible.

    Args:
        groups: inverses, applied kind by kind.
        like: all parameters by name.
        names: those with a gradient, per param group.
    """

    def __init__(
        self, groups: Sequence[Group], like: Mapping[str, Tensor], names: Sequence[list[str]]
    ) -> None:
        self.share = {n: i for i, own in enumerate(names) for n in own}
        slabs = [(x.dtype, own) for x in groups for own, _ in x.slabs]
        held = {n for _, own in slabs for n in own}
        slabs += [(like[n].dtype, [n]) for n in self.share if n not in held]
        self.slots: dict[str, Slot] = {}
        self.sizes: dict[torch.dtype, int] = {}
        #: what lies between stacks, and parameters without a gradient: zeros
        self.gaps: list[tuple[torch.dtype, int, int]] = []
        self.missing: list[str] = []
        for dtype, own in sorted(slabs, key=self._first):
            at = self.sizes.get(dtype, 0)
            for name in own:
                p = like[name]
                layout = torch.empty_like(p, device="meta").stride()
                self.slots[name] = Slot(dtype, at, tuple(p.shape), layout)
                at += p.numel()
                if name not in self.share:
                    self.missing.append(name)
            end = -(-at // _APART) * _APART
            if end > at:
                self.gaps.append((dtype, at, end))
            self.sizes[dtype] = end

    def _first(self, slab: tuple[torch.dtype, list[str]]) -> int:
        return next((self.share[n] for n in slab[1] if n in self.share), len(self.share))

    def spans(self) -> list[tuple[torch.dtype, int, int, int]]:
        """Dtype, param group, start and end of all entries, in as few pieces as possible."""
        out: list[tuple[torch.dtype, int, int, int]] = []
        inside = [n for n in self.slots if n in self.share]
        for name in sorted(inside, key=lambda n: (str(self.slots[n].dtype), self.slots[n].start)):
            slot, share = self.slots[name], self.share[name]
            end = slot.start + slot.count
            last = out[-1] if out else None
            if last and last[:2] == (slot.dtype, share) and end - last[2] <= _LONGEST:
                out[-1] = (*last[:3], end)  # what lies between counts for nothing
            else:
                out.append((slot.dtype, share, slot.start, end))
        return out


class Rooms:
    """Memory by a plan, zeros at first; it may be given back between steps."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        self.flat = {d: torch.zeros(n, dtype=d, device=device) for d, n in plan.sizes.items()}
        self._bytes = {d: t.nbytes for d, t in self.flat.items()}
        self.views = {
            name: self.flat[s.dtype].as_strided(s.shape, s.stride, s.start)
            for name, s in plan.slots.items()
        }
        self._missing = [self.views[n] for n in plan.missing]
        self._gaps = [self.flat[d][a:b] for d, a, b in plan.gaps]
        self._held = True

    def hold(self) -> None:
        """Have the memory, zero where nothing is going to be written."""
        blank = list(self._missing)
        if not self._held:
            for dtype, t in self.flat.items():
                t.untyped_storage().resize_(self._bytes[dtype])
            blank += self._gaps
            self._held = True
        if blank:
            torch._foreach_zero_(blank)

    def release(self) -> None:
        """Give the memory back; the views stay, and wait for the next `hold`."""
        for t in self.flat.values():
            t.untyped_storage().resize_(0)
        self._held = False

    def stack(self, names: Sequence[str], shape: tuple[int, ...]) -> Stack:
        """Parameters that lie side by side, as one tensor."""
        return Stack(self.flat, [self._plan.slots[n] for n in names], shape)


class Stack:
    """Members of a room as one tensor of the given shape, whatever their own layout is."""

    def __init__(
        self, flat: Mapping[torch.dtype, Tensor], slots: Sequence[Slot], shape: tuple[int, ...]
    ) -> None:
        self._shape, memory = shape, flat[slots[0].dtype]
        self._parts: list[Tensor] = []
        #: the memory itself, where it is in order
        self.direct: Tensor | None = None
        if all(s.plain for s in slots):
            self.direct = memory.narrow(0, slots[0].start, prod(shape)).view(shape)
            return
        first = 0
        for i in range(1, len(slots) + 1):
            one = slots[first]
            if i == len(slots) or (slots[i].shape, slots[i].stride) != (one.shape, one.stride):
                sizes, strides = (i - first, *one.shape), (one.count, *one.stride)
                self._parts.append(memory.as_strided(sizes, strides, one.start))
                first = i

    def read(self) -> Tensor:
        """The tensor, a copy where it is not in order."""
        if self.direct is not None:
            return self.direct
        pieces = [part.reshape(-1) for part in self._parts]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(self._shape)

    def write(self, found: Tensor) -> None:
        """Put a tensor there; nothing where it was written to the memory itself."""
        if self.direct is not None:
            if found.data_ptr() != self.direct.data_ptr():
                self.direct.copy_(found)
            return
        pieces = found.reshape(-1).split([part.numel() for part in self._parts])
        for part, piece in zip(self._parts, pieces, strict=True):
            part.copy_(piece.view(part.shape))
