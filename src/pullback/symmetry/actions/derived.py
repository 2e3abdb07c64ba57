"""What acts on weights that are computed from parameters: normalized weights and transposes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .scaling import Action, Leg, Parameters, Scaling
from .shifts import Folding


@dataclass(frozen=True)
class NormalizedWeight:
    """W = g v/‖v‖, with norms over all axes but `dim`; g has size 1 along those."""

    gain: str
    vector: str
    dim: int

    def length(self, v: Tensor) -> Tensor:
        """‖v‖, of the shape of g."""
        axes = [d for d in range(v.ndim) if d != self.dim]
        return torch.linalg.vector_norm(v, 2, axes, keepdim=True)

    def weight(self, params: Parameters) -> Tensor:
        """W."""
        g, v = params[self.gain].detach(), params[self.vector].detach()
        return v * (g.view(self.length(v).shape) / self.length(v))

    def radial(self, params: Parameters) -> Scaling:
        """The length of v, which does nothing: a number for each place of `dim`."""
        n = params[self.vector].shape[self.dim]
        shape = [n if d == self.dim else 1 for d in range(params[self.vector].ndim)]
        about = f"length of {self.vector}, which a weight normalization takes away"
        return Scaling(n, [Leg(self.vector, torch.arange(n).view(shape), 1)], about)


@dataclass(frozen=True)
class Directed(Action):
    r"""An action on weights W = g v/‖v‖, in terms of g and v.

    W ← W' is v ← W'‖v‖/g and g ← g‖W'‖/‖W‖, which keeps g's sign; on tangents
    dv = dW‖v‖/g and dg = ⟨v, dW⟩/‖v‖. Where g is zero v stays.

    Attributes:
        inner: what acts, on W by the names that stand for them.
        directions: by those names.
    """

    inner: Action
    directions: Mapping[str, NormalizedWeight]

    @property
    def about(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.about.replace(", normalized", "")

    @property
    def dimension(self) -> int:
        return self.inner.dimension

    @property
    def names(self) -> tuple[str, ...]:
        out: dict[str, None] = {}
        for name in self.inner.names:
            known = self.directions.get(name)
            out.update(dict.fromkeys([name] if known is None else [known.gain, known.vector]))
        return tuple(out)

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        seen = with_weights(params, self.directions)
        out: dict[str, Tensor] = {}
        for name, new in self.inner.act(seen, element).items():
            known = self.directions.get(name)
            if known is None:
                out[name] = new
                continue
            g, v = params[known.gain].detach(), params[known.vector].detach()
            old, size = known.length(seen[name]), known.length(v)
            ratio = torch.where(old > 0, known.length(new) / old, 1.0)
            wide = g.view(size.shape)
            turned = new * torch.where(wide != 0, size / wide, 0.0)
            out[known.vector] = torch.where(wide != 0, turned, v)
            out[known.gain] = g * ratio.view(g.shape)
        return out

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        moved = self.inner.tangent(with_weights(params, self.directions), element)
        for name, change in moved.items():
            known = self.directions.get(name)
            if known is None:
                out[name] = change
                continue
            g, v = params[known.gain].detach(), params[known.vector].detach()
            size = known.length(v)
            wide = g.view(size.shape)
            axes = [d for d in range(v.ndim) if d != known.dim]
            out[known.vector] = change * torch.where(wide != 0, size / wide, 0.0)
            out[known.gain] = ((v * change).sum(axes, keepdim=True) / size).view(g.shape)
        return out


def with_weights(
    params: Parameters, directions: Mapping[str, NormalizedWeight]
) -> dict[str, Tensor]:
    """The parameters and the weights W."""
    return {**params, **{n: d.weight(params) for n, d in directions.items()}}


def in_parameters(action: Action, directions: Mapping[str, NormalizedWeight]) -> Action:
    """The action without names that stand for weights W, which others than scalings also read.

    A scaling that multiplies whole vectors of W multiplies g; else v has to turn.
    """
    if not directions:
        return action
    if isinstance(action, Scaling):
        action = _on_gains(action, directions)
        if not any(name in directions for name in action.names):
            return action
    return Directed(action, directions)


def _on_gains(action: Scaling, directions: Mapping[str, NormalizedWeight]) -> Scaling:
    """The scaling with g in place of each W whose vectors it leaves in their directions."""
    turned = {leg.name for leg in action.legs if not _along(leg, directions)}
    legs = [
        leg
        if leg.name in turned or leg.name not in directions
        else Leg(directions[leg.name].gain, leg.unit, leg.power)
        for leg in action.legs
    ]
    return Scaling(action.units, legs, action.about.replace(", normalized", ""))


def _along(leg: Leg, directions: Mapping[str, NormalizedWeight]) -> bool:
    known = directions.get(leg.name)
    return known is None or all(n == 1 for d, n in enumerate(leg.unit.shape) if d != known.dim)


@dataclass(frozen=True)
class Turned(Action):
    """An action on transposes, in terms of the parameters.

    Attributes:
        inner: what acts, on the transposes by the names that stand for them.
        held: the parameters, by those names.
    """

    inner: Action
    held: Mapping[str, str]

    @property
    def about(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        about = self.inner.about
        for name, own in self.held.items():
            about = about.replace(name, own)
        return about

    @property
    def dimension(self) -> int:
        return self.inner.dimension

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.held.get(name, name) for name in self.inner.names)

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        return self._back(self.inner.act(with_transposes(params, self.held), element))

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        return self._back(self.inner.tangent(with_transposes(params, self.held), element))

    def _back(self, moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.held.get(n, n): t.mT if n in self.held else t for n, t in moved.items()}


def with_transposes(params: Parameters, held: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters, and the transposes of those that are held by other names."""
    return {**params, **{name: params[own].mT for name, own in held.items()}}


def undo_transposes(action: Action, held: Mapping[str, str]) -> Action:
    """The action without names that stand for transposes, which others than scalings also read."""
    if not held:
        return action
    if isinstance(action, Folding):
        return replace(action, scaling=_scaling(action.scaling, held))
    if isinstance(action, Scaling):
        return _scaling(action, held)
    return Turned(action, held)


def _scaling(action: Scaling, held: Mapping[str, str]) -> Scaling:
    legs = [
        Leg(held[leg.name], leg.unit.mT, leg.power) if leg.name in held else leg
        for leg in action.legs
    ]
    about = action.about
    for name, own in held.items():
        about = about.replace(name, own)
    return replace(action, legs=legs, about=about)
