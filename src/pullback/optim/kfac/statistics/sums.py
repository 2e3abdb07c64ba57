"""What one statistics step adds up, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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

    @property
    def joint(self) -> bool:
        """Whether a Kronecker block holds weight and bias together."""
        return self.kind == "kronecker" and len(self.names) == 2


@dataclass(frozen=True)
class Term:
    """One role of a weight: whether its rows belong to the input, and which kind of layer it is."""

    layer: str
    input_first: bool


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


def averaged(
    sums: Mapping[Key, Sums], samples: Tensor | float, scale: Tensor | float
) -> dict[Key, dict[str, Tensor]]:
    """Means over samples (cotangents) and places (inputs), under flat names to be saved."""
    out: dict[Key, dict[str, Tensor]] = {}
    cotangents: list[Tensor] = []
    borders: list[tuple[Tensor, Tensor]] = []
    for key, held in sums.items():
        own = out[key] = {}
        if held.squares is not None:
            own["squares"] = held.squares
        for term, second in held.outputs.items():
            tag = f"{term.layer}.{'first' if term.input_first else 'last'}"
            own[f"{tag}.outputs"] = second
            own[f"{tag}.inputs"] = _homogeneous(held.inputs[term], key.joint, borders)
        cotangents += [t for n, t in own.items() if not n.endswith(".inputs")]
    factor = scale / samples
    for some in _alike(cotangents):
        torch._foreach_mul_(some, factor)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if borders:
        torch._foreach_copy_([to for to, _ in borders], [new for _, new in borders])
    return out


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those of one device and dtype together."""
    kinds: dict[object, list[Tensor]] = {}
    for t in tensors:
        kinds.setdefault((t.device, t.dtype), []).append(t)
    return list(kinds.values())


def add_bias(held: Sums, second: Tensor) -> None:
    """A bias by itself: its input is 1 everywhere."""
    term = Term("bias", False)
    ones = torch.ones_like(second[:, :1] if second.ndim == 2 else second[:, 0, :1])
    held.inputs[term] = Moments(ones, ones, 1.0)
    held.add_outputs(term, second)


def _homogeneous(m: Moments, joint: bool, borders: list[tuple[Tensor, Tensor]]) -> Tensor:
    """mean āāᵀ with ā = (a, 1) for a joint block, else mean aaᵀ; groups may count apart.

    `borders` receives what is yet to be copied where.
    """
    one = two = m.places
    if isinstance(m.places, Tensor):
        one, two = m.places.view(-1, 1), m.places.view(-1, *[1] * (m.second.ndim - 1))
    if not joint:
        return m.second / two
    if m.second.ndim == 2:
        ones = torch.ones_like(m.second[:, :1])
        return torch.cat([m.second / two, ones], 1)
    g, n = m.first.shape
    out = m.second.new_empty(g, n + 1, n + 1)
    torch.div(m.second, two, out=out[:, :n, :n])
    row, mean = out.select(1, n), m.first / one
    row.fill_(1)
    borders += [(row[:, :n], mean), (out.select(2, n)[:, :n], mean)]
    return out
