"""`parameter_roles`: what each parameter is for, for this library's optimizers and for others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._core.capture import Call, unwrap_model
from ..maps.roles import Role, find_roles
from .checks import refuse_inference
from .kfac.options import default_rule


@dataclass(frozen=True)
class RoleRow:
    """One parameter of a model.

    Attributes:
        name: in `model.named_parameters()`.
        role: "matrix", "convolution", "experts", "embedding", "head" or "vector".
        split: row counts of the independent matrices that the parameter holds, along
            `split_axis`; empty for embeddings and vectors.
        rule: the rule that `KFAC(model)` gives it: "spectral", "eigenbasis" or "adam".
        shape: of the parameter.
        split_axis: the axis of the parameter that counts rows, that is outputs of its matrices.
        reason: what shows the role.
        is_normalized: whether the length of a weight has no effect, because all that it gives is
            normalized, as that of a convolution before a batch norm.
    """

    name: str
    role: Role
    split: tuple[int, ...]
    rule: str
    shape: tuple[int, ...]
    split_axis: int
    reason: str
    is_normalized: bool = False


class RoleTable(tuple[RoleRow, ...]):
    """One row per parameter; prints as a table."""

    def __str__(self) -> str:
        lines = [("parameter", "shape", "role", "split", "rule", "reason")]
        for row in self:
            shape = "×".join(map(str, row.shape))
            split = "+".join(map(str, row.split))
            lines.append((row.name, shape, row.role.value, split, row.rule, row.reason))
        columns = list(zip(*lines, strict=True))
        widths = [max(map(len, column)) for column in columns[:-1]]
        return "\n".join(_format_line(line, widths) for line in lines)


def _format_line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, cells[-1]])


def parameter_roles(model: nn.Module, *example_inputs: Any, **kwargs: Any) -> RoleTable:
    """Return what each parameter of a model is for, from one forward pass of the example inputs.

    The pass shows which layer or function uses each parameter, which matrix gives the output, and
    how outputs of fused weights are split: so a table of embeddings is told from a matrix, a
    depthwise filter from a convolution, and queries, keys and values in one weight from one
    matrix. Names and shapes do not matter. The model is run in the mode that it is in; its
    parameters, gradients and buffers and the random state stay as they are.

    Args:
        model: any module. Frozen parameters have roles too.
        example_inputs: the positional arguments of one call; a small batch does.
        kwargs: its keyword arguments.

    Returns:
        A tuple of rows, one per floating-point parameter, in the order of `named_parameters()`;
        see `RoleRow`.

    Raises:
        PullbackError: for parameters of lazy modules that have no shape yet, for reentrant
            activation checkpoints and nested tensors, and in inference mode.
    """
    refuse_inference("the roles are read from a graph", "parameter_roles()")
    roles = find_roles(model, Call.record_start(model, example_inputs, kwargs, _device(model)))
    rule = default_rule(unwrap_model(model))
    shapes = {name: tuple(p.shape) for name, p in unwrap_model(model).named_parameters()}
    rows = []
    for role in roles:
        rule_name = "adam"
        if rule.accepts(role.role) and not role.is_computed_from:
            rule_name = rule.name
        row = RoleRow(
            name=role.name,
            role=role.role,
            split=role.split,
            rule=rule_name,
            shape=shapes[role.name],
            split_axis=role.split_axis,
            reason=role.reason,
            is_normalized=role.is_normalized,
        )
        rows.append(row)
    return RoleTable(rows)


def _device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    return parameter.device
