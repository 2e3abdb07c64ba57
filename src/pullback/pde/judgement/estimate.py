"""The error of a solution, estimated from its residuals and its tangents."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf, isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.space import ParameterSpace
from ...maps.jets import Unsupported
from ..discretization.seeds import SEEDS
from ..discretization.term import build_term
from ..discretization.trial import UNKNOWNS_PREFIX, Trial
from ..networks.modules import Slabs
from ..networks.windows import read_initial_values, restrict_to_window
from ..problem.conditions import Dirichlet
from ..problem.problem import Problem
from .error_profile import ErrorProfile
from .validation import Validation


@dataclass(frozen=True)
class EstimateThresholds:
    """How the error equation is solved."""

    #: parameters up to which it is solved: the SVD is cubic in them
    most_parameters: int = 2000
    #: singular values below this share of the largest are left out: no residual sees them
    unseen_share: float = 1e-10
    #: share of the tangents, or of an unknown, by which such directions may move the solution
    loose_share: float = 1e-4
    #: share of a residual's noise that a fit leaves; round-off hides less of it
    least_freedom: float = 1e-6
    #: points of a condition for each parameter, and at least, so that rows outnumber columns
    points_per_parameter: int = 2
    fewest_points: int = 500
    #: points at which the error is measured
    error_points: int = 2000
    #: of parameters, after which a network that was zero has all its tangents
    small_change: float = 1e-3
    #: the least norm of a solution, against a division by zero
    smallest_norm: float = 1e-300


THRESHOLDS = EstimateThresholds()


@dataclass(frozen=True)
class Estimate:
    """The error of a solution, by its own tangents or by a second discretization.

    Attributes:
        error: estimated relative L² error, the largest of all fields together and of each by
            itself; infinite where the conditions do not determine them, NaN where it is unknown.
        spread: standard errors of the unknown coefficients, by name; infinite likewise.
        affine: whether the problem is linear; otherwise the error must be small for the tangents'
            estimate to hold.
        reach: the largest error that tangents explain for residuals of norm 1, 0 where unknown.
        lost_fields: fields that may be zero as far as their errors tell.
        lost_from: the time from which on the error is as large as the solution, None if it is not.
        is_isolated: whether a second discretization was tried and found no solution near this one.
        is_unbounded: whether residuals are amplified more than a second discretization resolves.
    """

    error: float
    spread: Mapping[str, float]
    affine: bool
    reach: float = 0.0
    lost_fields: tuple[str, ...] = ()
    lost_from: float | None = None
    is_isolated: bool = False
    is_unbounded: bool = False

    def combine(self, profile: ErrorProfile, *, is_resolved: bool) -> Estimate:
        """Return this estimate with the error of a second discretization in place of its own.

        If that one does not resolve the residuals, the larger error counts, with what the others
        may add. Whether the conditions determine the solution at all is a question to the tangents,
        unless it was integrated.
        """
        error = profile.error
        is_undetermined = self.error == inf and not profile.is_integrated
        if not is_resolved:
            error += profile.unexplained
        if not is_resolved or is_undetermined:
            error = max(error, self.error)
        if not profile.is_bounded and error < inf:
            return replace(self, error=nan, is_unbounded=True)
        lost_fields = profile.lost_fields
        return replace(self, error=error, lost_fields=lost_fields, lost_from=profile.lost_from)


@dataclass(frozen=True)
class TangentSystem:
    """The linearized residuals and fields, at a solution.

    Attributes:
        rows: A, the derivatives of the weighted residuals by the parameters, (n, p).
        residuals: r, (n,).
        tangents: T, the derivatives of the fields over the domain, (N, p).
        fields: u there, (N,).
    """

    rows: Tensor
    residuals: Tensor
    tangents: Tensor
    fields: Tensor


@dataclass(frozen=True)
class SeenDirections:
    """A = u·diag(s)·vᵀ on the directions that residuals see.

    Attributes:
        u: (n, k).
        s: (k,).
        v: (p, k).
        unseen: directions of the parameters that no residual sees, (p, min(n, p) − k).
    """

    u: Tensor
    s: Tensor
    v: Tensor
    unseen: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> SeenDirections:
        """Return the directions of a matrix A, (n, p)."""
        u, s, vh = torch.linalg.svd(rows, full_matrices=False)
        is_seen = s > THRESHOLDS.unseen_share * s[0]
        return cls(u[:, is_seen], s[is_seen], vh[is_seen].T, vh[~is_seen].T)

    def pseudo_inverse_row(self, row: int) -> Tensor:
        """Return a row of A⁺, (n,)."""
        return (self.v[row] / self.s) @ self.u.T


class ErrorField:
    """The error e from A δ = r at fresh points, e = T δ, where T are the fields' tangents.

    For a linear equation L u = f the error solves L e = r, with r the residual. What no tangent
    explains, r − A δ, adds at most its norm times max ‖T δ‖/‖A δ‖, the equation's stability as far
    as the tangents see it. Directions δ with A δ = 0 change nothing, unless a condition is missing:
    then T δ is another solution.

    Attributes:
        explained: the mean square of T δ over the domain, all fields together.
        unexplained: that of what the other residuals may add; infinite where directions that no
            residual sees move the fields.
        size: that of the solution.
        reach: max ‖T δ‖/‖A δ‖, with the root mean square over the domain for ‖T δ‖.
        spread: standard errors of the unknown coefficients, by name.
        corrected: the solution without T δ.
    """

    def __init__(self, problem: Problem, trial: Trial, weights: Mapping[str, float]) -> None:
        params: dict[str, Tensor] = {
            name: p for name, p in trial.named_parameters() if p.requires_grad
        }
        system = _linearize(problem, trial, params, weights)
        directions = SeenDirections.of(system.rows)
        # the fields that each singular direction moves, for a residual of norm 1
        reach = system.tangents @ directions.v / directions.s
        coefficients = directions.u.T @ system.residuals
        stability = _spectral_norm(reach)
        self.reach = stability / len(system.tangents) ** 0.5
        unseen_move = _spectral_norm(system.tangents @ directions.unseen)
        if unseen_move > THRESHOLDS.loose_share * _spectral_norm(system.tangents):
            stability = inf
        left_over = float((system.residuals - directions.u @ coefficients).norm())
        self.explained = float((reach @ coefficients).square().sum())
        self.unexplained = (stability * left_over) ** 2
        self.size = float(system.fields.square().sum())
        self.spread = compute_standard_errors(params, directions, system.residuals)
        space = ParameterSpace(params)
        move = space.split((directions.v @ (coefficients / directions.s)).to(space.dtype))
        self.corrected = Corrected(trial, move)


class Corrected(nn.Module):
    """u − T δ: the solution without an error that its tangents explain."""

    def __init__(self, trial: Trial, move: dict[str, Tensor]) -> None:
        super().__init__()
        self.trial = trial
        self._move = move

    def forward(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise Unsupported("a tangent")

        def evaluate(params: dict[str, Tensor]) -> Tensor:
            return self.trial.apply_to(params, x)

        parameters = dict(self.trial.named_parameters())
        point = {name: parameters[name].detach() for name in self._move}
        value_and_tangent = torch.func.jvp(evaluate, (point,), (self._move,))
        return value_and_tangent[0] - value_and_tangent[1]


def estimate_error(
    problem: Problem,
    trial: Trial,
    weights: Mapping[str, float],
    affine: bool,
    most_parameters: int = THRESHOLDS.most_parameters,
) -> Estimate | None:
    """Return the error by the network's own tangents.

    It is None for energies and above so many parameters, of a slab.

    Args:
        problem, trial: what was solved, and with what.
        weights: of the conditions in the loss, by name.
        affine: whether the problem is linear.
        most_parameters: beyond which the tangents take too long.
    """
    network = trial.network
    pieces = network.networks if isinstance(network, Slabs) else [network]
    if max(map(_count_parameters, pieces)) > most_parameters:
        return None
    if any(condition.is_energy for condition in problem.conditions):
        return None
    if isinstance(network, Slabs) and not problem.domain.evolves:
        return None  # an ordinary equation in slabs: it is integrated
    if isinstance(network, Slabs):
        return _estimate_slabs(problem, trial, network, weights, affine)
    field = ErrorField(problem, trial, weights)
    error = field.explained**0.5 + field.unexplained**0.5
    if field.size == 0:
        return _estimate_zero(problem, trial, weights, affine, error)
    return Estimate(error / field.size**0.5, field.spread, affine, field.reach)


def _estimate_zero(
    problem: Problem, trial: Trial, weights: Mapping[str, float], affine: bool, error: float
) -> Estimate:
    """Return the estimate for a network that is zero: 0 where that is exact, else NaN.

    Such a network has few tangents, since its last layer is zero. Whether other solutions are near
    is asked of the tangents of a network that is almost zero.
    """
    nearby = copy.deepcopy(trial)
    generator = torch.Generator().manual_seed(SEEDS.inspection)
    with torch.no_grad():
        for parameter in nearby.network.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += THRESHOLDS.small_change * noise.to(parameter)
    field = ErrorField(problem, nearby, weights)
    is_exact = error == 0 and isfinite(field.unexplained)
    return Estimate(0.0 if is_exact else nan, field.spread, affine, field.reach)


def _count_parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def _estimate_slabs(
    problem: Problem, trial: Trial, network: Slabs, weights: Mapping[str, float], affine: bool
) -> Estimate:
    """Return the error slab by slab; each one begins with that of the last one at its end."""
    unknowns = {name: value.item() for name, value in trial.unknowns.items()}
    previous = None
    carried = 0.0
    reach = 0.0
    squared_error = 0.0
    squared_size = 0.0
    spread: Mapping[str, float] = {}
    windows = pairwise(network.edges.tolist())
    for piece, (start, end) in zip(network.networks, windows, strict=True):
        restricted = restrict_to_window(problem, start, end, previous)
        piece_trial = Trial(piece, unknowns, next(piece.parameters()))
        field = ErrorField(restricted, piece_trial, weights)
        carried += field.unexplained**0.5
        reach = max(reach, field.reach)
        squared_error += (end - start) * (field.explained**0.5 + carried) ** 2
        squared_size += (end - start) * field.size
        previous = read_initial_values(field.corrected, time_axis=problem.domain.dim - 1)
        spread = field.spread
    error = (squared_error / max(squared_size, THRESHOLDS.smallest_norm)) ** 0.5
    return Estimate(error, spread, affine, reach)


def _linearize(
    problem: Problem, trial: Trial, params: dict[str, Tensor], weights: Mapping[str, float]
) -> TangentSystem:
    """Return the residuals at fresh points and the fields, linearized, in float64."""
    size = sum(p.numel() for p in params.values())
    count = max(THRESHOLDS.points_per_parameter * size, THRESHOLDS.fewest_points)
    counts = {condition.name: count for condition in problem.conditions}
    validation = Validation(problem, trial, counts, weights, SEEDS.validation)
    rows = []
    residuals = []
    with torch.enable_grad():
        for condition in problem.conditions:
            sites = validation.draw(condition, 1, count)
            term = build_term(problem, condition, trial, sites, weights[condition.name])
            linearization = term.map.linearize(params)
            rows.append(linearization.rows().double())
            residuals.append(linearization.value.flatten().double())
        tangents, fields = _linearize_fields(problem, trial, params)
    return TangentSystem(torch.cat(rows), torch.cat(residuals), tangents, fields)


def _linearize_fields(
    problem: Problem, trial: Trial, params: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return ∂u/∂w and u of all fields over the domain; constants of free fields are left out."""
    parameter = next(iter(params.values()))
    points = problem.domain.sample(THRESHOLDS.error_points, "sobol", seed=3)
    sites = (points.to(parameter.dtype, parameter.device),)
    all_tangents = []
    all_values = []
    for name in problem.fields:
        field = Dirichlet(0.0, field=name, on=problem.domain)
        linearization = build_term(problem, field, trial, sites, 1.0).map.linearize(params)
        tangents = linearization.rows().double()
        values = linearization.value.flatten().double()
        if name in problem.free:
            tangents = tangents - tangents.mean(0)
            values = values - values.mean()
        all_tangents.append(tangents)
        all_values.append(values)
    return torch.cat(all_tangents), torch.cat(all_values)


def _spectral_norm(matrix: Tensor) -> float:
    """Return the largest singular value; zero for a matrix without entries."""
    if not matrix.numel():
        return 0.0
    return float(torch.linalg.matrix_norm(matrix, 2))


def compute_standard_errors(
    params: dict[str, Tensor], directions: SeenDirections, residuals: Tensor
) -> dict[str, float]:
    """Return standard errors of the unknowns: √Σ (A⁺)²ᵢ rᵢ²/(1 − hᵢ), with hᵢ = (A A⁺)ᵢᵢ.

    A fit bends towards its data, so that residuals of few data are smaller than their noise: E rᵢ²
    is (1 − hᵢ) of it. That of an unknown which moves in a direction that no residual sees is
    infinite.
    """
    leverages = directions.u.square().sum(1)
    variances = residuals.square() / (1 - leverages).clamp(min=THRESHOLDS.least_freedom)
    errors: dict[str, float] = {}
    row = 0
    for name, parameter in params.items():
        if name.startswith(UNKNOWNS_PREFIX):
            error = inf
            if float(directions.unseen[row].norm()) <= THRESHOLDS.loose_share:
                weights = directions.pseudo_inverse_row(row).square()
                error = float((weights * variances).sum().sqrt())
            errors[name.removeprefix(UNKNOWNS_PREFIX)] = error
        row += parameter.numel()
    return errors
