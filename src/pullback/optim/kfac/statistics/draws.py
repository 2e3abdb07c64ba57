"""What the output of one forward pass gives: covectors to be pulled back, and how many samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import outputs
from .coupling import Coupling
from .covectors import drawn
from .pool import Recipe


@dataclass(frozen=True)
class Draws:
    """Covectors in the layout of the output z, without z itself: it may be large.

    Each comes in a list of its own, to be taken out of it: nobody else holds it.
    """

    covectors: Iterator[tuple[list[Tensor], Coupling | None]]
    samples: Tensor | float
    #: which places of the output count
    keep: Tensor | None


def draws(
    recipe: Recipe, z: Tensor, cotangent: Tensor, inputs: Any, generator: torch.Generator
) -> Draws | None:
    """From the output, ∂loss/∂z and the model's first tensor; None where z is not finite."""
    axis = recipe.batch_dim
    value = outputs.arranged(z, axis, cast=False)
    if not bool(value.amax() < torch.inf):  # NaN too; −inf may mask a class
        return None
    slope = outputs.arranged(cotangent, axis, cast=False)
    mask = recipe.metric.counted(value, slope)
    samples: Tensor | float = recipe.metric.samples(value)
    if mask is not None:
        samples = samples * mask.double().mean()
    found = drawn(
        recipe.metric,
        recipe.fisher,
        value,
        slope,
        draws=recipe.draws,
        inputs=outputs.first(inputs, len(value), axis),
        generator=generator,
        batch_dim=axis,
    )
    ndim, dtype = z.ndim, z.dtype

    def placed(pair: tuple[Tensor, Coupling | None]) -> tuple[list[Tensor], Coupling | None]:
        covector = pair[0] if mask is None else pair[0] * mask
        return [outputs.placed(covector, ndim, dtype, axis)], pair[1]

    return Draws(map(placed, found), samples, outputs.places(mask, z, axis))
