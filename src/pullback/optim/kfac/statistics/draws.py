"""What the output of one forward pass gives: covectors to be pulled back, and how many samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import outputs
from .coupling import Coupling
from .covectors import drawn
from .later import Later
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
    #: whether all of them do, as far as it is known
    whole: bool
    #: a covector of all that count, where the others are of single positions: it shows which places
    #: of a layer have a part in them
    reach: list[Tensor] | None = None
    #: whether all places count, where that was hoped for; nothing is finite then where z is not
    later: Later | None = None


def draws(
    recipe: Recipe,
    z: Tensor,
    cotangent: Tensor,
    inputs: Any,
    generator: torch.Generator,
    *,
    hope: bool = False,
) -> Draws | None:
    """From the output, ∂loss/∂z and the model's first tensor; None where z is not finite.

    With `hope` nobody waits to see whether every place counts: `later` tells. Nor whether z is
    finite, without which statistics are not.
    """
    axis = recipe.batch_dim
    value = outputs.arranged(z, axis, cast=False)
    slope = outputs.arranged(cotangent, axis, cast=False)
    silent = recipe.metric.uncounted(value, slope) if hope else None
    later = None if silent is None else Later(~silent.view(1))
    if later is None and not bool(value.amax() < torch.inf):  # NaN neither; −inf may mask a class
        return None
    mask = None if later is not None else recipe.metric.counted(value, slope)
    samples: Tensor | float = recipe.metric.samples(value)
    if mask is not None:
        samples = samples * mask.double().mean()
    draw = partial(
        drawn,
        recipe.metric,
        z=value,
        cotangent=slope,
        inputs=outputs.first(inputs, len(value), axis),
        generator=generator,
        batch_dim=axis,
    )
    found = draw(fisher=recipe.fisher, draws=recipe.draws)
    ndim, dtype = z.ndim, z.dtype

    def placed(pair: tuple[Tensor, Coupling | None]) -> tuple[list[Tensor], Coupling | None]:
        covector = pair[0] if mask is None else pair[0] * mask
        return [outputs.placed(covector, ndim, dtype, axis)], pair[1]

    keep, reach = outputs.places(mask, z, axis), None
    if keep is not None and recipe.fisher == "exact" and not recipe.metric.couples_samples:
        reach = placed(next(draw(fisher="mc", draws=1)))[0]
    return Draws(map(placed, found), samples, keep, mask is None, reach, later)
