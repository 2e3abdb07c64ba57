r"""What gradients are multiplied by: inverse blocks, those of the same shape together.

With weight V, bias b and the inverse right side [P q; qᵀ s] of a joint block,

    U = R⁻¹V,  u = R⁻¹b:        weight  U P + u qᵀ,        bias  U q + u s,

so that no odd matrix with the bias as one more column is formed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....grams.kronecker import sides
from ....grams.kronecker.blocks import rotated
from ..statistics.sums import Key
from .layout import arranged, refuse_shape, scattered


@dataclass
class Inverse:
    """The inverse of one block.

    Kronecker blocks have `left` and `right`, (G, n, n) or diagonals, and where the bias is joined
    its `border` q, (G, I), and `corner` s, (G,). With `scale` the sides are eigenvectors instead
    (bias included) and `scale` the reciprocal eigenvalues; with `factors` matrices are lower
    Cholesky factors (bias included) to solve with. Units have `left` alone, (U, k, k).
    """

    left: Tensor | None
    right: Tensor | None = None
    border: Tensor | None = None
    corner: Tensor | None = None
    scale: Tensor | None = None
    factors: bool = False

    @classmethod
    def of_sides(cls, key: Key, left: Tensor, right: Tensor) -> Inverse:
        """From inverse sides, the bias still a coordinate of the right one."""
        if not key.joint:
            return cls(left, right)
        if sides.is_diagonal(right):
            return cls(left, right[:, :-1], torch.zeros_like(right[:, :-1]), right[:, -1])
        return cls(left, right[:, :-1, :-1], right[:, -1, :-1], right[:, -1, -1])

    def tensors(self) -> dict[str, Tensor | None]:
        """All that is held."""
        return {n: t for n, t in vars(self).items() if n != "factors"}

    def moved(self, *to: Any) -> Inverse:
        """The same on another device or in another dtype."""
        there = {n: None if t is None else t.to(*to) for n, t in self.tensors().items()}
        return Inverse(**there, factors=self.factors)

    def renewals(self, other: Inverse) -> list[tuple[Tensor, Tensor]] | None:
        """What to copy where, to take over another one's values in the same memory."""
        pairs = list(zip(self.tensors().values(), other.tensors().values(), strict=True))
        same = all(t is None or u is None or t.shape == u.shape for t, u in pairs)
        if self.kind != other.kind or not same:
            return None
        return [(held, new) for held, new in pairs if held is not None and new is not None]

    @property
    def kind(self) -> tuple[object, ...]:
        """Inverses of the same kind are applied together."""
        held = self.tensors().values()
        shapes = [None if t is None else (*t.shape[1:], t.dtype, t.device) for t in held]
        return (self.factors, *shapes)

    @property
    def alone(self) -> bool:
        """Whether it is large enough to be applied by itself: on a CPU stacks are but copies."""
        first = self.left
        return first is not None and not first.is_cuda and first.ndim == 3 and first.shape[1] > 64


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
        return self.apply(self.stack(gradients, like), like)

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

    def stack(self, gradients: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> list[Tensor]:
        """The members' gradients, one stack per role; a missing one is zero."""
        self.check(like)
        some = next(t for t in self._all.tensors().values() if t is not None)
        out = []
        for role in range(self._roles):
            pieces = []
            for i, key in enumerate(self.keys):
                g = gradients.get(key.names[role])
                if g is None:
                    pieces.append(some.new_zeros(self._shape(i, role)))
                else:
                    pieces.append(g.to(some.dtype).reshape(self._shape(i, role)))
            out.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        return out

    def room(self, like: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Stacks of zeros that gradients can be written to, and their views by name."""
        stacks = self.stack({}, like)
        views = {}
        for role, stack in enumerate(stacks):
            for key, piece in zip(self.keys, stack.split(self._counts), strict=True):
                views[key.names[role]] = piece.view(like[key.names[role]].shape)
        return stacks, views

    def apply(self, stacks: Sequence[Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The directions, from stacked gradients."""
        if self._kronecker:
            v, b = stacks[0], stacks[1] if len(stacks) > 1 else None
            found = (solved if self._all.factors else applied)(self._all, v, b)
        else:
            found = self._units(stacks)
        out = {}
        for role, whole in enumerate(found[: self._roles]):
            assert whole is not None
            pieces = [whole] if len(self.keys) == 1 else whole.split_with_sizes(self._counts)
            for key, piece in zip(self.keys, pieces, strict=True):
                name = key.names[role]
                out[name] = piece.reshape(like[name].shape)
        return out

    def _units(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """Entry by entry: Σ_j m_ij g_j for gains and shifts of all units at once."""
        m = self._all.left
        assert m is not None
        roles = range(len(flat))
        return [sum((m[:, i, j] * flat[j] for j in roles[1:]), m[:, i, 0] * flat[0]) for i in roles]


def applied(inverse: Inverse, v: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """R⁻¹[V b]C⁻¹ for V (G, O, I) and b (G, O)."""
    left, right = inverse.left, inverse.right
    assert left is not None
    assert right is not None
    v = left[..., None] * v if sides.is_diagonal(left) else left @ v
    if b is None:
        return (v * right[:, None] if sides.is_diagonal(right) else v @ right), None
    q, s = inverse.border, inverse.corner
    assert q is not None
    assert s is not None
    b = left * b if sides.is_diagonal(left) else (left @ b[..., None])[..., 0]
    if sides.is_diagonal(right):
        return v * right[:, None], b * s[:, None]
    weight = torch.bmm(v, right).addcmul_(b[..., None], q[:, None])
    return weight, torch.baddbmm((b * s[:, None])[..., None], v, q[..., None])[..., 0]


def solved(inverse: Inverse, v: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The same with Cholesky factors; a diagonal side is its reciprocal."""
    left, right = inverse.left, inverse.right
    assert left is not None
    assert right is not None
    v = v if b is None else torch.cat([v, b[..., None]], 2)
    v = left[..., None] * v if sides.is_diagonal(left) else torch.cholesky_solve(v, left)
    if sides.is_diagonal(right):
        v = v * right[:, None]
    else:
        v = torch.cholesky_solve(v.mT, right).mT
    return (v, None) if b is None else (v[..., :-1], v[..., -1])


def turned(
    key: Key,
    inverse: Inverse,
    gradients: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    shape: tuple[int, ...],
) -> dict[str, Tensor]:
    """The same in eigenbases: U (scale ∘ UᵀVW) Wᵀ."""
    scale = inverse.scale
    assert scale is not None
    zero = scale.new_zeros
    found = [gradients.get(n) for n in key.names]
    given = [
        zero(like[n].shape) if g is None else g.to(scale.dtype)
        for n, g in zip(key.names, found, strict=True)
    ]
    v = rotated(inverse.left, arranged(key, given, shape), inverse.right) * scale
    back = rotated(inverse.left, v, inverse.right, back=True)
    return dict(zip(key.names, scattered(key, back, [like[n] for n in key.names]), strict=True))
