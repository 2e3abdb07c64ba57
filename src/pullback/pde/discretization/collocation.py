"""The objective of a solve, step by step: its points move, and so may its precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.processes import Processes
from ..._core.space import ParameterSpace
from ...maps import OperatorMap
from ...optim import Objective, Term
from ..domains.sampling import Points
from ..problem.conditions import Condition, Data, Energy, Equation, Prior
from ..problem.problem import Problem
from .causal import Causal
from .plan import SamplingPlan
from .residual import fingerprint, refuse_coupled, refuse_unused
from .sites import Sites, take_share
from .term import build_term, find_nesting_reason
from .trial import Trial
from .weights import balanced, evidence

_SPECTRUM = 2**22  # entries of A up to which its singular values are reported


_LATER = 1e-4  # of their weight: equations whose coefficients have priors, in the beginning


_SETTLED = 1.3  # a prior's weight that is right up to this factor stays


class Collocation:
    """Points of every condition, and the objective on this process's share of them.

    Attributes:
        sites: the points now, by condition; in float64, rounded ones would lie beside the boundary.
        objective: on the share of these points, None until the first step.
        weights: of the conditions in the loss, by name.
        count: of residuals at the first points.
    """

    def __init__(
        self,
        problem: Problem,
        trial: Trial,
        plan: SamplingPlan,
        like: Tensor,
        causal: bool,
        processes: Processes,
    ) -> None:
        self._problem, self._trial, self._plan = problem, trial, plan
        self._processes = processes
        self._terms: list[tuple[Condition, Sites, Term]] = []
        self._dtype, self._device = like.dtype, like.device
        self._built = like.dtype  # the objective's
        self._like = like.detach().new_empty(0)
        self.sites: dict[str, Sites] = plan.draw(plan.at(0))
        self.count = sum(refuse_coupled(problem, c, self.sites[c.name]) for c in problem.conditions)
        refuse_unused(problem, self.sites)
        self.objective: Objective | None = None
        self._drawn, self._refined = plan.at(0), None
        self._since = 0  # the step from which on losses compare
        self._causal = Causal(problem) if causal else None
        self.weights = processes.broadcast_object(balanced(problem, self.sites))
        if self._priors:  # data first: an equation alone is solved by coefficients of either sign
            self.weights |= {c.name: _LATER * c.weight for c in self._equations}

    def fingerprints(self) -> list[Any]:
        """What the conditions say on the points."""
        conditions = self._problem.conditions
        return [fingerprint(self._problem, c, self.sites[c.name]) for c in conditions]

    def at(self, step: int, double: bool = False) -> Objective:
        """The objective at the points and in the precision of this step, or in float64."""
        drawn, refine = self._plan.at(step), self._plan.refine
        double = double and self._device.type != "mps"  # which has none
        dtype = torch.float64 if double else self._dtype
        self._trial.to(dtype)
        new = self.objective is None or dtype != self._built
        if drawn != self._drawn:
            self.sites, self._drawn, new = self._plan.draw(drawn), drawn, True
        elif refine is not None and refine.due(step) and self._refined != step:
            self.sites, new = self._refined_sites(step), True
            self._refined = step  # an interrupted step finds its points as they were
        if new:
            self.objective = self._build(dtype)
        if self._causal is not None and self._causal.due(step):
            self._weigh_times(self._causal, step)
        assert self.objective is not None
        return self.objective

    def _weigh_times(self, causal: Causal, step: int) -> None:
        """Let times count by what is left before them."""
        params = {n: p.detach() for n, p in self._trial.named_parameters()}
        losses = torch.zeros_like(causal.weights, device=self._device)
        with torch.no_grad():
            for x, item in self._timed:
                losses += causal.losses(x, item(params).square().sum(1) / causal(x))
        causal.update(self._processes.sum([losses])[0], step)
        self._scale_times(causal)
        if causal.open:
            self.unsettle(step)

    def _scale_times(self, causal: Causal) -> None:
        for x, item in self._timed:
            item.scale(causal(x))

    @property
    def _timed(self) -> list[tuple[Tensor, OperatorMap]]:
        """Points and residuals of the equations."""
        found = [(sites[0].x, t.map) for c, sites, t in self._terms if isinstance(c, Equation)]
        return [(x, item) for x, item in found if isinstance(item, OperatorMap)]

    def concentrate(self, step: int) -> None:
        """Move points of the equations to where their residuals are large."""
        self.sites, self._since = self._refined_sites(step), step
        self._refined, self.objective = step, self._build(next(self._trial.parameters()).dtype)

    def _refined_sites(self, step: int) -> dict[str, Sites]:
        """The points that the first process moves, on all of them."""
        first = self._processes.rank == 0
        with self._processes.raise_together():
            moved = self._plan.refined(self.sites, self._trial, step) if first else self.sites
        return self._processes.broadcast_object(moved)

    def reweigh(self, step: int) -> bool:
        """Let equations count after the data, then weigh priors; whether any weight changed."""
        if not self._priors:
            return False
        before = dict(self.weights)
        self.weights |= {c.name: c.weight for c in self._equations}
        if self.weights == before:
            terms = [(c, item) for c, _, item in self._terms]
            with torch.enable_grad():
                factor = evidence(terms, dict(self._trial.named_parameters()), self._processes)
            for c in self._priors if not 1 / _SETTLED < factor < _SETTLED else []:
                # beyond its first value a prior would replace the equation
                self.weights[c.name] = min(c.weight, self.weights[c.name] * factor)
        if self.weights == before:
            return False
        self.objective = self._build(next(self._trial.parameters()).dtype)
        self.unsettle(step)
        return True

    @property
    def _priors(self) -> list[Prior]:
        """Those whose weights the data choose."""
        found = [c for c in self._problem.conditions if isinstance(c, Prior) and c.chosen]
        return found if any(isinstance(c, Data) for c in self._problem.conditions) else []

    @property
    def _equations(self) -> list[Equation]:
        return [c for c in self._problem.conditions if isinstance(c, Equation)]

    def unsettle(self, step: int) -> None:
        """Let losses compare from this step on alone: parameters or weights changed."""
        self._since = step

    def settled(self, step: int) -> bool:
        """Whether losses from this step on compare: same points, same precision, squares."""
        refine = self._plan.refine
        still = step >= self._since and (refine is None or refine.over(step))
        # an energy does not go to zero: a share of it says nothing about what is left
        return self._plan.resample is None and still and self.squares

    @property
    def squares(self) -> bool:
        """Whether the loss is a sum of squares, which would vanish at a solution."""
        return not any(isinstance(c, Energy) for c in self._problem.conditions)

    def full(self) -> None:
        """The trial in its own precision, and the objective with it."""
        self._trial.to(self._dtype)
        if self.objective is not None and self._built != self._dtype:
            self.objective = self._build(self._dtype)

    def nested(self) -> str:
        """Why derivatives take the slower way, or nothing."""
        return "" if self.objective is None else find_nesting_reason(self.objective.terms)

    @torch.no_grad()
    def loss(self) -> float:
        """The loss of the network as it is now; all times count alike."""
        if self.objective is None:
            return float("nan")
        params = {n: p.detach() for n, p in self._trial.named_parameters()}
        own = 0.0
        for c, sites, item in self._terms:
            z = item.map(params)
            if self._causal is not None and isinstance(c, Equation):
                z = z / self._causal(sites[0].x).sqrt()[:, None]
            own += float(item.loss(z))
        return self._processes.sum_numbers([own])[0]

    def refuse_broken(self, reason: str) -> None:
        """Say which condition is not finite, and where; any process may have found it."""
        params = {n: p.detach() for n, p in self._trial.named_parameters()}
        with self._processes.raise_together(), torch.no_grad():
            for condition, sites, item in self._terms:
                z = item.map(params)
                bad = ~torch.isfinite(z).all(1)
                if not bool(bad.any()):
                    bad = ~torch.isfinite(item.slope(z)).all(1)
                if bool(bad.any()):
                    where = "" if condition.whole else f", such as {sites[0].x[bad][0].tolist()}"
                    raise PullbackError(
                        f"The residual of {condition.name!r} is not finite",
                        f"at {int(bad.sum())} of {len(bad)} points{where}",
                        "Check the residual there (division, logarithm, root), or move the points",
                    )
        raise PullbackError(
            "The loss has no finite gradient",
            f"the residuals are finite, but {reason}",
            "Check the network and the residuals for roots and divisions at zero",
        )

    def spectrum(self) -> Tensor | None:
        """Singular values of the whitened Jacobian, where it is small."""
        if self.objective is None:
            return None
        params = dict(self._trial.named_parameters())
        linears = [item.map.linearize(params) for item in self.objective.terms]
        size = ParameterSpace(params).size
        own = torch.tensor([sum(x.value.numel() for x in linears)], device=self._processes.device)
        entries = int(self._processes.sum([own])[0]) * size
        if entries > _SPECTRUM or not self.squares:
            return None
        rows = torch.cat([self._like.new_zeros(0, size), *(x.rows() for x in linears)])
        return torch.linalg.svdvals(self._processes.gather([rows])[0].cpu())

    def state(self) -> dict[str, Any]:
        """Where the points are."""
        sites = {
            name: [(p.x, p.weights, p.normals) for p in sites] for name, sites in self.sites.items()
        }
        return {
            "drawn": self._drawn,
            "refined": self._refined,
            "since": self._since,
            "sites": sites,
            "weights": self.weights,
            "causal": None if self._causal is None else self._causal.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The points of a `state`."""
        self._drawn, self._refined = state["drawn"], state["refined"]
        self._since, self.weights = state["since"], dict(state["weights"])
        if self._causal is not None:
            self._causal.restore(state["causal"])
        self.sites = {
            name: tuple(Points(*parts) for parts in sites) for name, sites in state["sites"].items()
        }
        self.objective = self._build(self._dtype)

    def _build(self, dtype: torch.dtype) -> Objective:
        processes, self._terms, self._built = self._processes, [], dtype
        for c in self._problem.conditions:
            sites = tuple(p.to(dtype, self._device) for p in self.sites[c.name])
            total = sites[0].weights.sum()
            sites = take_share(c, sites, processes)
            if len(sites[0]):
                item = build_term(self._problem, c, self._trial, sites, self.weights[c.name], total)
                self._terms.append((c, sites, item))
        if self._causal is not None:
            self._scale_times(self._causal)
        return Objective([item for *_, item in self._terms], shared=not processes.is_single)
