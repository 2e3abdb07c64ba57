"""Windows of an ordinary initial value problem in which the state is built into small networks.

A window is short, so that forty neurons are enough for it, whose hidden layer may even stay as it
begins: a step takes milliseconds, and a window as many of them as Newton's method. The state at its
start is exact by construction: no weight decides how well it is met. Every field is in units of its
size in the window, and every equation in units of its terms, so that a field of size 1e-8 is solved
and judged as one of size 1 is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..domains import Interval
from ..judgement.integration import InitialValueProblem
from ..networks.modules import mlp
from ..networks.state import StateLift
from ..networks.windows import read_initial_values
from ..problem.conditions import Condition, Interior
from ..problem.fields import View, scale_field
from ..problem.problem import Problem
from .settings import Settings
from .time_windows import MarchControl, TimeWindow, TimeWindows


@dataclass(frozen=True)
class StateWindowSizes:
    """The networks and runs of windows; measured on Lorenz's and van der Pol's equations.

    Attributes:
        width: neurons of the hidden layer; 30 leave residuals ten times as large.
        steepness: their largest weight on [−1, 1]; with 2 and 8 residuals are a few times as large.
        beyond_ends: their centers are spread over [−1, 1] times this, past both ends.
        points: of the equations, Gauss's: three for each coefficient of a field.
        steps: that a window may take; a converging one takes five to ten.
        patience: steps without progress after which a window is over.
        smallest_loss: at which it is over as well: relative residuals are about 3e-11.
    """

    width: int = 40
    steepness: float = 4.0
    beyond_ends: float = 1.1
    points: int = 120
    steps: int = 30
    patience: int = 3
    smallest_loss: float = 1e-21


SIZES = StateWindowSizes()
#: windows are cheap here, so that they may be short and must be accurate; the first ones of a stiff
#: system are as short as its fastest decay, before which halvings change little
CONTROL = MarchControl(
    first_share=1 / 16,
    shortest_share=2.0**-24,
    halvings_compared=16,
    accurate_residual=1e-8,
    easy_share=1.0,
    easy_residual=3e-11,
    shares_budget=False,
)


@dataclass(frozen=True)
class WindowUnits:
    """Sizes in a window, estimated from its start.

    Attributes:
        fields: of each field, (m,).
        equations: of the terms of each equation, (m,).
    """

    fields: Tensor
    equations: Tensor


class ScaledEquation(Interior):
    """Equations for fields in units of their own.

    Args:
        equations: for the fields u.
        units: of u, by field, and of the equations' residuals.
    """

    is_equation = True
    prescribes_values = True

    def __init__(
        self,
        equations: Sequence[Condition],
        field_units: Mapping[str, float],
        residual_units: Sequence[float],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._equations = list(equations)
        self._field_units = dict(field_units)
        self._residual_units = list(residual_units)

    def residual(self, view: View) -> list[Tensor]:
        fields = {}
        for name, field in view.fields[0].items():
            fields[name] = scale_field(field, self._field_units[name])
        scaled = replace(view, fields=[fields])
        components: list[Tensor] = []
        for equation in self._equations:
            values = equation.residual(scaled)
            if isinstance(values, Tensor):
                values = [values]
            components += values
        pairs = zip(components, self._residual_units, strict=True)
        return [component / unit for component, unit in pairs]


class StateWindows(TimeWindows):
    """Windows of an ordinary initial value problem, each with a small network of its own."""

    control = CONTROL

    def __init__(self, problem: Problem, initial_value_problem: InitialValueProblem) -> None:
        super().__init__(problem)
        self._initial_value_problem = initial_value_problem
        equations = [c for c in problem.conditions if c.is_equation and c.on is None]
        self._equations: list[Condition] = equations

    def adapt(self, settings: Settings) -> Settings:
        """Return the settings of a window: few points and steps."""
        sampling = replace(
            settings.sampling, points=SIZES.points, sampler="gauss", resample=None, refine=None
        )
        limits = replace(
            settings.limits, steps=SIZES.steps, patience=SIZES.patience, tol=SIZES.smallest_loss
        )
        return replace(settings, sampling=sampling, limits=limits, causal=False)

    def open(
        self, start: float, end: float, network: nn.Module, previous: nn.Module | None
    ) -> TimeWindow:
        length = end - start
        state = self._read_state(start, previous)
        units = self._measure_units(start, length, state)
        equation = ScaledEquation(
            self._equations,
            dict(zip(self.problem.fields, units.fields.tolist(), strict=True)),
            units.equations.tolist(),
            name="equation",
        )
        restricted = Problem(
            Interval(start, end, name="t"),
            [equation],
            fields=self.problem.fields,
            sources=self.problem.sources,
            name=f"{self.problem.name}, t = {start:.4g} to {end:.4g}",
        )
        coefficients = self._expand(state, units.fields, length)
        template = next(network.parameters())
        features = make_feature_network(len(units.fields), template)
        lifted = StateLift(features, start, length, coefficients)
        return TimeWindow(restricted, lifted, units.fields)

    def _read_state(self, start: float, previous: nn.Module | None) -> list[list[float]]:
        """Return u, u', … of each field at the start of a window."""
        orders = self._initial_value_problem.orders
        if previous is None:
            state = self._initial_value_problem.find_initial_state()
            return [derivatives.tolist() for derivatives in state.split(orders)]
        read = read_initial_values(previous, 0)
        point = torch.tensor([[start]], dtype=torch.float64)
        with torch.no_grad():
            by_order = [read(point, order)[0].double().tolist() for order in range(max(orders))]
        by_field = []
        for field, order in enumerate(orders):
            by_field.append([by_order[j][field] for j in range(order)])
        return by_field

    def _measure_units(
        self, start: float, length: float, state: Sequence[Sequence[float]]
    ) -> WindowUnits:
        """Return sizes of fields and residuals by the state, its slope and the window's length.

        A field counts as its largest Taylor term, max |u⁽ʲ⁾|·lengthʲ. An equation counts as its
        highest derivatives do.
        """
        orders = self._initial_value_problem.orders
        flat_state = torch.tensor(list(chain.from_iterable(state)), dtype=torch.float64)
        leading = self._initial_value_problem.linearize(start, flat_state)
        sizes = []
        for derivatives, highest in zip(state, leading.highest.tolist(), strict=True):
            terms = [abs(u) * length**j for j, u in enumerate([*derivatives, highest])]
            sizes.append(max(terms))
        fallback = max(sizes) or 1.0
        fields = torch.tensor([size or fallback for size in sizes], dtype=torch.float64)
        lengths = torch.tensor([length**-order for order in orders], dtype=torch.float64)
        equations = leading.slopes.abs() @ (fields * lengths)
        return WindowUnits(fields, torch.where(equations > 0, equations, 1.0))

    def _expand(
        self, state: Sequence[Sequence[float]], units: Tensor, length: float
    ) -> list[list[float]]:
        """Return the Taylor coefficients of the fields, in their units and in those of time."""
        coefficients = []
        for derivatives, unit in zip(state, units.tolist(), strict=True):
            factor = 1 / unit
            of_field = []
            for order, derivative in enumerate(derivatives):
                if order:
                    factor *= length / order
                of_field.append(derivative * factor)
            coefficients.append(of_field)
        return coefficients


@torch.no_grad()
def make_feature_network(fields: int, template: Tensor) -> nn.Sequential:
    """Return fixed tanh features of [−1, 1] and a trained output layer, which begins at zero.

    The fields are linear in what is trained, so that a window of a linear equation takes one step
    and others as many as Newton's method (extreme learning machines; Dong and Li,
    arXiv:2012.02895).

    Args:
        fields: outputs.
        template: of the dtype and device.
    """
    network = mlp(1, SIZES.width, fields, seed=0, dtype=template.dtype)
    hidden = network[0]
    output = network[2]
    assert isinstance(hidden, nn.Linear)
    assert isinstance(output, nn.Linear)
    generator = torch.Generator().manual_seed(0)
    uniform = 2 * torch.rand(SIZES.width, generator=generator, dtype=torch.float64) - 1
    weights = SIZES.steepness * uniform
    centers = torch.linspace(-1, 1, SIZES.width, dtype=torch.float64) * SIZES.beyond_ends
    hidden.weight.copy_(weights[:, None])
    hidden.bias.copy_(-weights * centers)
    hidden.requires_grad_(False)
    output.weight.zero_()
    output.bias.zero_()
    return network.to(template.device)


def find_state_windows(problem: Problem) -> StateWindows | None:
    """Return the windows of an ordinary initial value problem; None for any other."""
    if problem.domain.names != ("t",) or problem.unknowns:
        return None
    ordinary = InitialValueProblem.from_problem(problem, problem.unknowns)
    if ordinary is None:
        return None
    return StateWindows(problem, ordinary)
