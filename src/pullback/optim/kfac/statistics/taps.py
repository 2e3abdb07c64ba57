"""The affine maps inside compound layers, replayed with the cotangents at the layer's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from ....maps.layers import Tap
from ....maps.layers.moments import Moments, Sharing, counted, moments, second_moment
from .graph import Roots, beside
from .plan import Plan
from .sums import Key, Sums, Term, add_bias
from .tape import Tape, Whole

Found = Sequence[tuple[Tap, list[Tensor]]]


class Replays:
    """The compound layers of one pass.

    Args:
        tape: what the pass did.
        cotangents: at the outputs of these layers that stand in the graph, in order.
    """

    def __init__(self, tape: Tape, cotangents: Sequence[Tensor | None]) -> None:
        self._name = tape.name
        self._found: list[tuple[Whole, list[Tensor | None], Found]] = []
        pieces = iter(cotangents)
        for whole in tape.wholes:
            ends = [None if e is None else next(pieces) for e in whole.edges]
            if any(d is not None for d in ends):
                self._found.append((whole, ends, replayed(whole, ends)))

    @property
    def layers(self) -> list[Found]:
        """Per call of a layer its affine maps with the cotangents, step by step."""
        return [found for _, _, found in self._found]

    def roles(self, tap: Tap) -> dict[str, str | None]:
        """The parameters of a map."""
        return {"weight": self._name(tap.weight), "bias": self._name(tap.bias)}

    @property
    def uses(self) -> list[tuple[dict[str, str | None], str, bool]]:
        """Per map its parameters, and what they are in a `Plan`."""
        return [(self.roles(tap), "kronecker", True) for maps in self.layers for tap, _ in maps]

    @property
    def remarks(self) -> dict[str, str]:
        """What `coverage` says of parameters whose layer did not do what its replay does."""
        return {
            name: f"{type(whole.module).__name__}, replayed without {whole.note}"
            for whole, _, maps in self._found
            if whole.note
            for tap, _ in maps
            for name in self.roles(tap).values()
            if name is not None
        }

    def alone(self, root: Roots, leaves: Mapping[str, Tensor]) -> tuple[dict[str, Any], set[str]]:
        """What stands for the loss's gradients where those are of layers with dropout.

        These layers' gradients by themselves, without it; and the parameters among them that are
        used elsewhere too.
        """
        random = [(whole, ends) for whole, ends, _ in self._found if whole.note]
        own: dict[str, Any] = {}
        for whole, ends in random:
            for name, gradient in alone(whole, ends, self._name).items():
                own[name] = own[name] + gradient if name in own else gradient
        others = beside(root, [(w.edges, w.below) for w, _ in random]) if own else set()
        return own, {n for n in own if get_gradient_edge(leaves[n]).node in others}

    def add(
        self,
        sums: dict[Key, Sums],
        plan: Plan,
        sharing: Sharing,
        keep: Tensor | None,
        *,
        inputs: bool,
    ) -> None:
        """Add the moments; `keep` says which places of the output count, in its layout."""
        if keep is not None:
            keep = keep.movedim(min(sharing.batch_dim, keep.ndim - 1), 0)
        term = Term.named("tap")
        for tap, deltas in (one for maps in self.layers for one in maps):
            if not any(tap.places):
                continue
            names, delta = self.roles(tap), torch.cat(list(deltas), 1)
            second = second_moment(delta, sharing)
            if (key := plan.weight(names)) is not None:
                held = sums.setdefault(key, Sums())
                if inputs:
                    held.add_inputs(term, _inputs(tap, delta, sharing, keep))
                held.add_outputs(term, second)
            if (key := plan.bias(names)) is not None:
                add_bias(sums.setdefault(key, Sums()), second)


def replayed(whole: Whole, cotangents: Sequence[Tensor | None]) -> Found:
    """The maps of one layer with their cotangents."""
    outputs, taps = whole.compound.replay(whole.module, whole.args, whole.kwargs)
    targets = [z for tap in taps for z in tap.outputs]
    found = iter(_pulled(outputs, targets, cotangents))
    pairs = [(tap, [(next(found), z) for z in tap.outputs]) for tap in taps]
    return [(t, [torch.zeros_like(z) if d is None else d for d, z in ds]) for t, ds in pairs]


def alone(
    whole: Whole, cotangents: Sequence[Tensor | None], name: Callable[[Tensor | None], str | None]
) -> dict[str, Tensor]:
    """A layer's gradients by itself, without what its replay leaves out."""
    outputs = whole.compound.alone(whole.module, whole.args, whole.kwargs)
    named = {n: p for p in whole.module.parameters() if (n := name(p)) is not None}
    found = _pulled(outputs, list(named.values()), cotangents)
    return {n: g for n, g in zip(named, found, strict=True) if g is not None}


def _pulled(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    pairs = [(y, d.to(y.dtype)) for y, d in zip(outputs, cotangents, strict=True) if d is not None]
    ends, given = [y for y, _ in pairs], [d for _, d in pairs]
    return torch.autograd.grad(ends, targets, given, allow_unused=True)


def _inputs(tap: Tap, delta: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
    x = torch.cat([a.detach() for a in tap.inputs], 1)
    if keep is not None:
        return moments(x, sharing, _counted(tap, delta, keep))
    found = moments(x, sharing)
    if len(set(tap.places)) == 1:
        return Moments(found.second, found.first, tap.places[0])
    return Moments(found.second, found.first, found.first.new_tensor(tap.places))


def _counted(tap: Tap, delta: Tensor, keep: Tensor) -> Tensor:
    """Which of the places of δ (G, P, O) count, (G, P), by that and the output's mask."""
    grids, axis = tap.grids or [(n, 1) for n in tap.places], tap.batch_dim if tap.grids else 0
    rows = []
    for own, n, grid in zip(delta, tap.places, grids, strict=True):
        mask = counted(own[:n].unflatten(0, grid).movedim(axis, 0), keep).movedim(0, axis)
        rows.append(F.pad(mask.flatten(), (0, delta.shape[1] - n)))
    return torch.stack(rows)
