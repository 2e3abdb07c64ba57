"""Natural gradients for a solver of PINA.

solver = pina.solver.PINN(problem, model)  # its weighting counts, its optimizer does not
losses = train_pina(solver, steps=100)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..._core.errors import PullbackError
from ...optim import Objective, Squares
from ..arguments import is_integer, require
from .autograd_map import AutogradMap
from .training import NetworkWithUnknowns, train


def pina_objective(solver: Any) -> Objective:
    """Return the residuals of a PINA solver as an objective of `NaturalGradient.step`.

    These are the residuals of all conditions of its problem, at all points: equations on domains
    and at inputs, and inputs with targets. The loss is ½ Σ weight · mean residual², half of what
    PINA shows. Terms that other solvers add to those of `PINN` are not used.

    Args:
        solver: with one model; the weights of its `ScalarWeighting` count.

    Raises:
        PullbackError: without a model, before the domains are discretised, for weights that change,
            for a loss that is no mean square, and for unknown parameters, which `train_pina` takes.
    """
    residuals = PINAResiduals(solver)
    if _get_unknowns(solver):
        raise PullbackError(
            "The problem has unknown parameters",
            "these are no parameters of the model",
            "Use train_pina(solver), which trains both",
        )
    return Objective([Squares(AutogradMap(residuals))])  # pyright: ignore[reportArgumentType]


def _get_unknowns(solver: Any) -> dict[str, Tensor]:
    return dict(getattr(solver.problem, "unknown_parameters", None) or {})


class PINAResiduals:
    """The weighted residuals of a solver, as a function of its model's parameters."""

    def __init__(self, solver: Any) -> None:
        _refuse_unusable(solver)
        self._solver = solver
        self._prefix = _find_prefix(solver)
        parameter = next(solver.model.parameters())
        self._conditions = solver.problem.conditions
        self._weights = _read_weights(solver)
        self._inputs = {}
        for name, condition in self._conditions.items():
            points = _find_points(solver.problem, condition, name)
            self._inputs[name] = points.to(dtype=parameter.dtype, device=parameter.device)

    def __call__(self, params: dict[str, Tensor]) -> Tensor:
        """Return all residuals, (n,); the sum of their squares is Σ weight · mean residual²."""
        return self._compute(params, None)

    def evaluate(self, params: dict[str, Tensor], unknowns: Sequence[Tensor]) -> Tensor:
        """Return the residuals of these values of the problem's unknown parameters."""
        if not unknowns:
            return self(params)
        names = _get_unknowns(self._solver)
        return self._compute(params, dict(zip(names, unknowns, strict=True)))

    def _compute(self, params: dict[str, Tensor], unknowns: Mapping[str, Tensor] | None) -> Tensor:
        model_params = {self._prefix + name: p for name, p in params.items()}
        columns = []
        for name, condition in self._conditions.items():
            inputs = self._inputs[name].detach().clone().requires_grad_()
            outputs = functional_call(self._solver, model_params, (inputs,))
            if hasattr(condition, "equation"):
                residual = condition.equation.residual(inputs, outputs, unknowns)
            else:
                residual = outputs - condition.target.to(outputs)
            residual = residual.as_subclass(Tensor).flatten()
            columns.append(residual * math.sqrt(self._weights[name] / residual.numel()))
        return torch.cat(columns)


def _refuse_unusable(solver: Any) -> None:
    """Raise if Gauss–Newton steps would not lower the loss of this solver."""
    problem = getattr(solver, "problem", None)
    if problem is None or not isinstance(getattr(solver, "model", None), nn.Module):
        raise PullbackError(
            "The solver has no problem with one model",
            f"got {type(solver).__name__}",
            "Pass a solver such as pina.solver.PINN(problem, model)",
        )
    if not isinstance(solver.loss, nn.MSELoss):
        raise PullbackError(
            "The loss is no mean square",
            f"it is {type(solver.loss).__name__}",
            "Leave out loss=: a Gauss–Newton step needs squares",
        )


def _find_prefix(solver: Any) -> str:
    """Return what the model's parameter names begin with in the solver."""
    for name, module in solver.named_modules():
        if module is solver.model:
            return f"{name}."
    raise PullbackError(
        "The model is no submodule of the solver", "its parameters have no names", "Use PINN"
    )


def _find_points(problem: Any, condition: Any, name: str) -> Any:
    """Return the inputs of a condition, or the points of its domain."""
    if hasattr(condition, "input"):
        return condition.input
    if condition.domain not in problem.discretised_domains:
        raise PullbackError(
            f"The condition {name!r} has no points",
            f"the domain {condition.domain!r} is not discretised",
            "Call problem.discretise_domain(n, mode) first",
        )
    return problem.discretised_domains[condition.domain]


def _read_weights(solver: Any) -> dict[str, float]:
    """Return the fixed weights of the conditions, by name."""
    weighting = solver.weighting
    if not hasattr(weighting, "default_value_weights"):
        raise PullbackError(
            "The weights change while the solver trains",
            f"the weighting is {type(weighting).__name__}",
            "Use ScalarWeighting, or none",
        )
    default = weighting.default_value_weights
    return {name: float(weighting.values.get(name, default)) for name in solver.problem.conditions}


def train_pina(solver: Any, steps: int = 100, **options: Any) -> list[float]:
    """Take so many natural gradient steps; model and unknown parameters change in place.

    Args:
        solver: of PINA, with one model, in float64 if it is to be accurate (`model.double()`).
            Unknown parameters of its problem are trained too; their domain is not enforced.
        steps: how many.
        options: of `NaturalGradient`, such as solver= and step=.

    Returns:
        The loss before every step.
    """
    require(is_integer(steps, 1), "steps=", steps, "Use an integer ≥ 1")
    residuals = PINAResiduals(solver)
    module = NetworkWithUnknowns(solver.model, list(_get_unknowns(solver).values()))
    return train(module, residuals.evaluate, steps, options)
