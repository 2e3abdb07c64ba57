r"""Slices: submanifolds that meet the orbits of a scaling group once.

A slice S = {c(w) = 0} has normals N = dc and meets orbits with tangents Z. At w

    retract     w ↦ exp(t)·w ∈ S, along the orbit, so that the function stays as it is
    project     v ↦ v − Nᵀ(NNᵀ)⁻¹N v, the orthogonal projection onto T_wS
    lift        v ↦ v − Zᵀ(NZᵀ)⁻¹N v, the vector of T_wS that moves the function as v does

On a *balanced* slice N = Z: it is orthogonal to the orbits and both projections are one.

The paper's slice has layers of equal norm, for layers in chains. Merged scalings e^{t_1}, …,
e^{t_{ℓ−1}} of a chain act on its ℓ blocks (A_k, b_k): A_k lies between the scalings k − 1 and k and
is multiplied by e^{t_k − t_{k−1}}, b_k only leads into the k-th and is multiplied by e^{t_k}. The
last block has no b, and t_0 = t_ℓ = 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from .._core.capture import unwrap_model
from .._core.errors import PullbackError, refuse_unknown
from .._core.space import ParameterSpace
from .actions.scaling import Scaling, connected
from .retraction import Norms, OrbitGram, ScalingUnits, UnitNorms, log_squares, to_slice

SLICES = ("balanced", "layer-balanced", "equal-norm")

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
        given = (
            unwrap_model(model).named_parameters()
            if isinstance(model, nn.Module)
            else model.items()
        )
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
        normals = torch.stack([space.flatten({n: v.get(n) for n in self.params}) for v in solved])
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


class BlockNorms:
    r"""Norms of blocks of whole parameters along an orbit: imbalance −D log(R exp(log q + 2Bt)).

    Args:
        slice: with R (blocks, P), which adds up blocks, and D (U, blocks), their differences.
        params: by name, with squared norms q (P,).
    """

    near = torch.inf

    def __init__(self, slice: EqualNorm, params: Mapping[str, Tensor]) -> None:
        self.units = slice.units
        self._adds, self._differences = slice.adds, slice.differences
        self._twice = 2 * slice.units.powers
        logs, _ = log_squares(slice.units, params)
        self._logs = torch.stack([each.reshape(()) for each in logs])
        self.zeros = self._twice.new_zeros(slice.units.total)
        alive = torch.isfinite(self._log_sums(self.zeros))
        self.dead = torch.zeros_like(self.zeros, dtype=torch.bool)
        start = 0
        for order in slice.chains:
            end = start + len(order) + 1
            self.dead[order] = ~alive[start:end].all()
            start = end

    def _terms(self, t: Tensor) -> Tensor:
        """log|w|² of each block's parameters, −inf for those of others: (blocks, P)."""
        return torch.where(self._adds > 0, self._logs + self._twice @ t, -torch.inf)

    def _log_sums(self, t: Tensor) -> Tensor:
        """log|w_k|² of the blocks, (blocks,); −inf for zeros."""
        return self._terms(t).logsumexp(1)

    def imbalance(self, t: Tensor) -> Tensor:
        sums = self._log_sums(t)
        found = self._differences @ torch.where(torch.isfinite(sums), sums, 0.0)
        return torch.where(self.dead, 0.0, -found)

    def newton(self, t: Tensor, tolerance: float) -> Tensor:
        shares = self._terms(t).softmax(1).nan_to_num(0.0)
        jacobian = self._differences @ (shares @ self._twice)
        jacobian = torch.where(self.dead[:, None], 0.0, jacobian)
        return torch.linalg.pinv(jacobian) @ self.imbalance(t)

    def rows(self) -> Tensor:
        """Coefficients (U, P) of the constraints' gradients, times a common factor: N = rows·w."""
        inverse = (-self._log_sums(self.zeros)).exp()
        rows = self._differences @ (self._adds * inverse[:, None]).nan_to_num(0.0, 0.0, 0.0)
        return torch.where(self.dead[:, None], 0.0, rows)


class EqualNorm(Slice):
    r"""Layers of equal norm, |(A_k, b_k)| = λ for all k; the last layer's bias does not count.

        S = {|(A_1, b_1)| = … = |(A_{ℓ−1}, b_{ℓ−1})| = |A_ℓ|}

    It meets every orbit of the *layer-wise* scalings once. The network restricted to it is still no
    immersion: there is one scaling symmetry per hidden unit, and S cuts only one per hidden layer.

    Without biases the retraction is the paper's, w_k ← exp(mean_i log|w_i|) w_k/|w_k|: Newton's
    method ends after one step, since the constraints are linear in t. (The printed retraction
    with biases multiplies b_k by one common factor too few from the third layer on, and changes
    the function.)

    Args:
        scalings: of units or of layers; units of a layer are merged.
        model: the module, or parameters by name.
    """

    def __init__(
        self, scalings: Sequence[Scaling], model: nn.Module | Mapping[str, Tensor]
    ) -> None:
        super().__init__([s if s.units == 1 else s.merged() for s in scalings], model)
        #: the indices of the scalings of each chain, in order
        self.chains: list[list[int]] = []
        for part in connected(s.names for s in self.scalings):
            order = chain(self.scalings, part)
            if order is None:
                names = ", ".join(self.scalings[i].about for i in part)
                raise PullbackError(
                    "There is no slice of equal norms",
                    f"the layers of {names} are no chain: their norms cannot all be made equal",
                    "Use symmetry.Balanced, which every network has",
                )
            self.chains.append(order)
        #: the parameters that count in each norm
        self.blocks = [n for order in self.chains for n in _layers(self.scalings, order)]
        powers = self.units.powers
        self.adds = powers.new_zeros(len(self.blocks), len(powers))
        for k, names in enumerate(self.blocks):
            self.adds[k, [self.units.names.index(n) for n in names]] = 1
        self.differences = powers.new_zeros(self.units.total, len(self.blocks))
        k = 0
        for order in self.chains:
            for i in order:
                self.differences[i, k], self.differences[i, k + 1] = 1, -1
                k += 1
            k += 1

    def norms(self, params: Mapping[str, Tensor]) -> BlockNorms:
        return BlockNorms(self, params)

    def _normal(self, v: Mapping[str, Tensor]) -> Tensor:
        rows = self.norms(self.params).rows()
        pairs = rows.new_zeros(len(self.units.names))
        for i, n in enumerate(self.units.names):
            if n in v:
                pairs[i] = torch.sum(self.params[n].detach().to(rows) * v[n].to(rows))
        return rows @ pairs

    def _conormal(self, a: Tensor) -> dict[str, Tensor]:
        coefficients = a @ self.norms(self.params).rows()
        return {
            n: (self.params[n].detach().to(a) * c).to(self.params[n].dtype)
            for n, c in zip(self.units.names, coefficients, strict=True)
        }

    def _solve(self, rhs: Tensor, orbits: bool) -> Tensor:
        rows = self.norms(self.params).rows()
        found = [self.params[n].detach().to(rows).square().sum() for n in self.units.names]
        right = self.units.powers if orbits else rows.mT
        return torch.linalg.pinv((rows * torch.stack(found)) @ right) @ rhs


def make_slice(
    kind: str, scalings: Sequence[Scaling], model: nn.Module | Mapping[str, Tensor]
) -> Slice:
    """A slice by name: one of `SLICES`."""
    refuse_unknown("slice", kind, SLICES)
    if kind == "equal-norm":
        return EqualNorm(scalings, model)
    return Balanced(scalings if kind == "balanced" else [s.merged() for s in scalings], model)


def layer_slice(scalings: Sequence[Scaling]) -> str:
    """Equal norms where all layers stand in chains, else the balanced slice of layers."""
    chains = all(chain(scalings, part) for part in connected(s.names for s in scalings))
    return "equal-norm" if chains else "layer-balanced"


def layers_of(scalings: Sequence[Scaling]) -> list[tuple[tuple[str, ...], ...]]:
    """The names of each layer's parameters, for every component."""
    return [_layers(scalings, part) for part in connected(s.names for s in scalings)]


def _layers(scalings: Sequence[Scaling], component: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """What leads into each scaling, weights between two of them first; then what only leads out."""
    into, out = _sides(scalings, component)
    leads, entered = (set().union(*side.values()) for side in (out, into))
    found = [tuple(sorted(into[i], key=lambda n: n not in leads)) for i in component]
    last = [tuple(n for n in out[i] if n not in entered) for i in component]
    return (*found, *(names for names in last if names))


def chain(scalings: Sequence[Scaling], component: Sequence[int]) -> list[int] | None:
    """The component in order; None where it branches, or scales by other powers or in part."""
    into, out = _sides(scalings, component)
    legs = [leg for i in component for leg in scalings[i].legs]
    if any(abs(leg.power) != 1 or not leg.complete for leg in legs):
        return None
    after: dict[int, int | None] = {}
    for i in component:
        targets = {next((j for j in component if n in into[j]), None) for n in out[i]}
        if len(targets) != 1:
            return None
        after[i] = targets.pop()
    starts = set(component) - set(after.values())
    if len(starts) != 1 or len(set(after.values())) != len(component):
        return None
    order = [starts.pop()]
    while (following := after[order[-1]]) is not None:
        order.append(following)
    # a parameter inside must leave exactly one scaling
    left = [n for i in order for n in out[i]]
    return order if len(order) == len(component) and len(set(left)) == len(left) else None


def _sides(
    scalings: Sequence[Scaling], component: Sequence[int]
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    into = {i: [leg.name for leg in scalings[i].legs if leg.power > 0] for i in component}
    out = {i: [leg.name for leg in scalings[i].legs if leg.power < 0] for i in component}
    return into, out
