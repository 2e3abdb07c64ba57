"""The largest entries along an orbit, as logarithms: where squares would overflow or vanish."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .units import Part, Units, wide


class Tops:
    """log max |w_e| of all parameters that some units scale, over the axes that tell none apart."""

    def __init__(self, units: Units, params: Mapping[str, Tensor]) -> None:
        self.units = units
        self.logs = [_logs(part, params[part.name]) for part in units.parts]

    def spread(self) -> float:
        """The largest difference between entries of one parameter that are not zero."""
        found = [logs[torch.isfinite(logs)] for logs in self.logs]
        return max((float(x.amax() - x.amin()) for x in found if len(x)), default=0.0)

    def zeros(self) -> Tensor:
        """t = 0."""
        return self.logs[0].new_zeros(self.units.total)

    def imbalance(self, t: Tensor) -> Tensor:
        """log(out²/in²) of every unit's largest entries, 0 for dead ones: (U,)."""
        n = self.units.total + 1  # the last is nobody's
        into, out = (t.new_full((n,), -torch.inf) for _ in range(2))
        for part, logs in zip(self.units.parts, self.logs, strict=True):
            values = logs + part.log_factor(t)
            for leg in part.legs:
                side = into if leg.power > 0 else out
                index = (leg.unit % n).expand(part.shape)
                side.scatter_reduce_(0, index.reshape(-1), values.reshape(-1), "amax")
        found = 2 * (out - into)[:-1]
        return torch.where(torch.isfinite(found), found, 0.0)


def _logs(part: Part, w: Tensor) -> Tensor:
    """Of the part's shape; −inf for zeros."""
    w = w.detach().to(wide(w)).abs()
    axes = [d for d, size in enumerate(part.shape) if size == 1 and w.shape[d] != 1]
    return (w.amax(axes, keepdim=True) if axes and w.numel() else w).log().expand(part.shape)
