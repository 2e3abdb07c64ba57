r"""Slices: submanifolds that meet the orbits of a scaling group once.

A slice S = {c(w) = 0} has normals N = dc and meets orbits with tangents Z. At w

    retract     w ↦ exp(t)·w ∈ S, along the orbit, so that the function stays as it is
    project     v ↦ v − Nᵀ(NNᵀ)⁻¹N v, the orthogonal projection onto T_wS
    lift        v ↦ v − Zᵀ(NZᵀ)⁻¹N v, the vector of T_wS that moves the function as v does

On a *balanced* slice N = Z: it is orthogonal to the orbits and both projections are one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..._core.capture import plain
from ..._core.errors import PullbackError
from ..._core.space import ParameterSpace
from ..actions.scaling import Scaling
from .retraction import Norms, OrbitGram, UnitNorms, to_slice
from .units import ScalingUnits

Vector = TypeVar("Vector", Tensor, Mapping[str, Tensor])


@dataclass(frozen=True)
class Retraction:
    """What a retraction did.

    Attributes:
        scales: log-scales by scaling, (units,) each.
        dead: indices of units that no scale can bring to the slice, by scaling: their incoming or
            outgoing weights are all zero. They keep the scale 1.
        off: max |c(w)| before.
    """

    scales: tuple[Tensor, ...]
    dead: dict[str, tuple[int, ...]] = field(default_factory=dict)
    off: float = 0.0


class Slice(ABC):
    """A slice of the orbits of some scalings, in the parameters of a model.

    Args:
        scalings: the group.
        model: its module, or parameters by name; the methods speak of their current values.
    """

    def __init__(
        self, scalings: Sequence[Scaling], model: nn.Module | Mapping[str, Tensor]
    ) -> None:
        given = plain(model).named_parameters() if isinstance(model, nn.Module) else model.items()
        self.params: dict[str, Tensor] = dict(given)
        self.units = ScalingUnits(scalings, self.params)

    @property
    def scalings(self) -> tuple[Scaling, ...]:
        """The group whose orbits are cut."""
        return self.units.scalings

    @abstractmethod
    def norms(self, params: Mapping[str, Tensor]) -> Norms:
        """What the slice compares, along the orbit of w."""

    def log_scales(self, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """t (U,) that brings w to the slice, and which units (U,) are dead."""
        eps = max(torch.finfo(params[name].dtype).eps for name in self.units.names)
        norms = self.norms(params)
        return to_slice(norms, norms.zeros, eps), norms.dead

    def constraint(self, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """c(w), zero on the slice and free of units: ½ log(in/out), 0 for dead units: (U,)."""
        norms = self.norms(self.params if params is None else params)
        return -0.5 * norms.imbalance(norms.zeros)

    @abstractmethod
    def _normal(self, v: Mapping[str, Tensor]) -> Tensor:
        """N v, (k,)."""

    @abstractmethod
    def _conormal(self, a: Tensor) -> dict[str, Tensor]:
        """Nᵀ a, by name."""

    @abstractmethod
    def _solve(self, rhs: Tensor, orbits: bool) -> Tensor:
        """(NNᵀ)⁻¹ rhs, or with orbits (NZᵀ)⁻¹ rhs."""

    @torch.no_grad()
    def retract(self, params: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The slice's point on the orbit of w, by name; other parameters are unchanged."""
        given = self.params if params is None else params
        return {**given, **self._moved(given)[0]}

    @torch.no_grad()
    def retract_(self) -> Retraction:
        """Move the model's parameters to the slice, in place."""
        off = self.constraint()
        moved, t, dead = self._moved(self.params)
        for name, value in moved.items():
            self.params[name].copy_(value)
        names = (scaling.about for scaling in self.scalings)
        lost = {
            about: tuple(flags.nonzero()[:, 0].tolist())
            for about, flags in zip(names, self.units.split(dead), strict=True)
            if bool(flags.any())
        }
        return Retraction(self.units.split(t), lost, float(off.abs().amax()) if len(off) else 0.0)

    def contains(
        self, params: Mapping[str, Tensor] | None = None, tolerance: float | None = None
    ) -> bool:
        """Whether |c(w)| is at round-off, or at most the tolerance."""
        given = self.params if params is None else params
        eps = max(torch.finfo(given[name].dtype).eps for name in self.units.names)
        bound = 64 * eps if tolerance is None else tolerance
        return bool((self.constraint(given).abs() <= bound).all())

    @torch.no_grad()
    def project(self, v: Vector) -> Vector:
        """The orthogonal projection of v onto T_wS: by name, or flat (p,) as the model's own."""
        by_name = self._named(v)
        a = self._solve(self._normal(by_name), orbits=False)
        return self._as(v, by_name, self._conormal(a))

    @torch.no_grad()
    def lift(self, v: Vector) -> Vector:
        """The vector of T_wS that moves the function as v does: v and a move along the orbit."""
        by_name = self._named(v)
        a = self._solve(self._normal(by_name), orbits=True)
        return self._as(v, by_name, self.units.spread(self.params, a))

    def tangent_basis(self) -> Tensor:
        """An orthonormal basis of T_wS, (p, p − k); for small models."""
        space, k = self._space(), self.units.total
        eye = torch.eye(k, dtype=space.dtype, device=space.device)
        # solved first: dead units have no normal
        solved = [self._conormal(self._solve(e, orbits=False)) for e in eye]
        normals = torch.stack([space.flatten(self._full(v)) for v in solved])
        u, s, _ = torch.linalg.svd(normals.mT, full_matrices=True)
        rank = int((s > s[0] * len(s) * torch.finfo(s.dtype).eps).sum()) if k else 0
        return u[:, rank:]

    def _moved(self, params: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        t, dead = self.log_scales(params)
        moved = self.units.scaled(params, t)
        eps = min(torch.finfo(w.dtype).eps for w in moved.values())
        if float(t.abs().amax()) * torch.finfo(t.dtype).eps > eps / 2:
            # a long way: t has lost digits that a second look restores
            more, _ = self.log_scales(moved)
            moved, t = self.units.scaled(moved, more), t + more
        return moved, t, dead

    def _space(self) -> ParameterSpace:
        return ParameterSpace({n: w for n, w in self.params.items() if w.requires_grad})

    def _full(self, v: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        return {n: v.get(n) for n in self.params}

    def _named(self, v: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not isinstance(v, Tensor):
            return v
        space = self._space()
        if v.shape != (space.size,):
            raise PullbackError(
                "The vector is not of the parameter space",
                f"its shape is {tuple(v.shape)}, and the model has {space.size} parameters",
                "Pass a flat vector in the order of model.parameters(), or a dict by name",
            )
        return space.split(v)

    def _as(self, v: Vector, by_name: Mapping[str, Tensor], less: Mapping[str, Tensor]) -> Vector:
        out = {n: x - less[n].to(x.dtype) if n in less else x for n, x in by_name.items()}
        flat = isinstance(v, Tensor)
        return self._space().flatten(out).to(v.dtype) if flat else out  # pyright: ignore[reportReturnType]


class Balanced(Slice):
    r"""Every unit takes in what it gives out: Σ_in w² (with its bias) = Σ_out w².

    The least Σw² of the orbit, and the slice orthogonal to orbits: constraints have the generators
    as gradients. The gradient of any function of the network's outputs is tangent to it, biases or
    not, and so is uniform weight decay. With `Scaling.merged` it is the balanced slice of layers,
    |A_{k+1}|² = |A_k|² + |b_k|².
    """

    def norms(self, params: Mapping[str, Tensor]) -> UnitNorms:
        return UnitNorms(self.units, params)

    def _normal(self, v: Mapping[str, Tensor]) -> Tensor:
        return self.units.pair(self.params, v)

    def _conormal(self, a: Tensor) -> dict[str, Tensor]:
        return self.units.spread(self.params, a)

    def _solve(self, rhs: Tensor, orbits: bool) -> Tensor:
        norms = self.norms(self.params)
        gram = OrbitGram(norms, norms.zeros)
        return gram.solve(rhs) * (-gram.top).exp() / norms.largest / norms.largest
