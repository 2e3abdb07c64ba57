r"""Matrix completion: min ‖Z‖_* subject to Z = b at the observed entries, with a certified gap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..checks import refuse_kind, refuse_nonfinite, refuse_shape
from ..parameters import whole_numbers

_EVERY = 10


@dataclass(frozen=True)
class Completion:
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
) -> Completion:
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
        max_iterations: at most so many singular value decompositions.

    Raises:
        PullbackError: if observations contradict each other, or the gap is not reached.
    """
    y, mask = _observed(shape, rows, columns, values)
    size = float(torch.linalg.matrix_norm(y, 2))
    if size == 0:
        return Completion(y, 0.0, 0.0, 0)
    b, threshold = y / size, 1.0
    y, u = b.clone(), torch.zeros_like(b)
    gap, norm, bound = float("inf"), 0.0, 0.0
    for i in range(1, max_iterations + 1):
        left, sigma, right = torch.linalg.svd(y - u, full_matrices=False)
        z = (left * (sigma - threshold).clamp(min=0)) @ right
        before = y
        y = torch.where(mask, b, z + u)
        u = u + z - y
        if i % _EVERY:
            continue
        norm = float(torch.linalg.matrix_norm(y, "nuc"))
        dual = -u / threshold
        dual = dual / max(1.0, float(torch.linalg.matrix_norm(dual, 2)))
        bound = max(bound, float((dual * b)[mask].sum()))
        gap = (norm - bound) / norm
        if gap <= tol:
            return Completion(size * y, size * norm, max(gap, 0.0), i)
        if i <= max_iterations // 2:
            ratio = float((z - y).norm() * u.norm() / ((y - before).norm() * y.norm() + 1e-300))
            factor = 2.0 if ratio > 5 else 0.5 if ratio < 0.2 else 1.0  # keeps residuals level
            threshold, u = threshold / factor, u / factor
    raise PullbackError(
        "The completion did not converge",
        f"after {max_iterations} iterations the relative duality gap is {gap:.2g} of {tol:.2g}",
        "Raise max_iterations or tol, or use float64",
    )


def _sides(shape: tuple[int, int]) -> tuple[int, int]:
    rows, *columns = whole_numbers("shape", shape) or (0,)
    if len(columns) != 1:
        raise PullbackError("shape is not that of a matrix", f"got {shape}", "Pass (m, n)")
    return rows, columns[0]


def _observed(
    shape: tuple[int, int], rows: Tensor, columns: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The matrix with the observations, zero elsewhere, and where they are."""
    shape = _sides(shape)
    refuse_shape("The observed values", values, ("n",))
    refuse_shape("The observed rows", rows, values.shape)
    refuse_shape("The observed columns", columns, values.shape)
    refuse_kind("The observed values", values)
    refuse_nonfinite("The observations", values)
    if rows.is_floating_point() or columns.is_floating_point():
        raise PullbackError(
            "The indices are not whole numbers",
            f"rows are of {rows.dtype}, columns of {columns.dtype}",
            "Pass integer tensors, such as those of mask.nonzero().T",
        )
    rows, columns = rows.long(), columns.long()
    if not len(values):
        raise PullbackError("Nothing is observed", "there are no entries", "Pass some entries")
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
