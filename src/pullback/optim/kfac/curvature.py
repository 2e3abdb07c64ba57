r"""The K-FAC metric of a model as it is known so far: averages per block, and their inverses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...grams.kronecker import Block, Pair, Rotated, Units, inverses, merged, sides
from .damping import Damping
from .inverse import Group, Inverse, turned
from .sums import Key

_GROWTH, _TRIES = 10.0, 8


@dataclass
class Average:
    """An exponential moving average with bias correction, and the plain mean beside it."""

    value: dict[str, Tensor] = field(default_factory=dict)
    mass: float = 0.0
    mean: dict[str, Tensor] | None = None
    count: int = 0

    def update(self, new: Mapping[str, Tensor], ema: float, *, plain: bool) -> None:
        """value ← ema·value + (1 − ema)·new."""
        if {n: v.shape for n, v in self.value.items()} != {n: v.shape for n, v in new.items()}:
            self.value, self.mass, self.mean, self.count = {}, 0.0, None, 0
        if not self.value:
            self.value = {n: (1 - ema) * v if ema else v.clone() for n, v in new.items()}
        else:
            for name, v in new.items():
                self.value[name].lerp_(v, 1 - ema)
        self.mass = ema * self.mass + 1 - ema
        self.count += 1
        if plain:
            if self.mean is None:
                self.mean = {n: v.clone() for n, v in self.corrected().items()}
            else:
                for name, v in new.items():
                    self.mean[name].lerp_(v, 1 / self.count)

    def joins(
        self,
        new: Mapping[str, Tensor],
        ema: float,
        pairs: list[tuple[Tensor, Tensor]],
        *,
        plain: bool,
    ) -> bool:
        """Whether `update` is but an interpolation, left to be done with those of other blocks."""
        same = {n: v.shape for n, v in self.value.items()} == {n: v.shape for n, v in new.items()}
        if plain or not same:
            return False
        pairs += [(self.value[n], v) for n, v in new.items()]
        self.mass = ema * self.mass + 1 - ema
        self.count += 1
        return True

    def corrected(self) -> dict[str, Tensor]:
        """The average without the weight of the empty beginning."""
        if self.mass == 1.0:
            return self.value
        return {n: v / self.mass for n, v in self.value.items()}

    def moved(self, device: torch.device, dtype: torch.dtype) -> None:
        """Follow the parameters to another device or dtype."""
        self.value = {n: v.to(device, dtype) for n, v in self.value.items()}
        if self.mean is not None:
            self.mean = {n: v.to(device, dtype) for n, v in self.mean.items()}


def block_of(key: Key, held: Mapping[str, Tensor]) -> Block:
    """The Gram block of an average."""
    if key.kind != "kronecker":
        return Units(held["squares"])
    pairs = []
    width = max(
        held[f"{tag}.{'outputs' if tag.endswith('first') else 'inputs'}"].shape[-1]
        for tag in _tags(held)
    )
    for tag in _tags(held):
        a, d = held[f"{tag}.inputs"], held[f"{tag}.outputs"]
        left, right = (a, d) if tag.endswith(".first") else (d, a)
        pairs.append(Pair(left, _widened(right, width)))
    return merged(pairs)


def _tags(held: Mapping[str, Tensor]) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in held})


def _widened(side: Tensor, width: int) -> Tensor:
    """A right side without the bias's coordinate, among others with it."""
    more = width - side.shape[-1]
    if not more:
        return side
    return F.pad(side, (0, more) if sides.is_diagonal(side) else (0, more, 0, more))


class Curvature:
    """Averages and inverses of all blocks."""

    def __init__(self) -> None:
        self.averages: dict[Key, Average] = {}
        self.inverses: dict[Key, Inverse] = {}
        #: second moments of the gradient in the eigenbases, where these are asked for
        self.corrections: dict[Key, Average] = {}
        #: what went wrong in the last inversion, by block
        self.notes: dict[Key, str] = {}
        self._groups: list[Group] | None = None

    def take(
        self, found: Mapping[Key, dict[str, Tensor]], ema: float, damping: Damping, value: float
    ) -> None:
        """One more set of statistics into the averages."""
        for key in found:
            for old in [k for k in self.averages if k != key and set(k.names) & set(key.names)]:
                self.drop(old)  # a bias was frozen, say, and the weight is by itself now
        pairs: list[tuple[Tensor, Tensor]] = []
        for key, new in found.items():
            squares = new.pop("squares") if key.kind == "kronecker" and "squares" in new else None
            self.follow(key, next(iter(new.values()), None))
            average = self.averages.setdefault(key, Average())
            if not average.joins(new, ema, pairs, plain=damping.referenced):
                average.update(new, ema, plain=damping.referenced)
            if squares is not None:
                self.correct(key, squares, ema, value)
        if pairs:
            torch._foreach_lerp_([v for v, _ in pairs], [n for _, n in pairs], 1 - ema)

    def precondition(
        self,
        parameters: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        low: Mapping[Key, Callable[[Inverse], Sequence[Tensor]]],
    ) -> dict[str, Tensor]:
        """F̂⁻¹g block by block; the gradient itself where a parameter has no block.

        Args:
            parameters: all of the model's, by name.
            wanted: those with a gradient; where a partner has none, its gradient counts as zero.
            low: blocks whose gradient is at hand in factors.
        """
        for key in self.inverses:
            self.follow(key, parameters[key.names[0]], dtype=False)
        if self._groups is None:
            self._groups = self._grouped()
        out = {n: p.grad for n, p in wanted.items() if p.grad is not None}
        found: dict[str, Tensor] = {}
        for group in self._groups:
            if not low.keys().isdisjoint(group.keys):  # the others of the group by themselves
                for key in group.keys:
                    one = Group({key: self.inverses[key]}, {key: self.shape(key)[0]})
                    if key not in low:
                        found |= one(parameters, self.shape(key)[1])
            elif any(n in wanted for k in group.keys for n in k.names):
                found |= group(parameters, self.shape(group.keys[0])[1])
        for key, inverse in self.inverses.items():
            if key in low:
                found |= dict(zip(key.names, low[key](inverse), strict=True))
            elif inverse.scale is not None:
                found |= turned(key, inverse, parameters, self.shape(key)[0])
        return {n: found.get(n, g) for n, g in out.items()}

    def _grouped(self) -> list[Group]:
        """The inverses by kind; eigenbases go one by one."""
        kinds: dict[tuple[object, ...], dict[Key, Inverse]] = {}
        for key, inverse in self.inverses.items():
            if inverse.scale is None:
                apart = key if inverse.alone else None
                kinds.setdefault((key.kind, apart, *inverse.kind), {})[key] = inverse
        shapes = {k: self.shape(k)[0] for k in self.inverses}
        return [Group(members, shapes) for members in kinds.values()]

    def block(self, key: Key) -> Block:
        """The Gram of a block, without damping."""
        return block_of(key, self.averages[key].corrected())

    def corrected(self, key: Key) -> Block:
        """The same with corrected eigenvalues, where they are known."""
        if key not in self.corrections:
            return self.block(key)
        held = self.inverses[key]
        return Rotated(held.left, held.right, self.corrections[key].corrected()["values"])

    def shape(self, key: Key) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a block's coordinates."""
        held = self.averages[key].value
        if key.kind != "kronecker":
            squares = held["squares"]
            return tuple(squares.shape[:2]), squares.dtype
        sizes: dict[str, int] = {"left": 0, "right": 0}
        for name, side in held.items():
            first, end = name.rpartition(".")[0].endswith(".first"), name.rpartition(".")[2]
            which = "left" if first == (end == "inputs") else "right"
            sizes[which] = max(sizes[which], side.shape[-1])
        some = next(iter(held.values()))
        return (len(some), sizes["left"], sizes["right"]), some.dtype

    def drop(self, key: Key) -> None:
        """Forget a block whose parameters belong to another one now."""
        for held in (self.averages, self.inverses, self.corrections, self.notes):
            held.pop(key, None)
        self._groups = None

    def memory(self) -> dict[str, int]:
        """Bytes held, by what for."""
        averages = [a for x in self.averages.values() for a in (x.value, x.mean or {})]
        return {
            "averages": sum(t.nbytes for held in averages for t in held.values()),
            "inverses": sum(
                t.nbytes
                for x in self.inverses.values()
                for t in x.tensors().values()
                if t is not None
            ),
        }

    def reference(self, key: Key, damping: Damping) -> Pair | None:
        """Long-run averages of a block's sides."""
        given = getattr(damping, "reference", None)
        average = self.averages[key]
        held = given.get(key) if given is not None else average.mean
        block = None if held is None else block_of(key, held)
        return block if isinstance(block, Pair) else None

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
        pairs: dict[Key, Pair] = {}
        for key in keys:
            self.notes.pop(key, None)
            block = self.block(key)
            if isinstance(block, Pair):
                pairs[key] = block
            else:
                assert isinstance(block, Units)
                self._accept(key, Inverse(block.inverse(value)))
        if damping.exact or eigen:
            for key, pair in pairs.items():
                self._decompose(key, pair, value)
        else:
            self._cholesky(damping, value, pairs, once)

    def _cholesky(self, damping: Damping, value: float, pairs: dict[Key, Pair], once: bool) -> None:
        waiting = dict(pairs)
        singular = value == 0 or damping.referenced
        for attempt in range(_TRIES):
            now = value * _GROWTH**attempt
            refs = {k: self.reference(k, damping) for k in waiting} if damping.referenced else {}
            damped = {
                k: damping.sides(p, refs.get(k), now, spare=self.averages[k].mass != 1.0)
                for k, p in waiting.items()
            }
            every = [side for both in damped.values() for side in both]
            # without damping, or with an invariant one, a singular side is inverted on its range
            factors = once and not singular
            found = inverses(every, singular=singular, factors=factors)
            for i, key in enumerate(list(waiting)):
                if found.failed[2 * i] or found.failed[2 * i + 1]:
                    continue
                both = found.sides[2 * i], found.sides[2 * i + 1]
                made = Inverse(*both, factors=True) if factors else Inverse.of_sides(key, *both)
                self._accept(key, made)
                self._report(key, attempt, now, found.ranks[2 * i], found.ranks[2 * i + 1])
                del waiting[key]
            if not waiting or value == 0:
                break
            for key in waiting:  # the sides may have been overwritten
                block = self.block(key)
                assert isinstance(block, Pair)
                waiting[key] = block
        for key in waiting:
            kept = "the last good inverse stays" if key in self.inverses else "it has none yet"
            self.notes[key] = f"its sides could not be inverted; {kept}"

    def _report(
        self, key: Key, attempt: int, now: float, left: Tensor | None, right: Tensor | None
    ) -> None:
        if attempt:
            self.notes[key] = f"its damping was raised to {now:.3g} to invert it"
        for name, rank in (("output", left), ("input", right)):
            if rank is not None:
                self.notes[key] = (
                    f"its {name} side is singular: rank {int(rank.min())}, inverted on its range"
                )

    def _decompose(self, key: Key, pair: Pair, value: float) -> None:
        try:
            (rows, u), (columns, w) = sides.eigen(pair.left), sides.eigen(pair.right)
        except torch.linalg.LinAlgError:
            self.notes[key] = "its eigenvalues were not found; the last good inverse stays"
            return
        values = rows[..., None] * columns[:, None]
        self.corrections.pop(key, None)  # of the old eigenbasis
        self._accept(key, Inverse(u, w, scale=_reciprocal(values, value)))

    def correct(self, key: Key, values: Tensor, ema: float, damping: float) -> None:
        """Eigenvalues from second moments of the gradient in the eigenbases (EKFAC)."""
        average = self.corrections.setdefault(key, Average())
        average.update({"values": values}, ema, plain=False)
        held = self.inverses[key]
        held.scale = _reciprocal(average.corrected()["values"], damping)

    def _accept(self, key: Key, inverse: Inverse) -> None:
        self.inverses[key] = inverse
        self._groups = None

    def state_dict(self) -> dict[str, Any]:
        """Everything, to resume to the same bits."""
        return {
            "blocks": [
                {
                    "key": (key.kind, key.names, key.bias),
                    "average": vars(average),
                    "inverse": vars(inv) if (inv := self.inverses.get(key)) else None,
                    "correction": vars(c) if (c := self.corrections.get(key)) else None,
                    "note": self.notes.get(key),
                }
                for key, average in self.averages.items()
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state."""
        self.__init__()
        for item in state["blocks"]:
            kind, names, bias = item["key"]
            key = Key(kind, tuple(names), bias)
            self.averages[key] = Average(**item["average"])
            if item["inverse"] is not None:
                self.inverses[key] = Inverse(**item["inverse"])
            if item["correction"] is not None:
                self.corrections[key] = Average(**item["correction"])
            if item["note"] is not None:
                self.notes[key] = item["note"]

    def follow(self, key: Key, like: Tensor | None, *, dtype: bool = True) -> None:
        """Move a block to where its parameters are now, and to the dtype of their statistics."""
        average = self.averages.get(key)
        if average is None or not average.value or like is None:
            return
        held = next(iter(average.value.values()))
        to = (like.device, like.dtype if dtype else held.dtype)
        if (held.device, held.dtype) == to:
            return
        average.moved(*to)
        if key in self.corrections:
            self.corrections[key].moved(*to)
        if (inverse := self.inverses.get(key)) is not None:
            self.inverses[key] = inverse.moved(*to)
            self._groups = None


def _reciprocal(values: Tensor, damping: float) -> Tensor:
    if damping == 0:
        keep = sides.cut(values.flatten(1)).view_as(values)
        return torch.where(keep, 1 / values, 0.0)
    return 1 / (values + damping)
