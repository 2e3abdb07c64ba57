r"""What gradients are multiplied by: inverse blocks.

With weight V, bias b and the inverse right side [P q; qᵀ s] of a joint block,

    U = R⁻¹V,  u = R⁻¹b:        weight  U P + u qᵀ,        bias  U q + u s,

so that no odd matrix with the bias as one more column is formed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....grams.kronecker import sides
from ....grams.kronecker.blocks import rotated
from ..statistics.sums import Key
from .layout import arranged, scattered


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
        return {n: t for n, t in vars(self).items() if not isinstance(t, bool)}

    @property
    def dtype(self) -> torch.dtype:
        """Of the gradients that it is applied to."""
        return next(t.dtype for t in self.tensors().values() if t is not None)

    def widened(self) -> Inverse:
        """The same with sides that can be multiplied by as they are."""
        return self

    def moved(self, *to: Any) -> Inverse:
        """The same on another device or in another dtype."""
        there = {n: None if t is None else t.to(*to) for n, t in self.tensors().items()}
        return Inverse(**there, factors=self.factors)

    def renewals(self, other: Inverse) -> list[tuple[Tensor, Tensor]] | None:
        """What to copy where, to take over another one's values in the same memory."""
        if self.kind != other.kind:
            return None
        pairs = zip(self.tensors().values(), other.tensors().values(), strict=True)
        found = [(held, new) for held, new in pairs if held is not None and new is not None]
        return found if all(held.shape == new.shape for held, new in found) else None

    @property
    def kind(self) -> tuple[object, ...]:
        """Inverses of the same kind are applied together."""
        held = vars(self).values()
        shapes = [(*t.shape[1:], t.dtype, t.device) if isinstance(t, Tensor) else t for t in held]
        return (type(self), *shapes)

    @property
    def alone(self) -> bool:
        """Whether it is large enough to be applied by itself: on a CPU stacks are but copies."""
        first = self.left
        return first is not None and not first.is_cuda and first.ndim == 3 and first.shape[1] > 64


def applied_to_units(inverse: Inverse, x: Tensor, out: Tensor | None) -> Tensor:
    """Σ_j m_ij g_j for gains and shifts (k, U) of all units."""
    m = inverse.left
    assert m is not None
    if len(x) == 1:
        return torch.mul(m[:, 0].T, x, out=out)
    return torch.sum(m.permute(1, 2, 0) * x, 1, out=out)


def applied(
    inverse: Inverse,
    v: Tensor,
    b: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    tall: Tensor | None = None,
) -> list[Tensor]:
    """R⁻¹[V b]C⁻¹ for V (G, O, I) and b (G, O), in given memory where there is some.

    With `tall` = [P; qᵀ; 0], (G, I + 1 or more, I), the weight is [U u 0] times that.
    """
    left, right = inverse.left, inverse.right
    assert left is not None
    assert right is not None
    if b is not None and tall is not None:
        return _applied_tall(inverse, v, b, weight, bias, tall)
    v = left[..., None] * v if sides.is_diagonal(left) else torch.bmm(left, v)
    diagonal = sides.is_diagonal(right)
    if b is None:
        if diagonal:
            return [torch.mul(v, right[:, None], out=weight)]
        return [torch.bmm(v, right, out=weight)]
    q, s = inverse.border, inverse.corner
    assert q is not None
    assert s is not None
    b = left * b if sides.is_diagonal(left) else torch.bmm(left, b[..., None])[..., 0]
    if diagonal:
        return [torch.mul(v, right[:, None], out=weight), torch.mul(b, s[:, None], out=bias)]
    weight = torch.bmm(v, right, out=weight).addcmul_(b[..., None], q[:, None])
    bias = torch.addcmul(torch.bmm(v, q[..., None])[..., 0], b, s[:, None], out=bias)
    return [weight, bias]


def _applied_tall(
    inverse: Inverse,
    v: Tensor,
    b: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    tall: Tensor,
) -> list[Tensor]:
    """The same without a pass over the weight for u qᵀ."""
    left, q, s = inverse.left, inverse.border, inverse.corner
    assert left is not None
    assert q is not None
    assert s is not None
    n = v.shape[-1]
    both = v.new_empty(*v.shape[:2], tall.shape[1])
    inner, last, rest = both[..., :n], both[..., n : n + 1], both[..., n + 1 :]
    rest.zero_()
    if sides.is_diagonal(left):
        torch.mul(left[..., None], v, out=inner)
        torch.mul(left, b, out=last[..., 0])
    else:
        torch.bmm(left, v, out=inner)
        torch.bmm(left, b[..., None], out=last)
    bias = torch.addcmul(torch.bmm(inner, q[..., None])[..., 0], last[..., 0], s[:, None], out=bias)
    return [torch.bmm(both, tall, out=weight), bias]


def bordered(inverse: Inverse) -> bool:
    """Whether a right side and its border are one factor: products on a GPU leave no pass free."""
    right = inverse.right
    if inverse.border is None or right is None or inverse.factors:
        return False
    return right.is_cuda and not sides.is_diagonal(right)


def solved(inverse: Inverse, v: Tensor, b: Tensor | None) -> list[Tensor]:
    """The same with Cholesky factors; a diagonal side is its reciprocal."""
    left, right = inverse.left, inverse.right
    assert left is not None
    assert right is not None
    # a copy, row by row: both sides are solved for in its memory
    v = (
        v.clone(memory_format=torch.contiguous_format)
        if b is None
        else torch.cat([v, b[..., None]], 2)
    )
    if sides.is_diagonal(left):
        v.mul_(left[..., None])
    else:
        torch.linalg.solve_triangular(left, v, upper=False, out=v)
        torch.linalg.solve_triangular(left.mT, v, upper=True, out=v)
    if sides.is_diagonal(right):
        v.mul_(right[:, None])
    else:
        torch.linalg.solve_triangular(right.mT, v, upper=True, left=False, out=v)
        torch.linalg.solve_triangular(right, v, upper=False, left=False, out=v)
    return [v] if b is None else [v[..., :-1], v[..., -1]]


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
