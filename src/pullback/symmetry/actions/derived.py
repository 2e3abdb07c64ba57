"""What acts on weights that are computed from parameters: normalized weights, and matrices and
vectors that parameters hold in other shapes, or times a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from .scaling import Action, Leg, Mixing, Parameters, Scaling
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
class MatrixView:
    """Entries of a parameter as a matrix (outputs, inputs), such as the transpose of w in x @ w.

    Attributes:
        own: the parameter.
        outputs, inputs: its axes that are merged to the matrix's rows and to its columns.
        at: the place along its other axes, as of one expert in a stack.
        factor: what the entries are multiplied by.
    """

    own: str
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    at: tuple[int, ...] = ()
    factor: float = 1.0

    def of(self, w: Tensor) -> Tensor:
        """The matrix."""
        return self.factor * self._chosen(w)

    def put(self, w: Tensor, matrix: Tensor) -> Tensor:
        """The parameter with this matrix in it."""
        places = self._chosen(torch.arange(w.numel(), device=w.device).view(w.shape)).flatten()
        return w.flatten().index_copy(0, places, matrix.flatten() / self.factor).view(w.shape)

    def _chosen(self, w: Tensor) -> Tensor:
        rest = [d for d in range(w.ndim) if d not in (*self.outputs, *self.inputs)]
        chosen = w.permute(*rest, *self.outputs, *self.inputs)[self.at]
        return chosen.reshape(prod(chosen.shape[: len(self.outputs)]), -1)


@dataclass(frozen=True)
class VectorView:
    """All entries of a parameter as one vector, times a number: the biases of several layers."""

    own: str
    factor: float = 1.0

    def of(self, w: Tensor) -> Tensor:
        """The vector."""
        return self.factor * w.flatten()

    def put(self, w: Tensor, vector: Tensor) -> Tensor:
        """The parameter with this vector in it."""
        return vector.view(w.shape) / self.factor


View = MatrixView | VectorView


@dataclass(frozen=True)
class OnMatrices(Action):
    """An action on matrices that parameters hold in other shapes, in terms of the parameters.

    Attributes:
        inner: what acts, on the matrices by the names that stand for them.
        views: by those names.
    """

    inner: Action
    views: Mapping[str, View]

    @property
    def about(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        about = self.inner.about
        for name, view in self.views.items():
            about = about.replace(name, view.own)
        return about

    @property
    def dimension(self) -> int:
        return self.inner.dimension

    @property
    def names(self) -> tuple[str, ...]:
        own = (self.views[n].own if n in self.views else n for n in self.inner.names)
        return tuple(dict.fromkeys(own))

    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        start = {n: params[n].detach() for n in self.names}
        return self._back(start, self.inner.act(with_matrices(params, self.views), element))

    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        start = {n: torch.zeros_like(params[n]) for n in self.names}
        return self._back(start, self.inner.tangent(with_matrices(params, self.views), element))

    def _back(self, out: dict[str, Tensor], moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        for name, t in moved.items():
            view = self.views.get(name)
            own = name if view is None else view.own
            out[own] = t if view is None else view.put(out[own], t)
        return out


def with_matrices(params: Parameters, views: Mapping[str, View]) -> dict[str, Tensor]:
    """The parameters, and the matrices that they hold in other shapes."""
    return {**params, **{name: view.of(params[view.own]) for name, view in views.items()}}


def in_own_shapes(action: Action, views: Mapping[str, View]) -> Action:
    """The action without names that stand for matrices; scalings have none."""
    if isinstance(action, (Scaling, Folding)) or not views:
        return action
    if isinstance(action, Mixing) and not any(name in views for name in action.names):
        return action
    return OnMatrices(action, views)
