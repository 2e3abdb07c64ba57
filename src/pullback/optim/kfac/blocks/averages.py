"""Averages of statistics over steps, and the Gram blocks that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....grams.kronecker import Block, Pair, Units, merged, sides
from ..statistics.sums import Key
from .entering import begin
from .halves import Half, halved
from .runs import apart


class Average:
    """An exponential moving average with bias correction, and the plain mean beside it.

    Args:
        value: the average, by name.
        mass: the weight of all statistics in it; the rest is that of the empty beginning.
        mean: the plain mean, where it is wanted.
        count: how many sets of statistics there were.
        symmetric: whether matrices in it are, and large ones may be held by halves.
    """

    def __init__(
        self,
        value: Mapping[str, Tensor] | None = None,
        mass: float = 0.0,
        mean: dict[str, Tensor] | None = None,
        count: int = 0,
        *,
        symmetric: bool = True,
    ) -> None:
        self._symmetric = symmetric
        self.value = value or {}
        self.mass, self.mean, self.count = mass, mean, count

    @property
    def value(self) -> dict[str, Tensor]:
        """The average by name, copies of what is held otherwise."""
        return {n: v.whole() if isinstance(v, Half) else v for n, v in self.held.items()}

    @value.setter
    def value(self, value: Mapping[str, Tensor]) -> None:
        #: the average by name, perhaps in one piece of memory with those of other blocks
        self.held: dict[str, Tensor | Half] = {n: self.as_held(v) for n, v in value.items()}

    def as_held(self, v: Tensor) -> Tensor | Half:
        """How such a part of an average is held."""
        return Half.of(v) if self._symmetric and halved(v) else v

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of the average."""
        return {n: v.shape for n, v in self.held.items()}

    @property
    def memory(self) -> list[Tensor]:
        """All that is held, the average first."""
        own = [v.memory if isinstance(v, Half) else v for v in self.held.values()]
        return [*own, *(self.mean or {}).values()]

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle has memory of its own."""
        held = {
            n: Half(apart(v.memory), v.low) if isinstance(v, Half) else apart(v)
            for n, v in self.held.items()
        }
        return {**vars(self), "held": held}

    def state_dict(self) -> dict[str, Any]:
        """What it is made from."""
        value = {n: apart(v) for n, v in self.value.items()}
        return {"value": value, "mass": self.mass, "mean": self.mean, "count": self.count}

    def update(self, new: Mapping[str, Tensor], ema: float, *, plain: bool) -> None:
        """value ← ema·value + (1 − ema)·new."""
        if not self.fits(new):
            begin([(self, new)], ema)
        else:
            for name, v in new.items():
                held = self.held[name]
                if isinstance(held, Half):
                    held.memory.lerp_(Half.of(v).memory, 1 - ema)
                else:
                    held.lerp_(v, 1 - ema)
        self.count_in(new, ema, plain=plain)

    def clear(self, new: Mapping[str, Tensor]) -> None:
        """Forget all; these themselves are held, to be replaced."""
        self.held = {name: v for name, v in new.items()}
        self.mass, self.mean, self.count = 0.0, None, 0

    def counts(self, ema: float) -> None:
        """One more set of statistics is in the average."""
        self.mass = ema * self.mass + 1 - ema
        self.count += 1

    def count_in(self, new: Mapping[str, Tensor], ema: float, *, plain: bool) -> None:
        """The same, and they are in the plain mean as well where it is wanted."""
        self.counts(ema)
        if not plain:
            return
        if self.mean is None:
            self.mean = self.corrected()
            return
        for name, v in new.items():
            self.mean[name].lerp_(v, 1 / self.count)

    def fits(self, new: Mapping[str, Tensor]) -> bool:
        """Whether they are of the same names and shapes."""
        held = self.held
        return held.keys() == new.keys() and all([held[n].shape == v.shape for n, v in new.items()])

    def corrected(self) -> dict[str, Tensor]:
        """The average without the weight of the empty beginning, in memory of its own."""
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
