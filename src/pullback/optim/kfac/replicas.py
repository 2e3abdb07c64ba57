"""The processes that train one model together.

They meet in a step at named places: gradients are averaged if no wrapper does it, statistics become
those of the joined batch, and inverses are computed by their owners (see `factors.placement`).

Averages are linear in the statistics. Between inversions every process may keep its share of them:
their sum over all processes is the average, and less is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.processes import Processes
from ...grams.kronecker.packed import Packed, Side, memory, zeros_like
from ...maps.layers.moments import Moments
from ..checks import refuse_sparse
from .factors.average import Average
from .factors.factor import SPECTRUM, BlockKey, Factor
from .factors.placement import Placement
from .factors.preconditioner import Preconditioner
from .statistics.capture import StatisticsCapture
from .statistics.sums import Pool, Sums
from .update import Groups, Parameters

_LEAST = 16  # rows from which on a triangle is worth a copy
#: blocks with statistics, in an order that all processes have
Blocks = Sequence[tuple[BlockKey, Average]]


class Replicas:
    """The processes, who inverts which block, and whether averages are shares now.

    Args:
        processes: those that train together; one alone sends nothing.
        workers: how many of them hold an inverse.
        wrapped: whether a wrapper averages the gradients.
        lazy: whether averages may be shares between inversions.
        read: whether xᵀF̂x is read in between.
    """

    def __init__(
        self, processes: Processes, workers: int | None, *, wrapped: bool, lazy: bool, read: bool
    ) -> None:
        self.processes, self.placement = processes, Placement(processes, workers)
        self._wrapped, self._read = wrapped, read
        self._lazy = lazy and not processes.alone
        self._shared = False

    @property
    def alone(self) -> bool:
        """Whether there is no other process."""
        return self.processes.alone

    def meet(
        self, params: Parameters, options: Mapping[str, Any], groups: Groups, schedule: Any
    ) -> None:
        """Raise where processes differ in model or options; begin at the same parameters."""
        if self.alone:
            return
        shapes = {n: (tuple(p.shape), p.dtype) for n, p in params.by_name.items()}
        rates = _rates(params, groups, schedule)
        options = {**options, "workers": self.placement.workers}
        self.processes.same("their model", shapes, "Build the same model in every process")
        self.processes.same("the options of KFAC", options, "Give all of them the same options")
        self.processes.same("the options of KFAC", rates, "Give all the same param groups")
        if not self._wrapped:
            held = [p.data for p in params.by_name.values()]
            self.processes.exchange(held, [0] * len(held), "parameters")

    # --- on the way in --------------------------------------------------------------------------

    def average_gradients(self, params: Parameters, groups: Groups, wrapped: bool) -> None:
        """Average the gradients of a model that no wrapper does it for."""
        if self.alone or self._wrapped or wrapped:
            return
        held = {n: p for n, p in params.of(groups).items() if p.requires_grad and p.numel()}
        given = [torch.zeros_like(p) if p.grad is None else p.grad for p in held.values()]
        for name, g in zip(held, given, strict=True):
            refuse_sparse(name, g)
        some = torch.tensor([p.grad is not None for p in held.values()], device=given[0].device)
        *total, counts = self.processes.sum([*given, some.double()], "gradients")
        for p, g, count in zip(held.values(), total, counts.tolist(), strict=True):
            p.grad = g.div_(self.processes.size) if count else None

    def join(
        self,
        capture: StatisticsCapture,
        params: Parameters,
        groups: Groups,
        gradients: Mapping[str, Tensor],
        schedule: Mapping[str, Any],
    ) -> None:
        """Make the pooled sums those of all processes; raise on all where they contradict."""
        processes, pool, structure = self.processes, capture.pool, capture.structure
        broken = isinstance(pool.samples, float) and isnan(pool.samples)
        keys = [] if broken else sorted(pool.sums, key=lambda key: key.names)
        layouts = {key: Layout.of(pool.sums[key]) for key in keys}
        partners, rates = sorted(structure.partners.items()), _rates(params, groups, schedule)
        told = repr((layouts, partners)), repr([*gradients]), repr(rates)
        codes = [crc32(text.encode()) for text in told]
        signed = [*codes, *(-code for code in codes)]
        *found, whole, called = processes.least([*signed, int(not broken), -int(pool.calls > 0)])
        alike = [low == -high for low, high in zip(found[:3], found[3:], strict=True)]
        if not alike[2]:
            remedy = "Change param groups and load states in all of them alike"
            processes.same("the options of KFAC", rates, remedy)
        if not alike[1]:
            chosen = params.of(groups)
            given = {f"that of {n}": "there" if n in gradients else None for n in chosen}
            remedy = "Wrap the model in DistributedDataParallel(find_unused_parameters=True)"
            processes.same("their gradients", given, remedy)
        if not called:
            return
        if not alike[0] and whole:
            every = processes.values((layouts, dict(structure.partners)))
            layouts = join_layouts([own for own, _ in every])
            structure.partners = {
                n: own for _, known in reversed(every) for n, own in known.items()
            }
        pool.calls = max(pool.calls, 1)
        if whole:
            shared = {key: self._shared_sides(key, own.sides) for key, own in layouts.items()}
            sum_pool(pool, layouts, params.by_name, processes, shared)
        else:
            pool.sums, pool.samples = {}, torch.nan

    def agree(self, flag: Tensor) -> Tensor:
        """Return whether statistics are good on all processes: only their sum is the same."""
        return self.processes.agree(flag) if self._lazy else flag

    # --- averages as shares ---------------------------------------------------------------------

    def _shared_sides(
        self, key: BlockKey, shapes: Mapping[Factor, Sequence[int]]
    ) -> frozenset[str]:
        """The sides of a block of which processes hold shares between inversions."""
        return shared_sides(key, shapes, read=self._read) if self._lazy else frozenset()

    def _sides(self, blocks: Blocks) -> list[Side]:
        """The sides of which processes hold shares, in an order that all have."""
        out = []
        for key, average in blocks:
            value = average.value
            some = self._shared_sides(key, {f: t.shape for f, t in value.items()})
            out += [value[f] for f in sorted(value) if f.side in some]
        return out

    def split(self, blocks: Blocks) -> None:
        """Let averages be shares, whose sum over all processes is the average."""
        if self._lazy and not self._shared:
            self._shared = True
            held = [memory(side) for side in self._sides(blocks)]
            if self.processes.rank and held:
                torch._foreach_zero_(held)

    def whole(self, blocks: Blocks) -> None:
        """Make averages whole, where they are shares; all processes call it."""
        if not self._shared:
            return
        sides = self._sides(blocks)
        totals = sum_sides(sides, self.processes, [True] * len(sides))
        for side, total in zip(sides, totals, strict=True):
            memory(side).copy_(memory(total))
        self._shared = False

    def corner(self, key: BlockKey, average: Average) -> float | None:
        """Return this process's share of the second moment of a bias's input, which is 1.

        None where all processes hold the block, and another one adds it up.
        """
        if not self._shared or self.processes.rank == 0:
            return 1.0
        shared = self._shared_sides(key, {f: t.shape for f, t in average.value.items()})
        return float("mean" not in shared) if shared else None

    def total(self, share: Tensor) -> Tensor:
        """Return what the shares of all processes add up to."""
        return self.processes.sum([share], "lengths")[0] if self._shared else share

    # --- on the way out -------------------------------------------------------------------------

    def place(self, own: Preconditioner, keys: Iterable[BlockKey], *, loaded: bool = False) -> None:
        """Give new blocks an owner; averages that were `loaded` are no shares."""
        self._shared = self._shared and not loaded
        if not self.alone:
            self.placement.assign(own, keys)
            self.placement.release(own)

    def collect(self, own: Preconditioner, blocks: Blocks) -> bool:
        """Bring the whole state here; return whether inverses of other teams are among it."""
        spread = not self.placement.across.alone
        try:
            self.whole(blocks)
            if spread:
                self.placement.collect(own)
        except RuntimeError as error:
            raise PullbackError(
                "state_dict() did not hear from all processes",
                "each of them holds a part of the state, and one did not call it, or is lost",
                "Call state_dict() on all processes together; one of them may write it",
            ) from error
        return spread


def _rates(params: Parameters, groups: Groups, schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return what param groups and schedule say, without numbers on a device."""
    out: dict[str, Any] = {}
    for i, group in enumerate(groups):
        own = {n: v for n, v in group.items() if not isinstance(v, Tensor)}
        own["params"] = [*params.of([group])]
        out |= {f"{name} of param group {i}": v for name, v in own.items()}
    return out | {f"the schedule's {n}": v for n, v in schedule.items()}


# --- sums of the joined batch ---------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The shapes of a block's sums, by factor, and their dtype.

    A process without samples, or whose samples passed other layers, adds nothing to a block that
    others saw. One that sees a parameter in another block is an error on all of them.
    """

    #: of "inputs" those of Σaaᵀ, Σa and the counts of places; of "values" one
    shapes: dict[tuple[str, Factor], tuple[tuple[int, ...], ...]]
    dtype: torch.dtype

    @property
    def sides(self) -> dict[Factor, tuple[int, ...]]:
        """The shapes of Σaaᵀ and of Σδδᵀ."""
        roles = {f.role for kind, f in self.shapes if kind == "values"}
        return {f: shapes[0] for (_, f), shapes in self.shapes.items() if f.role in roles}

    @classmethod
    def of(cls, sums: Sums) -> Layout:
        """Return the shapes of these sums."""
        held: dict[Any, Any] = {("values", f): (t,) for f, t in sorted(sums.values.items())}
        for f, m in sorted(sums.inputs.items()):
            held["inputs", f] = m.second, m.first, _places(m)
        shapes = {key: tuple(tuple(t.shape) for t in some) for key, some in held.items()}
        return cls(shapes, memory(next(iter(held.values()))[0]).dtype)

    def join(self, other: Layout) -> Layout | None:
        """Return the layout with the factors of both; None where they contradict each other."""
        both, same = {**self.shapes, **other.shapes}, {**other.shapes, **self.shapes}
        fits = both == same and self.dtype == other.dtype
        return Layout(dict(sorted(both.items())), self.dtype) if fits else None

    def fill(self, sums: Sums, like: Tensor) -> None:
        """Add zeros for what this process did not see."""

        def zeros(shape: Sequence[int]) -> Side:
            shown = torch.zeros((), dtype=self.dtype, device=like.device).expand(*shape)
            return zeros_like(shown)

        for (kind, factor), (shape, *rest) in self.shapes.items():
            if kind == "values" and factor not in sums.values:
                sums.values[factor] = zeros(shape)
            elif kind == "inputs" and factor not in sums.inputs:
                first, places = rest
                count = torch.zeros(places, device=like.device) if places else 0.0
                sums.inputs[factor] = Moments(zeros(shape), memory(zeros(first)), count)


Layouts = dict[BlockKey, Layout]


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
    shapes = [shape for (kind, _), (shape, *_) in layout.shapes.items() if kind == "values"]
    together = f" of {' and '.join(key.names)}" if len(key.names) > 1 else ""
    return f"a {key.kind} block{together} with sides {shapes} in {layout.dtype}"


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
