"""Shifts: what is added to some parameters is taken away by others, or seen by nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .charts import FixedNorm
from .scaling import Action, Leg, Parameters

Places = Tensor  # along the first axis of a parameter


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
        self._size, self._names, self._move, self.about = size, names, move, about

    @property
    def dimension(self) -> int:
        return self._size

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._names))

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        return self._move(params, element)

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        return {n: params[n].detach() + d for n, d in self.tangent(params, element).items()}


def _placed(w: Tensor, places: Places, values: Tensor) -> Tensor:
    """The values at some places along the first axis of w, zeros elsewhere."""
    return torch.zeros_like(w).index_add(0, places.to(w.device), values)


@dataclass(frozen=True)
class Reader:
    """A linear layer: outputs at rows of `weight` and places of `bias`; c is read at `columns`."""

    bias: str
    places: Places
    weight: str
    rows: Places
    columns: Tensor

    def taken(self, params: Parameters, c: Tensor) -> Tensor:
        """−W'c at this layer's places of the bias."""
        w = params[self.weight].detach()
        chosen = w[self.rows.to(w.device)][:, self.columns.to(w.device)]
        chosen = chosen.flatten(2).sum(2) if chosen.ndim > 2 else chosen
        return _placed(params[self.bias].detach(), self.places, -(chosen @ c.to(w)))


def bias_shift(
    units: int,
    legs: Sequence[Leg],
    readers: Sequence[tuple[Reader, int]] = (),
    uniform: bool = False,
    about: str = "shift",
) -> Shift:
    """Constants added to biases and tables, w_e ← w_e + power·c_unit(e), which readers take away.

    A reader (W', b') that sees t·c takes it away, b' ← b' − t W' c: a norm's shift goes into the
    next layers' biases, the value's bias into the output's. Without readers the constants cancel,
    or do nothing (the key's bias, one before a batch norm).

    Args:
        units: how many numbers c there are.
        legs: the biases and tables that move.
        readers: (who takes it away, t).
        uniform: whether all c are the same number, which norms do not see.
        about: what it is, for people.
    """
    names = [*(leg.name for leg in legs), *(reader.bias for reader, _ in readers)]

    def move(params: Parameters, element: Tensor) -> dict[str, Tensor]:
        c = element.expand(units)
        moved = {n: torch.zeros_like(params[n]) for n in names}
        for leg in legs:
            moved[leg.name] = moved[leg.name] + leg.rates(c.to(moved[leg.name]))
        for reader, t in readers:
            moved[reader.bias] = moved[reader.bias] + reader.taken(params, t * c)
        return moved

    return Shift(1 if uniform else units, names, move, about)


def folded_shift(source: Leg, units: int, norm: FixedNorm, at: Places, about: str) -> Shift:
    """b ← b + c before a batch norm with fixed statistics, which takes it away: β ← β − c g/σ."""

    def move(params: Parameters, element: Tensor) -> dict[str, Tensor]:
        b, shift = params[source.name].detach(), params[norm.shift].detach()
        c, rate = element.to(b), params[norm.gain].detach() * norm.inverse.to(b)
        taken = _placed(shift, at, -c * rate[at.to(b.device)])
        return {source.name: source.rates(c).expand(b.shape), norm.shift: taken}

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
        w = params[reader.weight].detach()
        a, columns = element.to(w), reader.columns.to(w.device)
        one = torch.ones(len(columns), dtype=w.dtype, device=w.device)
        inverse = one if gain is None else 1 / params[gain].detach()
        line = torch.zeros_like(w[0]).index_copy(0, columns, inverse)
        moved = {reader.weight: _placed(w, reader.rows, a[:, None] * line)}
        if shift is not None:
            total = (params[shift].detach() * inverse).sum()
            moved[reader.bias] = _placed(params[reader.bias].detach(), reader.places, -a * total)
        return moved

    names = [reader.weight] if shift is None else [reader.weight, reader.bias]
    return Shift(len(reader.rows), names, move, about)


def common_shift(
    weight: tuple[str, Places] | None,
    bias: tuple[str, Places] | None,
    width: int,
    about: str = "common shift",
) -> Shift:
    """The same added to all rows of a group: W_ij ← W_ij + a_j, b_i ← b_i + a.

    What a layer norm or a softmax of the outputs takes away (weights and bias), or a group norm
    (bias).

    Args:
        weight: its name and the rows in the group; None if only the bias moves.
        bias: the same, if there is one.
        width: how many a_j there are, the bias's last.
        about: what it is, for people.
    """

    def move(params: Parameters, element: Tensor) -> dict[str, Tensor]:
        moved: dict[str, Tensor] = {}
        if weight is not None:
            w, rows = params[weight[0]].detach(), weight[1]
            a = element[: w[0].numel()].to(w).view(w[0].shape)
            moved[weight[0]] = _placed(w, rows, a.expand(len(rows), *a.shape))
        if bias is not None:
            b, places = params[bias[0]].detach(), bias[1]
            moved[bias[0]] = _placed(b, places, element[-1].to(b).expand(len(places)))
        return moved

    return Shift(width, [side[0] for side in (weight, bias) if side is not None], move, about)
