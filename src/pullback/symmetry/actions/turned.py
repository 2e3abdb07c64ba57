"""Weights that a network holds as (in, out): what acts on their transposes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from .action import Action, Parameters
from .folding import Folding
from .scaling import Leg, Scaling


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


def turned_back(action: Action, held: Mapping[str, str]) -> Action:
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
