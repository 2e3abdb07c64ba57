"""Blocks of one form as a stack: one state, and one call of their rule for the directions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from .factors.block import BlockKey, BlockKind
from .rules import BlockShape, Rule, RuleState, StepContext
from .rules.base import StateCheck, make_direction_error

Tensors = Mapping[str, Tensor]


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
        self._is_elementwise = first.rule.is_elementwise
        #: along which states are joined: entries (1, N) side by side, other blocks below each other
        self._axis = 1 if self._is_elementwise else 0
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
        if self._is_elementwise:
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
        if self._is_elementwise:
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
        """Return the directions of all weights (member 0) or partners by name, in their shapes."""
        names = [block.key.names[member] for block in self._blocks]
        unbound = stacked.reshape(len(names), *self._templates[names[0]].shape).unbind()
        return dict(zip(names, unbound, strict=True))

    def _split_flat(self, flat: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Return a flat direction of these parameters by name, in their shapes."""
        templates = [self._templates[name] for name in names]
        pieces = flat.split([template.numel() for template in templates])
        by_name: dict[str, Tensor] = {}
        for name, template, piece in zip(names, templates, pieces, strict=True):
            if template.ndim == 1:
                by_name[name] = piece
            else:
                by_name[name] = piece.view(template.shape)
        return by_name


def select_stacks(
    stacks: Sequence[Stack], gradients: Tensors, replayed: Collection[str]
) -> list[Stack]:
    """Return the stacks that have a gradient, without those whose directions a graph gave."""
    return [s for s in stacks if s.has_gradient(gradients) and s.is_disjoint(replayed)]


def find_directions(
    stacks: Sequence[Stack], gradients: Tensors, step: StepContext
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the directions of stacks of one rule by name, and the tensors they are views of."""
    if len(stacks) == 1:
        pieces = stacks[0].direction(gradients, step)
        return stacks[0].split(pieces), pieces
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
    by_name: dict[str, Tensor] = {}
    for stack, direction, gradient in zip(stacks, directions, joined, strict=True):
        _check_direction(rule, direction, gradient)
        by_name |= stack.split([direction])
    return by_name, list(directions)


def _flatten(gradient: Tensor) -> Tensor:
    """Return a gradient as a vector; for most biases that is no operation."""
    if gradient.ndim == 1:
        return gradient
    return gradient.reshape(-1)


def _check_direction(rule: Rule, direction: Any, gradient: Tensor) -> None:
    """Raise if a rule returned something else than a direction of the gradient's shape."""
    if not isinstance(direction, Tensor) or direction.shape != gradient.shape:
        raise make_direction_error(rule, direction, gradient)
