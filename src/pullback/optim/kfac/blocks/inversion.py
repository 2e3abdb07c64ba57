"""From averages to inverses: blocks of one size together, and what to do where one fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....grams.kronecker import Block, Inverses, Pair, Units, inverses, sides
from ..statistics.sums import Key
from .averages import Average, block_of
from .damping import Damping
from .group import Group
from .inverse import Inverse
from .layout import together
from .rounded import shortened

_GROWTH, _TRIES = 10.0, 8


class Inversion:
    """Averages of all blocks, and their inverses."""

    averages: dict[Key, Average]
    inverses: dict[Key, Inverse]
    corrections: dict[Key, Average]
    notes: dict[Key, str]
    fixed: bool
    _groups: list[Group] | None

    def block(self, key: Key) -> Block:
        """The Gram of a block, without damping."""
        return block_of(key, self.averages[key].corrected())

    def reference(self, key: Key, damping: Damping) -> Any:
        """The block of long-run averages, where the damping needs one."""
        if not damping.referenced:
            return None
        average, given = self.averages[key], damping.reference
        if given is not None and key in given:
            some = average.memory[0]
            return block_of(key, {n: v.to(some.device, some.dtype) for n, v in given[key].items()})
        if given is not None:
            self._note(key, "its reference is its own average: the one given lacks this block")
        return block_of(key, average.corrected() if average.mean is None else average.mean)

    def _note(self, key: Key, text: str) -> None:
        """One more thing to say about a block, if it was not said yet."""
        said = self.notes.get(key)
        if said is None or text not in said:
            self.notes[key] = text if said is None else f"{said}; {text}"

    def invert(
        self, damping: Damping, value: float, keys: list[Key], *, eigen: bool, once: bool = False
    ) -> None:
        """New inverses of these blocks; where one fails, the last good one stays.

        Args:
            damping: what is added, and how singular sides are treated.
            value: λ.
            keys: the blocks.
            eigen: whether eigenbases are wanted.
            once: whether they serve one step only, which Cholesky factors then do more cheaply.
        """
        for key in keys:
            self.notes.pop(key, None)
        found = self._units(damping, value, [k for k in keys if k.kind != "kronecker"])
        paired = [k for k in keys if k.kind == "kronecker"]
        if damping.exact or eigen:
            for key in paired:
                self._decompose(key, value, found)
        else:
            self._cholesky(damping, value, paired, once, found)
        self._accept(found)

    def _units(self, damping: Damping, value: float, keys: Sequence[Key]) -> dict[Key, Inverse]:
        """Those of gains, shifts and single entries, all of a size at once."""
        alike: dict[Any, dict[Key, Tensor]] = {}
        for key in keys:
            block = self.block(key)
            assert isinstance(block, Units)
            block, shift = damping.units(block, self.reference(key, damping), value)
            m = block.matrices
            alike.setdefault((shift, m.shape[1:], m.dtype, m.device), {})[key] = m
        found = {}
        for (shift, *_), some in alike.items():
            whole = Units(torch.cat(list(some.values()))).inverse(shift)
            parts = whole.split([len(m) for m in some.values()])
            found |= {k: Inverse(part) for k, part in zip(some, parts, strict=True)}
            if damping.referenced:
                self._report_units(some, parts)
        return found

    def _report_units(self, some: Mapping[Key, Tensor], inverses: Sequence[Tensor]) -> None:
        for (key, m), inverse in zip(some.items(), inverses, strict=True):
            rank, size = round(float((m * inverse).sum())), m.shape[:2].numel()  # tr M M⁺
            if rank < size:
                self._note(key, f"it is singular: rank {rank} of {size}, inverted on its range")

    def _cholesky(
        self, damping: Damping, value: float, keys: list[Key], once: bool, found: dict[Key, Inverse]
    ) -> None:
        waiting, singular = list(keys), value == 0 or damping.referenced
        # without damping, or with an invariant one, a singular side is inverted on its range
        factors = once and not singular
        for attempt in range(_TRIES):
            now = value * _GROWTH**attempt
            got = self._damped(damping, now, waiting, singular=singular, factors=factors)
            left = []
            for i, key in enumerate(waiting):
                one, two = 2 * i, 2 * i + 1
                if got.failed[one] or got.failed[two]:
                    left.append(key)
                    continue
                both = got.sides[one], got.sides[two]
                found[key] = (
                    Inverse(*both, factors=True) if factors else Inverse.of_sides(key, *both)
                )
                self._report(key, attempt, now, got.ranks[one], got.ranks[two])
            waiting = left
            if not waiting or value == 0:
                break
        for key in waiting:
            kept = "the last good inverse stays" if key in self.inverses else "it has none yet"
            self._note(key, f"its sides could not be inverted; {kept}")

    def _damped(
        self, damping: Damping, value: float, keys: Sequence[Key], *, singular: bool, factors: bool
    ) -> Inverses:
        """Left and right sides with what is added, inverted, one block after the other."""
        if not keys or value == 0 or not damping.shifts_only:
            pairs = {k: self._pair(k) for k in keys}
            both = [damping.sides(p, self.reference(k, damping), value) for k, p in pairs.items()]
            every = [side for sides_ in both for side in sides_]
            return inverses(every, singular=singular, factors=factors)
        given = [self._undivided(k) for k in keys]
        every = [side for pair, _ in given for side in (pair.left, pair.right)]
        scales = [scale for _, scale in given for _ in range(2)]
        shifts = _shifts(damping, value, torch._foreach_div(_means(every), scales))
        return inverses(every, scales=scales, shifts=shifts, singular=singular, factors=factors)

    def _pair(self, key: Key) -> Pair:
        block = self.block(key)
        assert isinstance(block, Pair)
        return block

    def _undivided(self, key: Key) -> tuple[Pair, float]:
        """The sides, and what both are yet to be divided by."""
        average = self.averages[key]
        if len(average.shapes) > 2:  # several roles, whose sum has its own scale
            return self._pair(key), 1.0
        block = block_of(key, average.value)
        assert isinstance(block, Pair)
        return block, average.mass

    def _report(
        self, key: Key, attempt: int, now: float, left: Tensor | None, right: Tensor | None
    ) -> None:
        if attempt:
            self._note(key, f"its damping was raised to {now:.3g} to invert it")
        for name, rank in (("output", left), ("input", right)):
            if rank is not None:
                text = f"its {name} side is singular: rank {int(rank.min())}, inverted on its range"
                self._note(key, text)

    def _decompose(self, key: Key, value: float, found: dict[Key, Inverse]) -> None:
        pair = self._pair(key)
        try:
            (rows, u), (columns, w) = sides.eigen(pair.left), sides.eigen(pair.right)
        except torch.linalg.LinAlgError:
            self._note(key, "its eigenvalues were not found; the last good inverse stays")
            return
        values = rows[..., None] * columns[:, None]
        self.corrections.pop(key, None)  # of the old eigenbasis
        found[key] = Inverse(u, w, scale=_reciprocal(values, value))

    def correct(self, key: Key, values: Tensor, ema: float, damping: float) -> None:
        """Eigenvalues from second moments of the gradient in the eigenbases (EKFAC)."""
        average = self.corrections.setdefault(key, Average(symmetric=False))
        average.update({"values": values}, ema, plain=False)
        held = self.inverses[key]
        scale = _reciprocal(average.corrected()["values"], damping)
        if not self.fixed or held.scale is None or held.scale.shape != scale.shape:
            held.scale, self._groups = scale, None
        else:
            held.scale.copy_(scale)

    def _accept(self, found: dict[Key, Inverse]) -> None:
        """Take over new inverses, in the same memory where kernels were recorded there."""
        copies: list[tuple[Tensor, Tensor]] = []
        for key, inverse in shortened(found).items():
            held = self.inverses.get(key)
            pairs = held.renewals(inverse) if self.fixed and held is not None else None
            if pairs is None:
                self.inverses[key], self._groups = inverse, None
            else:
                copies += pairs
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for pair in together(copies):
            by_dtype.setdefault(pair[0].dtype, []).append(pair)
        for some in by_dtype.values():  # one kernel knows one dtype
            torch._foreach_copy_([held for held, _ in some], [new for _, new in some])


def _means(every: Sequence[Tensor]) -> list[Tensor]:
    """The mean eigenvalue of each side, (G,); those of one length at once."""
    out: list[Tensor] = list(every)
    alike: dict[Any, list[int]] = {}
    for i, side in enumerate(every):
        alike.setdefault((side.shape[-1], side.dtype, side.device), []).append(i)
    for some in alike.values():
        means = torch.cat([sides.diagonal(every[i]) for i in some]).mean(-1)
        for i, part in zip(some, means.split([len(every[i]) for i in some]), strict=True):
            out[i] = part
    return out


def _shifts(damping: Damping, value: float, means: Sequence[Tensor]) -> list[Tensor]:
    """What is added to each side, for left and right sides in turn; blocks of a kind at once."""
    out: list[Tensor] = list(means)
    kinds: dict[Any, list[int]] = {}
    for i in range(0, len(means), 2):
        kinds.setdefault((means[i].dtype, means[i].device), []).append(i)
    for some in kinds.values():
        counts = [len(means[i]) for i in some]
        rows, columns = (torch.cat([means[i + j] for i in some]) for j in (0, 1))
        for j, shift in enumerate(damping.shifts(rows, columns, value)):
            for i, part in zip(some, shift.split(counts), strict=True):
                out[i + j] = part
    return out


def _reciprocal(values: Tensor, damping: float) -> Tensor:
    if damping == 0:
        keep = sides.cut(values.flatten(1)).view_as(values)
        return torch.where(keep, 1 / values, 0.0)
    return 1 / (values + damping)
