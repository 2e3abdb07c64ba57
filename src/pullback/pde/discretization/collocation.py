"""The objective of a solve, step by step: its points move, and so may its precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.processes import Processes
from ..._core.space import ParameterSpace
from ...maps import ChunkedMap, OperatorMap
from ...optim import Objective, Term
from ..domains.sampling import Points
from ..problem.conditions import Condition
from ..problem.problem import Problem
from .causal import Causal
from .plan import SamplingPlan
from .residual import count_residuals, fingerprint, refuse_unused
from .sites import Sites, take_share
from .term import build_term, find_nesting_reason
from .trial import Trial
from .weights import balance_weights, choose_prior_factor


@dataclass(frozen=True)
class CollocationThresholds:
    """Bounds of what a collocation computes and changes."""

    #: entries of the Jacobian up to which its singular values are computed for the report: 2,048
    #: squared, some seconds on a core
    spectrum_entries: int = 2**22
    #: share of their weight that equations have in the beginning, if data choose a prior's weight:
    #: an equation alone is solved by coefficients of either sign. Residuals of the data then count
    #: a hundred times as much, so that these are fitted first.
    first_equation_share: float = 1e-4
    #: a prior's weight that is right up to this factor stays: after a change losses do not compare
    prior_tolerance: float = 1.3


THRESHOLDS = CollocationThresholds()


@dataclass(frozen=True)
class ConditionTerm:
    """A condition at this process's points.

    Attributes:
        condition: what must hold.
        sites: the points, in the precision of the objective.
        term: of the loss.
    """

    condition: Condition
    sites: Sites
    term: Term


class Collocation:
    """Points of every condition, and the objective on this process's share of them.

    Attributes:
        sites: the points now, by condition; in float64, rounded ones would lie beside the boundary.
        objective: on the share of these points, None until the first step.
        weights: of the conditions in the loss, by name.
        residual_count: at the first points.

    With a memory, in bytes, points are linearized in chunks whose derivatives fit it.
    """

    def __init__(
        self,
        problem: Problem,
        trial: Trial,
        plan: SamplingPlan,
        template: Tensor,
        causal: bool,
        processes: Processes,
        memory: int | None = None,
    ) -> None:
        self._problem = problem
        self._trial = trial
        self._plan = plan
        self._processes = processes
        self._memory = memory
        self._terms: list[ConditionTerm] = []
        self._dtype = template.dtype
        self._device = template.device
        self._objective_dtype = template.dtype
        self._draw_number = plan.draw_number(0)
        self._refined_step: int | None = None
        self._comparable_since = 0
        self._causal = Causal(problem) if causal else None
        self.objective: Objective | None = None
        self.sites: dict[str, Sites] = plan.draw(self._draw_number)
        self.residual_count = sum(
            count_residuals(problem, c, self.sites[c.name]) for c in problem.conditions
        )
        refuse_unused(problem, self.sites)
        self.weights = processes.broadcast_object(balance_weights(problem, self.sites))
        if self._chosen_priors:
            share = THRESHOLDS.first_equation_share
            self.weights |= {c.name: share * c.weight for c in self._equations}

    def fingerprints(self) -> list[Any]:
        """Return what tells these conditions from others, at the points."""
        conditions = self._problem.conditions
        return [fingerprint(self._problem, c, self.sites[c.name]) for c in conditions]

    def objective_at(self, step: int, *, double: bool = False) -> Objective:
        """Return the objective at the points of a step, in the precision of the trial.

        Args:
            step: the number of the step.
            double: in float64 instead, if the device has it.
        """
        dtype = self._dtype
        if double and self._device.type != "mps":
            dtype = torch.float64
        self._trial.to(dtype)
        has_moved = self._move_on_schedule(step)
        if has_moved or self.objective is None or dtype != self._objective_dtype:
            self._build_objective(dtype)
        if self._causal is not None and self._causal.is_due(step):
            self._update_time_weights(self._causal, step)
        assert self.objective is not None
        return self.objective

    def _move_on_schedule(self, step: int) -> bool:
        """Draw or refine points if it is time; return True if they moved.

        A step that was interrupted and is repeated finds its points as they were.
        """
        number = self._plan.draw_number(step)
        refine = self._plan.refine
        if number != self._draw_number:
            self.sites = self._plan.draw(number)
            self._draw_number = number
            return True
        if refine is None or not refine.is_due(step) or self._refined_step == step:
            return False
        self._refine(step)
        return True

    def concentrate(self, step: int) -> None:
        """Move points of the equations to where their residuals are large."""
        self._refine(step)
        self.compare_losses_from(step)
        self._build_objective(next(self._trial.parameters()).dtype)

    def _refine(self, step: int) -> None:
        """Move points on the first process, and send them to all."""
        sites = self.sites
        with self._processes.raise_together():
            if self._processes.rank == 0:
                sites = self._plan.refine_sites(sites, self._trial, step)
        self.sites = self._processes.broadcast_object(sites)
        self._refined_step = step

    def _update_time_weights(self, causal: Causal, step: int) -> None:
        """Set the weights of times from the loss that is left before them."""
        params = self._detached_parameters()
        losses = torch.zeros_like(causal.weights, device=self._device)
        with torch.no_grad():
            for x, residual in self._equation_maps():
                squares = residual(params).square().sum(1)
                losses += causal.sum_by_time(x, squares / causal(x))
        causal.update(self._processes.sum([losses])[0], step)
        self._scale_times(causal)
        if causal.is_open:
            self.compare_losses_from(step)

    def _scale_times(self, causal: Causal) -> None:
        for x, residual in self._equation_maps():
            residual.scale(causal(x))

    def _equation_maps(self) -> list[tuple[Tensor, OperatorMap | ChunkedMap]]:
        """Return the points and the residuals of the equations."""
        maps = []
        for item in self._terms:
            residuals = item.term.map
            if item.condition.is_equation and isinstance(residuals, (OperatorMap, ChunkedMap)):
                maps.append((item.sites[0].x, residuals))
        return maps

    def reweigh(self, step: int) -> bool:
        """Reweight equations against data, then priors; return True if weights changed."""
        if not self._chosen_priors:
            return False
        before = dict(self.weights)
        self.weights |= {c.name: c.weight for c in self._equations}
        if self.weights == before:
            self._weigh_priors()
        if self.weights == before:
            return False
        self._build_objective(next(self._trial.parameters()).dtype)
        self.compare_losses_from(step)
        return True

    def _weigh_priors(self) -> None:
        """Choose the weights of priors by the data, at most those that they began with.

        With more weight a prior would replace the equation.
        """
        terms = [(item.condition, item.term) for item in self._terms]
        with torch.enable_grad():
            parameters = dict(self._trial.named_parameters())
            factor = choose_prior_factor(terms, parameters, self._processes)
        if 1 / THRESHOLDS.prior_tolerance < factor < THRESHOLDS.prior_tolerance:
            return
        for prior in self._chosen_priors:
            self.weights[prior.name] = min(prior.weight, self.weights[prior.name] * factor)

    @property
    def _chosen_priors(self) -> list[Condition]:
        """Return the priors whose weights the data determine."""
        conditions = self._problem.conditions
        if not any(condition.is_measured for condition in conditions):
            return []
        return [condition for condition in conditions if condition.has_chosen_weight]

    @property
    def _equations(self) -> list[Condition]:
        return [c for c in self._problem.conditions if c.is_equation]

    def compare_losses_from(self, step: int) -> None:
        """Compare no losses before this step with later ones: parameters or weights changed."""
        self._comparable_since = step

    def can_compare_losses(self, step: int) -> bool:
        """Return True if losses from this step on are of the same points and weights, and squares.

        An energy does not go to zero: a share of it says nothing about what is left.
        """
        refine = self._plan.refine
        if refine is not None and not refine.is_over(step):
            return False
        is_late_enough = step >= self._comparable_since
        return is_late_enough and self._plan.resample is None and self.is_least_squares

    @property
    def is_least_squares(self) -> bool:
        """Return True if the loss is a sum of squares, which would vanish at a solution."""
        return not any(condition.is_energy for condition in self._problem.conditions)

    def restore_precision(self) -> None:
        """Set the trial back to its precision, after float64 in short steps."""
        self._trial.to(self._dtype)
        if self.objective is not None and self._objective_dtype != self._dtype:
            self._build_objective(self._dtype)

    def nesting_reason(self) -> str:
        """Return why derivatives take the slower way; nothing if they do not."""
        if self.objective is None:
            return ""
        return find_nesting_reason(self.objective.terms)

    @torch.no_grad()
    def loss(self, params: Mapping[str, Tensor] | None = None) -> float:
        """Return the loss of the network as it is now, or with these parameters.

        All times count alike.
        """
        if self.objective is None:
            return float("nan")
        if params is None:
            params = self._detached_parameters()
        loss = 0.0
        for item in self._terms:
            z = item.term.map(params)
            if self._causal is not None and item.condition.is_equation:
                z = z / self._causal(item.sites[0].x).sqrt()[:, None]
            loss += float(item.term.loss(z))
        return self._processes.sum_numbers([loss])[0]

    def _detached_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self._trial.named_parameters()}

    def raise_not_finite(self, reason: str) -> None:
        """Raise with the condition that is not finite, and where; any process may have found it."""
        params = self._detached_parameters()
        largest = 0.0
        with self._processes.raise_together(), torch.no_grad():
            for item in self._terms:
                _refuse_not_finite(item, params)
                largest = max(largest, float(item.term.map(params).abs().max()))
        largest = max(self._processes.gather_objects(largest))
        limits = torch.finfo(next(iter(params.values())).dtype)
        if 0 < largest < (limits.tiny / limits.eps) ** 0.5:
            raise PullbackError(
                "Residuals are so small that their squares vanish",
                f"the largest one is {largest:.0e}, in {limits.dtype}",
                "State the problem in units in which its solution and sources are about 1",
            )
        raise PullbackError(
            "The loss has no finite gradient",
            f"the residuals are finite, but {reason}",
            "Check the network and the residuals for roots and divisions at zero",
        )

    def spectrum(self) -> Tensor | None:
        """Return the singular values of the whitened Jacobian, None if it is large or overflows."""
        if self.objective is None or not self.is_least_squares:
            return None
        params = dict(self._trial.named_parameters())
        linearizations = [term.map.linearize(params) for term in self.objective.terms]
        columns = ParameterSpace(params).size
        count = sum(linearization.value.numel() for linearization in linearizations)
        counts = torch.tensor([count], device=self._processes.device)
        if int(self._processes.sum([counts])[0]) * columns > THRESHOLDS.spectrum_entries:
            return None
        no_rows = torch.empty(0, columns, dtype=self._dtype, device=self._device)
        rows = torch.cat([no_rows, *(linearization.rows() for linearization in linearizations)])
        rows = self._processes.gather([rows])[0].cpu()
        if not bool(rows.isfinite().all()):
            return None
        return torch.linalg.svdvals(rows)

    def state(self) -> dict[str, Any]:
        """Return where the points are, and their weights."""
        sites = {name: list(map(_pack_points, sites)) for name, sites in self.sites.items()}
        return {
            "draw_number": self._draw_number,
            "refined_step": self._refined_step,
            "comparable_since": self._comparable_since,
            "sites": sites,
            "weights": self.weights,
            "causal": None if self._causal is None else self._causal.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to the points of a `state`."""
        self._draw_number = state["draw_number"]
        self._refined_step = state["refined_step"]
        self._comparable_since = state["comparable_since"]
        self.weights = dict(state["weights"])
        if self._causal is not None:
            self._causal.restore(state["causal"])
        self.sites = {}
        for name, sites in state["sites"].items():
            self.sites[name] = tuple(Points(*tensors) for tensors in sites)
        self._build_objective(self._dtype)

    def _build_objective(self, dtype: torch.dtype) -> None:
        """Build the terms at this process's points, in a precision."""
        self._terms = []
        self._objective_dtype = dtype
        for condition in self._problem.conditions:
            sites = tuple(p.to(dtype, self._device) for p in self.sites[condition.name])
            total = sites[0].weights.sum()
            sites = take_share(condition, sites, self._processes)
            if len(sites[0]):
                weight = self.weights[condition.name]
                term = build_term(
                    self._problem, condition, self._trial, sites, weight, total, self._memory
                )
                self._terms.append(ConditionTerm(condition, sites, term))
        if self._causal is not None:
            self._scale_times(self._causal)
        terms = [item.term for item in self._terms]
        self.objective = Objective(terms, shared=not self._processes.is_single)


def _pack_points(points: Points) -> tuple[Tensor, Tensor, Tensor | None]:
    return points.x, points.weights, points.normals


def _refuse_not_finite(item: ConditionTerm, params: dict[str, Tensor]) -> None:
    """Raise if a residual or its slope is not finite at some point."""
    z = item.term.map(params)
    broken = ~torch.isfinite(z).all(1)
    if not bool(broken.any()):
        broken = ~torch.isfinite(item.term.slope(z)).all(1)
    if not bool(broken.any()):
        return
    example = ""
    if not item.condition.is_integral:
        example = f", such as {item.sites[0].x[broken][0].tolist()}"
    raise PullbackError(
        f"The residual of {item.condition.name!r} is not finite",
        f"at {int(broken.sum())} of {len(broken)} points{example}",
        "Check the residual there (division, logarithm, root), or move the points",
    )
