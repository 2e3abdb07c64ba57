"""K-FAC's memory goes along when parameters are rescaled."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...optim.kfac import KFAC
from ...optim.kfac.factors.rescale import Scales
from ..slices.units import Units


class CurvatureFollower:
    """Averages and inverses of a `KFAC` optimizer; nothing for others."""

    def __init__(self, optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
        self._optimizer = optimizer if isinstance(optimizer, KFAC) else None
        self._params = params

    @property
    def present(self) -> bool:
        """Whether there is something to carry along."""
        return self._optimizer is not None

    def follow(self, units: Units, t: Tensor) -> None:
        """Parameters were multiplied as log-scales t (U,) say."""
        if self._optimizer is not None:
            self._optimizer.rescale_state(scales_of(units, t))


def scales_of(units: Units, t: Tensor) -> dict[str, Scales]:
    """What multiplies each parameter, leg by leg: e^(power·t), and whether it leads into units."""
    rest = torch.cat([t, t.new_zeros(1)])  # for −1: not scaled
    return {
        part.name: [((leg.power * rest[leg.unit]).exp(), leg.power > 0) for leg in part.legs]
        for part in units.parts
    }
