r"""The K-FAC metric of a model as it is known so far: averages per block, and their inverses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....grams.kronecker import Block, Rotated
from ..statistics.sums import Key
from .averages import Average
from .damping import Damping
from .entering import Entering, Unsure, take_up
from .group import Group
from .inverse import Inverse, turned
from .inversion import Inversion
from .rounded import Rounded


class Curvature(Inversion):
    """Averages and inverses of all blocks."""

    def __init__(self) -> None:
        self.averages: dict[Key, Average] = {}
        self.inverses: dict[Key, Inverse] = {}
        #: second moments of the gradient in the eigenbases, where these are asked for
        self.corrections: dict[Key, Average] = {}
        #: what went wrong in the last inversion, by block
        self.notes: dict[Key, str] = {}
        #: whether inverses stay where they are in memory, because kernels were recorded there
        self.fixed = False
        self._groups: list[Group] | None = None
        #: where the last statistics entered
        self._entering: Entering | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A pickle does not keep that averages and inverses are views of common memory."""
        return {**vars(self), "_groups": None, "_entering": None, "fixed": False}

    def take(
        self, found: Mapping[Key, dict[str, Tensor]], ema: float, damping: Damping, value: float
    ) -> None:
        """One more set of statistics into the averages."""
        damping.refuse(found)
        holders = {n: k for k in self.averages for n in k.names}
        for key in found:
            for old in {holders[n] for n in key.names if holders.get(n, key) != key}:
                if old in self.averages:
                    self.drop(old)  # a bias was frozen, say, and the weight is by itself now
        pairs: list[tuple[Average, dict[str, Tensor]]] = []
        for key, new in found.items():
            squares = new.pop("squares") if key.kind == "kronecker" and "squares" in new else None
            self.follow(key, next(iter(new.values()), None))
            pairs.append((self.averages.setdefault(key, Average()), new))
            if squares is not None:
                self.correct(key, squares, ema, value)
        plain = damping.referenced
        self._entering = take_up(pairs, ema, plain=plain, last=self._entering)

    def unsure(self, found: Mapping[Key, dict[str, Tensor]]) -> Unsure | None:
        """The same left to the device, if averages of just such statistics are held already."""
        known = [average for key in found if (average := self.averages.get(key)) is not None]
        if len(known) < len(found):
            return None
        met = Entering.of(list(zip(known, found.values(), strict=True)), self._entering)
        if met is None:
            return None
        self._entering, new = met
        return Unsure(known, self._entering, new) if self._entering.alike(new) else None

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
        self.follow_all(parameters)
        gradients = {n: p.grad for n, p in wanted.items() if p.grad is not None}
        found: dict[str, Tensor] = {}
        for group in self.groups:
            if low and not low.keys().isdisjoint(group.keys):  # the others by themselves
                for key in group.keys:
                    if key not in low:
                        own, shapes = {key: self.inverses[key]}, {key: self.shape(key)[0]}
                        found |= Group(own, shapes, passing=True)(gradients, parameters)
            elif any(n in gradients for n in group.names):
                found |= group(gradients, parameters)
        for key, direction in low.items():
            found |= dict(zip(key.names, direction(self.inverses[key]), strict=True))
        for key in self.turned_keys:
            if key not in low:
                found |= self.turn(key, gradients, parameters)
        return {n: found.get(n, g) for n, g in gradients.items()}

    def follow_all(self, parameters: Mapping[str, Tensor]) -> None:
        """Move every block to where its parameters are now."""
        for key in self.inverses:
            self.follow(key, parameters[key.names[0]], dtype=False)

    @property
    def groups(self) -> list[Group]:
        """The inverses that are applied together; a new list where their memory has changed."""
        if self._groups is None:
            self._groups = self._grouped()
        return self._groups

    @property
    def complete(self) -> bool:
        """Whether every block has an inverse."""
        return len(self.inverses) == len(self.averages)

    @property
    def turned_keys(self) -> list[Key]:
        """Blocks held by their eigenbases."""
        return [k for k, inverse in self.inverses.items() if inverse.scale is not None]

    def turn(
        self, key: Key, gradients: Mapping[str, Tensor], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The directions of such a block."""
        return turned(key, self.inverses[key], gradients, like, self.shape(key)[0])

    def _grouped(self) -> list[Group]:
        """The inverses by kind; eigenbases go one by one."""
        kinds: dict[tuple[object, ...], dict[Key, Inverse]] = {}
        for key, inverse in self.inverses.items():
            if inverse.scale is None:
                apart = key if inverse.alone else None
                kinds.setdefault((key.kind, apart, *inverse.kind), {})[key] = inverse
        shapes = {k: self.shape(k)[0] for k in self.inverses}
        return [Group(members, shapes) for members in kinds.values()]

    def corrected(self, key: Key) -> Block:
        """The same with corrected eigenvalues, where they are known."""
        if key not in self.corrections:
            return self.block(key)
        held = self.inverses[key]
        left, right = (None if t is None else t.clone() for t in (held.left, held.right))
        return Rotated(left, right, self.corrections[key].corrected()["values"])

    def shape(self, key: Key) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a block's coordinates."""
        held, dtype = self.averages[key].shapes, self.averages[key].memory[0].dtype
        if key.kind != "kronecker":
            return tuple(held["squares"][:2]), dtype
        sizes: dict[str, int] = {"left": 0, "right": 0}
        for name, shape in held.items():
            first, end = name.rpartition(".")[0].endswith(".first"), name.rpartition(".")[2]
            which = "left" if first == (end == "inputs") else "right"
            sizes[which] = max(sizes[which], shape[-1])
        return (next(iter(held.values()))[0], sizes["left"], sizes["right"]), dtype

    def drop(self, key: Key) -> None:
        """Forget a block whose parameters belong to another one now."""
        for held in (self.averages, self.inverses, self.corrections, self.notes):
            held.pop(key, None)
        self._groups = self._entering = None

    def kept(self, *, averages: bool) -> dict[str, dict[Key, Any]]:
        """What `restore` goes back to; averages are copied only if they are going to change."""
        held = {n: dict(getattr(self, n)) for n in ("averages", "inverses", "corrections", "notes")}
        copied = copy.deepcopy if self.fixed else copy.copy  # renewed in place, or replaced
        held["inverses"] = {k: copied(inverse) for k, inverse in self.inverses.items()}
        for name in ("averages", "corrections") if averages else ():
            held[name] = {k: copy.deepcopy(average) for k, average in held[name].items()}
        return held

    def restore(self, held: Mapping[str, Mapping[Key, Any]]) -> None:
        """Go back to what was kept."""
        for name, own in held.items():
            now = getattr(self, name)  # others hold the dict itself
            now.clear()
            now.update(own)
        self._groups = self._entering = None

    def memory(self) -> dict[str, int]:
        """Bytes held, by what for."""
        return {
            "averages": sum(t.nbytes for x in self.averages.values() for t in x.memory),
            "inverses": sum(
                t.nbytes
                for x in self.inverses.values()
                for t in x.tensors().values()
                if t is not None
            ),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything, to resume to the same bits."""
        return {
            "blocks": [
                {
                    "key": (key.kind, key.names, key.bias),
                    "average": average.state_dict(),
                    "inverse": vars(inv) if (inv := self.inverses.get(key)) else None,
                    "correction": c.state_dict() if (c := self.corrections.get(key)) else None,
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
                own = item["inverse"]
                self.inverses[key] = (Rounded if "rows" in own else Inverse)(**own)
            if item["correction"] is not None:
                self.corrections[key] = Average(**item["correction"], symmetric=False)
            if item["note"] is not None:
                self.notes[key] = item["note"]

    def follow(self, key: Key, like: Tensor | None, *, dtype: bool = True) -> None:
        """Move a block to where its parameters are now, and to the dtype of their statistics."""
        average = self.averages.get(key)
        if average is None or not average.memory or like is None:
            return
        held = average.memory[0]
        to = (like.device, like.dtype if dtype else held.dtype)
        if (held.device, held.dtype) == to:
            return
        average.moved(*to)
        self._entering = None
        if key in self.corrections:
            self.corrections[key].moved(*to)
        if (inverse := self.inverses.get(key)) is not None:
            self.inverses[key] = inverse.moved(*to)
            self._groups = None
