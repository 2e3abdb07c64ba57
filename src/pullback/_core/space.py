"""Coordinates of a set of named parameters: one flat vector, and views of it by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from .errors import PullbackError


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of linear algebra: half precisions are promoted to float32."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype


@dataclass(frozen=True)
class ToleranceLimits:
    """Bounds of `relative_tolerance`."""

    #: a larger difference counts as a mistake even in bfloat16, whose √ε is 9 %
    largest: float = 0.05


_LIMITS = ToleranceLimits()


def relative_tolerance(dtype: torch.dtype, factor: float = 1.0) -> float:
    """Return how much two right answers may differ, relatively: factor·√ε, at most 5 %."""
    return min(factor * torch.finfo(dtype).eps ** 0.5, _LIMITS.largest)


class ParameterSpace:
    """The space R^p of an ordered dict of parameters.

    A vector of the space is a flat tensor of shape (p,). `split` shows it as one view per
    parameter; leading batch axes are allowed on both sides.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        if not parameters:
            raise PullbackError(
                "There is nothing to optimize",
                "no parameter requires a gradient",
                "Unfreeze at least one parameter or pass others",
            )
        self.names = tuple(parameters)
        self.shapes = tuple(tuple(p.shape) for p in parameters.values())
        self.sizes = tuple(prod(s) for s in self.shapes)
        self.size = sum(self.sizes)
        dtypes = {p.dtype for p in parameters.values()}
        devices = {p.device for p in parameters.values()}
        if len(devices) > 1:
            raise PullbackError(
                "The parameters live on several devices",
                f"found {sorted(map(str, devices))}, and the Gram couples all of them",
                "Move the model to one device",
            )
        self.device = devices.pop()
        self.dtype = compute_dtype(max(dtypes, key=lambda d: torch.finfo(d).bits))

    def slices(self) -> dict[str, slice]:
        """Return the slice of each name's entries in the flat vector."""
        bounds = pairwise(accumulate(self.sizes, initial=0))
        slices = [slice(start, stop) for start, stop in bounds]
        return dict(zip(self.names, slices, strict=True))

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views (*batch, *shape) of a flat (*batch, p) tensor, by name."""
        batch = flat.shape[:-1]
        views = {}
        pieces = flat.split(self.sizes, dim=-1)
        for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True):
            views[name] = piece.reshape((*batch, *shape))  # one tuple, for parameters of shape ()
        return views

    def flatten(self, tensors: Mapping[str, Tensor | None] | Sequence[Tensor | None]) -> Tensor:
        """Return the flat (p,) vector of per-parameter tensors; None counts as zero."""
        if isinstance(tensors, Mapping):
            tensors = [tensors[name] for name in self.names]
        pieces = []
        for tensor, size in zip(tensors, self.sizes, strict=True):
            if tensor is None:
                pieces.append(self.zeros(size))
            else:
                pieces.append(tensor.reshape(-1).to(self.dtype))
        return torch.cat(pieces)

    def empty(self, *shape: int) -> Tensor:
        """Return memory that is to be written, on this space's device, in its dtype."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros on this space's device, in its dtype."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)
