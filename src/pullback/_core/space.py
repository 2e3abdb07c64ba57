"""Coordinates of a set of named parameters: one flat vector, and views of it by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor

from .errors import PullbackError


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype linear algebra runs in: half precisions are promoted to float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def relative_tolerance(dtype: torch.dtype, factor: float = 1.0) -> float:
    """The relative difference of two right answers in this arithmetic: factor·√ε, at most 5 %."""
    return min(factor * torch.finfo(dtype).eps ** 0.5, 0.05)


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
        """Where each name's entries stand in the flat vector."""
        places = pairwise(accumulate(self.sizes, initial=0))
        return {name: slice(*place) for name, place in zip(self.names, places, strict=True)}

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views (*batch, *shape) of a flat (*batch, p) tensor, by name."""
        pieces = flat.split(self.sizes, dim=-1)
        return {
            n: v.reshape((*flat.shape[:-1], *s))  # one tuple, for parameters of shape ()
            for n, v, s in zip(self.names, pieces, self.shapes, strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor | None] | Sequence[Tensor | None]) -> Tensor:
        """The flat (p,) vector of per-parameter tensors; None counts as zero."""
        values = [tensors[n] for n in self.names] if isinstance(tensors, Mapping) else tensors
        return torch.cat(
            [
                self.zeros(size) if v is None else v.reshape(-1).to(self.dtype)
                for v, size in zip(values, self.sizes, strict=True)
            ]
        )

    def zeros(self, *shape: int) -> Tensor:
        """Zeros on this space's device, in its dtype."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)
