"""Shifts: constants that are added to some parameters and removed by others, or have no effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .action import Action, Parameters
from .charts import FixedNorm
from .scaling import Leg


class Shift(Action):
    """w ← w + D(w)·c with D(w) independent of what moves: the orbit is its own tangent.

    Args:
        size: how many numbers c there are.
        names: the parameters that move.
        move: (w, c) ↦ D(w)·c, by name.
        about: what it is, for people.
    """

    reads = True

    def __init__(
        self,
        size: int,
        names: Sequence[str],
        move: Callable[[Parameters, Tensor], dict[str, Tensor]],
        about: str = "shift",
    ) -> None:
        self._size = size
        self._names = names
        self._move = move
        self.about = about

    @property
    def dimension(self) -> int:
        return self._size

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._names))

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        return self._move(params, element)

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        changes = self.tangent(params, element)
        return {name: params[name].detach() + change for name, change in changes.items()}


@dataclass(frozen=True)
class ParameterRows:
    """Positions along the first axis of a parameter.

    Attributes:
        name: the parameter.
        rows: the positions.
    """

    name: str
    rows: Tensor

    def embed(self, params: Parameters, values: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape with these values at the rows, zeros elsewhere.

        Values of rows that occur several times are added.
        """
        zeros = torch.zeros_like(params[self.name].detach())
        return zeros.index_add(0, self.rows.to(zeros.device), values)


@dataclass(frozen=True)
class Reader:
    """A linear layer that reads a constant c, W'c, and can remove it from its bias.

    Attributes:
        weight: the layer's rows in its weight.
        columns: the columns of the weight that c is read at.
        bias: the layer's places in its bias; None if it has none, and can remove nothing.
    """

    weight: ParameterRows
    columns: Tensor
    bias: ParameterRows | None

    def require_bias(self) -> ParameterRows:
        """Return the bias; the caller has made sure that there is one."""
        assert self.bias is not None, f"{self.weight.name} is used without a bias"
        return self.bias

    def compensate(self, params: Parameters, constants: Tensor) -> Tensor:
        """Return the change −W'c of the bias that removes the constants c."""
        w = params[self.weight.name].detach()
        block = w[self.weight.rows.to(w.device)][:, self.columns.to(w.device)]
        if block.ndim > 2:  # a constant image is multiplied by the kernel's sum
            block = block.flatten(2).sum(2)
        return self.require_bias().embed(params, -(block @ constants.to(w)))


def bias_shift(
    units: int,
    legs: Sequence[Leg],
    readers: Sequence[tuple[Reader, int]] = (),
    uniform: bool = False,
    about: str = "shift",
) -> Shift:
    """Constants added to biases and tables, w_e ← w_e + power·c_unit(e), which readers remove.

    A reader (W', b') that sees t·c removes it, b' ← b' − t W' c: a norm's shift goes into the
    next layers' biases, the value's bias into the output's. Without readers the constants cancel,
    or have no effect (the key's bias, a bias before a batch norm).

    Args:
        units: how many numbers c there are.
        legs: the biases and tables that move.
        readers: (the layer that removes the constant, t).
        uniform: whether all c are the same number, which norms remove.
        about: what it is, for people.
    """
    names = [leg.name for leg in legs]
    names.extend(reader.require_bias().name for reader, _ in readers)

    def move(params: Parameters, element: Tensor) -> dict[str, Tensor]:
        constants = element.expand(units)
        changes = {name: torch.zeros_like(params[name]) for name in names}
        for leg in legs:
            change = changes[leg.name]
            changes[leg.name] = change + leg.log_multipliers(constants.to(change))
        for reader, multiple in readers:
            bias_name = reader.require_bias().name
            compensation = reader.compensate(params, multiple * constants)
            changes[bias_name] = changes[bias_name] + compensation
        return changes

    if uniform:
        return Shift(1, names, move, about)
    return Shift(units, names, move, about)


def folded_shift(source: Leg, units: int, norm: FixedNorm, channels: Tensor, about: str) -> Shift:
    """b ← b + c before a batch norm with fixed statistics, which removes it: β ← β − c g/σ.

    Args:
        source: the bias, by units.
        units: how many numbers c there are.
        norm: the batch norm.
        channels: the norm's channel for each unit.
        about: what it is, for people.
    """
    shift_rows = ParameterRows(norm.shift, channels)

    def move(params: Parameters, element: Tensor) -> dict[str, Tensor]:
        bias = params[source.name].detach()
        constants = element.to(bias)
        slope = params[norm.gain].detach() * norm.inverse.to(bias)
        compensation = shift_rows.embed(params, -constants * slope[channels.to(bias.device)])
        return {
            source.name: source.log_multipliers(constants).expand(bias.shape),
            norm.shift: compensation,
        }

    return Shift(units, [source.name, norm.shift], move, about)


def mean_shift(reader: Reader, gain: str | None, shift: str | None, about: str = "mean") -> Shift:
    """W ← W + a (1/g)ᵀ and b ← b − a Σ_i β_i/g_i behind a layer norm with gain g and shift β.

    Its outputs before gain and shift sum to zero, so that this direction of W reads nothing.

    Args:
        reader: the layer that reads the norm, with a bias where there is a shift.
        gain, shift: of the norm, where it has them.
        about: what it is, for people.
    """

    def move(params: Parameters, element: Tensor) -> dict[str, Tensor]:
        w = params[reader.weight.name].detach()
        amounts = element.to(w)
        columns = reader.columns.to(w.device)
        if gain is None:
            inverse_gain = torch.ones(len(columns), dtype=w.dtype, device=w.device)
        else:
            inverse_gain = 1 / params[gain].detach()
        row = torch.zeros_like(w[0]).index_copy(0, columns, inverse_gain)
        changes = {reader.weight.name: reader.weight.embed(params, amounts[:, None] * row)}
        if shift is not None:
            total = (params[shift].detach() * inverse_gain).sum()
            bias = reader.require_bias()
            changes[bias.name] = bias.embed(params, -amounts * total)
        return changes

    names = [reader.weight.name]
    if shift is not None:
        names.append(reader.require_bias().name)
    return Shift(len(reader.weight.rows), names, move, about)


def common_shift(
    weight: ParameterRows | None,
    bias: ParameterRows | None,
    width: int,
    about: str = "common shift",
) -> Shift:
    """The same added to all rows of a group: W_ij ← W_ij + a_j, b_i ← b_i + a.

    A layer norm or a softmax of the outputs removes both, a group norm the bias's.

    Args:
        weight: the rows in the group; None if only the bias moves.
        bias: the same, if there is one.
        width: how many a_j there are, the bias's last.
        about: what it is, for people.
    """

    def move(params: Parameters, element: Tensor) -> dict[str, Tensor]:
        changes: dict[str, Tensor] = {}
        if weight is not None:
            first_row = params[weight.name].detach()[0]
            row = element[: first_row.numel()].to(first_row).view(first_row.shape)
            rows = row.expand(len(weight.rows), *row.shape)
            changes[weight.name] = weight.embed(params, rows)
        if bias is not None:
            number = element[-1].to(params[bias.name])
            changes[bias.name] = bias.embed(params, number.expand(len(bias.rows)))
        return changes

    names = [rows.name for rows in (weight, bias) if rows is not None]
    return Shift(width, names, move, about)
