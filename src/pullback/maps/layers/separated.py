r"""The Gram of rows Σ_t δ_t ⊗ ā_t where covectors and places separate: δ_rto = v_ro g_to.

So it is before an activation whose outputs are added up over places and read out linearly: v is the
read-out, g the activation's derivative. The row is v_ro M_oi with M_oi = Σ_t g_to ā_ti, and

    K_rr' = Σ_o v_ro v'_r'o (M_o · M'_o),

one product of length I for all R·R' pairs of covectors, where rows take one for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from ..._core.products import cross

_CACHE = 2**21  # products M_o·M'_o held at once on a CPU
_PASS = 2**19  # cotangents looked at once there


@dataclass(frozen=True)
class Separated:
    """v (R, O) and g (N, T, O)."""

    v: Tensor
    g: Tensor

    @classmethod
    def of(cls, delta: Tensor, *, hopeful: bool = False) -> Separated | None:
        """The factors of cotangents (N, R, T, O), where they have them up to rounding.

        Unless there is hope, a few are looked at first, which show it already if they have none.
        """
        few = delta[:2, :, :2]
        if not hopeful and few.shape != delta.shape and _factors(few) is None:
            return None
        return _factors(delta)

    def moments(self, inputs: Tensor, heights: Tensor | None) -> Tensor:
        """M (O, N, I), with the bias (O, N, I + 1), for inputs (N, T, I)."""
        m = torch.bmm(self.g.mT, inputs)
        if heights is not None:
            m = torch.cat([m, torch.einsum("nto,t->no", self.g, heights)[..., None]], 2)
        return m.transpose(0, 1).contiguous()


def _factors(delta: Tensor) -> Separated | None:
    """v from each feature's largest cotangents, g by least squares, and the proof."""
    n, r, t, o = delta.shape
    some = max(1, _PASS // (n * t * o)) if delta.device.type == "cpu" else r
    parts = delta.split(some, 1)
    sizes = reduce(torch.maximum, (p.abs().amax(1) for p in parts))
    largest, place = sizes.flatten(0, 1).max(0)  # (O,) over samples and places
    v = delta[place // t, :, place % t, torch.arange(o, device=delta.device)].T  # (R, O)
    norms = v.square().sum(0)
    weights = (v / torch.where(norms == 0, 1, norms)).split(some)
    shares = ((p * w[:, None]).sum(1) for p, w in zip(parts, weights, strict=True))
    g = reduce(torch.Tensor.add_, shares)
    left = [
        torch.addcmul(p, w[:, None], g[:, None], value=-1).abs_().amax((0, 1, 2))
        for p, w in zip(parts, v.split(some), strict=True)
    ]
    bound = 32 * torch.finfo(delta.dtype).eps * largest
    return Separated(v, g) if bool((torch.stack(left) <= bound).all()) else None


def add_separated(
    out: Tensor, one: tuple[Separated, Tensor], two: tuple[Separated, Tensor], budget: int
) -> None:
    """out += K for factors and moments of both sides, and `out` (N·R, N'·R').

    Where `two` is `one` the lower half is formed.
    """
    (a, m), (b, m2) = one, two
    (o, n, _), n2, r, r2 = m.shape, m2.shape[1], len(a.v), len(b.v)
    pairs = (a.v[:, None] * b.v).flatten(0, 1)  # (R·R', O)
    size = budget // (4 * m.element_size())
    size = min(size, _CACHE) if m.device.type == "cpu" else size
    panel = max(1, size // ((o + r * r2) * n2))
    target = out.view(n, r, n2, r2)
    for start in range(0, n, panel):
        stop = min(start + panel, n)
        end = stop if two is one else n2
        products = torch.bmm(m[:, start:stop], m2[:, :end].mT)  # (O, n, n')
        share = cross(products.flatten(1).T, pairs)
        target[start:stop, :, :end] += share.view(-1, end, r, r2).transpose(1, 2)
