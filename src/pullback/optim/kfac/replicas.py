"""The processes that train one model together.

They exchange data at two places: `sum_statistics` makes the statistics of a step those of the
joined batch, and `refresh` lets the owner of a block refresh its state, which the others receive.
Beside these, gradients are averaged where no wrapper does it, directions are sent where few
processes hold a state, and `state_dict` brings together what is held in parts. With one process all
of it does nothing. No other file of K-FAC asks whether there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.flags import checksum
from ..._core.placement import Placement
from ..._core.processes import Processes
from ..._core.shards import Groups, ModelParameters
from ...grams.kronecker.packed_matrix import PackedMatrix, get_entries, pack_triangle
from ..checks import refuse_sparse
from .block_stack import Block, Tensors
from .factors.averages import Average
from .factors.block import BlockKey
from .options import Options
from .rules import RuleState
from .stacks import Averages, BlockStates
from .statistics.capture import StatisticsCapture
from .statistics.sums import (
    BlockTensors,
    Pool,
    SentSums,
    ShapesByBlock,
    SumShapes,
    describe_shapes,
    is_broken,
    join_shapes,
    list_sums,
    make_zeros,
)

#: blocks with statistics, in an order that all processes have
BlockAverages = Sequence[tuple[BlockKey, Average]]


def placeholder(t: Tensor, device: torch.device | None = None) -> Tensor:
    """Return zeros of this shape and dtype that take no memory, by default on the same device."""
    return torch.zeros((), dtype=t.dtype, device=device or t.device).expand(t.shape)


@dataclass(frozen=True)
class _Agreement:
    """What holds on all processes at a sum of statistics; in the order of `_list_flags`."""

    #: no process lost its statistics
    is_unbroken: bool
    #: no process recorded a call
    is_idle: bool
    #: the sums that were sent ahead hold all calls
    is_fresh: bool
    #: the sums that were sent ahead are those of the present pool, or none were sent
    is_current: bool


def _list_flags(pool: Pool, sent: SentSums | None) -> list[bool]:
    """Return the fields of `_Agreement` as this process alone sees them."""
    is_current = sent is None or sent.pool is pool
    is_fresh = sent is not None and is_current and sent.calls == pool.calls
    return [not is_broken(pool), pool.calls == 0, is_fresh, is_current]


def _list_shapes(pool: Pool) -> ShapesByBlock:
    """Return the shapes of the pooled sums, in an order that all processes have."""
    if is_broken(pool):
        return {}
    keys = sorted(pool.sums, key=lambda key: key.names)
    return {key: describe_shapes(list_sums(pool.sums[key])) for key in keys}


def _fill_missing_sums(
    pool: Pool, key: BlockKey, sum_shapes: SumShapes, parameter: Tensor
) -> BlockTensors:
    """Return a block's sums of these shapes, with zeros where this process has none."""
    tensors: BlockTensors = {}
    if not is_broken(pool) and key in pool.sums:
        tensors = list_sums(pool.sums[key])
    if not describe_shapes(tensors).items() <= sum_shapes.items():
        tensors = {}  # the shapes are out of date; `sum_statistics` notices, and sums anew
    filled: BlockTensors = {}
    for sum_key, (shape, dtype) in sum_shapes.items():
        if sum_key in tensors:
            filled[sum_key] = tensors[sum_key]
        else:
            filled[sum_key] = make_zeros(sum_key, shape, dtype, parameter)
    return filled


#: shape and dtype of a tensor
TensorForm = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class _RefreshOutcome:
    """What the owner of a block tells the other processes after a refresh."""

    is_ready: bool
    note: str
    #: the forms of the state's tensors, by name
    tensors: dict[str, TensorForm]

    @classmethod
    def of(cls, block: Block) -> _RefreshOutcome:
        """Return the outcome for a block that was refreshed here."""
        return cls(block.is_ready, block.note, _describe_tensors(block.state))


class Replicas:
    """The processes, and which of them refreshes which block.

    Args:
        processes: those that train together; one alone sends nothing.
        workers: how many of them hold a block's state.
        is_wrapped: whether a wrapper averages the gradients.
        is_owned: whether an average is held by the one process alone that refreshes its block.
    """

    def __init__(
        self, processes: Processes, workers: int | None, *, is_wrapped: bool, is_owned: bool = False
    ) -> None:
        self.processes = processes
        self.is_single = processes.is_single
        self.placement: Placement[BlockKey] = Placement(processes, workers)
        self._is_wrapped = is_wrapped
        self._is_owned = is_owned and not self.is_single
        #: whether sums may be under way while a wrapper's backward pass goes on, and in which group
        self._overlaps = is_wrapped and not is_owned and not self.is_single
        self._overlap_group: Processes | None = None
        #: the shapes of the sums that all processes measured last, and the sums under way
        self._last_shapes: ShapesByBlock | None = None
        self._sent: SentSums | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but what is under way, and the group in which it is."""
        return {**vars(self), **dict.fromkeys(("_sent", "_overlap_group", "_last_shapes"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.is_single = self.processes.is_single  # where it is read, others may not run

    def refuse_options(self, options: Options) -> None:
        """Raise for options that do not go with several processes, or with teams of them."""
        if options.metric.couples_samples:
            self.refuse_several(
                f"{options.metric!r} does not go with several processes",
                "it relates the samples of a batch, of which each process has a part",
                "Use a metric of single samples, such as the likelihood's own",
            )
        if options.measures_spectrum and self.placement.has_several_teams:
            raise PullbackError(
                "workers= does not go with ekfac=True",
                "all processes measure in the eigenbases",
                "Leave workers out, so that all of them hold these",
            )

    def refuse_several(self, what: str, why: str, remedy: str) -> None:
        """Raise this error where several processes train together."""
        if not self.is_single:
            raise PullbackError(what, why, remedy)

    def synchronize(
        self, params: ModelParameters, options: Mapping[str, Any], groups: Groups, schedule: Any
    ) -> None:
        """Raise where processes differ in model or options, and copy the first one's parameters."""
        if self.is_single:
            return
        shapes = {n: (tuple(p.shape), p.dtype) for n, p in params.by_name.items()}
        rates = _collect_options(params, groups, schedule)
        options = {**options, "workers": self.placement.workers}
        self.processes.require_same("their model", shapes, "Build the same model in every process")
        self.processes.require_same(
            "the options of KFAC", options, "Give all of them the same options"
        )
        self.processes.require_same("the options of KFAC", rates, "Give all the same param groups")
        if not self._is_wrapped:
            self.processes.broadcast_first([p.data for p in params.by_name.values()], "parameters")

    # --- on the way in: statistics ----------------------------------------------------------------

    def attach(self, capture: StatisticsCapture, launch: Callable[[], None]) -> None:
        """Let a capture call `launch` in the backward pass, as soon as statistics are complete."""
        if not self.is_single:
            capture.on_complete = launch

    def average_gradients(self, params: ModelParameters, groups: Groups, is_wrapped: bool) -> None:
        """Average gradients over processes where no wrapper (DDP, FSDP) does."""
        if self.is_single or self._is_wrapped or is_wrapped:
            return
        trained = {
            n: p for n, p in params.in_groups(groups).items() if p.requires_grad and p.numel()
        }
        for name, p in trained.items():
            refuse_sparse(name, p.grad)
        self.processes.average_gradients(trained.values())

    def launch_sums(self, pool: Pool, params: ModelParameters) -> None:
        """Begin to sum the pooled statistics, in the shapes that all had last time.

        It is called in the backward pass, and before `sum_statistics`: messages of their own group
        know no order but theirs. So every process begins once between two sums, also where a step
        was skipped, and `sum_statistics` finds out what is out of date. Nothing is waited for,
        since another process may wait for this one's gradients.
        """
        group = self._overlap_group
        if self._sent is None and group is not None and self._last_shapes is not None:
            self._sent = self._start_sums(pool, self._last_shapes, params, group)

    def forget_sums(self) -> None:
        """Begin no sums ahead from now on: states were loaded, and some may have begun."""
        if self._last_shapes is not None:
            self._sent = None
            self._overlap_group = None
            self._overlaps = False

    def close(self) -> None:
        """Give up the group of sums that begin ahead; all processes call it."""
        self._sent = None
        self._overlaps = False
        if self._overlap_group is not None:
            self._overlap_group.destroy()
            self._overlap_group = None

    def sum_statistics(
        self,
        capture: StatisticsCapture,
        params: ModelParameters,
        groups: Groups,
        gradients: Tensors,
        schedule: Mapping[str, Any],
    ) -> None:
        """Sum the pooled statistics over processes; raise on all where the processes differ."""
        if self.is_single:
            return
        self.launch_sums(capture.pool, params)
        sent = self._sent
        self._sent = None
        pool = capture.pool
        shapes = _list_shapes(pool)
        facts = (
            shapes, sorted(capture.structure.partners.items()), capture.table.list_known_roles()
        )  # fmt: skip
        flags = _list_flags(pool, sent)
        have_same_facts, common = self._compare(facts, flags, params, groups, gradients, schedule)
        agreement = _Agreement(*common)
        if not have_same_facts:
            shapes = self._join_structure(shapes, capture)
        if agreement.is_idle:
            return
        pool.calls = max(pool.calls, 1)
        if not agreement.is_unbroken:
            pool.sums = {}
            pool.samples = torch.nan
            return
        self._finish_sums(pool, sent, shapes, agreement, params)

    def _finish_sums(
        self,
        pool: Pool,
        sent: SentSums | None,
        shapes: ShapesByBlock,
        agreement: _Agreement,
        params: ModelParameters,
    ) -> None:
        """Wait for the sums that were sent ahead, or send and sum anew if they are out of date."""
        if sent is not None and agreement.is_current and not agreement.is_fresh:
            # a step has several passes: the sums that were sent ahead lack the later ones
            self._overlap_group = None
        if sent is None or not agreement.is_fresh or shapes != self._last_shapes:
            sent = self._start_sums(pool, shapes, params, self.processes)
        if self._last_shapes is None and self._overlaps:
            self._make_overlap_group()
        self._last_shapes = shapes
        sent.finish()

    def _make_overlap_group(self) -> None:
        """Make the group in which sums are sent while the backward pass goes on."""
        self._overlap_group = self.processes.duplicate()
        if self._overlap_group is not None and self._overlap_group.is_freed_alone:
            free = finalize(self, self._overlap_group.destroy)
            free.atexit = False  # torch gives up all groups by itself then

    def _join_structure(self, shapes: ShapesByBlock, capture: StatisticsCapture) -> ShapesByBlock:
        """Return the blocks that any process saw, and let all know the same structure and roles."""
        structure = capture.structure
        known = (shapes, dict(structure.partners), dict(capture.table.roles))
        known_by_rank = self.processes.gather_objects(known)
        partners: dict[str, tuple[str, ...]] = {}
        for _, rank_partners, roles in reversed(known_by_rank):
            partners |= rank_partners
            capture.table.add_roles(roles.values())
        structure.partners = partners
        return join_shapes([rank_shapes for rank_shapes, *_ in known_by_rank])

    def _compare(
        self,
        facts: object,
        flags: Sequence[bool],
        params: ModelParameters,
        groups: Groups,
        gradients: Tensors,
        schedule: Mapping[str, Any],
    ) -> tuple[bool, list[bool]]:
        """Return whether all processes have the same facts, and which flags are true on all.

        Raise on all where replicas would drift apart, in rates, gradients or parameters.
        """
        processes = self.processes
        rates = _collect_options(params, groups, schedule)
        bits = (checksum([*gradients.values()]), params.checksum(groups))
        are_equal, common = processes.compare([facts, rates, [*gradients]], flags, bits)
        have_same_facts, *have_same_replicas = are_equal
        if not all(have_same_replicas):
            self._refuse_drift(have_same_replicas, params, groups, gradients, rates)
        return have_same_facts, common

    def _refuse_drift(
        self,
        have_same: Sequence[bool],
        params: ModelParameters,
        groups: Groups,
        gradients: Tensors,
        rates: Mapping[str, Any],
    ) -> None:
        """Raise on all processes, with what differs between them.

        `have_same` says of rates, names of gradients, bits of gradients and bits of parameters
        whether all processes have the same.
        """
        same_rates, same_names, same_gradients, same_parameters = have_same
        processes = self.processes
        if not same_rates:
            remedy = "Change param groups and load states in all of them alike"
            processes.require_same("the options of KFAC", rates, remedy)
        if not same_names:
            presence: dict[str, str | None] = {}
            for name in params.in_groups(groups):
                presence[f"that of {name}"] = "there" if name in gradients else None
            remedy = "Wrap the model in DistributedDataParallel(find_unused_parameters=True)"
            processes.require_same("their gradients", presence, remedy)
        if not same_gradients:
            remedy = "Change them in all processes alike, or before they are averaged: in the loss"
            processes.require_same(
                "their gradients", _describe_norms_and_checksums(gradients), remedy
            )
        if not same_parameters:
            remedy = "Load the last checkpoint, and change gradients in all processes alike"
            parameters = params.gather_whole(params.in_groups(groups), "parameters")
            processes.require_same(
                "their parameters", _describe_norms_and_checksums(parameters), remedy
            )

    def _start_sums(
        self, pool: Pool, shapes: ShapesByBlock, params: ModelParameters, processes: Processes
    ) -> SentSums:
        """Begin to sum over processes what was pooled, blocks and sums of these shapes."""
        device = next(iter(params.by_name.values())).device
        sums: dict[BlockKey, BlockTensors] = {}
        for key, sum_shapes in shapes.items():
            sums[key] = _fill_missing_sums(pool, key, sum_shapes, params.by_name[key.names[0]])
        owners = {}
        if self._is_owned and sums.keys() <= self.placement.owners.keys():
            owners = self.placement.owners
        return SentSums(pool, sums, processes, device, owners)

    # --- averages ---------------------------------------------------------------------------------

    def keeps_average(self, key: BlockKey) -> bool:
        """Return whether this process holds the average of a block."""
        return not self._is_owned or self.placement.owners.get(key) in (None, self.processes.rank)

    def sum_over_owners(self, shares: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums over processes of numbers, where averages have one owner each.

        Every owner gives the numbers of its blocks, and zeros for those of the others.
        """
        if not self._is_owned or not shares:
            return shares
        first = next(iter(shares.values()))
        stacked = torch.stack([t.to(first) for t in shares.values()])
        totals = self.processes.sum([stacked], "lengths")[0]
        return dict(zip(shares, totals.unbind(), strict=True))

    def assemble_averages(self, blocks: BlockAverages) -> None:
        """Receive the averages that other processes own, until `release` gives them up again."""
        if not self._is_owned:
            return
        tensors: list[Tensor] = []
        owners: list[int] = []
        for key, average in blocks:
            if not self.keeps_average(key):
                average.replace_tensors(Tensor.contiguous)
            sides = average.sides()
            tensors += sides
            owners += [self.placement.owners[key]] * len(sides)
        self.processes.exchange(tensors, owners, "state")

    # --- on the way out: states -------------------------------------------------------------------

    def assign_owners(self, states: BlockStates, averages: Averages, keys: Set[BlockKey]) -> None:
        """Choose an owner for each of these blocks that has none, and release what others hold."""
        if self.is_single:
            return
        costs: dict[BlockKey, tuple[Any, float]] = {}
        for key in sorted(keys - self.placement.owners.keys(), key=lambda key: key.names):
            block = states.blocks[key]
            costs[key] = ((block.shape.size, block.state.form), block.cost)
        self.placement.assign(costs)
        self.release(states, averages)

    def release(self, states: BlockStates, averages: Averages) -> None:
        """Give up the memory of states that other teams hold, and of averages that others own."""
        for average in [a for key, a in averages.items() if not self.keeps_average(key)]:
            average.replace_tensors(placeholder, mass=False)
        for key in states.blocks.keys() & self.placement.owners.keys():
            block = states.blocks[key]
            if not block.is_absent and not self.placement.holds(key):
                states.replace_tensors(key, placeholder)
                block.is_absent = True

    def refresh(
        self,
        states: BlockStates,
        averages: Averages,
        keys: Sequence[BlockKey],
        damping: float,
        references: Any,
    ) -> None:
        """Refresh these blocks, each by its owner, and send them to those who hold them."""
        if self.is_single:
            states.refresh(averages, keys, damping, references)
            return
        owned_keys = [k for k in keys if self.placement.owns(k)]
        with self.processes.raise_together("refresh its blocks"):
            states.refresh(averages, owned_keys, damping, references)
        owned_outcomes = {k: _RefreshOutcome.of(states.blocks[k]) for k in owned_keys}
        outcomes: dict[BlockKey, _RefreshOutcome] = {}
        for rank_outcomes in self.processes.gather_objects(owned_outcomes):
            outcomes |= rank_outcomes
        for key in [k for k in keys if k not in owned_outcomes]:
            self._adopt(states, key, outcomes[key])
        self._send(states, keys)

    def _adopt(self, states: BlockStates, key: BlockKey, outcome: _RefreshOutcome) -> None:
        """Prepare a block for the state that its owner has refreshed and is about to send."""
        block = states.blocks[key]
        block.note = outcome.note
        if outcome.is_ready and not block.is_ready:
            block.is_ready = True
            states.invalidate_stacks()
        if outcome.tensors != _describe_tensors(block.state):
            is_held = self.placement.holds(key)
            block.state = _make_room(block.state, outcome.tensors, is_held=is_held)
            states.invalidate_stacks()

    def _send(self, states: BlockStates, keys: Sequence[BlockKey]) -> None:
        """Send what the owners of these blocks have refreshed to the other members of their teams.

        Of symmetric matrices a triangle is sent, and all members mirror it.
        """
        if self.placement.workers == 1:
            return
        sent: dict[BlockKey, list[Tensor]] = {}
        mirrored: list[tuple[Tensor, PackedMatrix]] = []
        for key in keys:
            if not states.blocks[key].is_ready or not self.placement.holds(key):
                continue
            sent[key] = []
            for tensor, is_symmetric in _refreshed_tensors(states.blocks[key].state):
                if is_symmetric:
                    packed = pack_triangle(tensor)
                    if isinstance(packed, PackedMatrix):
                        mirrored.append((tensor, packed))
                    sent[key].append(get_entries(packed))
                else:
                    sent[key].append(tensor)
        self.placement.send_within(sent, "inverses")
        for tensor, packed in mirrored:
            tensor.copy_(packed.unpack())

    def gather_directions(
        self,
        states: BlockStates,
        directions: dict[str, Tensor],
        stacked: list[Tensor],
        gradients: Tensors,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return `directions` and `stacked` with those of the blocks that other teams hold.

        `directions` are those of this team's blocks, by name, and `stacked` the few tensors that
        hold them. All processes call it.
        """
        if self.is_single or not self.placement.has_several_teams:
            return directions, stacked
        all_directions = dict(directions)
        sent: dict[BlockKey, list[Tensor]] = {}
        placed = states.ready & self.placement.owners.keys()
        for key in sorted(placed, key=lambda key: key.names):
            for name in [n for n in key.names if n in gradients]:
                dtype = states.blocks[key].shape.dtype
                all_directions[name] = torch.empty_like(gradients[name], dtype=dtype)
                if self.placement.holds(key):
                    all_directions[name].copy_(directions[name])
                sent.setdefault(key, []).append(all_directions[name])
        self.placement.send_across(sent, "directions")
        return all_directions, [*all_directions.values()]

    # --- saved states -----------------------------------------------------------------------------

    @contextmanager
    def explain_lost_process(self, call: str) -> Iterator[None]:
        """Say of a message that fails that another process may not have made this `call`."""
        try:
            yield
        except RuntimeError as error:
            if self.is_single:
                raise
            raise PullbackError(
                f"{call} did not hear from all processes",
                "each of them holds a part of the state, and one did not call it, or is lost",
                f"Call {call} on all processes together; one of them may write it",
            ) from error

    def collect_states(self, states: BlockStates) -> None:
        """Receive the states of other teams, unless `cut_piece` cuts them, until `release`."""
        if self._is_owned or not self.placement.has_several_teams:
            return
        placed = states.ready & self.placement.owners.keys()
        tensors: dict[BlockKey, list[Tensor]] = {}
        for key in sorted(placed, key=lambda key: key.names):
            block = states.blocks[key]
            if block.is_absent:
                states.replace_tensors(key, Tensor.contiguous)
                block.is_absent = False
            tensors[key] = [*block.state.tensors().values()]
        self.placement.send_across(tensors, "state")

    def cut_piece(self, key: BlockKey, t: Tensor) -> Tensor:
        """Return a tensor of a block for `state_dict`: where owners hold it, cut into pieces."""
        if self._is_owned:
            return self.processes.scatter(t, self.placement.owners.get(key), "state")
        if 0 in t.stride():  # shown, and without memory so far
            return t.clone(memory_format=torch.contiguous_format)
        return t


def _refreshed_tensors(state: RuleState) -> list[tuple[Tensor, bool]]:
    """Return the tensors that a refresh changes, and whether each is symmetric."""
    tensors = state.tensors()
    symmetric_names = state.symmetric_names()
    names = [name for name in state.refreshed_names() if name in tensors]
    return [(tensors[name], name in symmetric_names) for name in names]


def _describe_tensors(state: RuleState) -> dict[str, TensorForm]:
    """Return shape and dtype of each of a state's tensors."""
    return {n: (tuple(t.shape), t.dtype) for n, t in state.tensors().items()}


def _make_room(state: RuleState, forms: dict[str, TensorForm], *, is_held: bool) -> RuleState:
    """Return a state with zeros of these forms, in memory of its own where it is held here."""
    device = next(iter(state.tensors().values())).device
    tensors: dict[str, Tensor] = {}
    for name, (shape, dtype) in forms.items():
        zeros = torch.zeros((), dtype=dtype, device=device).expand(shape)
        if is_held:
            tensors[name] = zeros.clone()
        else:
            tensors[name] = zeros
    return type(state)(**{**vars(state), **tensors})


def _describe_norms_and_checksums(tensors: Tensors) -> dict[str, str]:
    """Return what tells tensors apart, in words."""
    words: dict[str, str] = {}
    for name, t in tensors.items():
        if t.numel():
            length = float(t.detach().double().norm())
            words[f"that of {name}"] = f"{length:.9g} long, with bits {checksum([t]):x}"
    return words


def _collect_options(
    params: ModelParameters, groups: Groups, schedule: Mapping[str, Any]
) -> dict[str, Any]:
    """Return options of param groups and the schedule's numbers, by what an error calls them.

    Tensors are left out: comparing them would wait for the device.
    """
    rates: dict[str, Any] = {}
    for i, group in enumerate(groups):
        options = {n: v for n, v in group.items() if not isinstance(v, Tensor)}
        options["params"] = [*params.in_groups([group])]
        rates |= {f"{name} of param group {i}": v for name, v in options.items()}
    return rates | {f"the schedule's {n}": v for n, v in schedule.items()}
