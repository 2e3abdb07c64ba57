r"""A step on the slice of equal norms with its retraction, from three numbers per parameter.

With q = |w|², d = ⟨w, g⟩ and e = |g|² of each parameter, the gradient on the slice is g + c_k w in
a layer k (`directions`), and

    w ← f (a w − η g),    a = 1 − η(c_k + decay),    |a w − η g|² = a²q − 2aη d + η²e.

So the retraction's factors f are known before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .directions import dot, finite, owners
from .layer_sweep import LayerSweep


class LayerStep:
    """Steps of plain SGD, without momentum, on the layers of an `EqualNorm` slice.

    Args:
        sweep: the slice's retraction.
        layers: for each connected set of layers the names of each layer's parameters.
        params: by name; moved in place.
    """

    def __init__(
        self,
        sweep: LayerSweep,
        layers: Sequence[Sequence[Sequence[str]]],
        params: Mapping[str, Tensor],
    ) -> None:
        self._sweep, self.names = sweep, sweep.names
        self.params = [params[n] for n in self.names]
        dtype, device = sweep.dtype, self.params[0].device
        chains = tuple(tuple(tuple(names) for names in chain) for chain in layers)
        self._owners = [owners(chain, tuple(self.names), dtype, device) for chain in chains]

    @property
    def dtype(self) -> torch.dtype:
        """In which the numbers are computed."""
        return self._sweep.dtype

    def run(
        self, kind: str, gradients: Mapping[str, Tensor], rates: Tensor, decays: Tensor
    ) -> None:
        """Move all parameters; `rates` and `decays` are those of each parameter, (P,)."""
        dtype = self.dtype
        ws = [w.detach() for w in self.params]
        gs = [gradients[n].to(w.dtype) for n, w in zip(self.names, ws, strict=True)]
        low = torch.float32 if ws[0].element_size() < 4 else None
        q, e = (
            torch.stack([x.to(dtype) for x in torch._foreach_norm(ts, 2, low)]).square()
            for ts in (ws, gs)
        )
        d = torch.stack([dot(w, g, low or w.dtype) for w, g in zip(ws, gs, strict=True)]).to(dtype)
        a = 1 - rates * (self._pull(kind, q, d + decays * q) + decays)
        squares = (a * a * q - 2 * a * rates * d + rates * rates * e).clamp_min(0)
        f = self._sweep.factors(squares)
        of_w, of_g = (a * f).unbind(), (-rates * f).unbind()
        for w, g, s, c in zip(ws, gs, of_w, of_g, strict=True):
            w.mul_(s.to(w.dtype)).addcmul_(g, c.to(w.dtype))

    def _pull(self, kind: str, q: Tensor, d: Tensor) -> Tensor:
        """c of each parameter's layer, (P,)."""
        total = torch.zeros_like(q)
        for owner in self._owners:
            sizes = (owner @ q).sqrt()
            inverse = torch.where(sizes > 0, 1 / sizes, 0.0)
            rho = (owner @ d) * inverse
            radial = rho.mean() if kind == "riemannian" else rho.sum()
            total = total + owner.mT @ finite((radial - rho) * inverse)
        return total
