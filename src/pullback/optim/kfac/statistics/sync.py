"""Where processes meet on the way in: their sums and counts become those of the joined batch.

A process without samples, or whose samples passed other layers, adds nothing to a block that others
saw. One that sees a parameter in another block is an error on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ...._core.processes import Processes
from ....grams.kronecker.packed import Packed, Side, memory, zeros_like
from ....maps.layers.moments import Moments
from ..factors.factor import SPECTRUM, BlockKey, Factor
from .sums import Pool, Sums

_LEAST = 16  # rows from which on a triangle is worth a copy


@dataclass(frozen=True)
class Layout:
    """The shapes of a block's sums, by factor, and their dtype."""

    #: of Σaaᵀ, Σa and the counts of places
    inputs: tuple[tuple[Factor, tuple[tuple[int, ...], ...]], ...]
    values: tuple[tuple[Factor, tuple[int, ...]], ...]
    dtype: torch.dtype

    @property
    def sides(self) -> dict[Factor, tuple[int, ...]]:
        """The shapes of Σaaᵀ and of Σδδᵀ."""
        roles = {f.role for f, _ in self.values}
        inputs = {f: shapes[0] for f, shapes in self.inputs if f.role in roles}
        return inputs | dict(self.values)

    @classmethod
    def of(cls, sums: Sums) -> Layout:
        """Return the shapes of these sums."""
        inputs = [
            (f, (tuple(m.second.shape), tuple(m.first.shape), tuple(_places(m).shape)))
            for f, m in sorted(sums.inputs.items())
        ]
        values = [(f, tuple(t.shape)) for f, t in sorted(sums.values.items())]
        held = [memory(t) for t in sums.values.values()]
        held += [memory(m.second) for m in sums.inputs.values()]
        return cls(tuple(inputs), tuple(values), held[0].dtype)

    def join(self, other: Layout) -> Layout | None:
        """Return the layout with the factors of both; None where they contradict each other."""
        both = Layout(
            tuple(sorted({**dict(self.inputs), **dict(other.inputs)}.items())),
            tuple(sorted({**dict(self.values), **dict(other.values)}.items())),
            self.dtype,
        )
        fits = both.dtype == other.dtype
        for one in (self, other):
            fits = fits and {*one.inputs} <= {*both.inputs} and {*one.values} <= {*both.values}
        return both if fits else None

    def fill(self, sums: Sums, like: Tensor) -> None:
        """Add zeros for what this process did not see."""

        def zeros(shape: Sequence[int]) -> Side:
            shown = torch.zeros((), dtype=self.dtype, device=like.device).expand(*shape)
            return zeros_like(shown)

        for factor, (second, first, places) in self.inputs:
            if factor not in sums.inputs:
                count = torch.zeros(places, device=like.device) if places else 0.0
                moments = Moments(zeros(second), memory(zeros(first)), count)
                sums.inputs[factor] = moments
        for factor, shape in self.values:
            if factor not in sums.values:
                sums.values[factor] = zeros(shape)


Layouts = dict[BlockKey, Layout]
Partners = Mapping[str, tuple[str, ...]]


def layouts_of(pool: Pool) -> Layouts:
    """Return the shapes of what was pooled, in the order in which it is sent."""
    return {k: Layout.of(pool.sums[k]) for k in sorted(pool.sums, key=lambda k: k.names)}


def join_layouts(every: Sequence[Layouts]) -> Layouts:
    """Return the blocks that any process saw; raise where a parameter is in several."""
    out: Layouts = {}
    blocks: dict[str, tuple[BlockKey, int]] = {}
    for rank, layouts in enumerate(every):
        for key, layout in layouts.items():
            for name in key.names:
                other, first = blocks.setdefault(name, (key, rank))
                both = layout.join(out.get(key, layout)) if other == key else None
                if both is None:
                    raise PullbackError(
                        f"The processes see {name!r} otherwise",
                        f"process {first} has {_said(other, every[first])} and process {rank} "
                        f"{_said(key, layouts)}",
                        "Let all of them use its layer in the same way, in the same precision",
                    )
                out[key] = both
    return {k: out[k] for k in sorted(out, key=lambda k: k.names)}


def _said(key: BlockKey, layouts: Layouts) -> str:
    layout = layouts[key]
    shapes = [shape for _, shape in layout.values]
    together = f" of {' and '.join(key.names)}" if len(key.names) > 1 else ""
    return f"a {key.kind} block{together} with sides {shapes} in {layout.dtype}"


def join_partners(every: Sequence[Partners]) -> dict[str, tuple[str, ...]]:
    """Return which parameters share a block, as any process knows it."""
    return {name: names for partners in reversed(every) for name, names in partners.items()}


def shared_sides(
    key: BlockKey, shapes: Mapping[Factor, Sequence[int]], *, read: bool
) -> frozenset[str]:
    """Return the sides of a block of which every process may hold a share between inversions.

    Averages are linear, so that shares can be averaged and added up later. If xᵀF̂x is `read` in
    between, it must be linear in what is shared: the longer of both sides, and neither of them
    where a parameter has several roles.
    """
    if not read or not key.kronecker:
        return frozenset({"left", "right", "mean"})
    if len({factor.role for factor in shapes}) > 1:
        return frozenset()
    lengths = {f.side: shape[-1] for f, shape in shapes.items() if len(shape) == 3}
    longer = lengths.get("right", 0) > lengths.get("left", 0)
    return frozenset({"right", "mean"} if longer else {"left"})


def sum_pool(
    pool: Pool,
    layouts: Layouts,
    params: Mapping[str, Tensor],
    processes: Processes,
    shared: Mapping[BlockKey, frozenset[str]],
) -> None:
    """Replace counts by their sums over all processes, and the sums of sides that are not `shared`.

    Of these every process keeps its share, over the counts of all.
    """
    device = next(iter(params.values())).device
    for key, layout in layouts.items():
        layout.fill(pool.of(key), params[key.names[0]])
    pool.sums = {key: pool.sums[key] for key in layouts}
    every = [(own.inputs, f) for own in pool.sums.values() for f in sorted(own.inputs)]
    counts = [torch.as_tensor(pool.samples, device=device)]
    counts += [_places(inputs[f]) for inputs, f in every]
    counts = processes.sum([t.to(device, torch.float64) for t in counts], "counts")
    pool.samples = counts[0]
    for (inputs, f), count in zip(every, counts[1:], strict=True):
        m = inputs[f]
        inputs[f] = Moments(m.second, m.first, count.to(m.first))
    pool.shared, pool.share = shared, float(processes.rank == 0)
    blocks = [(own, shared[key]) for key, own in pool.sums.items()]
    every = [
        (own.inputs, f) for own, kept in blocks for f in sorted(own.inputs) if f.side not in kept
    ]
    homes: list[tuple[dict[Any, Any], Any]] = [
        (own.values, f) for own, kept in blocks for f in sorted(own.values) if f.side not in kept
    ]
    sides = [values[f] for values, f in homes] + [inputs[f].second for inputs, f in every]
    firsts = [inputs[f].first for inputs, f in every]
    symmetric = [f != SPECTRUM for _, f in homes] + [True] * len(every) + [False] * len(every)
    found = sum_sides([*sides, *firsts], processes, symmetric)
    for (values, f), side in zip(homes, found, strict=False):
        values[f] = side
    rest = zip(every, found[len(homes) : len(sides)], found[len(sides) :], strict=True)
    for (inputs, f), second, first in rest:
        inputs[f] = Moments(second, memory(first), inputs[f].places)


def sum_sides(sides: Sequence[Side], processes: Processes, symmetric: Sequence[bool]) -> list[Side]:
    """Return the sums of sides over all processes; of symmetric matrices a triangle is sent."""
    thin = [_triangle(t) if even else t for t, even in zip(sides, symmetric, strict=True)]
    found = processes.sum([memory(t) for t in thin], "factors")
    out: list[Side] = []
    for side, sent, t in zip(sides, thin, found, strict=True):
        if isinstance(sent, Packed):
            out.append(Packed(t) if isinstance(side, Packed) else Packed(t).whole())
        else:
            out.append(t)
    return out


def _triangle(side: Side) -> Side:
    if isinstance(side, Packed) or side.ndim != 3 or side.shape[-1] < _LEAST:
        return side
    return Packed.of(side)


def _places(moments: Moments) -> Tensor:
    return torch.as_tensor(moments.places)
