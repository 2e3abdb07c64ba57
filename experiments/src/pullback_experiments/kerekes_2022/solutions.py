"""What training is compared with: margins, least squares, and completion by the nuclear norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from pullback import PullbackError
from pullback._core.checks import require_finite_tensor
from pullback.linear.parameters import read_signs, read_whole_numbers, refuse_data

__all__ = [
    # classifiers
    "l2_max_margin",
    "l1_max_margin",
    "lp_max_margin",
    "separates",
    "Margin",
    # regression
    "ordinary_least_squares",
    "ridgeless",
    # matrices
    "nuclear_norm_completion",
    "CompletedMatrix",
]


def ridgeless(x: Tensor, y: Tensor, rcond: float | None = None) -> Tensor:
    """X⁺y, (D,): of all least-squares solutions the shortest, at any rank.

    >>> ridgeless(torch.tensor([[3.0, 4.0]]), torch.tensor([25.0])).round(decimals=3)
    tensor([3., 4.])
    """
    refuse_data(x, y)
    return torch.linalg.pinv(x, rtol=rcond) @ y.to(x.dtype)


def ordinary_least_squares(x: Tensor, y: Tensor) -> Tensor:
    """(XᵀX)⁻¹Xᵀy, (D,), from a QR factorization.

    Raises:
        PullbackError: where the columns of X are dependent, so that many solutions exist.
    """
    refuse_data(x, y)
    rank = int(torch.linalg.matrix_rank(x))
    if rank < x.shape[1]:
        raise PullbackError(
            "The least-squares solution is not unique",
            f"the data matrix {tuple(x.shape)} has rank {rank}, below its number of columns",
            "Use ridgeless, the shortest solution, or drop dependent features",
        )
    q, r = torch.linalg.qr(x)
    return torch.linalg.solve_triangular(r, (q.T @ y.to(x.dtype))[:, None], upper=True)[:, 0]


@dataclass(frozen=True)
class Margin:
    """A separator with y_n x_nᵀβ ≥ 1.

    Attributes:
        beta: β, (D,).
        norm: ‖β‖_p, whose inverse is the margin.
        support: the samples with y_n x_nᵀβ = 1, as indices.
        status: "optimum", or "stationary point" where the problem is not convex.
        gap: a bound on the relative excess of the norm over the optimum, where there is one.
    """

    beta: Tensor
    norm: float
    support: Tensor
    status: str = "optimum"
    gap: float | None = None


def l2_max_margin(x: Tensor, y: Tensor) -> Margin:
    r"""min ‖β‖₂: the hard-margin support vector machine without a bias.

    A least-distance problem (Lawson and Hanson): with Z = y∘X the residual ρ of the nonnegative
    least squares min ‖[Z 1]ᵀα − (0, 1)‖, α ≥ 0, is a multiple of (β, −1).
    """
    z = _multiply_by_signs(x, y)
    alpha = _nonnegative(z)
    active = alpha > 0
    beta = _polish(z, active)
    scale = alpha.sum()
    # Σα = 1: ‖Zᵀα‖ bounds the margin from above
    if scale > 0:
        weights = alpha / scale
    else:
        weights = alpha
    upper = float(np.linalg.norm(z.T @ weights))
    norm = float(np.linalg.norm(beta))
    return _margin(beta, norm, z, x, gap=max(0.0, norm * upper - 1))


def l1_max_margin(x: Tensor, y: Tensor) -> Margin:
    """min ‖β‖₁, by linear programming; a vertex of the optimal face where there are several."""
    z = _multiply_by_signs(x, y)
    beta, dual = _weighted_l1(z, np.ones(z.shape[1]))
    norm = float(np.abs(beta).sum())
    # α ≥ 0 with ‖Zᵀα‖_∞ ≤ 1 proves ‖β‖₁ ≥ Σα
    bound = float(dual.sum() / max(1.0, np.abs(z.T @ dual).max()))
    return _margin(beta, norm, z, x, gap=max(0.0, norm / bound - 1))


def lp_max_margin(x: Tensor, y: Tensor, p: float, *, starts: int = 16, seed: int = 0) -> Margin:
    r"""min ‖β‖_p: for 0 < p < 1 a stationary point, the best found from several starts.

    Gradient descent on a diagonal network of L layers tends to p = 2/L. Below 1 the problem is
    concave on each orthant, its minima are vertices, and iteratively reweighted linear programs
    with weights (|β_i| + ε)^{p−1}, ε → 0, descend to one.

    Args:
        x: inputs, (N, D).
        y: labels −1 or +1, (N,).
        p: 2, 1, or between 0 and 1.
        starts: how many initial weights to try: those of the ℓ1 and ℓ2 solutions, then random ones.
        seed: of the random ones.
    """
    if p in (1, 2):
        if p == 2:
            return l2_max_margin(x, y)
        return l1_max_margin(x, y)
    if not 0 < p < 1:
        raise PullbackError(
            "The norm is not usable", f"got p = {p}", "Use 2, 1, or a number between 0 and 1"
        )
    z = _multiply_by_signs(x, y)
    rng = np.random.default_rng(seed)
    dim = z.shape[1]
    points = [_weighted_l1(z, np.ones(dim))[0], _polish(z, _nonnegative(z) > 0)]
    candidates = [_minimize_reweighted(z, point, p, 1.0) for point in points[: max(1, starts)]]
    for _ in range(starts - 2):  # far apart, and without the smoothing that leads back to ℓ1
        candidates.append(_minimize_reweighted(z, np.exp(4 * rng.standard_normal(dim)), p, 1e-3))
    beta = min(candidates, key=lambda b: _quasi_norm(b, p))
    return _margin(beta, _quasi_norm(beta, p), z, x, status="stationary point")


def separates(x: Tensor, y: Tensor) -> bool:
    """Whether some β has y_n x_nᵀβ > 0 for all n."""
    refuse_data(x, y)
    z = (read_signs(y, x.dtype)[:, None] * x.detach()).double().cpu().numpy()
    return _largest_margin(z) > 0


def _multiply_by_signs(x: Tensor, y: Tensor) -> np.ndarray:
    """Z = y∘X; refused where no β separates."""
    refuse_data(x, y)
    z = (read_signs(y, x.dtype)[:, None] * x.detach()).double().cpu().numpy()
    if not _largest_margin(z) > 0:
        raise PullbackError(
            "The data is not separable",
            "no β classifies every sample correctly, so there is no margin",
            "Add dimensions or a constant feature, drop mislabeled samples, or fit a loss instead",
        )
    return z


def _largest_margin(z: np.ndarray) -> float:
    """max_t: Zβ ≥ t for rows scaled to unit size, |β_i| ≤ 1; zero below the solver's accuracy.

    Columns are scaled too: whether some β separates does not depend on the units of the features.
    """
    if not np.abs(z).max(1).all():
        return 0.0
    unit = z
    for _ in range(3):
        for axis in (0, 1):
            sizes = np.abs(unit).max(axis, keepdims=True)
            unit = unit / np.where(sizes > 0, sizes, 1.0)
    n, dim = z.shape
    cost = np.append(np.zeros(dim), -1.0)
    box = [(-1.0, 1.0)] * dim + [(None, 1.0)]
    result = scipy.optimize.linprog(
        cost, A_ub=np.hstack([-unit, np.ones((n, 1))]), b_ub=np.zeros(n), bounds=box
    )
    if not result.success or -result.fun <= 1e-9:  # no margin but for round-off
        return 0.0
    return -float(result.fun)


def _nonnegative(z: np.ndarray) -> np.ndarray:
    """α of the least-distance problem, up to a positive factor."""
    scale = np.abs(z).max()
    sides = np.vstack([z.T / scale, np.ones((1, len(z)))])
    target = np.append(np.zeros(z.shape[1]), 1.0)
    return scipy.optimize.nnls(sides, target, maxiter=50 * max(z.shape))[0]


def _polish(z: np.ndarray, active: np.ndarray) -> np.ndarray:
    """The shortest β with Z_aβ = 1 on the support, made feasible for the last digits elsewhere."""
    beta = np.linalg.lstsq(z[active], np.ones(int(active.sum())), rcond=None)[0]
    return beta / min(1.0, float((z @ beta).min()))


def _weighted_l1(z: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """argmin Σ w_i|β_i| with Zβ ≥ 1, and the multipliers."""
    cost = np.concatenate([weights, weights])
    result = scipy.optimize.linprog(
        cost, A_ub=np.hstack([-z, z]), b_ub=-np.ones(len(z)), method="highs"
    )
    if not result.success:
        raise PullbackError(
            "The linear program failed", str(result.message).rstrip("."), "Scale the data to size 1"
        )
    dim = z.shape[1]
    beta = result.x[:dim] - result.x[dim:]
    return beta / float((z @ beta).min()), np.maximum(0.0, -result.ineqlin.marginals)


def _minimize_reweighted(z: np.ndarray, start: np.ndarray, p: float, smooth: float) -> np.ndarray:
    """Linear programs with weights (|β| + ε)^{p−1}, ε from smooth·max|β| down."""
    beta = start
    best = start
    size = smooth * np.abs(start).max()
    for i, epsilon in enumerate(size * 10.0 ** -np.arange(0, 7)):
        for _ in range(20):
            weights = (np.abs(beta) + epsilon) ** (p - 1)
            moved, _ = _weighted_l1(z, weights / weights.max())
            has_converged = np.allclose(moved, beta, rtol=1e-9, atol=1e-12)
            beta = moved
            if has_converged:
                break
        if i == 0 or _quasi_norm(beta, p) < _quasi_norm(best, p):
            best = beta
    return best


def _quasi_norm(beta: np.ndarray, p: float) -> float:
    """(Σ|β_i|^p)^{1/p}, with entries of round-off taken for zero."""
    size = np.abs(beta)
    size = size[size > 1e-10 * size.max()]
    return float((size**p).sum() ** (1 / p))


def _margin(
    beta: np.ndarray,
    norm: float,
    z: np.ndarray,
    template: Tensor,
    status: str = "optimum",
    gap: float | None = None,
) -> Margin:
    slack = z @ beta - 1
    support = np.flatnonzero(slack <= 1e-7 * max(1.0, float(np.abs(slack).max())))
    return Margin(
        torch.as_tensor(beta).to(template),
        norm,
        torch.as_tensor(support, device=template.device),
        status,
        gap,
    )


@dataclass(frozen=True)
class CompletedMatrix:
    """A matrix that meets the observations exactly.

    Attributes:
        matrix: Z.
        norm: its nuclear norm.
        gap: (norm − bound)/norm for a proven lower bound on the nuclear norm of any completion.
        iterations: how many were made.
    """

    matrix: Tensor
    norm: float
    gap: float
    iterations: int

    def rank(self, tol: float = 1e-4) -> int:
        """How many singular values exceed tol times the largest."""
        sigma = torch.linalg.svdvals(self.matrix)
        return int((sigma > tol * sigma.max()).sum())


def nuclear_norm_completion(
    shape: tuple[int, int],
    rows: Tensor,
    columns: Tensor,
    values: Tensor,
    *,
    tol: float = 1e-6,
    max_iterations: int = 50_000,
) -> CompletedMatrix:
    r"""The completion of smallest nuclear norm, by alternating directions.

    Z = Y with Y observed and Z of small norm: Z ← shrink(Y − U), Y ← b on Ω and Z + U elsewhere,
    U ← U + Z − Y. U lives on Ω, and −ρU scaled to spectral norm 1 is a dual point: it proves
    ‖Z‖_* ≥ ⟨b, Λ⟩ for every completion, and the iteration stops at a relative gap of tol.

    Args:
        shape: of the matrix.
        rows: of the observed entries, (n,).
        columns: of the observed entries, (n,).
        values: of the observed entries, (n,).
        tol: the relative duality gap to reach.
        max_iterations: the largest number of singular value decompositions.

    Raises:
        PullbackError: if observations contradict each other, or the gap is not reached.
    """
    y, mask = _fill_observed(shape, rows, columns, values)
    size = float(torch.linalg.matrix_norm(y, 2))
    if size == 0:
        return CompletedMatrix(y, 0.0, 0.0, 0)
    b = y / size
    threshold = 1.0
    y = b.clone()
    u = torch.zeros_like(b)
    gap = float("inf")
    norm = 0.0
    bound = 0.0
    for i in range(1, max_iterations + 1):
        left, sigma, right = torch.linalg.svd(y - u, full_matrices=False)
        z = (left * (sigma - threshold).clamp(min=0)) @ right
        before = y
        y = torch.where(mask, b, z + u)
        u = u + z - y
        if i % 10:  # the gap is found at every tenth iteration
            continue
        norm = float(torch.linalg.matrix_norm(y, "nuc"))
        dual = -u / threshold
        dual = dual / max(1.0, float(torch.linalg.matrix_norm(dual, 2)))
        bound = max(bound, float((dual * b)[mask].sum()))
        gap = (norm - bound) / norm
        if gap <= tol:
            return CompletedMatrix(size * y, size * norm, max(gap, 0.0), i)
        if i <= max_iterations // 2:
            ratio = float((z - y).norm() * u.norm() / ((y - before).norm() * y.norm() + 1e-300))
            # keeps residuals level
            if ratio > 5:
                factor = 2.0
            elif ratio < 0.2:
                factor = 0.5
            else:
                factor = 1.0
            threshold = threshold / factor
            u = u / factor
    raise PullbackError(
        "The completion did not converge",
        f"after {max_iterations} iterations the relative duality gap is {gap:.2g} of {tol:.2g}",
        "Raise max_iterations or tol, or use float64",
    )


def _sides(shape: tuple[int, int]) -> tuple[int, int]:
    rows, *columns = read_whole_numbers("shape", shape) or (0,)
    if len(columns) != 1:
        raise PullbackError("shape is not that of a matrix", f"got {shape}", "Pass (m, n)")
    return rows, columns[0]


def _fill_observed(
    shape: tuple[int, int], rows: Tensor, columns: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The matrix with the observations, zero elsewhere, and where they are."""
    shape = _sides(shape)
    require_finite_tensor("The observed values", values, ("n",))
    require_finite_tensor("The observed rows", rows.double(), values.shape)
    require_finite_tensor("The observed columns", columns.double(), values.shape)
    if rows.is_floating_point() or columns.is_floating_point():
        raise PullbackError(
            "The indices are not whole numbers",
            f"rows are of {rows.dtype}, columns of {columns.dtype}",
            "Pass integer tensors, such as those of mask.nonzero().T",
        )
    rows = rows.long()
    columns = columns.long()
    inside = (rows >= 0) & (rows < shape[0]) & (columns >= 0) & (columns < shape[1])
    if not bool(inside.all()):
        raise PullbackError(
            "An observed entry is outside the matrix", f"its shape is {shape}", "Check the indices"
        )
    y = torch.zeros(shape, dtype=values.dtype, device=values.device)
    y[rows, columns] = values
    if not bool((y[rows, columns] == values).all()):
        raise PullbackError(
            "Observations contradict each other",
            "an entry is observed twice with different values",
            "Keep one of them, or their mean",
        )
    mask = torch.zeros(shape, dtype=torch.bool, device=values.device)
    mask[rows, columns] = True
    return y, mask
