"""The objective of a solve, step by step: its points move, and so may its precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..optim import Objective
from .conditions import Condition, Equation
from .discretize import Local, Sites, Trial, fingerprint, nested, term
from .plan import Plan
from .problem import Problem
from .sampling import Points

_SPECTRUM = 2**22  # entries of A up to which its singular values are reported
_HEAVIEST = 1e6


class Collocation:
    """Points of every condition, and the objective on them.

    Args:
        problem: what must hold.
        trial: the network and the unknown coefficients.
        plan: which points at which step.
        like: precision and device of the solve.
        single: steps in float32 first.

    Attributes:
        sites: the points now, by condition; in float64, rounded ones would lie beside the boundary.
        objective: on these points, None until the first step.
        weights: of the conditions in the loss, by name.
    """

    def __init__(
        self, problem: Problem, trial: Trial, plan: Plan, like: Tensor, single: int
    ) -> None:
        self._problem, self._trial, self._plan = problem, trial, plan
        self._dtype, self._device, self._single = like.dtype, like.device, single
        self.sites: dict[str, Sites] = plan.draw(plan.at(0))
        self.objective: Objective | None = None
        self._drawn, self._refined = plan.at(0), None
        self.weights = balanced(problem, self.sites)

    def fingerprints(self) -> list[Any]:
        """What the conditions say on the points."""
        conditions = self._problem.conditions
        return [fingerprint(self._problem, c, self.sites[c.name]) for c in conditions]

    def at(self, step: int) -> Objective:
        """The objective at the points and in the precision of this step."""
        drawn, refine = self._plan.at(step), self._plan.refine
        dtype = torch.float32 if step < self._single else self._dtype
        self._trial.to(dtype)
        new = self.objective is None
        if drawn != self._drawn:
            self.sites, self._drawn, new = self._plan.draw(drawn), drawn, True
        elif refine is not None and refine.due(step) and self._refined != step:
            self.sites, new = self._plan.refined(self.sites, self._trial, step), True
            self._refined = step  # an interrupted step finds its points as they were
        if step == self._single or (step == 0 and self._single):
            new = True
        if new:
            self.objective = self._build(dtype)
        assert self.objective is not None
        return self.objective

    def concentrate(self, step: int) -> None:
        """Move points of the equations to where their residuals are large."""
        self.sites = self._plan.refined(self.sites, self._trial, step)
        self._refined, self.objective = step, self._build(next(self._trial.parameters()).dtype)

    def unsettle(self, step: int) -> None:
        """Let losses compare from this step on alone: the parameters were moved."""
        self._refined = step

    def settled(self, step: int) -> bool:
        """Whether losses from this step on compare: same points, same precision, squares."""
        refine = self._plan.refine
        still = refine.over(step) if refine is not None else step >= (self._refined or 0)
        # an energy does not go to zero: a share of it says nothing about what is left
        return step >= self._single and self._plan.resample is None and still and self.squares

    @property
    def squares(self) -> bool:
        """Whether the loss is a sum of squares, which would vanish at a solution."""
        return self.objective is None or all(t.whitened for t in self.objective.terms)

    def full(self, steps: int) -> None:
        """The trial in its own precision, and the objective with it, after so many steps."""
        self._trial.to(self._dtype)
        if self.objective is not None and steps <= self._single:
            self.objective = self._build(self._dtype)

    def nested(self) -> str:
        """Why derivatives take the slower way, or nothing."""
        return "" if self.objective is None else nested(self.objective.terms)

    @torch.no_grad()
    def loss(self) -> float:
        """The loss of the network as it is now."""
        if self.objective is None:
            return float("nan")
        params = {n: p.detach() for n, p in self._trial.named_parameters()}
        return sum(float(t.loss(t.map(params))) for t in self.objective.terms)

    def spectrum(self) -> Tensor | None:
        """Singular values of the whitened Jacobian, where it is small."""
        if self.objective is None:
            return None
        params = dict(self._trial.named_parameters())
        linears = [item.map.linearize(params) for item in self.objective.terms]
        entries = sum(x.value.numel() for x in linears) * linears[0].space.size
        if entries > _SPECTRUM or any(not t.whitened for t in self.objective.terms):
            return None
        return torch.linalg.svdvals(torch.cat([x.rows() for x in linears]).cpu())

    def state(self) -> dict[str, Any]:
        """Where the points are."""
        sites = {
            name: [(p.x, p.weights, p.normals) for p in sites] for name, sites in self.sites.items()
        }
        return {
            "drawn": self._drawn,
            "refined": self._refined,
            "sites": sites,
            "weights": self.weights,
        }

    def restore(self, state: Mapping[str, Any], steps: int) -> None:
        """The points of a `state`, after so many steps."""
        self._drawn, self._refined = state["drawn"], state["refined"]
        self.weights = dict(state["weights"])
        self.sites = {
            name: tuple(Points(*parts) for parts in sites) for name, sites in state["sites"].items()
        }
        if self.sites and steps > self._single:
            self.objective = self._build(self._dtype)

    def _build(self, dtype: torch.dtype) -> Objective:
        terms = []
        for c in self._problem.conditions:
            sites = tuple(p.to(dtype, self._device) for p in self.sites[c.name])
            terms.append(term(self._problem, c, self._trial, sites, self.weights[c.name]))
        return Objective(terms)


def balanced(problem: Problem, sites: Mapping[str, Sites]) -> dict[str, float]:
    """The weights of conditions: given ones, and else by how strongly an error would be seen.

    A wave with the domain's own lengths, ∂ᵢ ~ π/Lᵢ, has residuals of some size in the equation and
    of another on the boundary. Their ratio is a boundary's weight, rounded down to a power of ten.
    Squared it would count errors of the solution alike, and 1 counts residuals alike.
    """
    equations = [c for c in problem.conditions if isinstance(c, Equation) and c.on is None]
    seen = sum(_visibility(problem, c, sites[c.name]) * (c.weight or 1.0) for c in equations)
    out = {}
    for c in problem.conditions:
        out[c.name] = 1.0 if c.weight is None else c.weight
        if c.weight is None and c.balanced and equations:
            ratio = seen / _visibility(problem, c, sites[c.name])
            if math.isfinite(ratio) and ratio > 0:
                power = math.floor(math.log10(ratio) / 2)
                out[c.name] = min(max(10.0**power, 1 / _HEAVIEST), _HEAVIEST)
    return out


def _visibility(problem: Problem, condition: Condition, sites: Sites) -> float:
    """Mean square of a condition's terms for a wave with the domain's own lengths."""
    unknowns = {n: sites[0].x.new_tensor(v) for n, v in problem.unknowns.items()}
    local = Local(problem, condition, sites, unknowns)
    waves = (math.pi / (problem.domain.high - problem.domain.low)).tolist()
    space = problem.coordinates.space

    def size(index: Any) -> float:
        if index is None:
            return sum(waves[i] ** 2 for i in space)
        return math.prod(waves[i] for i in index)

    ones = torch.ones_like(sites[0].x[:, 0])
    slopes = local.slopes({key: ones * size(key[2]) for key in local.keys})[1]
    total = sum(float(s.square().mean(0).sum()) * size(k[2]) ** 2 for k, s in slopes.items())
    return total if math.isfinite(total) and total > 0 else float("nan")
