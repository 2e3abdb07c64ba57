"""What one statistics step adds up, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from ....maps.layers import Layer
from ....maps.layers.moments import Moments


@dataclass(frozen=True)
class Key:
    """The parameters of one block, and what is held for them.

    `kind` is "kronecker" (weight and perhaps bias, or a bias alone), "units" (gain and shift of
    every unit) or "diagonal" (single entries).
    """

    kind: str
    names: tuple[str, ...]
    bias: bool = False

    def __hash__(self) -> int:
        return hash(self.names)  # few blocks share a parameter

    @cached_property
    def joint(self) -> bool:
        """Whether a Kronecker block holds weight and bias together."""
        return self.kind == "kronecker" and len(self.names) == 2


@dataclass(frozen=True, eq=False)
class Term:
    """One role of a weight: whether its rows belong to the input, and which kind of layer it is.

    There is one object for each, by `of` or `named`.
    """

    layer: str
    input_first: bool

    @staticmethod
    @cache
    def of(layer: Layer) -> Term:
        """The role of a layer's weight."""
        return Term.named(type(layer).__name__, layer.input_first)

    @staticmethod
    @cache
    def named(layer: str, input_first: bool = False) -> Term:
        """The same by the layer's name."""
        return Term(layer, input_first)

    @cached_property
    def tags(self) -> tuple[str, str]:
        """The names of its two sides in averages, inputs and outputs."""
        tag = f"{self.layer}.{'first' if self.input_first else 'last'}"
        return f"{tag}.inputs", f"{tag}.outputs"


@dataclass
class Sums:
    """Sums over the places and samples of all forward calls since the last step.

    `inputs` and `outputs` are the two sides of each role; `squares` serves units and diagonals.
    """

    inputs: dict[Term, Moments] = field(default_factory=dict)
    outputs: dict[Term, Tensor] = field(default_factory=dict)
    squares: Tensor | None = None

    def add_inputs(self, term: Term, moments: Moments) -> None:
        """One more use in this role."""
        self.inputs[term] = self.inputs[term] + moments if term in self.inputs else moments

    def add_outputs(self, term: Term, second: Tensor) -> None:
        """The cotangents of one covector at one more use."""
        held = self.outputs.get(term)
        self.outputs[term] = second if held is None else held + second

    def add_squares(self, squares: Tensor) -> None:
        """Outer products of gains and shifts, or squares of single entries."""
        self.squares = squares if self.squares is None else self.squares + squares


def held_by(sums: dict[Key, Sums], key: Key) -> Sums:
    """A block's sums, empty ones at first."""
    held = sums.get(key)
    if held is None:
        held = sums[key] = Sums()
    return held


def averaged(
    sums: Mapping[Key, Sums], samples: Tensor | float, scale: Tensor | float
) -> dict[Key, dict[str, Tensor]]:
    """Means over samples (cotangents) and places (inputs), under flat names to be saved."""
    out: dict[Key, dict[str, Tensor]] = {}
    joint: dict[Any, list[tuple[dict[str, Tensor], str, Moments]]] = {}
    factor = scale / samples
    factors: list[tuple[Tensor, Tensor | float]] = []
    for key, held in sums.items():
        own = out[key] = {}
        if held.squares is not None:
            own["squares"] = held.squares
            factors.append((held.squares, factor))
        for term, second in held.outputs.items():
            (left, right), m = term.tags, held.inputs[term]
            own[right] = second
            factors.append((second, factor))
            if key.joint and m.second.ndim == 3:
                joint.setdefault(_like(m), []).append((own, left, m))
            elif key.joint or isinstance(m.places, Tensor):
                own[left] = _mean(m, key.joint)
            else:
                own[left] = m.second
                if m.places != 1:
                    factors.append((m.second, 1 / m.places if m.places else torch.nan))
    _multiply(factors)
    for alike in joint.values():
        sides = _homogeneous([m for _, _, m in alike])
        for (own, name, _), side in zip(alike, sides, strict=True):
            own[name] = side
    return out


def _multiply(pairs: Sequence[tuple[Tensor, Tensor | float]]) -> None:
    """Each by its factor in place, as many at once as possible."""
    kinds: dict[object, list[tuple[Tensor, Any]]] = {}
    for t, factor in pairs:
        own = id(factor) if isinstance(factor, Tensor) else None
        kinds.setdefault((t.device, t.dtype, own), []).append((t, factor))
    for (_, _, own), some in kinds.items():  # pyright: ignore[reportGeneralTypeIssues]
        factors = [f for _, f in some] if own is None else some[0][1].to(some[0][0].dtype)
        torch._foreach_mul_([t for t, _ in some], factors)


def add_bias(held: Sums, second: Tensor) -> None:
    """A bias by itself: its input is 1 everywhere."""
    term = Term.named("bias")
    ones = torch.ones_like(second[:, :1] if second.ndim == 2 else second[:, 0, :1])
    held.inputs[term] = Moments(ones, ones, 1.0)
    held.add_outputs(term, second)


def _mean(m: Moments, joint: bool) -> Tensor:
    """mean aaᵀ, or of a joint block's diagonal that of (a, 1); groups may count apart."""
    mean = m.second / _counts(m, m.second.ndim)
    return torch.cat([mean, torch.ones_like(mean[:, :1])], 1) if joint else mean


def _homogeneous(some: Sequence[Moments]) -> Sequence[Tensor]:
    """mean āāᵀ with ā = (a, 1), (G, n + 1, n + 1), for moments of one shape.

    They lie in one piece of memory, so that their borders are written at once.
    """
    g, n, _ = some[0].second.shape
    out = some[0].second.new_empty(len(some), g, n + 1, n + 1)
    inner = out[..., :n, :n]
    if (stack := _stack(some)) is not None:
        counts = _together([m.places for m in some])
        torch.div(stack[0], counts, out=inner)
        first = stack[1] / (counts[..., 0] if isinstance(counts, Tensor) else counts)
    else:
        for side, m in zip(inner.unbind(), some, strict=True):
            torch.div(m.second, _counts(m, 3), out=side)
        first = torch.stack([m.first for m in some])
        counts = [m.places for m in some]
        if any(isinstance(c, Tensor) for c in counts) or len({*counts}) > 1:
            first = torch.stack([m.first / _counts(m, 2) for m in some])
        else:
            first /= counts[0]
    out[..., n, :n] = out[..., :n, n] = first
    out[..., n, n] = 1
    return out.unbind()


def _like(m: Moments) -> object:
    """The same for those that can be written to one piece of memory."""
    return (m.second.shape, m.second.dtype, m.second.device) if m.stack is None else id(m.stack)


def _stack(some: Sequence[Moments]) -> tuple[Tensor, Tensor] | None:
    """The one piece of memory in which all of them lie, in this order."""
    stack, size = some[0].stack, some[0].second.numel()
    if stack is None or len(stack[0]) != len(some):
        return None
    places = [(m.stack, m.second.storage_offset()) for m in some]
    return stack if all(s is stack and at == i * size for i, (s, at) in enumerate(places)) else None


def _together(counts: Sequence[Tensor | float]) -> Tensor | float:
    """The number of places of moments in one stack, one for all or (L, 1, 1, 1)."""
    if not isinstance(counts[0], Tensor):
        return counts[0]
    return torch.stack([torch.as_tensor(c) for c in counts]).view(-1, 1, 1, 1)


def _counts(m: Moments, ndim: int) -> Tensor | float:
    """The number of places, or one per group before `ndim` − 1 other axes."""
    return m.places.view(-1, *[1] * (ndim - 1)) if isinstance(m.places, Tensor) else m.places
