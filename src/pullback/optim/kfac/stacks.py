"""The states of all blocks, stacked by shape: refreshed from averages, and applied to gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..._core.flags import DeferredFlags
from ...grams.kronecker import Pair
from ...grams.kronecker.cholesky_inverse import is_inverted_alone
from ...grams.kronecker.packed_matrix import unpack
from .block_stack import Block, Stack, Tensors, find_directions, join_states, select_stacks
from .direction_graph import CaptureCount, DirectionGraph
from .factors.averages import Average, gram_of, stack_averages, undivided_gram
from .factors.block import BlockKey, BlockKind
from .rules import BlockShape, FactorAverages, RefreshReport, Rule, RuleState, StepContext
from .rules.base import InputFactor, StateCheck, Statistics

Averages = Mapping[BlockKey, Average]


@dataclass(frozen=True)
class Limits:
    """How much is done at once."""

    #: entries of a parameter that is concatenated with others: larger ones are not worth a copy
    concatenated: int = 2**16
    #: entries of a stack that shares operations with others: those on more take longer than their
    #: launch, and their results would all be in memory at once
    sharing: int = 2**16


_LIMITS = Limits()


@dataclass(frozen=True)
class RefreshStack:
    """Blocks of one form with their averages and states, to be refreshed together."""

    blocks: list[Block]
    averages: FactorAverages
    state: RuleState
    note: str

    @property
    def rule(self) -> Rule:
        """The rule that all of the blocks follow."""
        return self.blocks[0].rule

    def release(self) -> None:
        """Give up the memory of the refreshed state, of which the blocks have their parts."""
        for name in self.state.tensors():
            setattr(self.state, name, None)


@dataclass(frozen=True)
class StartedRefresh:
    """Stacks that a rule was asked to refresh, and its reports."""

    stacks: Sequence[RefreshStack]
    #: that the rule changes what it declares alone
    checks: Sequence[StateCheck]
    #: each is asked for when the one before is dealt with
    reports: Iterator[RefreshReport]


@dataclass(frozen=True)
class DeferredRefresh:
    """A refresh for which the host has not waited, and flags of the blocks that succeeded."""

    keys: Sequence[BlockKey]
    flags: DeferredFlags

    def wait_for_failed_keys(self) -> list[BlockKey]:
        """Return the blocks that failed, after the device is done with all of them."""
        outcomes = zip(self.keys, self.flags.flags(), strict=True)
        return [key for key, has_succeeded in outcomes if not has_succeeded]


class BlockStates:
    """The states of all blocks."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, Block] = {}
        #: states of one form in one piece of memory, those together of which a rule finds the
        #: directions at once; none unless `is_stacked`
        self._batches: list[list[Stack]] = []
        #: where a rule asks for one
        self._graph: DirectionGraph | None = None
        self._captures = CaptureCount()
        self.is_stacked = False
        #: found once for many steps, until `invalidate_stacks`
        self._ready: set[BlockKey] | None = None
        self._entry_names: set[str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the stacks: in a pickle states are no views of them."""
        forgotten = {"_batches": [], "is_stacked": False, "_ready": None, "_entry_names": None}
        return {**vars(self), **forgotten, "_graph": None}

    @property
    def ready(self) -> set[BlockKey]:
        """The blocks whose state can be applied."""
        if self._ready is None:
            self._ready = {key for key, block in self.blocks.items() if block.is_ready}
        return self._ready

    @property
    def entry_names(self) -> set[str]:
        """The parameters whose entries are blocks by themselves, without statistics."""
        if self._entry_names is None:
            entries = [key for key in self.blocks if key.kind == BlockKind.ENTRIES]
            self._entry_names = {key.names[0] for key in entries}
        return self._entry_names

    @property
    def notes(self) -> dict[BlockKey, str]:
        """What went wrong or was left out in the blocks' last refresh."""
        return {key: block.note for key, block in self.blocks.items() if block.note}

    # --- memory -----------------------------------------------------------------------------------

    def allocate(self, key: BlockKey, rule: Rule, shape: BlockShape, born: int = 0) -> Block:
        """Make the first state of a block."""
        is_ready = rule.reads is Statistics.NONE
        block = Block(key, rule, shape, rule.make_state(shape), is_ready=is_ready, born=born)
        self.blocks[key] = block
        self.invalidate_stacks()
        return block

    def drop(self, key: BlockKey) -> None:
        """Forget a block."""
        self.blocks.pop(key, None)
        self.invalidate_stacks()

    def replace_tensors(self, key: BlockKey, change: Callable[[Tensor], Tensor]) -> None:
        """Replace all tensors of a block's state by what `change` makes of them."""
        block = self.blocks[key]
        block.state = block.state.map(change)
        self.invalidate_stacks()

    def convert(self, key: BlockKey, template: Tensor) -> None:
        """Bring a block's state, with all that is in it, to the template's device and dtype."""
        block = self.blocks[key]
        block.shape = replace(block.shape, dtype=template.dtype, device=template.device)
        block.state = block.rule.convert(block.state, block.shape)
        self.invalidate_stacks()

    def invalidate_stacks(self) -> None:
        """Forget the stacks, whose blocks or states have changed; `stack` builds them again."""
        self._batches = []
        self._graph = None
        self.is_stacked = False
        self._ready = None
        self._entry_names = None

    # --- refresh ----------------------------------------------------------------------------------

    def limit_first_refreshes(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the blocks without those whose first refresh has to wait for a later step.

        A first refresh may take an `eigh` of each factor: `Rule.first_entries` bounds how many
        entries one step refreshes for the first time. Small blocks are first, and one block is
        refreshed however large it is. Parameters whose block waits follow the rule for others.
        """
        new = [k for k in keys if self._has_limited_first_refresh(k)]
        new.sort(key=lambda key: self.blocks[key].entries)
        totals = accumulate(self.blocks[key].entries for key in new)
        fitting = [total <= (self.blocks[new[0]].rule.first_entries or 0) for total in totals]
        waiting = {*new[max(1, sum(fitting)) :]}
        return [k for k in keys if k not in waiting]

    def _has_limited_first_refresh(self, key: BlockKey) -> bool:
        block = self.blocks[key]
        return not block.is_ready and key.is_kronecker and block.rule.first_entries is not None

    def refresh(
        self, averages: Averages, keys: Sequence[BlockKey], damping: float, references: Any = None
    ) -> None:
        """Refresh these blocks with λ = `damping`; where one fails, its last state stays."""
        waiting: StartedRefresh | None = None
        for portion in self._divide_in_portions(keys):
            rule = self.blocks[portion[0]].rule
            groups = self._group_by_form(averages, portion)
            batches = [[group] for group in groups]
            if rule.refreshes_together:
                batches = [groups]
            for batch in batches:
                started = self._start_refresh(
                    [self._stack_averages(averages, group, damping, references) for group in batch]
                )
                if waiting is not None:
                    self._finish_refresh(waiting)
                waiting = started
                if not rule.refreshes_ahead:  # then its averages take memory for nothing
                    self._finish_refresh(started)
                    waiting = None
        if waiting is not None:
            self._finish_refresh(waiting)

    def refresh_on_device(
        self,
        averages: Averages,
        keys: Sequence[BlockKey],
        damping: float,
        is_void: Tensor | None,
    ) -> DeferredRefresh:
        """Refresh blocks that have states, by rules that need not wait for the device.

        The last state stays where the block fails, or where the flag `is_void` is 1.
        """
        refreshed_keys: list[BlockKey] = []
        flags: list[Tensor] = []
        for portion in self._divide_in_portions(keys):
            groups = self._group_by_form(averages, portion)
            stacks = [self._stack_averages(averages, group, damping, None) for group in groups]
            checks = [StateCheck(stack.rule, stack.state) for stack in stacks]
            have_succeeded = stacks[0].rule.refresh_on_device(
                [stack.averages for stack in stacks], [stack.state for stack in stacks]
            )
            for entry in zip(groups, stacks, checks, have_succeeded, strict=True):
                group, stack, check, flags_of_stack = entry
                check.refuse_undeclared_changes(sum(b.shape.size[0] for b in stack.blocks))
                check.refuse_other_shapes()
                flags += _copy_successful(stack, flags_of_stack, is_void)
                stack.release()
                refreshed_keys += group
        return DeferredRefresh(refreshed_keys, DeferredFlags(torch.stack(flags)))

    def _divide_in_portions(self, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """Return blocks that are refreshed together, large ones first."""
        portions: list[list[BlockKey]] = []
        room = 0
        for key in sorted(keys, key=lambda key: -self.blocks[key].entries):
            entries = 0
            if key.is_kronecker:
                entries = self.blocks[key].entries
            if not portions or entries > room:
                portions.append([])
                room = self.blocks[key].rule.refreshed_entries
            portions[-1].append(key)
            room -= entries
        return portions

    def _group_by_form(self, averages: Averages, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """Return blocks whose averages and states can be stacked."""
        groups: dict[Any, list[BlockKey]] = {}
        for key in keys:
            block = self.blocks[key]
            average = averages[key]
            is_large = is_inverted_alone(max(block.shape.size[1:]), average.mass.device)
            form: Any = (key.kind, key.is_joint, average.form, block.state.form, block.is_ready)
            if (key.is_kronecker and is_large) or average.mean:
                form = key
            groups.setdefault(form, []).append(key)
        return list(groups.values())

    def _stack_averages(
        self, averages: Averages, keys: Sequence[BlockKey], damping: float, references: Any
    ) -> RefreshStack:
        """Return blocks of one form with their averages and states, stacked."""
        blocks = [self.blocks[key] for key in keys]
        gram, mass = undivided_gram(keys[0], stack_averages([averages[key] for key in keys]))
        is_first = not blocks[0].is_ready
        reference, note = find_reference(keys[0], averages[keys[0]], references)
        factors = gram
        if isinstance(gram, Pair) and blocks[0].rule.reads is Statistics.INPUTS:
            factors = InputFactor(gram.input_factor)
        stacked = FactorAverages(factors, mass, damping, is_first, reference)
        states = [block.state for block in blocks]
        if states[0].is_rebuilt:
            states = states[:1]
        return RefreshStack(blocks, stacked, join_states(states), note)

    def _start_refresh(self, stacks: Sequence[RefreshStack]) -> StartedRefresh:
        """Ask the rule that these stacks follow to refresh them."""
        averages = [stack.averages for stack in stacks]
        checks = [StateCheck(stack.rule, stack.state) for stack in stacks]
        reports = stacks[0].rule.refresh_stacks(averages, [stack.state for stack in stacks])
        return StartedRefresh(stacks, checks, reports)

    def _finish_refresh(self, started: StartedRefresh) -> None:
        """Give every block its part of what the rule has found."""
        entries = zip(started.stacks, started.checks, started.reports, strict=True)
        for stack, check, report in entries:
            check.refuse_undeclared_changes(sum(block.shape.size[0] for block in stack.blocks))
            start = 0
            for block in stack.blocks:
                stop = start + block.shape.size[0]
                block.note = stack.note
                self._accept(block, stack.state, range(start, stop), report)
                start = stop
            stack.release()

    def _accept(
        self, block: Block, state: RuleState, indices: range, report: RefreshReport
    ) -> None:
        """Copy its part of a refreshed stack to a block, unless it failed, and note the outcome."""
        notes = [block.note] if block.note else []
        for i in indices:
            notes += report.notes.get(i, ())
        block.note = "; ".join(dict.fromkeys(notes))
        if not report.failed.isdisjoint(indices):
            if block.is_ready:
                block.note += "; the last good one stays"
            else:
                block.note += "; it has none yet"
            return
        new = _copy_refreshed(state, indices, block.state)
        if new or not block.is_ready:
            block.state = replace(block.state, **new)
            self.invalidate_stacks()
        block.is_ready = True

    def make_factor_averages(
        self, key: BlockKey, average: Average, damping: float, references: Any
    ) -> FactorAverages:
        """Return a block's average as `Rule.gram` and `Rule.damped_gram` read it: both factors."""
        gram, mass = undivided_gram(key, average)
        reference, _ = find_reference(key, average, references)
        return FactorAverages(gram, mass, damping, not self.blocks[key].is_ready, reference)

    # --- directions -------------------------------------------------------------------------------

    def stack(self, templates: Tensors, group_numbers: Mapping[str, int]) -> None:
        """Bring states of one form, for parameters of one shape and group, into one memory."""
        groups: dict[Any, list[Block]] = {}
        for key, block in self.blocks.items():
            if not block.is_ready or block.is_absent or key.names[0] not in group_numbers:
                continue
            common = (id(block.rule), group_numbers[key.names[0]], block.born)
            groups.setdefault((*common, *_stack_form(block, templates)), []).append(block)
        stacks = [Stack(blocks, templates) for blocks in groups.values()]
        self._batches = _batch_stacks(stacks, group_numbers)
        if any(stack.rule.cuda_graph for stack in stacks):
            self._graph = DirectionGraph(stacks, self._captures)
        self.is_stacked = True

    def directions(
        self,
        gradients: Tensors,
        groups: Sequence[Mapping[str, Any]],
        group_numbers: Mapping[str, int],
        step: int,
        is_void: Tensor | None,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the directions of parameters that have a block, and the tensors they are views of.

        Where the partner in a block has no gradient, it counts as zero, and has a direction. Where
        the flag `is_void` is 1, moments stay as they are.
        """
        directions: dict[str, Tensor] = {}
        if self._graph is not None:
            directions = self._graph.directions(gradients, is_void)
        stacked = [*directions.values()]
        replayed = {*directions}
        for batch in self._batches:
            stacks = select_stacks(batch, gradients, replayed)
            if not stacks:
                continue
            options = groups[group_numbers[stacks[0].names[0]]]
            context = StepContext(step + 1 - stacks[0].born, options, is_void)
            by_name, pieces = find_directions(stacks, gradients, context)
            directions |= by_name
            stacked += pieces
        return directions, stacked


def _stack_form(block: Block, templates: Tensors) -> tuple[Any, ...]:
    """Return what blocks of one rule, group and age must have in common to be stacked."""
    key = block.key
    shape = block.shape
    if block.rule.is_elementwise:
        if shape.size[1] > _LIMITS.concatenated:
            return (shape.device, shape.dtype, *key.names)
        return (shape.device, shape.dtype)
    if key.is_kronecker:
        shapes = tuple(templates[name].shape for name in key.names)
        return (block.state.form, key.is_bias, key.is_transposed, shapes, shape.size)
    return (block.state.form, key.kind, len(key.names))


def _batch_stacks(stacks: Sequence[Stack], group_numbers: Mapping[str, int]) -> list[list[Stack]]:
    """Return stacks of which a rule finds the directions at once: small ones of one group."""
    batches: dict[Any, list[Stack]] = {}
    for i, stack in enumerate(stacks):
        form: Any = i
        if stack.entries <= _LIMITS.sharing and not stack.is_joint:
            number = group_numbers[stack.names[0]]
            form = (id(stack.rule), number, stack.born, stack.dtype, stack.device)
        batches.setdefault(form, []).append(stack)
    return list(batches.values())


def _copy_successful(stack: RefreshStack, flags: Tensor, is_void: Tensor | None) -> list[Tensor]:
    """Copy its part of a refreshed stack to each block that succeeded; return flags of blocks.

    A block succeeded where `flags`, of the stack's matrices, say so of all of its own. Nothing is
    copied where `is_void` is 1.
    """
    may_change = flags
    if is_void is not None:
        may_change = flags & (is_void == 0)
    refreshed = stack.state.tensors()
    names = [name for name in stack.state.refreshed_names() if name in refreshed]
    flags_of_blocks = []
    start = 0
    for block in stack.blocks:
        stop = start + block.shape.size[0]
        last = block.state.tensors()
        may_change_block = may_change[start:stop].all()
        for name in names:
            new = refreshed[name][start:stop]
            last[name].copy_(torch.where(may_change_block, new, last[name]))
        flags_of_blocks.append(flags[start:stop].all())
        start = stop
    return flags_of_blocks


def _copy_refreshed(stacked: RuleState, indices: range, state: RuleState) -> dict[str, Tensor]:
    """Copy some blocks of a refreshed stack into a state; return the tensors that do not fit."""
    new: dict[str, Tensor] = {}
    old = state.tensors()
    tensors = stacked.tensors()
    for name in [n for n in stacked.refreshed_names() if n in tensors]:
        refreshed = tensors[name][indices.start : indices.stop]
        if name in old and old[name].shape == refreshed.shape:
            old[name].copy_(refreshed)
        else:  # a dense reference beside a diagonal
            new[name] = refreshed.clone()
    return new


def find_reference(key: BlockKey, average: Average, references: Any) -> tuple[Any, str]:
    """Return the long-run averages of a block where the damping reads them, and a note or "".

    Without those of the user it is the mean of all statistics so far.

    Args:
        key: of the block.
        average: of the block.
        references: None where the damping reads none, else what the user has given, perhaps {}.
    """
    if references is None:
        return None, ""
    if key in references:
        factors = {f: unpack(t).to(average.mass) for f, t in references[key].items()}
        return gram_of(key, factors), ""
    note = ""
    if references:
        note = "its reference is its own average: the one given lacks this block"
    return gram_of(key, average.mean or average.normalize()), note
