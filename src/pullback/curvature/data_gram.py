r"""Influence with the exact G where neither G nor its rows fit into memory.

(G + λ)⁻¹∇f of every query comes from conjugate gradients, preconditioned with a fitted EK-FAC. A
product G v is one pass over the data: J v forward, the metric of the outputs, Jᵀ backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.checks import require_number
from .._core.errors import PullbackError, Status
from ..grams import Gram, Structure
from ..solvers import ConjugateGradient
from .curvature import Curvature, Damping
from .data import align_targets, refuse_no_samples
from .measures import Measure, measure_gradient
from .progress import ProgressLine
from .queries import QueryBlock, store_queries
from .reader import GradientReader
from .scores import Scorer, ScoringOptions, assemble_tiles, resolve_damping


@dataclass(frozen=True)
class DataTolerance:
    """How much readings of the same data may differ."""

    #: relative difference of the losses: batches of other sizes leave 1e-3 in half precision, and
    #: other data usually more than this
    loss: float = 1e-2


DATA_TOLERANCE = DataTolerance()


class DataGram(Gram):
    """G as products alone: the mean of Jᵀ M J over data that are read for every product.

    Args:
        curvature: fitted to these data; of it the model and the likelihood are used, and the trace.
        data: (inputs, targets), or a loader that can be read again.
    """

    structure = Structure(holds="operator", factored=False)

    def __init__(self, curvature: Curvature, data: Any) -> None:
        self._curvature = curvature
        self._reader = GradientReader(curvature)
        self._data = data
        self.size = curvature.space.size
        self.count = self.size
        self.dtype = curvature.space.dtype
        self.device = curvature.space.device

    def matvec(self, v: Tensor) -> Tensor:
        likelihood = self._curvature.likelihood
        total = self._curvature.space.zeros(self.size)
        samples = 0
        loss = 0.0
        for batch in self._reader.batches(self._data):
            tangent = self._reader.linearize(batch)
            outputs = tangent.outputs
            targets = align_targets(outputs, batch.targets)
            loss_gradient = measure_gradient(self._reader.loss, outputs, targets)[0]
            loss += float(self._reader.loss(outputs, targets).sum())
            mask = likelihood.counted(outputs, loss_gradient)
            move = tangent.directional_derivative(v)
            if mask is not None:
                move = move * mask
            covector = likelihood.factor(outputs).matvec(move)
            if mask is not None:
                covector = covector * mask
            total += tangent.summed_gradient(covector)
            samples += len(outputs)
        self._refuse_other_data(samples, loss)
        return total / samples

    def trace(self) -> Tensor:
        """Return the trace of the fitted curvature: EK-FAC keeps that of G."""
        return self._curvature.eigenvalues().double().sum()

    def _refuse_other_data(self, samples: int, loss: float) -> None:
        fitted = self._curvature.totals
        gap = abs(loss - fitted.loss)
        if samples == fitted.samples and gap <= DATA_TOLERANCE.loss * abs(fitted.loss):
            return
        raise PullbackError(
            "These are not the data of the fit",
            f"{samples} samples with a loss of {loss:.6g} were read, and the curvature is of "
            f"{fitted.samples:.0f} with a loss of {fitted.loss:.6g}",
            "Give data= what was given to fit, as something that can be read again",
        )


@dataclass(frozen=True)
class ExactInfluence:
    """Scores with the exact curvature, and how exactly each query was solved.

    Attributes:
        scores: (queries, training samples).
        residuals: ‖(G + λ)x − ∇f‖/‖∇f‖ of every query.
        has_converged: whether every residual reached the tolerance.
    """

    scores: Tensor
    residuals: Tensor
    has_converged: bool


def exact_influence(
    curvature: Curvature,
    queries: Any,
    training: Any,
    *,
    data: Any = None,
    damping: Damping | None = None,
    measure: Measure | None = None,
    tol: float = 1e-6,
    max_iterations: int = 100,
    progress: bool | None = None,
) -> ExactInfluence:
    r"""Return ∇f(q)ᵀ (G + λ)⁻¹ ∇ℓ(z) with the exact G, by preconditioned conjugate gradients.

    It takes one pass over the data per query and iteration, so call it for a few queries.
    `fit(structure="exact")` is cheaper where the gradients of all samples fit into memory.

    Args:
        curvature: the preconditioner, fitted to `data` with "ekfac" or "kfac".
        queries, training, measure: as for `influence`.
        data: what the curvature was fitted to; by default `training`.
        damping: λ, a number or `Relative(r)` for r times the mean eigenvalue of all of G; by
            default Relative(0.1).
        tol: of the relative residual.
        max_iterations: per query; a query that needs more has its residual reported.
        progress: whether to write a line on stderr; by default on terminals.

    Raises:
        PullbackError: if `data` has another number of samples than the fit, or as `influence`.
    """
    require_number("The tolerance", tol, positive=True)
    require_number("The number of iterations", max_iterations, least=1, whole=True)
    if data is None:
        data = training
    gram = DataGram(curvature, data)
    solver = _QuerySolver(curvature, gram, damping, measure, tol, max_iterations, progress)
    scorer = Scorer(curvature, ScoringOptions(damping, measure, progress=progress))
    scores = assemble_tiles(
        scorer.iterate_block_tiles(solver.blocks(queries), training, is_summed=True)
    )
    return ExactInfluence(scores, torch.tensor(solver.residuals), solver.has_converged)


class _QuerySolver:
    """(G + λ)⁻¹∇f of queries, one after another, with what is reported of them."""

    def __init__(
        self,
        curvature: Curvature,
        gram: DataGram,
        damping: Damping | None,
        measure: Measure | None,
        tol: float,
        max_iterations: int,
        progress: bool | None,
    ) -> None:
        self._curvature = curvature
        self._reader = GradientReader(curvature)
        self._gram = gram
        self._measure = measure
        self._damping = resolve_damping(damping)
        self._solver = ConjugateGradient(
            self._damping,
            tol=tol,
            max_iterations=max_iterations,
            preconditioner=self._precondition,
        )
        self._progress = progress
        self.residuals: list[float] = []
        self.has_converged = True

    def _precondition(self, v: Tensor) -> Tensor:
        return self._curvature.solve(v, self._damping)

    def blocks(self, queries: Any) -> Iterator[QueryBlock]:
        """Yield the preconditioned gradients of each batch of queries."""
        line = ProgressLine("queries", None, self._progress)
        first_query = 0
        for number, batch in enumerate(self._reader.batches(queries)):
            rows = self._reader.flat_gradients(batch, self._measure)
            directions = torch.stack([self._solve(row) for row in rows])
            line.update(number + 1, first_query + len(rows))
            yield self._arrange_in_blocks(directions, first_query)
            first_query += len(rows)
        refuse_no_samples("queries", first_query)

    def _solve(self, gradient: Tensor) -> Tensor:
        solution = self._solver.solve(self._solver.init(self._gram), gradient)
        residual = float("nan")
        if solution.residual is not None:
            residual = solution.residual
        self.residuals.append(residual)
        self.has_converged = self.has_converged and solution.status is Status.OK
        return solution.x

    def _arrange_in_blocks(self, directions: Tensor, first_query: int) -> QueryBlock:
        """Return flat vectors (n, p) as the blocks of the curvature hold them."""
        by_name = self._curvature.space.split(directions)
        pieces = {name: piece.flatten(1) for name, piece in by_name.items()}
        query_blocks = []
        for form in self._curvature.forms:
            query_blocks.append(store_queries(form.gather(pieces), directions.dtype, None))
        return QueryBlock(first_query, query_blocks)
