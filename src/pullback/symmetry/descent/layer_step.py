r"""A step on the slice of equal norms with its retraction, from three numbers per parameter.

With q = |w|², d = ⟨w, g⟩ and e = |g|² of each parameter, the gradient on the slice is g + c_k w in
a layer k (`directions`), and

    w ← f (a w − η g),    a = 1 − η(c_k + decay),    |a w − η g|² = a²q − 2aη d + η²e.

So the retraction's factors f are known before anything is written: w and g are read twice, and w is
multiplied and added to. What lies between are some dozens of operations on (P,) numbers in places
of their own, on a GPU one recorded graph, wherever the gradients are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..._core.replay import Replay
from .directions import dot, owners
from .layer_sweep import LayerSweep

#: learning rate and weight decay of each parameter
Rates = tuple[tuple[float, float], ...]


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
        blocks = tuple(tuple(names) for chain in layers for names in chain)
        self._owner = owners(blocks, tuple(self.names), dtype, device)
        ones = [self._owner.new_ones(len(chain), len(chain)) for chain in layers]
        means = [x / len(x) for x in ones]
        eye = torch.eye(len(blocks), dtype=dtype, device=device)
        # ρ ↦ what is added along each ŵ: mean ρ − ρ_k, or Σρ − ρ_k
        self._radial = {
            "riemannian": (torch.block_diag(*means) - eye),
            "gtk-orthonormal": (torch.block_diag(*ones) - eye),
        }
        new = self._owner.new_zeros
        self._numbers, self._factors = new(3, len(self.names)), new(2, len(self.names))
        self._known: Rates | None = None
        self._rates = new(2, len(self.names))
        self._replay = Replay()

    def run(
        self, kind: str, gradients: Mapping[str, Tensor], rates: Rates, retract: bool = True
    ) -> None:
        """Move all parameters, and with `retract` onto the slice."""
        if rates != self._known:
            self._known = rates
            self._rates.copy_(torch.tensor(rates, dtype=self._rates.dtype).mT)
        ws = [w.detach() for w in self.params]
        gs = [gradients[n].to(w.dtype) for n, w in zip(self.names, ws, strict=True)]
        self._measure(ws, gs, retract)
        self._replay.run((kind, retract), [self._numbers], lambda: self._solve(kind, retract))
        of_w, of_g = (each.unbind() for each in self._factors.to(_low(ws) or ws[0].dtype))
        for w, g, a, b in zip(ws, gs, of_w, of_g, strict=True):
            w.mul_(a).addcmul_(g, b)

    def _measure(self, ws: list[Tensor], gs: list[Tensor], retract: bool) -> None:
        """⟨w, g⟩, |w| and, which only the retraction needs, |g| of each parameter: (3, P)."""
        low = _low(ws)
        dots = [dot(w, g, low or w.dtype) for w, g in zip(ws, gs, strict=True)]
        norms = torch._foreach_norm([*ws, *gs] if retract else ws, 2, low)
        found = torch.stack([*dots, *norms]).view(-1, len(ws))
        self._numbers[: len(found)].copy_(found)

    def _solve(self, kind: str, retract: bool) -> None:
        """The factors of w and of g, (2, P), from the numbers."""
        d, size, slope = self._numbers
        rate, decay = self._rates
        q = size.square()
        a = 1 - rate * (self._pull(kind, q, torch.addcmul(d, decay, q)) + decay)
        self._factors[0], self._factors[1] = a, -rate
        if retract:
            rest = torch.addcmul(a * q, rate, d, value=-2)
            moved = (rate * slope).square_().addcmul_(a, rest).clamp_min_(0)
            self._factors.mul_(self._sweep.factors(moved))

    def _pull(self, kind: str, q: Tensor, d: Tensor) -> Tensor:
        """c of each parameter's layer, (P,); 0 where that is zero or not finite."""
        inverse = (self._owner @ q).rsqrt().nan_to_num(posinf=0.0)
        along = self._radial[kind] @ ((self._owner @ d) * inverse)
        return self._owner.mT @ (along * inverse).nan_to_num(0.0, 0.0, 0.0)


def _low(ws: list[Tensor]) -> torch.dtype | None:
    """The dtype of sums over half-precision entries."""
    return torch.float32 if ws[0].element_size() < 4 else None
