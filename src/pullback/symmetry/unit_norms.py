"""Norms of what leads into units and out of them, and the Gram matrix of the orbits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from ..grams import Gram
from ..solvers import ConjugateGradient
from .actions.scaling import Leg
from .scaling_units import ScalingUnits, sum_in_logs


@dataclass(frozen=True)
class UnitThresholds:
    """Numbers that steer the balancing of units.

    Attributes:
        newton_radius: the largest |log(out/in)| at which Newton's method is tried. At ½ the
            quadratic model of e^x + e^−x is off by 2 %, so that Newton's steps converge at once.
        dense_size: the largest number of units whose Gram matrix is factorized: 8 MiB.
    """

    newton_radius: float = 0.5
    dense_size: int = 1024


THRESHOLDS = UnitThresholds()


class UnitNorms:
    """in_u = Σ w² over what leads into each unit, out_u over what leads out; their logarithms.

    They are equal at the least Σw² of the orbit, which is convex in t: its gradient is in − out,
    its Hessian twice the Gram K of the generators.

    Attributes:
        units: that scale the parameters.
        zeros: t = 0, (U,).
        newton_radius: Newton's method is tried where no imbalance is larger.
        dead: (U,) units whose incoming or outgoing weights are all zero.
        largest: m = max |w_e|.
    """

    def __init__(self, units: ScalingUnits, params: Mapping[str, Tensor]) -> None:
        self.units = units
        self.newton_radius = THRESHOLDS.newton_radius
        squares = units.log_squares(params)
        self._energies = squares.energies
        self.largest = squares.largest
        self.zeros = self._energies[0].new_zeros(units.total)
        incoming, outgoing = self._sum_sides(self.zeros)
        self.dead = ~(torch.isfinite(incoming) & torch.isfinite(outgoing))

    def energies(self, t: Tensor) -> list[Tensor]:
        """log (w_e/m)² of every parameter at log-scales t."""
        pairs = zip(self.units.parameters, self._energies, strict=True)
        return [energies + 2 * parameter.log_factor(t) for parameter, energies in pairs]

    def _sum_sides(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """log in/m² and log out/m²: (U,)."""
        incoming = torch.full_like(t, -torch.inf)
        outgoing = torch.full_like(t, -torch.inf)
        for parameter, energies in zip(self.units.parameters, self.energies(t), strict=True):
            for leg in parameter.legs:
                side = incoming if leg.power > 0 else outgoing
                sums = _sum_units_in_logs(leg, energies, self.units.total) + log(abs(leg.power))
                torch.logaddexp(side, sums, out=side)
        return incoming, outgoing

    def imbalance(self, t: Tensor) -> Tensor:
        incoming, outgoing = self._sum_sides(t)
        return torch.where(self.dead, 0.0, outgoing - incoming)

    def newton_step(self, t: Tensor, tolerance: float) -> Tensor:
        gram = OrbitGram(self, t)
        step = -0.5 * gram.solve(gram.slope, tolerance)
        return step / step.abs().amax().clamp(min=1.0)


def _sum_units_in_logs(leg: Leg, logs: Tensor, units: int) -> Tensor:
    """log Σ exp(logs) over the entries of each unit, (units,); −inf for none."""
    flat = sum_in_logs(logs, leg.unit.shape).reshape(-1)
    # The last place collects the entries of no unit.
    index = (leg.unit % (units + 1)).reshape(-1)
    largest = flat.new_full((units + 1,), -torch.inf).scatter_reduce_(0, index, flat, "amax")
    largest = torch.where(torch.isfinite(largest), largest, 0.0)
    sums = torch.zeros_like(largest).index_add_(0, index, (flat - largest[index]).exp())
    return (sums.log() + largest)[:-1]


class OrbitGram(Gram):
    """K (U, U) at t over e^top·m²: dense where it is small, else by products.

    Dead units have no generator: they stand apart with a 1 on the diagonal.

    Attributes:
        slope: (in − out) of each unit over e^top·m²; 0 for dead ones.
        top: the logarithm of the largest (w_e/m)².
    """

    def __init__(self, norms: UnitNorms, t: Tensor) -> None:
        self._dead = norms.dead
        self._units = norms.units
        self.size = len(t)
        self.dtype = t.dtype
        self.device = t.device
        logs = norms.energies(t)
        self.top = torch.stack([energies.amax() for energies in logs]).amax()
        self.top = self.top.nan_to_num(neginf=0.0)
        self._energies = [(energies - self.top).exp() for energies in logs]
        self.slope = torch.zeros_like(t)
        self._diagonal = torch.zeros_like(t)
        for parameter, energies in zip(self._units.parameters, self._energies, strict=True):
            self.slope += self._units.collect(parameter, energies)
            for leg in parameter.legs:
                self._diagonal += leg.power**2 * leg.sums(energies, self.size)
        # The diagonal preconditions only. It leaves out products of legs of one parameter that meet
        # in a unit, as on a skip.
        self.slope = torch.where(self._dead, 0.0, self.slope)
        is_singular = self._dead | ~(self._diagonal > 0)
        self._diagonal = torch.where(is_singular, 1.0, self._diagonal)

    def matvec(self, v: Tensor) -> Tensor:
        """K v on the living units, v on the dead ones."""
        living = torch.where(self._dead, 0.0, v)
        product = torch.zeros_like(v)
        for parameter, energies in zip(self._units.parameters, self._energies, strict=True):
            product += self._units.collect(parameter, energies * parameter.log_factor(living))
        return torch.where(self._dead, v, product)

    def dense(self) -> Tensor:
        """Return K as a matrix."""
        side = self.size + 1  # the last row and column collect entries of no unit
        flat = self._diagonal.new_zeros(side * side)
        for parameter, energies in zip(self._units.parameters, self._energies, strict=True):
            for row_leg in parameter.legs:
                for column_leg in parameter.legs:
                    index = (row_leg.unit % side) * side + column_leg.unit % side
                    index = index.expand(parameter.shape).reshape(-1)
                    power = row_leg.power * column_leg.power
                    flat.index_add_(0, index, power * energies.reshape(-1))
        matrix = flat.view(side, side)[:-1, :-1]
        living = ~self._dead
        matrix = torch.where(living[:, None] & living, matrix, 0.0)
        return matrix + self._dead.to(matrix.dtype).diag()

    def solve(self, rhs: Tensor, tolerance: float | None = None) -> Tensor:
        """K⁻¹ rhs, 0 on dead units; to round-off, or with a relative residual of this size."""
        rhs = torch.where(self._dead, 0.0, rhs)
        if len(rhs) > THRESHOLDS.dense_size:
            solver = ConjugateGradient(
                0.0, tol=tolerance or 0.0, preconditioner=lambda v: v / self._diagonal
            )
            return solver.solve(self, rhs).x
        # With a unit diagonal, units of very different size do not spoil each other.
        matrix = self.dense()
        diagonal = matrix.diagonal()
        is_normal = diagonal > torch.finfo(matrix.dtype).tiny  # below that products would overflow
        scale = torch.where(is_normal, diagonal, 1.0).rsqrt()
        matrix = matrix * scale[:, None] * scale
        factor, info = torch.linalg.cholesky_ex(matrix)
        if not bool(info):
            return scale * torch.cholesky_solve((scale * rhs)[:, None], factor)[:, 0]
        return scale * (torch.linalg.pinv(matrix, hermitian=True) @ (scale * rhs))
