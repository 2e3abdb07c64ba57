"""Logistic regression in closed form: the population's Fisher information, the natural gradient.

Averaged over inputs N(0, 1), with β̂ = β/‖β‖ and φ' = φ(1 − φ), the Fisher information is

    F(β) = a (1 − β̂β̂ᵀ) + c β̂β̂ᵀ,   a = E φ'(‖β‖z),  c = E z²φ'(‖β‖z),   z ~ N(0, 1).

At β = 0 both are 1/4. It belongs to a loss averaged over samples.

On data, with u = y∘Xβ, loss Σ log(1 + e^{−u}) and F = Xᵀdiag(φ(u)φ(−u))X, φ the sigmoid, the
natural gradient is −Δ for the shortest Δ that minimizes

    Σ_n φ(u_n)φ(−u_n) (y_n x_nᵀΔ − 1/φ(u_n))²

Weights positive but of any spread leave the rank and the row space of X alone. So the row space
is split off first, X = U Σ Vᵀ: where the rows of X are independent nothing else is left to do, and
the weights do not enter, Δ = X⁺(y/φ(u)); elsewhere a weighted problem in U remains, whose weights
are taken relative to the largest (common factors of F and ∇ cancel).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi, sqrt
from typing import Any

import scipy
import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.checks import require_finite_tensor, require_number
from .._core.errors import PullbackError
from .._core.space import compute_dtype
from .parameters import read_signs, refuse_data


@dataclass(frozen=True)
class LogisticThresholds:
    """Numbers of the quadrature and of the weighted problem.

    Attributes:
        step: of the trapezoidal rule, whose error is e^{−2π²/step} = 5e-35.
        range: of the trapezoidal rule, whose tail is e^{−range} = 3e-20.
        moderate: samples are wrong by a logit of so much at most where 1/φ(u) < 150 is moderate.
    """

    step: float = 0.25
    range: float = 45.0
    moderate: float = 5.0


THRESHOLDS = LogisticThresholds()


@dataclass(frozen=True)
class PopulationFisher:
    """F(β) for x ~ N(0, 1), held as a, c and β̂; products and solves cost O(D).

    >>> fisher = population_fisher(torch.zeros(3))
    >>> fisher.matvec(torch.ones(3))
    tensor([0.2500, 0.2500, 0.2500])
    """

    across: Tensor
    along: Tensor
    unit: Tensor

    def matvec(self, v: Tensor) -> Tensor:
        """F v along the last axis."""
        return self._apply(self.across, self.along, v)

    def solve(self, g: Tensor) -> Tensor:
        """F⁻¹g."""
        return self._apply(1 / self.across, 1 / self.along, g)

    def _apply(self, a: Tensor, c: Tensor, v: Tensor) -> Tensor:
        return a * v + (c - a) * (v @ self.unit)[..., None] * self.unit

    def dense(self) -> Tensor:
        """F, (D, D)."""
        eye = torch.eye(len(self.unit), dtype=self.unit.dtype, device=self.unit.device)
        return self.matvec(eye)


def population_fisher(beta: Tensor) -> PopulationFisher:
    """F at β, (D,)."""
    require_finite_tensor("β", beta, ("D",))
    top = beta.abs().max()  # squares of large or small entries are not representable
    size = torch.where(top > 0, top * torch.linalg.vector_norm(beta / top), 0.0)
    a, c = curvatures(size)
    return PopulationFisher(a, c, torch.where(size > 0, beta / size, 0.0))


def curvatures(size: Tensor) -> tuple[Tensor, Tensor]:
    r"""a = E φ'(ρz) and c = E z²φ'(ρz) at ρ = size, by the trapezoidal rule.

    The rule converges exponentially for analytic integrands; the variable is z up to ρ = 1 and
    t = ρz beyond, where φ' is the narrower of the two bells.
    """
    rho = size.double()
    stretch = rho.clamp(min=1.0)
    count = int(THRESHOLDS.range / THRESHOLDS.step)
    indices = torch.arange(-count, count + 1, dtype=torch.float64, device=size.device)
    t = THRESHOLDS.step * indices
    z = t / stretch
    slope = t * (rho / stretch)
    bell = (F.logsigmoid(slope) + F.logsigmoid(-slope) - 0.5 * z.square()).exp()
    unit = THRESHOLDS.step / (stretch * sqrt(2 * pi))
    a = unit * bell.sum()
    c = unit * (z.square() * bell).sum()
    return a.to(size.dtype), c.to(size.dtype)


def logistic_natural_gradient(
    x: Tensor, y: Tensor, beta: Tensor, *, rcond: float | None = None
) -> Tensor:
    r"""F⁺∇L of L = Σ_n log(1 + e^{−y_n x_nᵀβ}) at β, (D,), for N < D and N ≥ D alike.

    F and L are both sums over samples; with both taken as means the answer is the same. (A summed
    loss with a mean Fisher matrix, as the paper has it, is N times faster.)

    Args:
        x: the inputs, (N, D).
        y: labels −1 or +1, (N,).
        beta: β, (D,).
        rcond: singular values of X below rcond·σ_max count as zero.

    >>> x, y = torch.eye(2), torch.tensor([1.0, -1.0])
    >>> logistic_natural_gradient(x, y, torch.zeros(2))
    tensor([-2.,  2.])
    """
    refuse_data(x, y)
    require_finite_tensor("β", beta, (x.shape[-1],))
    result_dtype = torch.promote_types(x.dtype, beta.dtype)
    dtype = compute_dtype(result_dtype)
    x = x.detach().to(dtype)
    beta = beta.detach().to(dtype)
    return natural_gradient_from_rows(x, y, x @ beta, rcond=rcond).to(result_dtype)


def natural_gradient_from_rows(
    rows: Tensor, y: Tensor, logits: Tensor, *, rcond: float | None = None
) -> Tensor:
    """F⁺∇ for any J given as rows (N, q) of d(logits): −(S J)⁺(S y/φ(y·logits)), S² = φφ(−·)."""
    refuse_data(rows, y)
    require_finite_tensor("The logits", logits, (len(rows),))
    y = read_signs(y, rows.dtype)
    u = y * logits
    if rcond is None:
        rcond = max(rows.shape) * torch.finfo(rows.dtype).eps
    else:
        require_number("rcond", rcond, below=1.0)
    left, sigma, vt = torch.linalg.svd(rows, full_matrices=False)
    is_kept = sigma > rcond * sigma.max()
    if not bool(is_kept.any()):
        return torch.zeros_like(rows[0])
    basis = left[:, is_kept]
    if basis.shape[1] == len(rows):
        coordinates = basis.T @ (y * (1 + (-u).exp()))
    else:
        coordinates = _solve_weighted(y[:, None] * basis, u)
    move = -(coordinates / sigma[is_kept]) @ vt[is_kept]
    if not bool(torch.isfinite(move).all()):
        raise PullbackError(
            "The natural gradient overflows",
            f"a sample is misclassified by a logit of {float(u.min()):.3g}, and 1/φ(u) grows as "
            "its exponential",
            "Start from smaller logits, or add damping (NaturalGradient with a damped solver)",
        )
    return move


def _find_weights(u: Tensor) -> tuple[Tensor, Tensor]:
    """√(φ(u)φ(−u)) and that over φ(u), relative to the largest weight.

    Where 1/φ(u) is moderate everywhere, a sample whose root is below √ε of the next larger one only
    decides, to round-off, what those before leave open. Such gaps are shortened to √ε e⁻²: it takes
    dozens of them to leave the range of the numbers.
    """
    longest_gap = torch.inf
    if bool(u.min() > -THRESHOLDS.moderate):
        longest_gap = 2 - 0.5 * log(torch.finfo(u.dtype).eps)
    log_root = (F.logsigmoid(u) + F.logsigmoid(-u)) / 2
    descending, order = log_root.sort(descending=True)
    gaps = (descending[:-1] - descending[1:]).clamp(max=longest_gap)
    log_root = torch.zeros_like(u).index_copy(0, order[1:], -gaps.cumsum(0))
    return log_root.exp(), (log_root - F.logsigmoid(u)).exp()


def _solve_weighted(basis: Tensor, u: Tensor) -> Tensor:
    """argmin Σ φ(u)φ(−u)(b_nᵀc − 1/φ(u))² for independent columns b.

    Rows are sorted by weight before a QR that takes the largest remaining column first (LAPACK's,
    on the CPU): it is then accurate row by row.
    """
    root, target = _find_weights(u)
    order = root.argsort(descending=True)
    root = root[order]
    target = target[order]
    rows = root[:, None] * basis[order]
    factorization: Any = scipy.linalg.qr(rows.cpu().numpy(), mode="economic", pivoting=True)
    q, r, columns = (torch.as_tensor(array, device=basis.device) for array in factorization)
    rank = int((r.diagonal() != 0).sum())
    if rank < basis.shape[1]:
        raise PullbackError(
            "The weights of the samples are out of range",
            f"logits differ by {float(u.max() - u.min()):.3g}, and {basis.shape[1] - rank} "
            "directions have weights that round to zero",
            "Use float64, smaller logits, or drop samples that are far ahead of the others",
        )
    permuted = torch.linalg.solve_triangular(r, (q.T @ target)[:, None], upper=True)[:, 0]
    solution = torch.zeros_like(basis[0])
    solution[columns.long()] = permuted
    return solution
