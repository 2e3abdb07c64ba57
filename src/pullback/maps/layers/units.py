"""Rows of gains and shifts, whose last steps are the same for many layers and taken at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: mean and 1/σ of a normalization
Kept = tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class UnitSums:
    """By role, "weight" and "bias", Σδx̂ and Σδ over the places of each sample and unit: (N, U).

    Where `kept` has μ and 1/σ, (U,), "weight" is Σδx, and Σδx̂ = (Σδx − μΣδ)/σ is yet to come.
    """

    by: dict[str, Tensor]
    roles: tuple[str, ...]
    kept: Kept = None

    @property
    def shape(self) -> torch.Size:
        """(N, U)."""
        return next(iter(self.by.values())).shape

    @property
    def kind(self) -> tuple[object, ...]:
        """Those of one kind can be finished together."""
        some = next(iter(self.by.values()))
        return some.shape[0], some.dtype, some.device, self.roles, self.kept is None


def finished(some: Sequence[UnitSums]) -> Tensor:
    """The rows (N, ΣU, k) of layers of one kind, side by side."""
    first = some[0]
    beside = _beside([x.by[role] for role in first.by for x in some], 1).chunk(len(first.by), 1)
    by, kept = dict(zip(first.by, beside, strict=True)), [x.kept for x in some if x.kept]
    if kept:
        mean, scale = _beside([t for pair in zip(*kept, strict=True) for t in pair], 0).chunk(2)
        by["weight"] = torch.addcmul(by["weight"], mean, by["bias"], value=-1).mul_(scale)
    return torch.stack([by[role] for role in first.roles], -1)


def second_moments(some: Sequence[UnitSums]) -> list[Tensor]:
    """Σ_n rows rowsᵀ, (U, k, k), of each of these layers of one kind."""
    rows = finished(some)
    units = torch.bmm(rows.permute(1, 2, 0), rows.transpose(0, 1))
    return list(units.split([x.shape[1] for x in some]))


def _beside(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
