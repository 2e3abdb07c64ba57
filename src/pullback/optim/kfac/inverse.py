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

from ...grams.kronecker import sides
from ...grams.kronecker.blocks import rotated
from .layout import arranged, refuse_shape, scattered
from .sums import Key


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
        return cls(left, right[:, :-1, :-1], right[:, :-1, -1], right[:, -1, -1])

    def tensors(self) -> dict[str, Tensor | None]:
        """All that is held."""
        return {n: t for n, t in vars(self).items() if n != "factors"}

    def moved(self, *to: Any) -> Inverse:
        """The same on another device or in another dtype."""
        there = {n: None if t is None else t.to(*to) for n, t in self.tensors().items()}
        return Inverse(**there, factors=self.factors)

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
        self._shapes = shapes
        if len(members) == 1:
            self._all = next(iter(members.values()))
            for name, tensor in self._all.tensors().items():
                if tensor is not None and tensor.is_cuda:  # where products of parts are slower
                    setattr(self._all, name, tensor.contiguous())
            return
        counts = [shapes[k][0] for k in self.keys]
        stacked: dict[str, Tensor | None] = {}
        for name in ("left", "right", "border", "corner"):
            pieces = [getattr(m, name) for m in members.values()]
            if pieces[0] is None:
                stacked[name] = None
                continue
            whole = torch.cat(pieces)
            stacked[name] = whole
            for member, piece in zip(members.values(), whole.split(counts), strict=True):
                setattr(member, name, piece)
        self._all = Inverse(**stacked, factors=next(iter(members.values())).factors)

    def __call__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The directions of all members, by name."""
        gradients = {k: [_gradient(parameters[n], dtype) for n in k.names] for k in self.keys}
        if self.keys[0].kind != "kronecker":
            return self._units(gradients, parameters)
        counts = [self._shapes[k][0] for k in self.keys]
        weights = [_weight(k, g[0], self._shapes[k]) for k, g in gradients.items()]
        biases = [g[1].reshape(self._shapes[k][0], -1) for k, g in gradients.items() if k.joint]
        v = weights[0] if len(weights) == 1 else torch.cat(weights)
        b = None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases)
        weight, bias = (solved if self._all.factors else applied)(self._all, v, b)
        out = {}
        for key, w in zip(self.keys, weight.split(counts), strict=True):
            out[key.names[0]] = w.reshape(parameters[key.names[0]].shape)
        if bias is not None:
            for key, s in zip(self.keys, bias.split(counts), strict=True):
                out[key.names[1]] = s.reshape(parameters[key.names[1]].shape)
        return out

    def _units(
        self, gradients: Mapping[Key, Sequence[Tensor]], parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Entry by entry: Σ_j m_ij g_j for gains and shifts of all units at once."""
        counts = [self._shapes[k][0] for k in self.keys]
        for key, found in gradients.items():
            refuse_shape(key, (found[0].numel(), len(found)), self._shapes[key])
        roles = range(len(self.keys[0].names))
        flat = [torch.cat([g[j].flatten() for g in gradients.values()]) for j in roles]
        m = self._all.left
        assert m is not None
        out = {}
        for i in roles:
            total = sum((m[:, i, j] * flat[j] for j in roles[1:]), m[:, i, 0] * flat[0])
            for key, piece in zip(self.keys, total.split(counts), strict=True):
                out[key.names[i]] = piece.view(parameters[key.names[i]].shape)
        return out


def _gradient(p: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(p, dtype=dtype) if p.grad is None else p.grad.to(dtype)


def _weight(key: Key, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(G, O, I), without the bias."""
    alone = Key(key.kind, key.names[:1], key.bias)
    return arranged(alone, [gradient], (*shape[:2], shape[2] - key.joint))


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
    weight = torch.baddbmm(b[..., None] * q[:, None], v, right)
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
    key: Key, inverse: Inverse, parameters: Mapping[str, Tensor], shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """The same in eigenbases: U (scale ∘ UᵀVW) Wᵀ."""
    assert inverse.scale is not None
    like = [parameters[n] for n in key.names]
    v = arranged(key, [_gradient(p, inverse.scale.dtype) for p in like], shape)
    v = rotated(inverse.left, v, inverse.right) * inverse.scale
    found = scattered(key, rotated(inverse.left, v, inverse.right, back=True), like)
    return dict(zip(key.names, found, strict=True))
