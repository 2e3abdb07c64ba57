"""The states of all blocks, stacked by shape: refreshed from averages, and applied to gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...grams.kronecker import Pair
from ...grams.kronecker.cholesky_inverse import is_inverted_alone
from ...grams.kronecker.packed_matrix import unpack
from .direction_graph import DirectionGraph
from .factors.averages import Average, gram_of, stack_averages, undivided_gram
from .factors.block import BlockKey, BlockKind
from .rules import BlockShape, FactorAverages, RefreshReport, Rule, RuleState, StepContext
from .rules.base import InputFactor, StateCheck, Statistics, make_direction_error

Averages = Mapping[BlockKey, Average]
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Limits:
    """How much is done at once."""

    #: entries of a parameter that is concatenated with others: larger ones are not worth a copy
    concatenated: int = 2**16
    #: entries of a stack that shares operations with others: those on more take longer than their
    #: launch, and their results would all be in memory at once
    sharing: int = 2**16


_LIMITS = Limits()


@dataclass
class Block:
    """A block: the rule that it follows, and the rule's state."""

    key: BlockKey
    rule: Rule
    shape: BlockShape
    state: RuleState
    #: whether the state has been refreshed; rules without statistics need none
    is_ready: bool = False
    #: whether another process holds the state, which has no memory here
    is_absent: bool = False
    #: steps that were done when the state was made
    born: int = 0
    #: what went wrong or was left out in the last refresh
    note: str = ""

    @property
    def entries(self) -> int:
        """How many entries the factors of a weight have."""
        groups, *sizes = self.shape.size
        return groups * sum(n * n for n in sizes)

    @property
    def cost(self) -> float:
        """About how many products a refresh and a direction take."""
        groups, *sizes = self.shape.size
        entries = prod(self.shape.size)
        if self.shape.kind != BlockKind.KRONECKER:
            return entries
        is_dense = (self.shape.dense_rows, self.shape.dense_columns)
        dense = [n for n, is_matrix in zip(sizes, is_dense, strict=True) if is_matrix]
        return sum(groups * float(n) ** 3 + entries * n for n in dense) + entries


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


class BlockStates:
    """The states of all blocks."""

    def __init__(self) -> None:
        self.blocks: dict[BlockKey, Block] = {}
        #: states of one form in one piece of memory, those together of which a rule finds the
        #: directions at once; none unless `is_stacked`
        self._batches: list[list[Stack]] = []
        #: where a rule asks for one
        self._graph: DirectionGraph | None = None
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
        """What is to be said of blocks."""
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

    def change(self, key: BlockKey, change: Callable[[Tensor], Tensor]) -> None:
        """Replace all tensors of a block's state."""
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
        for portion in self._divide_in_portions(keys):
            groups = self._group_by_form(averages, portion)
            batches = [[group] for group in groups]
            if self.blocks[portion[0]].rule.refreshes_together:
                batches = [groups]
            for batch in batches:
                self._refresh_stacks(
                    [self._stack_averages(averages, group, damping, references) for group in batch]
                )

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

    def _refresh_stacks(self, stacks: Sequence[RefreshStack]) -> None:
        """Refresh stacks, which follow one rule, and give every block its part."""
        averages = [stack.averages for stack in stacks]
        checks = [StateCheck(stack.rule, stack.state) for stack in stacks]
        reports = stacks[0].rule.refresh_stacks(averages, [stack.state for stack in stacks])
        for stack, check, report in zip(stacks, checks, reports, strict=True):
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
        """Copy a block's part of a refreshed stack to the block's memory, unless it failed."""
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
        """Return a block's average in the form in which its rule reads it."""
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
            self._graph = DirectionGraph(stacks)
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
            stacks = [s for s in batch if s.has_gradient(gradients) and s.is_disjoint(replayed)]
            if not stacks:
                continue
            options = groups[group_numbers[stacks[0].names[0]]]
            context = StepContext(step + 1 - stacks[0].born, options, is_void)
            for stack, pieces in zip(
                stacks, find_directions(stacks, gradients, context), strict=True
            ):
                directions |= stack.split(pieces)
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


def find_directions(
    stacks: Sequence[Stack], gradients: Tensors, step: StepContext
) -> list[list[Tensor]]:
    """Return the directions of each stack as `Stack.direction` does, all of them by one call."""
    if len(stacks) == 1:
        return [stacks[0].direction(gradients, step)]
    rule = stacks[0].rule
    copies: list[tuple[Tensor, Tensor]] = []
    for stack in stacks:
        copies += stack.copy_idle_states(gradients)
    joined = [stack.join_gradients(gradients) for stack in stacks]
    directions = rule.directions(joined, [stack.state for stack in stacks], step)
    for stack in stacks:
        stack.check_first_direction()
    for tensor, copy in copies:
        tensor.copy_(copy)
    for direction, gradient in zip(directions, joined, strict=True):
        _check_direction(rule, direction, gradient)
    return [[direction] for direction in directions]


def _check_direction(rule: Rule, direction: Any, gradient: Tensor) -> None:
    if not isinstance(direction, Tensor) or direction.shape != gradient.shape:
        raise make_direction_error(rule, direction, gradient)


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


def join_states(states: Sequence[RuleState], axis: int = 0) -> RuleState:
    """Return states of one form as that of all their blocks."""
    if len(states) == 1:
        return replace(states[0])
    tensors_by_state = [state.tensors() for state in states]
    joined: dict[str, Tensor] = {}
    for name in tensors_by_state[0]:
        joined[name] = torch.cat([tensors[name] for tensors in tensors_by_state], axis)
    return replace(states[0], **joined)


class Stack:
    """Blocks of one form: their states are views of one state, which a rule applies at once."""

    def __init__(self, blocks: Sequence[Block], templates: Tensors) -> None:
        first = blocks[0]
        self.rule = first.rule
        self.born = first.born
        self.names = list(chain.from_iterable(block.key.names for block in blocks))
        self._name_set = {*self.names}
        self._blocks = blocks
        self._templates = templates
        self._key = first.key
        self.dtype = first.shape.dtype
        self.device = first.shape.device
        #: whether weights and biases share blocks
        self.is_joint = first.key.is_joint
        self.entries = sum(prod(block.shape.size) for block in blocks)
        self._rows, self._columns = first.shape.size[-2:]
        self._axis = int(first.rule.is_elementwise)
        self.state = join_states([block.state for block in blocks], self._axis)
        if len(blocks) > 1:
            self._make_views()
        #: until the first direction is found
        self._check: StateCheck | None = StateCheck(self.rule, self.state)

    def _make_views(self) -> None:
        """Let every block's state be a part of the joined one."""
        for name, stacked in self.state.tensors().items():
            sizes = [block.state.tensors()[name].shape[self._axis] for block in self._blocks]
            views = stacked.split(sizes, self._axis)
            for block, view in zip(self._blocks, views, strict=True):
                setattr(block.state, name, view)

    def has_gradient(self, gradients: Tensors) -> bool:
        """Return True if one of the parameters has a gradient."""
        return not self._name_set.isdisjoint(gradients)

    def is_disjoint(self, names: Collection[str]) -> bool:
        """Return True if none of the parameters has one of these names."""
        return self._name_set.isdisjoint(names)

    def direction(self, gradients: Tensors, step: StepContext) -> list[Tensor]:
        """Return the stacked directions, of weights and biases that share blocks in two parts.

        States of blocks without a gradient stay as they are.
        """
        before = self.copy_idle_states(gradients)
        if self.is_joint:
            weight = self._stack_weights(gradients)
            biases = self._list_gradients(1, gradients)
            if len(biases) == 1:
                bias = biases[0]
            else:
                bias = torch.stack(biases)
            bias = bias.reshape(-1, self._rows)
            pieces = list(self.rule.direction_with_bias(weight, bias, self.state, step))
        else:
            gradient = self.join_gradients(gradients)
            direction = self.rule.direction(gradient, self.state, step)
            _check_direction(self.rule, direction, gradient)
            pieces = [direction]
        self.check_first_direction()
        for tensor, copy in before:
            tensor.copy_(copy)
        return pieces

    def check_first_direction(self) -> None:
        """Raise after the first direction if the rule replaced a tensor of its state."""
        if self._check is not None:
            self._check.refuse_replaced_tensors()
            self._check = None

    def copy_idle_states(self, gradients: Tensors) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors of states without a gradient, each with a copy."""
        copies: list[tuple[Tensor, Tensor]] = []
        if self._name_set <= gradients.keys():
            return copies
        for block in self._blocks:
            if gradients.keys().isdisjoint(block.key.names):
                copies += [(t, t.clone()) for t in block.state.tensors().values()]
        return copies

    def _list_gradients(self, member: int, gradients: Tensors) -> list[Tensor]:
        """Return the gradients of all weights (member 0) or partners; missing ones are zero."""
        member_gradients: list[Tensor] = []
        for block in self._blocks:
            name = block.key.names[member]
            gradient = gradients.get(name)
            if gradient is None:
                gradient = torch.zeros_like(self._templates[name], dtype=self.dtype)
            elif gradient.dtype != self.dtype:
                gradient = gradient.to(self.dtype)
            member_gradients.append(gradient)
        return member_gradients

    def join_gradients(self, gradients: Tensors) -> Tensor:
        """Return the gradients in the blocks' coordinates."""
        if self._axis:
            flat = [_flatten(g) for g in self._list_gradients(0, gradients)]
            if len(flat) == 1:
                return flat[0][None]
            return torch.cat(flat)[None]
        if not self._key.is_kronecker:
            columns: list[Tensor] = []
            for member in range(len(self._key.names)):
                flat = [_flatten(g) for g in self._list_gradients(member, gradients)]
                columns.append(torch.cat(flat))
            return torch.stack(columns, 1)
        return self._stack_weights(gradients)

    def _stack_weights(self, gradients: Tensors) -> Tensor:
        """Return the gradients of all weights, (B, O, I)."""
        weights = self._list_gradients(0, gradients)
        if len(weights) == 1:
            weight = weights[0]
        else:
            weight = torch.stack(weights)
        columns = self._columns - self.is_joint
        if self._key.is_transposed:
            return weight.reshape(-1, columns, self._rows).mT.contiguous()
        return weight.reshape(-1, self._rows, columns)

    def split(self, pieces: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return stacked directions by name, in the parameters' shapes."""
        first = pieces[0]
        if self._axis:
            return self._split_flat(first[0], [block.key.names[0] for block in self._blocks])
        by_name: dict[str, Tensor] = {}
        if not self._key.is_kronecker:
            # one copy: an update of strided directions would copy them one by one
            for member, column in enumerate(first.T.contiguous()):
                names = [block.key.names[member] for block in self._blocks]
                by_name |= self._split_flat(column, names)
            return by_name
        weight = first
        if self._key.is_transposed:
            weight = first.mT
        by_name |= self._unbind(weight.contiguous(), 0)
        if self.is_joint:
            by_name |= self._unbind(pieces[1], 1)
        return by_name

    def _unbind(self, stacked: Tensor, member: int) -> dict[str, Tensor]:
        names = [block.key.names[member] for block in self._blocks]
        unbound = stacked.reshape(len(names), *self._templates[names[0]].shape).unbind()
        return dict(zip(names, unbound, strict=True))

    def _split_flat(self, flat: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        templates = [self._templates[name] for name in names]
        pieces = flat.split([template.numel() for template in templates])
        by_name: dict[str, Tensor] = {}
        for name, template, piece in zip(names, templates, pieces, strict=True):
            if template.ndim == 1:
                by_name[name] = piece
            else:
                by_name[name] = piece.view(template.shape)
        return by_name


def _flatten(gradient: Tensor) -> Tensor:
    """Return a gradient as a vector; for most biases that is no operation."""
    if gradient.ndim == 1:
        return gradient
    return gradient.reshape(-1)
