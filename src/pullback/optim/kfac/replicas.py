"""The processes that train one model together.

They meet in a step at named places: gradients are averaged if no wrapper does it, statistics become
those of the joined batch, and inverses are computed by their owners.

Averages are linear in the statistics. Between inversions every process may keep its share of them:
their sum over all processes is the average, and less is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from math import isnan, prod
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.placement import Placement
from ..._core.processes import Processes
from ..._core.shards import Groups, Parameters
from ...grams.kronecker.inverse import Inverse
from ...grams.kronecker.packed import Side, memory, sum_sides, zeros_like
from ...maps.layers.moments import Moments
from ..checks import refuse_sparse
from .factors.average import Average
from .factors.factor import SPECTRUM, BlockKey, Factor
from .factors.preconditioner import Preconditioner, placeholder
from .statistics.capture import StatisticsCapture
from .statistics.sums import Pool, Sums

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
        self.processes = processes
        self.placement: Placement[BlockKey] = Placement(processes, workers)
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
            self.processes.adopt([p.data for p in params.by_name.values()], "parameters")

    # --- on the way in --------------------------------------------------------------------------

    def average_gradients(self, params: Parameters, groups: Groups, wrapped: bool) -> None:
        """Average the gradients of a model that no wrapper does it for."""
        if self.alone or self._wrapped or wrapped:
            return
        held = {n: p for n, p in params.of(groups).items() if p.requires_grad and p.numel()}
        for name, p in held.items():
            refuse_sparse(name, p.grad)
        self.processes.average_gradients(held.values())

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
        sums = {key: tensors_of(pool.sums[key]) for key in keys}
        layouts = {key: layout_of(own) for key, own in sums.items()}
        partners, rates = sorted(structure.partners.items()), _rates(params, groups, schedule)
        told = (layouts, partners), [*gradients], rates
        alike, (whole, idle) = processes.compare(told, [not broken, pool.calls == 0])
        if not alike[2]:
            remedy = "Change param groups and load states in all of them alike"
            processes.same("the options of KFAC", rates, remedy)
        if not alike[1]:
            chosen = params.of(groups)
            given = {f"that of {n}": "there" if n in gradients else None for n in chosen}
            remedy = "Wrap the model in DistributedDataParallel(find_unused_parameters=True)"
            processes.same("their gradients", given, remedy)
        if idle:
            return
        pool.calls = max(pool.calls, 1)
        if not whole:
            pool.sums, pool.samples = {}, torch.nan
            return
        if not alike[0]:
            every = processes.values((layouts, dict(structure.partners)))
            layouts = join_layouts([own for own, _ in every])
            structure.partners = {
                n: own for _, known in reversed(every) for n, own in known.items()
            }
        for key, layout in layouts.items():
            like, own = params.by_name[key.names[0]], sums.get(key, {})
            sums[key] = {
                at: own[at] if at in own else _zeros(at, *layout[at], like) for at in layout
            }
        device = next(iter(params.by_name.values())).device
        self._sum(pool, {key: sums[key] for key in layouts}, device)

    def _sum(self, pool: Pool, sums: dict[BlockKey, BlockTensors], device: torch.device) -> None:
        """Fill the pool with counts of all processes, and with sums where they are no shares.

        Of the others every process keeps its share, over the counts of all.
        """
        shared = {key: self._shared_sides(key, _sides_of(own)) for key, own in sums.items()}
        every = [(key, at) for key, own in sums.items() for at in own]
        places = [(key, at) for key, at in every if at[0] == "places"]
        rest = [(k, at) for k, at in every if at[0] != "places" and at[1].side not in shared[k]]
        counts = [torch.as_tensor(pool.samples, device=device)]
        counts += [memory(sums[key][at]) for key, at in places]
        found = self.processes.sum([t.to(device, torch.float64) for t in counts], "counts")
        pool.samples = found[0]
        sides = sum_sides(
            [sums[key][at] for key, at in rest],
            self.processes,
            [at[1] != SPECTRUM for _, at in rest],
        )
        for (key, at), t in zip([*places, *rest], [*found[1:], *sides], strict=True):
            sums[key][at] = t
        pool.sums = {key: sums_of(own) for key, own in sums.items()}
        pool.shared, pool.share = shared, float(self.processes.rank == 0)

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

    def place(self, own: Preconditioner, keys: Set[BlockKey], *, loaded: bool = False) -> None:
        """Give new blocks an owner; averages that were `loaded` are no shares."""
        self._shared = self._shared and not loaded
        if not self.alone:
            new = sorted(keys - self.placement.owners.keys(), key=lambda key: key.names)
            kinds = {k: (own.shapes[k], own.inverses[k].kind) for k in new}
            self.placement.assign({k: (kinds[k], _cost(own, k)) for k in new})
            self.release(own)

    def release(self, own: Preconditioner) -> None:
        """Give up the memory of inverses that other teams hold."""
        placed = own.inverses.keys() & self.placement.owners.keys() - own.absent
        for key in [k for k in placed if not self.placement.holds(k)]:
            own.change(key, placeholder)
            own.absent.add(key)

    def renew(
        self,
        own: Preconditioner,
        averages: Mapping[BlockKey, Average],
        keys: Sequence[BlockKey],
        value: float,
    ) -> None:
        """Prepare these blocks, each by its owner, and send them to those who hold them."""
        if self.alone:
            own.renew(averages, keys, value)
            return
        for key in keys:
            own.notes.pop(key, None)
        mine = [k for k in keys if self.placement.owns(k)]
        with self.processes.together("renew its inverses"):
            own.renew(averages, mine, value)
        ends = {k: (k in own.ready, own.notes.get(k), _form(own.inverses[k])) for k in mine}
        every = {k: end for some in self.processes.values(ends) for k, end in some.items()}
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

    def send(self, own: Preconditioner, keys: Sequence[BlockKey]) -> None:
        """Send what the owners of these blocks have renewed to the other members of their teams."""
        sent: dict[BlockKey, list[Tensor]] = {}
        for key in [k for k in keys if k in own.ready and self.placement.holds(k)]:
            held = own.inverses[key].tensors()
            sent[key] = [t for name, t in held.items() if name not in own.untouched]
            if key in own.spectra:  # carried to new bases
                sent[key].append(memory(own.spectra[key].value[SPECTRUM]))
        self.placement.send_within(sent, "inverses")

    def collect(self, own: Preconditioner, blocks: Blocks) -> bool:
        """Bring the whole state here; return whether inverses of other teams are among it.

        Those are given up again by `release`.
        """
        owners = self.placement.owners
        try:
            self.whole(blocks)
            if self.placement.teams:
                keys = sorted((k for k in own.ready if k in owners), key=lambda key: key.names)
                for key in own.absent.intersection(keys):
                    own.change(key, Tensor.contiguous)
                own.absent.clear()
                own.regroup()
                held = {key: [*own.inverses[key].tensors().values()] for key in keys}
                self.placement.send_across(held, "state")
        except RuntimeError as error:
            raise PullbackError(
                "state_dict() did not hear from all processes",
                "each of them holds a part of the state, and one did not call it, or is lost",
                "Call state_dict() on all processes together; one of them may write it",
            ) from error
        return self.placement.teams

    def complete(
        self,
        own: Preconditioner,
        found: dict[str, Tensor],
        stacks: list[Tensor],
        gradients: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the directions of this team's blocks together with those of other teams."""
        if not self.placement.teams:
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


def _rates(params: Parameters, groups: Groups, schedule: Mapping[str, Any]) -> dict[str, Any]:
    """Return what param groups and schedule say, without numbers on a device."""
    out: dict[str, Any] = {}
    for i, group in enumerate(groups):
        own = {n: v for n, v in group.items() if not isinstance(v, Tensor)}
        own["params"] = [*params.of([group])]
        out |= {f"{name} of param group {i}": v for name, v in own.items()}
    return out | {f"the schedule's {n}": v for n, v in schedule.items()}


# --- sums of the joined batch ---------------------------------------------------------------------

#: one of a block's sums: "values", or of inputs "second" Σaaᵀ, "first" Σa and "places"
Place = tuple[str, Factor]
BlockTensors = dict[Place, Side]
#: shapes and dtypes of all sums, by block
Layouts = dict[BlockKey, dict[Place, tuple[tuple[int, ...], torch.dtype]]]


def tensors_of(sums: Sums) -> BlockTensors:
    """Return a block's sums one by one; `sums_of` puts them together again."""
    out: BlockTensors = {("values", f): t for f, t in sorted(sums.values.items())}
    for f, m in sorted(sums.inputs.items()):
        places = torch.as_tensor(m.places, dtype=torch.float64)
        out |= {("second", f): m.second, ("first", f): m.first, ("places", f): places}
    return out


def sums_of(own: BlockTensors) -> Sums:
    """Return the sums of a block."""
    out = Sums(values={f: t for (kind, f), t in own.items() if kind == "values"})
    for f in [f for kind, f in own if kind == "second"]:
        first, places = memory(own["first", f]), memory(own["places", f])
        out.inputs[f] = Moments(own["second", f], first, places.to(first))
    return out


def layout_of(own: BlockTensors) -> dict[Place, tuple[tuple[int, ...], torch.dtype]]:
    """Return shapes and dtypes of a block's sums."""
    return {at: (tuple(t.shape), memory(t).dtype) for at, t in own.items()}


def join_layouts(every: Sequence[Layouts]) -> Layouts:
    """Return the blocks that any process saw; raise where they contradict each other.

    A process without samples, or whose samples passed other layers, adds nothing to a block that
    others saw. One that sees a parameter in another block is an error on all of them.
    """
    out: Layouts = {}
    seen: dict[str, tuple[int, BlockKey]] = {}
    for rank, layouts in enumerate(every):
        for key, own in layouts.items():
            held = out.setdefault(key, {})
            fits = all(held.get(at, own[at]) == own[at] for at in own)
            for name in key.names:
                first, other = seen.setdefault(name, (rank, key))
                if other != key or not fits:
                    raise PullbackError(
                        f"The processes see {name!r} otherwise",
                        f"process {first} has {_said(other, every[first])} and process {rank} "
                        f"{_said(key, layouts)}",
                        "Let all of them use its layer in the same way, in the same precision",
                    )
            held |= own
    return {k: dict(sorted(out[k].items())) for k in sorted(out, key=lambda key: key.names)}


def _said(key: BlockKey, layouts: Layouts) -> str:
    found = [layout for (kind, _), layout in layouts[key].items() if kind == "values"]
    together = f" of {' and '.join(key.names)}" if len(key.names) > 1 else ""
    return f"a {key.kind} block{together} with sides {[s for s, _ in found]} in {found[0][1]}"


def _zeros(at: Place, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Side:
    """Return what a process has of sums that it did not see."""
    zeros = torch.zeros((), dtype=dtype, device=like.device).expand(torch.Size(shape))
    return zeros_like(zeros) if len(shape) == 3 and at[1] != SPECTRUM else zeros.clone()


def _sides_of(own: BlockTensors) -> dict[Factor, Sequence[int]]:
    """Return the shapes of Σaaᵀ and of Σδδᵀ."""
    roles = {f.role for kind, f in own if kind == "values"}
    some = [(f, t) for (kind, f), t in own.items() if kind in ("values", "second")]
    return {f: t.shape for f, t in some if f.role in roles}


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
