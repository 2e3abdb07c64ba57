"""Parameters to which something is added that is taken away elsewhere, and fixed batch norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .scaling import Action, Leg, Parameters, Scaling


class Shift(Action):
    """w ← w + D(w)·c with D(w) independent of what moves: the orbit is its own tangent."""

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        return {n: params[n].detach() + d for n, d in self.tangent(params, element).items()}


@dataclass(frozen=True)
class BiasShift(Shift):
    r"""Constants added to biases and tables, w_e ← w_e + power·c_unit(e), which readers take away.

    A reader (W', b') that still sees t·c takes it away, b' ← b' − t W' c: a norm's shift goes into
    the next layers' biases, the value's bias into the output's. Without readers the constants
    cancel, or do nothing (the key's bias, one before a batch norm).

    Attributes:
        units: how many numbers c there are.
        legs: the biases and tables that move.
        readers: (who takes it away, t).
        uniform: whether all c are the same number, which norms do not see.
        about: what it is, for people.
    """

    units: int
    legs: Sequence[Leg]
    readers: Sequence[tuple[Reader, int]] = ()
    uniform: bool = False
    about: str = "shift"

    @property
    def dimension(self) -> int:
        return 1 if self.uniform else self.units

    @property
    def names(self) -> tuple[str, ...]:
        moved = [*(leg.name for leg in self.legs), *(r.bias for r, _ in self.readers)]
        return tuple(dict.fromkeys(moved))

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        c = element.expand(self.units)
        moved = {n: torch.zeros_like(params[n]) for n in self.names}
        for leg in self.legs:
            moved[leg.name] = moved[leg.name] + leg.rates(c.to(moved[leg.name]))
        for reader, t in self.readers:
            moved[reader.bias] = reader.taken(params, moved[reader.bias], t * c)
        return moved


@dataclass(frozen=True)
class Reader:
    """A linear layer: outputs at rows of `weight` and places of `bias`; c is read at `columns`."""

    bias: str
    places: Tensor
    weight: str
    rows: Tensor
    columns: Tensor

    def taken(self, params: Parameters, change: Tensor, c: Tensor) -> Tensor:
        """change − W'c, at this layer's places of the bias."""
        w = params[self.weight].detach()
        chosen = w[self.rows.to(w.device)][:, self.columns.to(w.device)]
        chosen = chosen.flatten(2).sum(2) if chosen.ndim > 2 else chosen
        return change.index_add(0, self.places.to(w.device), -(chosen @ c.to(w)))


@dataclass(frozen=True)
class MeanShift(Shift):
    r"""W ← W + a (1/g)ᵀ and b ← b − a Σ_i β_i/g_i behind a layer norm with gain g and shift β.

    Its outputs before gain and shift sum to zero, so that this direction of W reads nothing.

    Attributes:
        weight, rows, columns: the matrix that reads the norm, its outputs and inputs.
        bias, places: of the same layer, if it has one.
        gain, shift: of the norm, where it has them.
        about: what it is, for people.
    """

    weight: str
    rows: Tensor
    columns: Tensor
    bias: str | None
    places: Tensor | None
    gain: str | None
    shift: str | None
    about: str = "mean"

    @property
    def dimension(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        moved = self.bias is not None and self.shift is not None
        return (self.weight, str(self.bias)) if moved else (self.weight,)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        w = params[self.weight].detach()
        a, columns = element.to(w), self.columns.to(w.device)
        one = torch.ones(len(columns), dtype=w.dtype, device=w.device)
        inverse = one if self.gain is None else 1 / params[self.gain].detach()
        line = torch.zeros(w.shape[1], dtype=w.dtype, device=w.device)
        line = line.index_copy(0, columns, inverse)
        moved = {
            self.weight: torch.zeros_like(w).index_add(0, self.rows.to(w.device), a[:, None] * line)
        }
        if self.bias is not None and self.shift is not None and self.places is not None:
            total = (params[self.shift].detach() * inverse).sum()
            b = params[self.bias].detach()
            moved[self.bias] = torch.zeros_like(b).index_add(
                0, self.places.to(b.device), -a * total
            )
        return moved


@dataclass(frozen=True)
class CommonShift(Shift):
    r"""The same added to all rows of a group: W_ij ← W_ij + a_j, b_i ← b_i + a.

    What a layer norm or a softmax of the outputs takes away (weights and bias), or a group norm
    (bias).

    Attributes:
        weight: None if only the bias moves.
        rows: of the weight, in the group.
        bias, places: the same for the bias, if there is one.
        width: how many a_j there are, the bias's last.
        about: what it is, for people.
    """

    weight: str | None
    rows: Tensor
    bias: str | None
    places: Tensor | None
    width: int
    about: str = "common shift"

    @property
    def dimension(self) -> int:
        return self.width

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(n for n in (self.weight, self.bias) if n is not None)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        moved: dict[str, Tensor] = {}
        if self.weight is not None:
            w = params[self.weight].detach()
            a = (
                element[: w[0].numel()]
                .to(w)
                .view(1, *w.shape[1:])
                .expand(len(self.rows), *w.shape[1:])
            )
            moved[self.weight] = torch.zeros_like(w).index_add(0, self.rows.to(w.device), a)
        if self.bias is not None and self.places is not None:
            b = params[self.bias].detach()
            a = element[-1].to(b).expand(len(self.places))
            moved[self.bias] = torch.zeros_like(b).index_add(0, self.places.to(b.device), a)
        return moved


@dataclass(frozen=True)
class Norm:
    """y = g (x − μ)/σ + β with numbers μ and 1/σ, (C,)."""

    gain: str
    shift: str
    mean: Tensor
    inverse: Tensor


@dataclass(frozen=True)
class Folding(Action):
    r"""A scaling of inputs of batch norms whose statistics are fixed.

    x ← αx, g ← g/α leaves g x/σ alone; the constant β − g μ/σ stays if β changes with g. In the
    coordinates (g, β − g μ/σ) it is a plain scaling.

    Attributes:
        scaling: of all parameters, the norms' gains included.
        norms: whose constants are kept.
    """

    scaling: Scaling
    norms: Sequence[Norm]

    @property
    def about(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scaling.about

    @property
    def dimension(self) -> int:
        return self.scaling.units

    @property
    def names(self) -> tuple[str, ...]:
        norms = [name for n in self.norms for name in (n.gain, n.shift)]
        return tuple(dict.fromkeys([*self.scaling.names, *norms]))

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        constants = self._changed({n: params[n] for n in self.names}, -1)
        return self._changed({**constants, **self.scaling.act(constants, element)}, 1)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        constants = self._changed({n: params[n] for n in self.names}, -1)
        still = {n: torch.zeros_like(params[n]) for n in self.names}
        return self._changed({**still, **self.scaling.tangent(constants, element)}, 1)

    def _changed(self, params: dict[str, Tensor], sign: int) -> dict[str, Tensor]:
        """Shifts β + sign·g μ/σ for all norms; linear in the parameters."""
        out = dict(params)
        for norm in self.norms:
            g = out[norm.gain]
            out[norm.shift] = out[norm.shift] + sign * g * (norm.mean * norm.inverse).to(g)
        return out


@dataclass(frozen=True)
class FoldedShift(Shift):
    r"""b ← b + c before a batch norm with fixed statistics, β ← β − c g/σ.

    Attributes:
        units: how many numbers c there are.
        source: the bias of the layer before.
        norm: which takes it away, output by output.
        places: of the outputs in the norm.
    """

    units: int
    source: Leg
    norm: Norm
    places: Tensor
    about: str = "shift"

    @property
    def dimension(self) -> int:
        return self.units

    @property
    def names(self) -> tuple[str, ...]:
        return (self.source.name, self.norm.shift)

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        b, shift = params[self.source.name].detach(), params[self.norm.shift].detach()
        c, at = element.to(b), self.places.to(b.device)
        rate = (params[self.norm.gain].detach() * self.norm.inverse.to(b))[at]
        return {
            self.source.name: self.source.rates(c).expand(b.shape),
            self.norm.shift: torch.zeros_like(shift).index_add(0, at, -c * rate),
        }
