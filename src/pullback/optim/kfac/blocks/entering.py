"""Statistics on their way into the averages of many blocks: those side by side enter at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .halves import Half
from .runs import in_a_row, joined, runs

if TYPE_CHECKING:
    from .averages import Average

_LARGE = 2**22  # entries of matrices that are not looked at one by one

#: averages, and statistics of the same blocks
Pairs = Sequence[tuple["Average", Mapping[str, Tensor]]]
#: an average and a name in it
Member = tuple["Average", str]


class Entering:
    """Where the statistics of many blocks enter their averages, in as few tensors as possible.

    Averages are brought into one piece of memory where their statistics lie in one.

    Args:
        pairs: averages, and statistics that fit.
    """

    def __init__(self, pairs: Pairs) -> None:
        members, new = _flat(pairs)
        #: what the averages hold
        self.held: list[Tensor] = []
        #: the places of statistics that enter there, in the order of all
        self._runs: list[list[int]] = []
        halves = [isinstance(average.held[name], Half) for average, name in members]
        for kind in (False, True):
            some = [i for i, half in enumerate(halves) if half == kind]
            for run in runs([new[i] for i in some]):
                self._add([some[j] for j in run], members, new)
        self._like = [(new[run[0]].shape, new[run[0]].dtype) for run in self._runs]
        self._names, self._parts = _known(pairs)

    @classmethod
    def of(cls, pairs: Pairs, last: Entering | None) -> tuple[Entering, list[Tensor]] | None:
        """The last one or a new one and what is met there, if statistics fit."""
        if last is not None and (new := last._meets(pairs)) is not None:
            return last, new
        if not all([average.fits(own) for average, own in pairs]):
            return None
        out = cls(pairs)
        return out, out._meets(pairs) or []

    def _add(self, run: list[int], members: Sequence[Member], new: Sequence[Tensor]) -> None:
        """One more run of statistics."""
        own, like = [members[i] for i in run], new[run[0]]
        memory = [_memory(average.held[name]) for average, name in own]
        if len(run) > 1 and not in_a_row(memory):
            if any(m.dtype != like.dtype or m.device != like.device for m in memory):
                for i in run:
                    self._add([i], members, new)
                return
            memory, (average, name) = [torch.cat(memory)], own[0]
            first = average.held[name]
            _place(own, Half(memory[0], first.low) if isinstance(first, Half) else memory[0])
        self.held.append(joined(memory))
        self._runs.append(run)

    def _meets(self, pairs: Pairs) -> list[Tensor] | None:
        """Statistics as tensors beside `held`, if they and the averages lie as they did."""
        names, parts = _known(pairs)
        same = names == self._names and len(parts) == len(self._parts)
        if not same or not all(map(is_, parts, self._parts)):
            return None
        new, out = [v for _, own in pairs for v in own.values()], []
        for run, like in zip(self._runs, self._like, strict=True):
            some = [new[i] for i in run]
            if (some[0].shape, some[0].dtype) != like or (len(some) > 1 and not in_a_row(some)):
                return None
            out.append(joined(some))
        return out

    def alike(self, new: Sequence[Tensor]) -> bool:
        """Whether what was met is laid out as what is held, but for halves."""
        for held, v in zip(self.held, new, strict=True):
            if held.dtype != v.dtype or held.device != v.device:
                return False
            if held.shape == v.shape and held.stride() != v.stride():
                return False
        return True

    def formed(self, new: Sequence[Tensor]) -> list[Tensor]:
        """What enters: halves where averages hold such."""
        both = zip(self.held, new, strict=True)
        return [v if v.shape == held.shape else Half.of(v).memory for held, v in both]


class Unsure:
    """One more set of statistics in the averages, if the device finds it good.

    The memory of averages that stay is not touched; `undo` makes them what they were.

    Args:
        averages: those that are to change.
        entering: where.
        new: what was met there.
    """

    def __init__(
        self, averages: Sequence[Average], entering: Entering, new: Sequence[Tensor]
    ) -> None:
        self._before = [(average, average.mass, average.count) for average in averages]
        self._entering, self._new = entering, new

    def telling(self) -> list[Tensor]:
        """Tensors that are finite where all that is to enter is.

        Of large second moments the diagonals: no entry is larger.
        """
        large = [t for t in self._new if t.ndim == 3 and t.numel() >= _LARGE]
        small = [t for t in self._new if t.ndim != 3 or t.numel() < _LARGE]
        if large:
            small.append(torch.cat([t.diagonal(dim1=1, dim2=2).flatten() for t in large]))
        return small

    def enter(self, ema: float, broken: Tensor) -> None:
        """Take them up, but where `broken`, a float32 number on the device, is 1."""
        kinds: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        formed = self._entering.formed(self._new)
        for held, v in zip(self._entering.held, formed, strict=True):
            values, news = kinds.setdefault((v.device, v.dtype), ([], []))
            values.append(held)
            news.append(v)
        for values, news in kinds.values():
            # v − (1 − ema)(v − new), by the one kernel that knows of a flag on the device
            torch._fused_sgd_(
                values, news, [], weight_decay=1.0, momentum=0.0, lr=1 - ema, dampening=0.0,
                nesterov=False, maximize=True, is_first_step=False, grad_scale=None,
                found_inf=broken.to(values[0].device),
            )  # fmt: skip
        for average, *_ in self._before:
            average.counts(ema)
        self._new = []

    def undo(self) -> None:
        """The statistics were not good."""
        for average, mass, count in self._before:
            average.mass, average.count = mass, count


def take_up(pairs: Pairs, ema: float, *, plain: bool, last: Entering | None = None) -> Entering:
    """value ← ema·value + (1 − ema)·new, from an empty beginning where they do not fit.

    Args:
        pairs: averages, and statistics.
        ema: the weight of the past.
        plain: whether the plain means are wanted, too.
        last: where the last ones entered.

    Returns:
        Where these did.
    """
    found = Entering.of(pairs, last)
    if found is None:
        fits = [average.fits(new) for average, new in pairs]
        begin([pair for pair, fit in zip(pairs, fits, strict=True) if not fit], ema)
        known = [pair for pair, fit in zip(pairs, fits, strict=True) if fit]
        found = Entering.of(known, None)
        assert found is not None
    entering, new = found
    if new:
        torch._foreach_lerp_(entering.held, entering.formed(new), 1 - ema)
    for average, own in pairs:
        average.count_in(own, ema, plain=plain)
    return entering


def begin(pairs: Pairs, ema: float) -> None:
    """(1 − ema)·new, in one piece of memory where the statistics are."""
    members, flat = _flat(pairs)
    pieces: list[tuple[list[Member], Tensor | Half]] = []
    for run in runs(flat):
        new, own = joined([flat[i] for i in run]), [members[i] for i in run]
        piece = own[0][0].as_held(new)
        if isinstance(piece, Half):
            piece.memory.mul_(1 - ema)
        else:
            piece = (1 - ema) * new if ema else new.clone()
        pieces.append((own, piece))
    for average, own in pairs:
        average.clear(own)
    for own, piece in pieces:
        _place(own, piece)


def _known(pairs: Pairs) -> tuple[list[tuple[str, ...]], list[Tensor | Half]]:
    """The names of statistics, and all that averages hold."""
    names = [tuple(new) for _, new in pairs]
    return names, [held for average, _ in pairs for held in average.held.values()]


def _flat(pairs: Pairs) -> tuple[list[Member], list[Tensor]]:
    """All members, and what is to enter there."""
    members = [(average, name) for average, new in pairs for name in new]
    return members, [v for _, new in pairs for v in new.values()]


def _place(members: Sequence[Member], piece: Tensor | Half) -> None:
    """Let averages be parts of one piece of memory."""
    count, parts = len(members), [piece]
    if count > 1:
        parts = piece.chunk(count)
    for (average, name), part in zip(members, parts, strict=True):
        average.held[name] = part


def _memory(held: Tensor | Half) -> Tensor:
    return held.memory if isinstance(held, Half) else held
