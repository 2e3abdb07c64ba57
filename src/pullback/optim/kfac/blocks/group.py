"""Inverse blocks of one kind, applied together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..statistics.sums import Key
from .inverse import Inverse, applied, applied_to_units, bordered, solved
from .layout import refuse_shape
from .rounded import Rounded

_ALIGNED = 8  # entries that rows of a factor are a multiple of: tensor cores read no others


class Group:
    """Inverses of one kind, stacked; the members' tensors become views of the stack.

    Args:
        members: the inverses, by block.
        shapes: of the blocks' coordinates.
        passing: whether a single one is to be applied once, from where it is.
    """

    def __init__(
        self,
        members: Mapping[Key, Inverse],
        shapes: Mapping[Key, tuple[int, ...]],
        *,
        passing: bool = False,
    ) -> None:
        self.keys = list(members)
        self.names = [n for k in self.keys for n in k.names]
        self._shapes = [shapes[k] for k in self.keys]
        self._counts = [shape[0] for shape in self._shapes]
        self._fit: dict[str, torch.Size] = {}
        every = list(members.values())
        first, alone = every[0], len(every) == 1
        #: right sides, each with its border below it
        self._tall = _tall(every) if bordered(first) and not passing else None
        stacked: dict[str, Tensor] = {}
        for name, some in first.tensors().items():
            if some is None or name == "scale":
                continue
            if self._tall is not None and name in ("right", "border"):
                n = some.shape[-1]
                stacked[name] = self._tall[:, :n] if name == "right" else self._tall[:, n]
            elif not alone:
                stacked[name] = torch.cat([getattr(m, name) for m in every])
            elif some.is_cuda and not passing:  # where products of parts are slower
                stacked[name] = _apart(some)
        for name, whole in stacked.items():
            for member, piece in zip(every, whole.split(self._counts), strict=True):
                setattr(member, name, piece)
        self._all = first if alone else replace(first, **stacked)

    def __call__(
        self, gradients: Mapping[str, Tensor], like: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The directions of all members, by name and in the parameters' shapes."""
        found = self.directions(self._stacked(gradients, like))
        if not self._kronecker:
            found = found[0].unbind(0)
        out = {}
        for role, whole in enumerate(found):
            pieces = [whole] if len(self.keys) == 1 else whole.split_with_sizes(self._counts)
            for key, piece in zip(self.keys, pieces, strict=True):
                name = key.names[role]
                out[name] = piece.reshape(like[name].shape)
        return out

    @property
    def dtype(self) -> torch.dtype:
        """Of what it is applied to."""
        return self._all.dtype

    @property
    def slabs(self) -> list[tuple[list[str], tuple[int, ...]]]:
        """What `directions` takes: whose entries one after the other, and in which shape.

        Weights (B, O, I) and biases (B, O) for B groups of all members; (k, U) for units.
        """
        roles = [[k.names[role] for k in self.keys] for role in range(self._roles)]
        if not self._kronecker:
            return [([n for names in roles for n in names], (self._roles, sum(self._counts)))]
        return [
            (names, (sum(self._counts), *self._shape(0, role)[1:]))
            for role, names in enumerate(roles)
        ]

    @property
    def _roles(self) -> int:
        """Stacks of inputs: weights and biases, or gains and shifts."""
        return len(self.keys[0].names)

    @property
    def _kronecker(self) -> bool:
        return self.keys[0].kind == "kronecker"

    def _shape(self, i: int, role: int) -> tuple[int, ...]:
        """Of one member's share: weights (G, O, I), biases (G, O), and units flat."""
        shape = self._shapes[i]
        if not self._kronecker:
            return shape[:1]
        return shape[:2] if role else (*shape[:2], shape[2] - self.keys[i].joint)

    def check(self, like: Mapping[str, Tensor]) -> None:
        """Raise where a parameter is no longer what its block was built for."""
        for key, shape in zip(self.keys, self._shapes, strict=True):
            for role, name in enumerate(key.names):
                p = like[name]
                if self._fit.get(name) == p.shape:
                    continue
                rows = p.numel() if role or key.bias or not self._kronecker else len(p)
                found = (rows, p.numel() // max(1, rows))
                wide = shape[2] - key.joint if self._kronecker and not role else 1
                high = shape[0] * shape[1] if self._kronecker else shape[0]
                refuse_shape(key, found, (high, wide))
                self._fit[name] = p.shape

    def _stacked(self, gradients: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> list[Tensor]:
        """The members' gradients, as `slabs` says; a missing one is zero."""
        self.check(like)
        dtype, out = self.dtype, []
        some = next(t for t in self._all.tensors().values() if t is not None)
        for role in range(self._roles):
            pieces = []
            for i, key in enumerate(self.keys):
                g = gradients.get(key.names[role])
                if g is None:
                    pieces.append(some.new_zeros(self._shape(i, role), dtype=dtype))
                else:
                    pieces.append(g.to(dtype).reshape(self._shape(i, role)))
            out.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return out if self._kronecker else [torch.stack(out)]

    def directions(
        self, stacks: Sequence[Tensor], out: Sequence[Tensor | None] | None = None
    ) -> Sequence[Tensor]:
        """F̂⁻¹g of stacked gradients, written to `out` where that is given: the same, perhaps."""
        out = [None] * len(stacks) if out is None else out
        if not self._kronecker:
            return [applied_to_units(self._all, stacks[0], out[0])]
        v, b = stacks[0], stacks[1] if len(stacks) > 1 else None
        if isinstance(self._all, Rounded):
            return self._all(v, b, *out)
        if self._all.factors:
            return solved(self._all, v, b)
        return applied(self._all, v, b, *out, tall=self._tall)


def _tall(members: Sequence[Inverse]) -> Tensor:
    """Right sides (B, n, n) and borders (B, n) as (B, n + 1, n), filled up with rows of zeros."""
    rights = [m.right for m in members if m.right is not None]
    borders = [m.border for m in members if m.border is not None]
    n, count = rights[0].shape[-1], sum(len(r) for r in rights)
    out = rights[0].new_zeros(count, -(-(n + 1) // _ALIGNED) * _ALIGNED, n)
    torch.cat(rights, out=out[:, :n])
    torch.cat(borders, out=out[:, n])
    return out


def _apart(t: Tensor) -> Tensor:
    """In order, and without the memory of others that it was a part of."""
    whole = t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes
    return t if whole else t.clone(memory_format=torch.contiguous_format)
