"""The affine maps inside compound layers, replayed with the cotangents at the layer's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....maps.layers import Tap
from ....maps.layers.moments import Moments, Sharing, moments, second_moment
from .plan import Plan
from .sums import Key, Sums, Term, add_bias
from .tape import Whole

Named = Callable[[Tensor | None], str | None]


def replayed(whole: Whole, cotangents: list[Tensor | None]) -> list[tuple[Tap, list[Tensor]]]:
    """The taps of a compound layer with their cotangents, step by step."""
    outputs, taps = whole.compound.replay(whole.module, whole.args, whole.kwargs)
    pairs = [(y, d.to(y.dtype)) for y, d in zip(outputs, cotangents, strict=True) if d is not None]
    targets = [z for tap in taps for z in tap.outputs]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], targets, [d for _, d in pairs], allow_unused=True
        )
    )
    out = []
    for tap in taps:
        deltas = [next(found) for _ in tap.outputs]
        filled = [
            torch.zeros_like(z) if d is None else d
            for d, z in zip(deltas, tap.outputs, strict=True)
        ]
        out.append((tap, filled))
    return out


def roles(tap: Tap, name: Named) -> dict[str, str | None]:
    """The tap's parameters by role."""
    return {"weight": name(tap.weight), "bias": name(tap.bias)}


def add_taps(
    sums: dict[Key, Sums],
    found: Sequence[tuple[Tap, list[Tensor]]],
    plan: Plan,
    sharing: Sharing,
    name: Named,
    *,
    inputs: bool,
) -> None:
    """Add the moments of a compound layer's affine maps."""
    for tap, deltas in found:
        names, term = roles(tap, name), Term("tap", False)
        second = second_moment(torch.cat(list(deltas), 1), sharing)
        if (key := plan.weight(names)) is not None:
            held = sums.setdefault(key, Sums())
            if inputs:
                held.add_inputs(term, _inputs(tap, sharing))
            held.add_outputs(term, second)
        if (key := plan.bias(names)) is not None:
            add_bias(sums.setdefault(key, Sums()), second)


def _inputs(tap: Tap, sharing: Sharing) -> Moments:
    found = moments(torch.cat([a.detach() for a in tap.inputs], 1), sharing)
    if len(set(tap.places)) == 1:
        return Moments(found.second, found.first, tap.places[0])
    return Moments(found.second, found.first, found.first.new_tensor(tap.places))
