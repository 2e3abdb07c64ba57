"""Weights of conditions in the loss: balanced ones, and those that data choose for a prior."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.processes import Processes
from ...maps.jets import Index
from ...optim import Term
from ..problem.conditions import Condition
from ..problem.problem import Problem
from .residual import LocalResidual
from .sites import Sites


@dataclass(frozen=True)
class WeightThresholds:
    """Bounds of chosen weights."""

    #: the heaviest balanced weight, and one over the lightest: beyond it digits of the other
    #: conditions are lost
    heaviest: float = 1e6
    #: a balanced weight from which on 1 is not enough: operators of order four, short lengths. Its
    #: root, 10, is one order of magnitude of residuals.
    unbalanced: float = 100.0
    #: ridge of the prior's precision matrix, as a share of its largest entry: directions that
    #: neither equation nor prior see; four digits above the round-off of float64
    ridge_share: float = 1e-12
    #: factors of a prior's weight that are compared, in powers of 10^(1/4); the linearization
    #: holds nearby alone
    smallest_power: int = -8
    largest_power: int = 4

    @property
    def prior_factors(self) -> list[float]:
        """The factors of a prior's weight that are compared."""
        return [10.0 ** (k / 4) for k in range(self.smallest_power, self.largest_power + 1)]


THRESHOLDS = WeightThresholds()


def balance_weights(problem: Problem, sites: Mapping[str, Sites]) -> dict[str, float]:
    """Return the weights of conditions; balanced ones by how strongly an error would be seen.

    A wave with the domain's own lengths, ∂ᵢ ~ π/Lᵢ, has residuals of some size in the equation and
    of another on the boundary. Their ratio is a boundary's weight, rounded down to a power of ten.
    Squared it would count errors of the solution alike, and 1 counts residuals alike.

    If one of the balanced weights is large, 1 would leave the boundary nearly free, as in a
    biharmonic equation. Then all conditions without a weight of their own are balanced.
    """
    weights = {condition.name: condition.weight for condition in problem.conditions}
    balanced = _find_balanced_weights(problem, sites)
    is_unbalanced = max(balanced.values(), default=0.0) >= THRESHOLDS.unbalanced
    for condition in problem.conditions:
        is_chosen = condition.balanced or (condition.has_default_weight and is_unbalanced)
        if is_chosen and condition.name in balanced:
            weights[condition.name] = balanced[condition.name]
    return weights


def _find_balanced_weights(problem: Problem, sites: Mapping[str, Sites]) -> dict[str, float]:
    """Return the balanced weights of conditions that hold at points other than the equations'."""
    equations = [c for c in problem.conditions if c.is_equation and c.on is None]
    if not equations:
        return {}
    equation_size = sum(measure_wave(problem, c, sites[c.name]) * c.weight for c in equations)
    balanced = {}
    for condition in problem.conditions:
        if condition not in equations and _can_be_balanced(condition):
            ratio = equation_size / measure_wave(problem, condition, sites[condition.name])
            balanced[condition.name] = _weight_from_squared_ratio(ratio, default=condition.weight)
    return balanced


def _can_be_balanced(condition: Condition) -> bool:
    """Return True for conditions at points that are weighed against the equations."""
    if condition.is_integral or condition.is_energy or condition.is_measured:
        return False
    return condition.balanced or condition.prescribes_values or condition.paired


def _weight_from_squared_ratio(ratio: float, default: float) -> float:
    """Return the square root of a ratio, rounded down to a power of ten within bounds."""
    if not math.isfinite(ratio) or ratio <= 0:
        return default
    power = math.floor(math.log10(ratio) / 2)
    return min(max(10.0**power, 1 / THRESHOLDS.heaviest), THRESHOLDS.heaviest)


def measure_wave(problem: Problem, condition: Condition, sites: Sites) -> float:
    """Return the mean square of a condition's terms for a wave with the domain's own lengths.

    It is NaN if the terms are not finite, or vanish.
    """
    local = LocalResidual(problem, condition, sites)
    wavenumbers = (math.pi / (problem.domain.high - problem.domain.low)).tolist()

    def size_of(index: Index | None) -> float:
        if index is None:
            return sum(wavenumbers[i] ** 2 for i in problem.coordinates.space)
        return math.prod(wavenumbers[i] for i in index)

    ones = torch.ones_like(sites[0].x[:, 0])
    slopes = local.linearize({key: ones * size_of(key[2]) for key in local.keys}).slopes
    total = 0.0
    for (_, _, index), slope in slopes.items():
        total += float(slope.square().mean(0).sum()) * size_of(index) ** 2
    if not math.isfinite(total) or total <= 0:
        return math.nan
    return total


def choose_prior_factor(
    terms: Sequence[tuple[Condition, Term]], params: Mapping[str, Tensor], processes: Processes
) -> float:
    r"""Return the factor by which the prior's weight should change, where evidence is largest.

    Let A_e, A_p, A_d be the weighted rows of equations, prior and data, and z their values. Around
    the parameters the first two say that a change δ is normal with mean δ₀ and, up to the noise's
    variance, precision K = A_eᵀA_e + s A_pᵀA_p. Data then are a Gaussian process with noise,

        ν = z_d + A_d δ₀,   C = 1 + A_d K⁻¹ A_dᵀ,   −2 log p = n log νᵀC⁻¹ν + log det C + const,

    whose smallest −2 log p over a grid of s is taken.
    """
    trained = {n: p for n, p in params.items() if p.requires_grad}
    size = sum(p.numel() for p in trained.values())
    empty = torch.zeros(0, dtype=torch.float64, device=next(iter(trained.values())).device)
    # Gram matrices with Aᵀz as the last column
    equation_gram = empty.new_zeros(size, size + 1)
    prior_gram = empty.new_zeros(size, size + 1)
    data_rows = [empty.new_zeros(0, size)]
    data_values = [empty]
    for condition, term in terms:
        linearization = term.map.linearize(trained)
        rows = linearization.rows().detach().double()
        values = linearization.value.detach().flatten().double()
        if condition.is_measured:
            data_rows.append(rows)
            data_values.append(values)
        elif condition.is_prior:
            prior_gram += rows.T @ torch.cat([rows, values[:, None]], 1)
        else:
            equation_gram += rows.T @ torch.cat([rows, values[:, None]], 1)
    equation_gram, prior_gram = processes.sum([equation_gram, prior_gram])
    rows, values = processes.gather([torch.cat(data_rows), torch.cat(data_values)])

    def cost(factor: float) -> float:
        return _compute_negative_log_evidence(equation_gram + factor * prior_gram, rows, values)

    return min(THRESHOLDS.prior_factors, key=cost)


def _compute_negative_log_evidence(gram: Tensor, rows: Tensor, values: Tensor) -> float:
    """Return −2 log p of the data, up to a constant.

    Args:
        gram: K with its right-hand side as the last column, (p, p + 1).
        rows: A_d, (n, p).
        values: z_d, (n,).
    """
    precision = gram[:, :-1].clone()
    right_side = gram[:, -1]
    precision.diagonal().add_(THRESHOLDS.ridge_share * precision.diagonal().max())
    lower = torch.linalg.cholesky_ex(precision).L
    spread = torch.linalg.solve_triangular(lower, rows.T, upper=False)  # L⁻¹A_dᵀ
    mean = torch.linalg.solve_triangular(lower, -right_side[:, None], upper=False)[:, 0]
    covariance = spread.T @ spread
    covariance.diagonal().add_(1.0)
    root = torch.linalg.cholesky_ex(covariance).L
    misfit = (values + spread.T @ mean)[:, None]
    whitened = torch.linalg.solve_triangular(root, misfit, upper=False)
    cost = len(values) * whitened.square().sum().log() + 2 * root.diagonal().log().sum()
    if not torch.isfinite(cost):
        return math.inf
    return float(cost)
