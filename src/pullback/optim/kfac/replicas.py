"""The processes that train one model together.

They meet in a step at named places: gradients are averaged if no wrapper does it, statistics become
those of the joined batch, and inverses are computed by their owners.

Averages are linear in the statistics. Between inversions every process may keep its share of them:
their sum over all processes is the average, and less is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.flags import checksum
from ..._core.placement import Placement
from ..._core.processes import Processes
from ..._core.shards import Groups, ModelParameters
from ...grams.kronecker.inverse import MOMENTS, Inverse
from ...grams.kronecker.packed_matrix import (
    FactorMatrix,
    PackedMatrix,
    get_entries,
    launch_sum,
    pack_triangle,
)
from ..checks import refuse_sparse
from .factors.block import SPECTRUM, Average, BlockKey, Factors
from .factors.preconditioner import Averages, Preconditioner, placeholder
from .statistics.capture import StatisticsCapture
from .statistics.sums import (
    BlockTensors,
    Layouts,
    Pool,
    SentSums,
    is_broken,
    join_layouts,
    layout_of,
    shared_sides,
    sides_of,
    tensors_of,
    zeros_of,
)
from .update import Tensors

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
        owned: whether an average is held by the one process alone that inverts it.
    """

    def __init__(
        self,
        processes: Processes,
        workers: int | None,
        *,
        wrapped: bool,
        lazy: bool,
        read: bool,
        owned: bool = False,
    ) -> None:
        self.processes = processes
        self.placement: Placement[BlockKey] = Placement(processes, workers)
        self._wrapped, self._read = wrapped, read
        self._owned = owned and not processes.is_single
        self._lazy = lazy and not owned and not processes.is_single
        self._shared = False
        #: whether sums may be under way while a wrapper's backward pass goes on, and in which group
        self._overlaps = wrapped and not owned and not processes.is_single
        self._apart: Processes | None = None
        #: what all processes measured last, and what is under way
        self._layouts: Layouts | None = None
        self._sent: SentSums | None = None

    @property
    def alone(self) -> bool:
        return self.processes.is_single

    def meet(
        self, params: ModelParameters, options: Mapping[str, Any], groups: Groups, schedule: Any
    ) -> None:
        """Raise where processes differ in model or options; begin at the same parameters."""
        if self.alone:
            return
        shapes = {n: (tuple(p.shape), p.dtype) for n, p in params.by_name.items()}
        rates = _rates(params, groups, schedule)
        options = {**options, "workers": self.placement.workers}
        self.processes.require_same("their model", shapes, "Build the same model in every process")
        self.processes.require_same(
            "the options of KFAC", options, "Give all of them the same options"
        )
        self.processes.require_same("the options of KFAC", rates, "Give all the same param groups")
        if not self._wrapped:
            self.processes.broadcast_first([p.data for p in params.by_name.values()], "parameters")

    # --- on the way in --------------------------------------------------------------------------

    def average_gradients(self, params: ModelParameters, groups: Groups, wrapped: bool) -> None:
        """Average gradients over processes where no wrapper (DDP, FSDP) does."""
        if self.alone or self._wrapped or wrapped:
            return
        held = {n: p for n, p in params.in_groups(groups).items() if p.requires_grad and p.numel()}
        for name, p in held.items():
            refuse_sparse(name, p.grad)
        self.processes.average_gradients(held.values())

    def launch(self, pool: Pool, params: ModelParameters) -> None:
        """Begin to sum the pooled statistics, in the shapes that all had last time.

        It is called in the backward pass, and before `join`: messages of their own group know no
        order but theirs. So every process begins once between two calls of `join`, also where a
        step was skipped, and `join` finds out what is out of date. Nothing is waited for, since
        another process may wait for this one's gradients.
        """
        if self._sent is None and self._apart is not None and self._layouts is not None:
            self._sent = self._begin(pool, self._layouts, params, self._apart)

    def forget_shares(self) -> None:
        """Go on with averages that are whole: all processes loaded them."""
        self._shared = False
        if self._layouts is not None:  # some may have begun, so that nothing is begun ahead now
            self._sent = self._apart = None
            self._overlaps = False

    def __getstate__(self) -> dict[str, Any]:
        """All but what is under way, and the group in which it is."""
        return {**vars(self), **dict.fromkeys(("_sent", "_apart", "_layouts"))}

    def join(
        self,
        capture: StatisticsCapture,
        params: ModelParameters,
        groups: Groups,
        gradients: Tensors,
        schedule: Mapping[str, Any],
    ) -> None:
        """Make the pooled sums those of all processes; raise on all where they contradict."""
        processes, pool, structure = self.processes, capture.pool, capture.structure
        sent, self._sent = self._sent, None
        broken = is_broken(pool)
        keys = [] if broken else sorted(pool.sums, key=lambda key: key.names)
        layouts = {key: layout_of(tensors_of(pool.sums[key])) for key in keys}
        current = sent is None or sent.pool is pool
        fresh = sent is not None and current and sent.calls == pool.calls
        flags = [not broken, pool.calls == 0, fresh, current]
        told = layouts, sorted(structure.partners.items())
        given = params, groups, gradients, schedule
        alike, (whole, idle, fresh, current) = self._compare(told, flags, *given)
        if idle:
            return
        pool.calls = max(pool.calls, 1)
        if not whole:
            pool.sums, pool.samples = {}, torch.nan
            return
        if not alike:
            every = processes.gather_objects((layouts, dict(structure.partners)))
            layouts = join_layouts([own for own, _ in every])
            structure.partners = {
                n: own for _, known in reversed(every) for n, own in known.items()
            }
        if sent is not None and current and not fresh:  # each of several passes would be sent
            self._apart = None
        if sent is None or not fresh or layouts != self._layouts:
            sent = self._begin(pool, layouts, params, processes)
        if self._layouts is None and self._overlaps:
            self._apart = processes.duplicate()
        self._layouts = layouts
        sent.finish()
        pool.shared = sent.shared
        pool.share = float(processes.rank == 0)

    def _compare(
        self,
        told: object,
        flags: Sequence[bool],
        params: ModelParameters,
        groups: Groups,
        gradients: Tensors,
        schedule: Mapping[str, Any],
    ) -> tuple[bool, list[bool]]:
        """Return whether all processes have `told` the same, and which flags are true on all.

        Raise on all where replicas would drift apart, in rates, gradients or parameters.
        """
        processes, rates = self.processes, _rates(params, groups, schedule)
        bits = checksum([*gradients.values()]), params.checksum(groups)
        alike, found = processes.compare([told, rates, [*gradients]], flags, bits)
        if not alike[1]:
            remedy = "Change param groups and load states in all of them alike"
            processes.require_same("the options of KFAC", rates, remedy)
        if not alike[2]:
            chosen = params.in_groups(groups)
            given = {f"that of {n}": "there" if n in gradients else None for n in chosen}
            remedy = "Wrap the model in DistributedDataParallel(find_unused_parameters=True)"
            processes.require_same("their gradients", given, remedy)
        if not alike[3]:
            remedy = "Change them in all processes alike, or before they are averaged: in the loss"
            processes.require_same("their gradients", _lengths(gradients), remedy)
        if not alike[4]:
            remedy = "Load the last checkpoint, and change gradients in all processes alike"
            held = params.gather_whole(params.in_groups(groups), "parameters")
            processes.require_same("their parameters", _lengths(held), remedy)
        return alike[0], found

    def _begin(
        self, pool: Pool, layouts: Layouts, params: ModelParameters, processes: Processes
    ) -> SentSums:
        """Begin to sum counts, and the sides of which processes hold no shares."""
        device = next(iter(params.by_name.values())).device
        sums: dict[BlockKey, BlockTensors] = {}
        for key, layout in layouts.items():
            held = None if is_broken(pool) else pool.sums.get(key)
            own = {} if held is None else tensors_of(held)
            if not layout_of(own).items() <= layout.items():
                own = {}  # `join` finds out
            like = params.by_name[key.names[0]]
            sums[key] = {
                at: own[at] if at in own else zeros_of(at, *layout[at], like) for at in layout
            }
        shared = {key: self._shared_sides(key, sides_of(own)) for key, own in sums.items()}
        owners = self.placement.owners if self._owned else {}
        placed = owners if sums.keys() <= owners.keys() else {}
        return SentSums(pool, sums, shared, processes, device, placed)

    # --- averages as shares ---------------------------------------------------------------------

    def _shared_sides(self, key: BlockKey, factors: Factors) -> frozenset[str]:
        """The sides of a block of which processes hold shares between inversions."""
        return shared_sides(key, factors, read=self._read) if self._lazy else frozenset()

    def _sides(self, blocks: Blocks) -> list[FactorMatrix]:
        """The sides of which processes hold shares, in an order that all have."""
        out = []
        for key, average in blocks:
            value, some = average.value, self._shared_sides(key, average.value)
            out += [value[f] for f in sorted(value) if f.side in some]
        return out

    def split(self, blocks: Blocks) -> None:
        """Let averages be shares, whose sum over all processes is the average."""
        if self._lazy and not self._shared:
            self._shared = True
            held = [get_entries(side) for side in self._sides(blocks)]
            if self.processes.rank and held:
                torch._foreach_zero_(held)

    def whole(self, blocks: Blocks) -> None:
        """Make averages whole, where they are shares; all processes call it."""
        if not self._shared:
            return
        sides = self._sides(blocks)
        totals = launch_sum(sides, self.processes).wait()
        for side, total in zip(sides, totals, strict=True):
            get_entries(side).copy_(get_entries(total))
        self._shared = False

    def corner(self, key: BlockKey, average: Average) -> float | None:
        """Return this process's share of the second moment of a bias's input, which is 1.

        None where another process adds the block up.
        """
        if self._owned:
            return 1.0 if self.keeps(key) else None
        if not self._shared or self.processes.rank == 0:
            return 1.0
        shared = self._shared_sides(key, average.value)
        return float("mean" not in shared) if shared else None

    def total(self, share: Tensor) -> Tensor:
        """Return what the shares of all processes add up to."""
        spread = self._shared or self._owned
        return self.processes.sum([share], "lengths")[0] if spread else share

    # --- averages of owners ---------------------------------------------------------------------

    def keeps(self, key: BlockKey) -> bool:
        """Whether this process holds the average of a block."""
        return not self._owned or self.placement.owners.get(key) in (None, self.processes.rank)

    def assemble(self, blocks: Blocks) -> None:
        """Bring whole averages here; those of owners are given up again by `release`."""
        self.whole(blocks)
        if self._owned:
            tensors, owners = [], []
            for key, average in blocks:
                if not self.keeps(key):
                    average.change(Tensor.contiguous)
                own = average.sides()
                tensors += own
                owners += [self.placement.owners[key]] * len(own)
            self.processes.exchange(tensors, owners, "state")

    # --- on the way out -------------------------------------------------------------------------

    def place(self, own: Preconditioner, averages: Averages, keys: Set[BlockKey]) -> None:
        """Give new blocks an owner."""
        if not self.alone:
            new = sorted(keys - self.placement.owners.keys(), key=lambda key: key.names)
            kinds = {k: (own.shapes[k], own.inverses[k].kind) for k in new}
            self.placement.assign({k: (kinds[k], _cost(own, k)) for k in new})
            self.release(own, averages)

    def release(self, own: Preconditioner, averages: Averages) -> None:
        """Give up the memory of inverses that other teams hold, and of averages that others own."""
        for average in [a for key, a in averages.items() if not self.keeps(key)]:
            average.change(placeholder, mass=False)
        placed = own.inverses.keys() & self.placement.owners.keys() - own.absent
        for key in [k for k in placed if not self.placement.holds(k)]:
            own.change(key, placeholder)
            own.absent.add(key)

    def renew(
        self, own: Preconditioner, averages: Averages, keys: Sequence[BlockKey], value: float
    ) -> None:
        """Prepare these blocks, each by its owner, and send them to those who hold them."""
        keys = own.affordable(keys)  # the same, however many processes there are
        if self.alone:
            own.renew(averages, keys, value)
            return
        for key in keys:
            own.notes.pop(key, None)
        mine, before = [k for k in keys if self.placement.owns(k)], own.bases(keys)
        with self.processes.raise_together("renew its inverses"):
            own.renew(averages, mine, value, alone=False)
        ends = {k: (k in own.ready, own.notes.get(k), _form(own.inverses[k])) for k in mine}
        every = {k: end for some in self.processes.gather_objects(ends) for k, end in some.items()}
        for key in [k for k in keys if k not in ends]:
            ready, note, form = every[key]
            if note is not None:
                own.notes[key] = note
            if ready and key not in own.ready:
                own.ready.add(key)
                own.regroup()
            if form != _form(own.inverses[key]):
                held = self.placement.holds(key)
                own.inverses[key] = _room(own.inverses[key], form, held=held)
                own.regroup()
        self.send(own, keys)
        own.turn_moments(before)

    def send(self, own: Preconditioner, keys: Sequence[BlockKey]) -> None:
        """Send what the owners of these blocks have renewed to the other members of their teams.

        Of symmetric matrices a triangle is sent, and all members mirror it.
        """
        if self.placement.workers == 1:
            return
        sent: dict[BlockKey, list[Tensor]] = {}
        mirrored: list[tuple[Tensor, PackedMatrix]] = []
        for key in [k for k in keys if k in own.ready and self.placement.holds(k)]:
            held, even = own.inverses[key].tensors(), own.symmetric(key)
            some = sent[key] = []
            for name in [name for name in held if name not in MOMENTS]:
                side = pack_triangle(held[name]) if name in even else held[name]
                some.append(get_entries(side))
                if isinstance(side, PackedMatrix):
                    mirrored.append((held[name], side))
            if key in own.spectra:  # carried to new bases
                some.append(get_entries(own.spectra[key].value[SPECTRUM]))
        self.placement.send_within(sent, "inverses")
        for t, side in mirrored:
            t.copy_(side.unpack())

    def collect(self, own: Preconditioner, blocks: Blocks) -> None:
        """Bring the whole state here, unless `piece` cuts it; `release` gives it up again."""
        if self._owned:
            return
        self.whole(blocks)
        if self.placement.has_several_teams:
            owners = self.placement.owners
            keys = sorted((k for k in own.ready if k in owners), key=lambda key: key.names)
            for key in own.absent.intersection(keys):
                own.change(key, Tensor.contiguous)
            own.absent.clear()
            held = {key: [*own.inverses[key].tensors().values()] for key in keys}
            self.placement.send_across(held, "state")

    def piece(self, key: BlockKey, t: Tensor) -> Tensor:
        """Return a tensor of a block for `state_dict`: where owners hold it, cut into pieces."""
        if self._owned:
            return self.processes.scatter(t, self.placement.owners.get(key), "state")
        return t.contiguous() if 0 in t.stride() else t  # shown, and without memory so far

    def complete(
        self,
        own: Preconditioner,
        found: dict[str, Tensor],
        stacks: list[Tensor],
        gradients: Tensors,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the directions of this team's blocks together with those of other teams."""
        if not self.placement.has_several_teams:
            return found, stacks
        every: dict[str, Tensor] = {}
        sent: dict[BlockKey, list[Tensor]] = {}
        for key in sorted(own.ready, key=lambda key: key.names):
            for name in [n for n in key.names if n in gradients]:
                t = torch.empty_like(gradients[name], dtype=own.inverses[key].dtype)
                every[name] = t.copy_(found[name]) if self.placement.holds(key) else t
                sent.setdefault(key, []).append(t)
        self.placement.send_across(sent, "directions")
        return every, [*every.values()]


def _cost(own: Preconditioner, key: BlockKey) -> float:
    """Return about how many products it takes to invert a block, and to apply the inverse."""
    held, entries = own.inverses[key], prod(own.shapes[key])
    dense = [t.shape for t in (held.left, held.right) if t is not None and t.ndim == 3]
    return sum(groups * float(n) ** 3 + entries * n for groups, n, _ in dense) + entries


def _form(inverse: Inverse) -> tuple[dict[str, Any], bool]:
    """Return shapes and dtypes of an inverse's tensors, and whether they are factors."""
    form = {n: (tuple(t.shape), t.dtype) for n, t in inverse.tensors().items()}
    return form, inverse.factors


def _room(mine: Inverse, form: tuple[dict[str, Any], bool], *, held: bool) -> Inverse:
    """Return an inverse of this form, with memory of its own where it is `held` here."""
    device = next(iter(mine.tensors().values())).device
    room: dict[str, Any] = {"left": None}
    for name, (shape, dtype) in form[0].items():
        one = torch.zeros((), dtype=dtype, device=device)
        room[name] = one.expand(shape).clone() if held else one.expand(shape)
    return Inverse(**room, factors=form[1])


def _lengths(tensors: Tensors) -> dict[str, str]:
    """Return what tells tensors apart, in words."""
    some = {n: t for n, t in tensors.items() if t.numel()}
    return {
        f"that of {n}": f"{float(t.detach().double().norm()):.9g} long, with bits {checksum([t]):x}"
        for n, t in some.items()
    }


def _rates(params: ModelParameters, groups: Groups, schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return what param groups and schedule say, without numbers on a device."""
    out: dict[str, Any] = {}
    for i, group in enumerate(groups):
        own = {n: v for n, v in group.items() if not isinstance(v, Tensor)}
        own["params"] = [*params.in_groups([group])]
        out |= {f"{name} of param group {i}": v for name, v in own.items()}
    return out | {f"the schedule's {n}": v for n, v in schedule.items()}
