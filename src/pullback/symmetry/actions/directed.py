r"""Weight normalization, W = g v/‖v‖: what acts on W, acting on g and v."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .action import Action, Parameters
from .scaling import Leg, Scaling


@dataclass(frozen=True)
class Direction:
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
    directions: Mapping[str, Direction]

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


def with_weights(params: Parameters, directions: Mapping[str, Direction]) -> dict[str, Tensor]:
    """The parameters and the weights W."""
    return {**params, **{n: d.weight(params) for n, d in directions.items()}}


def in_parameters(action: Action, directions: Mapping[str, Direction]) -> Action:
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


def _on_gains(action: Scaling, directions: Mapping[str, Direction]) -> Scaling:
    """The scaling with g in place of each W whose vectors it leaves in their directions."""
    turned = {leg.name for leg in action.legs if not _along(leg, directions)}
    legs = [
        leg
        if leg.name in turned or leg.name not in directions
        else Leg(directions[leg.name].gain, leg.unit, leg.power)
        for leg in action.legs
    ]
    return Scaling(action.units, legs, action.about.replace(", normalized", ""))


def _along(leg: Leg, directions: Mapping[str, Direction]) -> bool:
    known = directions.get(leg.name)
    return known is None or all(n == 1 for d, n in enumerate(leg.unit.shape) if d != known.dim)
