"""The table of all parameters: what each is for, and which rule it follows.

Before the first forward pass names, shapes and dtypes are known, and which param groups ask for the
rule for others. That pass shows the role of every parameter (`pullback.maps.roles`). The statistics
that follow show whether a matrix has the factors that the rule reads. States, statistics,
`coverage()`, checkpoints and processes read this table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..._core.shards import get_local_piece, is_sharded
from ..._core.space import compute_dtype
from ...grams.kronecker.packed_matrix import FactorMatrix, get_entries
from ...maps.roles import ParameterRole, Role
from .factors.block import (
    BlockKey,
    BlockKind,
    FactorKey,
    Factors,
    FactorSide,
    block_shape,
    is_dense,
)
from .rules import BlockShape, Rule

#: why a parameter follows the rule for others
GROUP_ASKS = "its param group asks for it"
NO_DENSE_FACTOR = "it has no dense side to whiten by"


@dataclass
class Assignment:
    """The role and the rule of every parameter of the param groups.

    Attributes:
        rule: for matrices, or for all parameters that it accepts.
        others: the rule for all other parameters; None where there are none.
        roles: what parameters are for, as far as forward passes have shown it.
        left_out: why matrices do not follow the rule although their role would let them.
        measured: the parameters that follow the rule, or whose role is not known yet.
        elementwise: those that follow the rule for others.
    """

    rule: Rule
    others: Rule | None
    roles: dict[str, ParameterRole] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    measured: list[str] = field(default_factory=list)
    elementwise: list[str] = field(default_factory=list)
    #: whether the model has changed since roles were found
    is_stale: bool = False
    #: whether the rule is for every parameter, whatever its role
    has_one_rule: bool = field(init=False)
    _shapes: dict[str, torch.Size] = field(default_factory=dict)
    #: of matrices, the root mean square of their entries before their first step
    _initial_sizes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.has_one_rule = self.rule.accepts(Role.VECTOR)

    def copy(self) -> Assignment:
        """Return the table as it is now."""
        return replace(self, roles=dict(self.roles), left_out=dict(self.left_out))

    def restore(self, other: Assignment) -> None:
        """Become the same as a copy."""
        vars(self).update(vars(other))

    def set_parameters(self, params: Mapping[str, Tensor], with_others: Collection[str]) -> None:
        """Set the parameters that are optimized, and those whose group asks for the other rule."""
        self._shapes = {name: p.shape for name, p in params.items() if p.numel()}
        for name in [n for n, why in self.left_out.items() if why == GROUP_ASKS]:
            del self.left_out[name]
        self.left_out |= dict.fromkeys(with_others, GROUP_ASKS)
        self._assign_rules()

    def measure_initial_sizes(self, params: Mapping[str, Tensor]) -> None:
        """Measure the entries of matrices that were not measured before.

        It is called before the first step of a parameter: its values may be set after the optimizer
        was made. Frozen parameters, whose state is given up, are measured when they thaw. All
        processes call it, with the same parameters in the same order.
        """
        for name, p in params.items():
            if not p.requires_grad:
                self._initial_sizes.pop(name, None)
            elif p.numel() and name not in self._initial_sizes and self.can_be_matrix(name):
                self._initial_sizes[name] = _measure_size(p)

    def add_roles(self, roles: Iterable[ParameterRole]) -> None:
        """Note what a forward pass has shown; a role that it did not use replaces no other."""
        self.is_stale = False
        for role in roles:
            known = self.roles.get(role.name)
            if known is None or role.is_used or not known.is_used:
                self.roles[role.name] = role
        self._assign_rules()

    def list_known_roles(self) -> list[tuple[object, ...]]:
        """Return the roles in a form that processes can compare, without the reasons."""
        roles = sorted(self.roles.items())
        return [
            (name, role.role.value, role.split, role.is_used, role.is_normalized)
            for name, role in roles
        ]

    def select_blocks(
        self, means: Mapping[BlockKey, dict[FactorKey, FactorMatrix]], longest: int
    ) -> dict[BlockKey, dict[FactorKey, FactorMatrix]]:
        """Return the measured blocks that follow the rule; note why other matrices do not.

        Sides up to `longest` are held as matrices.
        """
        selected = {
            key: factors for key, factors in means.items() if self.follows_rule(key, factors)
        }
        for key, factors in means.items():
            if key not in selected and _is_weight(key, factors):
                reason = NO_DENSE_FACTOR
                if max(side.shape[-1] for side in factors.values()) > longest:
                    reason = f"one of its sides is longer than max_factor={longest}"
                self.left_out |= dict.fromkeys(key.names, reason)
        self._assign_rules()
        return selected

    def _assign_rules(self) -> None:
        """Set `measured` and `elementwise` by what is known of every parameter now."""
        self.measured = [name for name in self._shapes if self._can_follow(name)]
        measured = {*self.measured}
        self.elementwise = [name for name in self._shapes if name not in measured]

    def _can_follow(self, name: str) -> bool:
        """Return True if a parameter follows the rule, or if nothing known rules that out."""
        if self.rule.is_elementwise or name in self.left_out:
            return False
        role = self.roles.get(name)
        if role is None or self.has_one_rule or self.rule.accepts(role.role):
            return True
        # another pass may use it in a layer, and so show that it is a matrix
        return role.role is Role.VECTOR and not role.is_used and self.can_be_matrix(name)

    def can_be_matrix(self, name: str) -> bool:
        """Return whether the shape of a parameter is that of a matrix, or of several."""
        shape = self._shapes.get(name, torch.Size())
        return len(shape) > 1 and min(shape[-2:]) > 1

    def is_unused(self, name: str) -> bool:
        """Return whether a parameter has a layer's role, and no forward pass used the layer."""
        role = self.roles.get(name)
        return role is not None and not role.is_used and role.role is not Role.VECTOR

    def lacks_role(self, names: Iterable[str]) -> bool:
        """Return whether the next forward pass is to show roles: one of these has none yet.

        A layer that no pass has used, such as an expert without rows, has the role of its kind, and
        how its output is split is not known. A role from a checkpoint comes without the reason.
        """
        if self.is_stale:
            return True
        for name in names:
            role = self.roles.get(name)
            if role is None or not role.reason or self.is_unused(name):
                return True
        return False

    def follows_rule(self, key: BlockKey, factors: Factors) -> bool:
        """Return True if a block follows the rule, and False if it follows the rule for others."""
        if self.has_one_rule:
            return True
        return _is_weight(key, factors) and self.rule.fits(self.shape_of(key, factors))

    def shape_of(self, key: BlockKey, factors: Factors) -> BlockShape:
        """Return the shape of a block that has these factors."""
        size = block_shape(key, factors)
        entries = get_entries(next(iter(factors.values())))
        parameter_role = self.roles.get(key.names[0])
        role: Role | None = None
        is_normalized = False
        if parameter_role is not None:
            role = parameter_role.role
            is_normalized = parameter_role.is_normalized
        return BlockShape(
            kind=key.kind,
            size=size,
            dense_rows=is_dense(factors, FactorSide.ROWS),
            dense_columns=is_dense(factors, FactorSide.COLUMNS),
            dtype=entries.dtype,
            device=entries.device,
            split=self._split_of(key, size),
            role=role,
            is_normalized=is_normalized,
            initial_size=self._initial_sizes.get(key.names[0]),
        )

    def _split_of(self, key: BlockKey, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the row counts of the matrices that a block's weight holds; () for a single one.

        The split of a role counts along an axis of the parameter. It is that of the block's rows
        where this axis is the first one, or a later one of a transposed weight. Groups of a
        convolution and experts are blocks of their own, each with all of the split.
        """
        role = self.roles.get(key.names[0])
        if role is None or not key.is_kronecker or key.is_bias or len(role.split) < 2:
            return ()
        if key.is_transposed:
            counts_rows = role.split_axis > 0
        else:
            counts_rows = role.split_axis == 0 or role.role is Role.EXPERTS
        if counts_rows and sum(role.split) == size[1]:
            return role.split
        return ()


@torch.no_grad()
def _measure_size(p: Tensor) -> float:
    """Return the root mean square of a parameter's entries; of a shard, those of all processes."""
    length: Any = torch.linalg.vector_norm(p, dtype=compute_dtype(p.dtype))
    if is_sharded(length):
        length = length.full_tensor()
    return float(length) / p.numel() ** 0.5


def make_entries_shape(p: Any) -> BlockShape:
    """Return the shape of the block of a parameter's entries, or of those that this process has."""
    piece = p
    if is_sharded(p):
        piece = get_local_piece(p)
    dtype = compute_dtype(p.dtype)
    size = (1, piece.numel())
    return BlockShape(
        kind=BlockKind.ENTRIES,
        size=size,
        dense_rows=False,
        dense_columns=False,
        dtype=dtype,
        device=torch.device(p.device),
    )


def _is_weight(key: BlockKey, factors: Factors) -> bool:
    """Whether a block is that of matrices, and not of single rows as in a depthwise convolution."""
    shapes = [t.shape for t in factors.values()]
    is_of_rows = shapes[0][0] > 1 and any(shape[-1] == 1 for shape in shapes)
    return key.is_kronecker and not key.is_bias and not is_of_rows
