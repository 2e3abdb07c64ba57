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
from enum import StrEnum
from typing import TypeVar

import torch
from torch import Tensor, nn

from .._core.capture import unwrap_model
from .._core.errors import PullbackError, refuse_unknown
from .._core.space import ParameterSpace
from .actions.scaling import Scaling
from .chains import find_components, list_component_layers, order_chain
from .retraction import Norms, solve_log_scales
from .scaling_units import ScalingUnits
from .unit_norms import OrbitGram, UnitNorms


class SliceKind(StrEnum):
    """The slices that have names."""

    BALANCED = "balanced"
    LAYER_BALANCED = "layer-balanced"
    EQUAL_NORM = "equal-norm"


@dataclass(frozen=True)
class SliceThresholds:
    """Numbers that decide whether parameters are on a slice.

    Attributes:
        contained: |c(w)| up to this many times the parameters' round-off is zero: norms are sums of
            many rounded squares.
    """

    contained: float = 64.0


THRESHOLDS = SliceThresholds()

Vector = TypeVar("Vector", Tensor, Mapping[str, Tensor])


@dataclass(frozen=True)
class Retraction:
    """The result of a retraction.

    Attributes:
        scales: log-scales by scaling, (units,) each.
        dead: indices of units that no scale can bring to the slice, by scaling: their incoming or
            outgoing weights are all zero. They keep the scale 1.
        off: max |c(w)| before.
    """

    scales: tuple[Tensor, ...]
    dead: dict[str, tuple[int, ...]] = field(default_factory=dict)
    off: float = 0.0


@dataclass(frozen=True)
class _Move:
    """A move along the orbit to the slice.

    Attributes:
        params: the parameters that were scaled, by name.
        log_scales: t, (U,).
        dead: (U,) units that no scale can bring to the slice.
    """

    params: dict[str, Tensor]
    log_scales: Tensor
    dead: Tensor


class Slice(ABC):
    """A slice of the orbits of some scalings, in the parameters of a model.

    Args:
        scalings: the group.
        model: its module, or parameters by name; the methods speak of their current values.
    """

    def __init__(
        self, scalings: Sequence[Scaling], model: nn.Module | Mapping[str, Tensor]
    ) -> None:
        self.params: dict[str, Tensor] = {}
        if isinstance(model, nn.Module):
            self.params.update(unwrap_model(model).named_parameters())
        else:
            self.params.update(model)
        self.units = ScalingUnits(scalings, self.params)

    @property
    def scalings(self) -> tuple[Scaling, ...]:
        """The group whose orbits are cut."""
        return self.units.scalings

    @abstractmethod
    def norms(self, params: Mapping[str, Tensor]) -> Norms:
        """Return the norms that the slice compares, along the orbit of w."""

    def log_scales(self, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """t (U,) that brings w to the slice, and which units (U,) are dead."""
        norms = self.norms(params)
        return solve_log_scales(norms, norms.zeros, self._find_eps(params)), norms.dead

    def _find_eps(self, params: Mapping[str, Tensor]) -> float:
        """Return the coarsest round-off of the scaled parameters."""
        return max(torch.finfo(params[name].dtype).eps for name in self.units.names)

    def constraint(self, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """c(w), zero on the slice and free of units: ½ log(in/out), 0 for dead units: (U,)."""
        if params is None:
            params = self.params
        norms = self.norms(params)
        return -0.5 * norms.imbalance(norms.zeros)

    @abstractmethod
    def _pair_with_normals(self, v: Mapping[str, Tensor]) -> Tensor:
        """N v, (k,)."""

    @abstractmethod
    def _combine_normals(self, coefficients: Tensor) -> dict[str, Tensor]:
        """Nᵀ a for coefficients a, by name."""

    @abstractmethod
    def _solve(self, rhs: Tensor, *, along_orbits: bool) -> Tensor:
        """(NNᵀ)⁻¹ rhs, or along the orbits (NZᵀ)⁻¹ rhs."""

    @torch.no_grad()
    def retract(self, params: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The slice's point on the orbit of w, by name; other parameters are unchanged."""
        if params is None:
            params = self.params
        return {**params, **self._move(params).params}

    @torch.no_grad()
    def retract_(self) -> Retraction:
        """Move the model's parameters to the slice, in place."""
        distances = self.constraint().abs()
        largest_distance = float(distances.amax()) if len(distances) else 0.0
        move = self._move(self.params)
        for name, value in move.params.items():
            self.params[name].copy_(value)
        dead_units: dict[str, tuple[int, ...]] = {}
        for scaling, flags in zip(self.scalings, self.units.split(move.dead), strict=True):
            if bool(flags.any()):
                dead_units[scaling.about] = tuple(flags.nonzero()[:, 0].tolist())
        return Retraction(self.units.split(move.log_scales), dead_units, largest_distance)

    def contains(
        self, params: Mapping[str, Tensor] | None = None, tolerance: float | None = None
    ) -> bool:
        """Whether |c(w)| is at round-off, or at most the tolerance."""
        if params is None:
            params = self.params
        if tolerance is None:
            tolerance = THRESHOLDS.contained * self._find_eps(params)
        return bool((self.constraint(params).abs() <= tolerance).all())

    @torch.no_grad()
    def project(self, v: Vector) -> Vector:
        """The orthogonal projection of v onto T_wS: by name, or flat (p,) as the model's own."""
        by_name = self._split_vector(v)
        coefficients = self._solve(self._pair_with_normals(by_name), along_orbits=False)
        return self._subtract(v, by_name, self._combine_normals(coefficients))

    @torch.no_grad()
    def lift(self, v: Vector) -> Vector:
        """The vector of T_wS that moves the function as v does: v and a move along the orbit."""
        by_name = self._split_vector(v)
        coefficients = self._solve(self._pair_with_normals(by_name), along_orbits=True)
        return self._subtract(v, by_name, self.units.spread(self.params, coefficients))

    def tangent_basis(self) -> Tensor:
        """An orthonormal basis of T_wS, (p, p − k); for small models."""
        space = self._parameter_space()
        count = self.units.total
        normals = space.zeros(count, space.size)
        identity = torch.eye(count, dtype=space.dtype, device=space.device)
        for row, unit_vector in zip(normals, identity, strict=True):
            # The solution comes first because dead units have no normal.
            normal = self._combine_normals(self._solve(unit_vector, along_orbits=False))
            row.copy_(space.flatten({name: normal.get(name) for name in self.params}))
        u, sigma, _ = torch.linalg.svd(normals.mT, full_matrices=True)
        rank = 0
        if count:
            rank = int((sigma > sigma[0] * count * torch.finfo(sigma.dtype).eps).sum())
        return u[:, rank:]

    def _move(self, params: Mapping[str, Tensor]) -> _Move:
        """Return the parameters at the slice's point on the orbit."""
        t, dead = self.log_scales(params)
        scaled = self.units.scale(params, t)
        eps = min(torch.finfo(w.dtype).eps for w in scaled.values())
        if float(t.abs().amax()) * torch.finfo(t.dtype).eps > eps / 2:
            # After a long way t has lost digits. A second solution restores them.
            correction, _ = self.log_scales(scaled)
            scaled = self.units.scale(scaled, correction)
            t = t + correction
        return _Move(scaled, t, dead)

    def _parameter_space(self) -> ParameterSpace:
        return ParameterSpace({n: w for n, w in self.params.items() if w.requires_grad})

    def _split_vector(self, v: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a vector by name."""
        if not isinstance(v, Tensor):
            return v
        space = self._parameter_space()
        if v.shape != (space.size,):
            raise PullbackError(
                "The vector is not of the parameter space",
                f"its shape is {tuple(v.shape)}, and the model has {space.size} parameters",
                "Pass a flat vector in the order of model.parameters(), or a dict by name",
            )
        return space.split(v)

    def _subtract(
        self, v: Vector, by_name: Mapping[str, Tensor], normals: Mapping[str, Tensor]
    ) -> Vector:
        """Return the difference of two vectors by name, as v was given: by name or flat."""
        difference = dict(by_name)
        for name, normal in normals.items():
            if name in difference:
                difference[name] = difference[name] - normal.to(difference[name].dtype)
        if isinstance(v, Tensor):
            return self._parameter_space().flatten(difference).to(v.dtype)
        return difference  # pyright: ignore[reportReturnType]


class Balanced(Slice):
    r"""Every unit takes in what it gives out: Σ_in w² (with its bias) = Σ_out w².

    The least Σw² of the orbit, and the slice orthogonal to orbits: constraints have the generators
    as gradients. The gradient of any function of the network's outputs is tangent to it, biases or
    not, and so is uniform weight decay. With `Scaling.merged` it is the balanced slice of layers,
    |A_{k+1}|² = |A_k|² + |b_k|².
    """

    def norms(self, params: Mapping[str, Tensor]) -> UnitNorms:
        return UnitNorms(self.units, params)

    def _pair_with_normals(self, v: Mapping[str, Tensor]) -> Tensor:
        return self.units.pair(self.params, v)

    def _combine_normals(self, coefficients: Tensor) -> dict[str, Tensor]:
        return self.units.spread(self.params, coefficients)

    def _solve(self, rhs: Tensor, *, along_orbits: bool) -> Tensor:
        norms = self.norms(self.params)
        gram = OrbitGram(norms, norms.zeros)
        return gram.solve(rhs) * (-gram.top).exp() / norms.largest / norms.largest


class BlockNorms:
    r"""Norms of blocks of whole parameters along an orbit: imbalance −D log(R exp(log q + 2Bt)).

    Args:
        slice: with R (blocks, P), which adds up blocks, and D (U, blocks), their differences.
        params: by name, with squared norms q (P,).

    Attributes:
        units: that scale the parameters.
        zeros: t = 0, (U,).
        newton_radius: infinite, because Newton's method converges from any distance.
        dead: (U,) units of chains with a block that is zero.
    """

    def __init__(self, slice: EqualNorm, params: Mapping[str, Tensor]) -> None:
        self.units = slice.units
        self.newton_radius = torch.inf
        self._block_sums = slice.block_sums
        self._differences = slice.differences
        self._twice_powers = 2 * slice.units.powers
        squares = slice.units.log_squares(params)
        self._log_squares = torch.stack([energy.reshape(()) for energy in squares.energies])
        self.zeros = self._twice_powers.new_zeros(slice.units.total)
        is_nonzero = torch.isfinite(self._log_block_norms(self.zeros))
        self.dead = torch.zeros_like(self.zeros, dtype=torch.bool)
        start = 0
        for order in slice.chains:
            end = start + len(order) + 1
            self.dead[order] = ~is_nonzero[start:end].all()
            start = end

    def _log_terms(self, t: Tensor) -> Tensor:
        """log|w|² of each block's parameters, −inf for those of others: (blocks, P)."""
        log_squares = self._log_squares + self._twice_powers @ t
        return torch.where(self._block_sums > 0, log_squares, -torch.inf)

    def _log_block_norms(self, t: Tensor) -> Tensor:
        """log|w_k|² of the blocks, (blocks,); −inf for zeros."""
        return self._log_terms(t).logsumexp(1)

    def imbalance(self, t: Tensor) -> Tensor:
        log_norms = self._log_block_norms(t)
        log_norms = torch.where(torch.isfinite(log_norms), log_norms, 0.0)
        return torch.where(self.dead, 0.0, -(self._differences @ log_norms))

    def newton_step(self, t: Tensor, tolerance: float) -> Tensor:
        shares = self._log_terms(t).softmax(1).nan_to_num(0.0)
        jacobian = self._differences @ (shares @ self._twice_powers)
        jacobian = torch.where(self.dead[:, None], 0.0, jacobian)
        return torch.linalg.pinv(jacobian) @ self.imbalance(t)

    def normal_coefficients(self) -> Tensor:
        """Return rows (U, P) with N = rows·w, the constraints' gradients times a common factor."""
        inverse = (-self._log_block_norms(self.zeros)).exp()
        inverse_squares = (self._block_sums * inverse[:, None]).nan_to_num(0.0, 0.0, 0.0)
        return torch.where(self.dead[:, None], 0.0, self._differences @ inverse_squares)


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
        super().__init__([_merge_units(scaling) for scaling in scalings], model)
        self.chains = self._order_chains()
        #: the parameters that count in each norm
        self.blocks: list[tuple[str, ...]] = []
        for order in self.chains:
            self.blocks.extend(list_component_layers(self.scalings, order))
        powers = self.units.powers
        self.block_sums = powers.new_zeros(len(self.blocks), len(powers))
        for k, names in enumerate(self.blocks):
            self.block_sums[k, [self.units.names.index(name) for name in names]] = 1
        self.differences = powers.new_zeros(self.units.total, len(self.blocks))
        block = 0
        for order in self.chains:
            for i in order:
                self.differences[i, block] = 1
                self.differences[i, block + 1] = -1
                block += 1
            block += 1  # a chain has one block more than scalings

    def _order_chains(self) -> list[list[int]]:
        """Return the numbers of the scalings of each chain, in order."""
        chains: list[list[int]] = []
        for component in find_components(self.scalings):
            order = order_chain(self.scalings, component)
            if order is None:
                names = ", ".join(self.scalings[i].about for i in component)
                raise PullbackError(
                    "There is no slice of equal norms",
                    f"the layers of {names} are no chain: their norms cannot all be made equal",
                    "Use symmetry.Balanced, which every network has",
                )
            chains.append(order)
        return chains

    def norms(self, params: Mapping[str, Tensor]) -> BlockNorms:
        return BlockNorms(self, params)

    def _pair_with_normals(self, v: Mapping[str, Tensor]) -> Tensor:
        rows = self.norms(self.params).normal_coefficients()
        pairs = rows.new_zeros(len(self.units.names))
        for i, name in enumerate(self.units.names):
            if name in v:
                pairs[i] = torch.sum(self.params[name].detach().to(rows) * v[name].to(rows))
        return rows @ pairs

    def _combine_normals(self, coefficients: Tensor) -> dict[str, Tensor]:
        factors = coefficients @ self.norms(self.params).normal_coefficients()
        normal = {}
        for name, factor in zip(self.units.names, factors, strict=True):
            w = self.params[name].detach()
            normal[name] = (w.to(coefficients) * factor).to(w.dtype)
        return normal

    def _solve(self, rhs: Tensor, *, along_orbits: bool) -> Tensor:
        rows = self.norms(self.params).normal_coefficients()
        squares = [self.params[n].detach().to(rows).square().sum() for n in self.units.names]
        columns = self.units.powers if along_orbits else rows.mT
        return torch.linalg.pinv((rows * torch.stack(squares)) @ columns) @ rhs


def _merge_units(scaling: Scaling) -> Scaling:
    """Return the scaling with one factor for all units."""
    if scaling.units == 1:
        return scaling
    return scaling.merged()


def make_slice(
    name: str, scalings: Sequence[Scaling], model: nn.Module | Mapping[str, Tensor]
) -> Slice:
    """Return a slice by name: one of `SliceKind`."""
    refuse_unknown("slice", name, map(str, SliceKind))
    if name == SliceKind.EQUAL_NORM:
        return EqualNorm(scalings, model)
    if name == SliceKind.LAYER_BALANCED:
        return Balanced([scaling.merged() for scaling in scalings], model)
    return Balanced(scalings, model)


def choose_layer_slice(scalings: Sequence[Scaling]) -> SliceKind:
    """Return equal norms where all layers stand in chains, else the balanced slice of layers."""
    components = find_components(scalings)
    if all(order_chain(scalings, component) for component in components):
        return SliceKind.EQUAL_NORM
    return SliceKind.LAYER_BALANCED
