"""Averages of statistics over steps, and the Gram blocks that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....grams.kronecker import Block, Pair, Units, merged, sides
from ..statistics.sums import Key
from .halves import Half, halved


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
        return {n: v.whole() if isinstance(v, Half) else v for n, v in self._held.items()}

    @value.setter
    def value(self, value: Mapping[str, Tensor]) -> None:
        self._held: dict[str, Tensor | Half] = {
            n: Half.of(v) if self._symmetric and halved(v) else v for n, v in value.items()
        }

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Of the average."""
        return {n: v.shape for n, v in self._held.items()}

    @property
    def memory(self) -> list[Tensor]:
        """All that is held, the average first."""
        own = [v.memory if isinstance(v, Half) else v for v in self._held.values()]
        return [*own, *(self.mean or {}).values()]

    def state_dict(self) -> dict[str, Any]:
        """What it is made from."""
        return {"value": self.value, "mass": self.mass, "mean": self.mean, "count": self.count}

    def update(self, new: Mapping[str, Tensor], ema: float, *, plain: bool) -> None:
        """value ← ema·value + (1 − ema)·new."""
        if not self._fits(new):
            self._held, self.mass, self.mean, self.count = {}, 0.0, None, 0
        if not self._held:
            self.value = {n: (1 - ema) * v if ema else v.clone() for n, v in new.items()}
        else:
            for held, v in self.pairs(new):
                held.lerp_(v, 1 - ema)
        self.counts(ema)
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
        if plain or not self._fits(new):
            return False
        pairs += self.pairs(new)
        self.counts(ema)
        return True

    def pairs(self, new: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The memory of what is held, and what is to enter there."""
        both = [(self._held[n], v) for n, v in new.items()]
        return [(h.memory, Half.of(v).memory) if isinstance(h, Half) else (h, v) for h, v in both]

    def counts(self, ema: float) -> None:
        """One more set of statistics is in the average."""
        self.mass = ema * self.mass + 1 - ema
        self.count += 1

    def alike(self, new: Mapping[str, Tensor]) -> bool:
        """Whether they fit and lie in memory as those that are held."""
        if self._held.keys() != new.keys():
            return False
        for name, v in self._held.items():
            w = new[name]
            memory = v.memory if isinstance(v, Half) else v
            if v.shape != w.shape or (memory is v and memory.stride() != w.stride()):
                return False
            if memory.dtype != w.dtype or memory.device != w.device:
                return False
        return True

    def _fits(self, new: Mapping[str, Tensor]) -> bool:
        held = self._held
        return held.keys() == new.keys() and all(held[n].shape == v.shape for n, v in new.items())

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


class Unsure:
    """One more set of statistics in the averages, if the device finds it good.

    The memory of averages that stay is not touched; `undo` makes them what they were.

    Args:
        averages: of all blocks.
        found: statistics of some, for which `fit` holds.
        ema: the weight of the past.
        broken: 1 where they are not to be taken up, a float32 number on the device.
    """

    def __init__(
        self,
        averages: Mapping[Key, Average],
        found: Mapping[Key, Mapping[str, Tensor]],
        ema: float,
        broken: Tensor,
    ) -> None:
        kinds: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
        self._before: list[tuple[Average, float, int]] = []
        for key, new in found.items():
            average = averages[key]
            self._before.append((average, average.mass, average.count))
            average.counts(ema)
            for held, v in average.pairs(new):
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

    @staticmethod
    def fit(averages: Mapping[Key, Average], found: Mapping[Key, Mapping[str, Tensor]]) -> bool:
        """Whether these are the same statistics as before, of which averages are held already."""
        return all(k in averages and averages[k].alike(new) for k, new in found.items())

    def undo(self) -> None:
        """The statistics were not good."""
        for average, mass, count in self._before:
            average.mass, average.count = mass, count


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
