"""Inverse blocks of one kind, applied together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..statistics.sums import Key
from .inverse import Inverse, applied, applied_to_units, solved
from .layout import refuse_shape


class Group:
    """Inverses of one kind, stacked; the members' tensors become views of the stack."""

    def __init__(
        self, members: Mapping[Key, Inverse], shapes: Mapping[Key, tuple[int, ...]]
    ) -> None:
        self.keys = list(members)
        self.names = [n for k in self.keys for n in k.names]
        self._shapes = [shapes[k] for k in self.keys]
        self._counts = [shape[0] for shape in self._shapes]
        self._fit: dict[str, torch.Size] = {}
        if len(members) == 1:
            self._all = next(iter(members.values()))
            for name, tensor in self._all.tensors().items():
                if tensor is not None and tensor.is_cuda:  # where products of parts are slower
                    setattr(self._all, name, tensor.contiguous())
            return
        stacked: dict[str, Tensor | None] = {}
        for name in ("left", "right", "border", "corner"):
            pieces = [getattr(m, name) for m in members.values()]
            if pieces[0] is None:
                stacked[name] = None
                continue
            whole = torch.cat(pieces)
            stacked[name] = whole
            for member, piece in zip(members.values(), whole.split(self._counts), strict=True):
                setattr(member, name, piece)
        self._all = Inverse(**stacked, factors=next(iter(members.values())).factors)

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
        """Of the inverses."""
        return self._some.dtype

    @property
    def _some(self) -> Tensor:
        return next(t for t in self._all.tensors().values() if t is not None)

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
        some, out = self._some, []
        for role in range(self._roles):
            pieces = []
            for i, key in enumerate(self.keys):
                g = gradients.get(key.names[role])
                if g is None:
                    pieces.append(some.new_zeros(self._shape(i, role)))
                else:
                    pieces.append(g.to(some.dtype).reshape(self._shape(i, role)))
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
        if self._all.factors:
            return solved(self._all, v, b)
        return applied(self._all, v, b, *out)
