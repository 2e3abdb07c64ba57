r"""The Fisher information of logistic regression averaged over the inputs' distribution N(0, 1).

    F(β) = a (1 − β̂β̂ᵀ) + c β̂β̂ᵀ,   a = E φ'(‖β‖z),  c = E z²φ'(‖β‖z),   z ~ N(0, 1)

with β̂ = β/‖β‖ and φ' = φ(1 − φ). At β = 0 both are 1/4. It belongs to a loss averaged over samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from .._core.errors import PullbackError
from .._core.factor import Factor, Whitened
from ..metrics import Metric
from .checks import refuse_kind, refuse_nonfinite, refuse_shape

_STEP, _RANGE = 0.25, 45.0  # the trapezoidal error is e^{−2π²/_STEP}, the tail's e^{−_RANGE}


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

    def power(self, v: Tensor, exponent: float) -> Tensor:
        """F^exponent v along the last axis."""
        a, c = self.across**exponent, self.along**exponent
        return a * v + (c - a) * (v @ self.unit)[..., None] * self.unit

    def matvec(self, v: Tensor) -> Tensor:
        """F v."""
        return self.power(v, 1.0)

    def solve(self, g: Tensor) -> Tensor:
        """F⁻¹g."""
        return self.power(g, -1.0)

    def dense(self) -> Tensor:
        """F, (D, D)."""
        eye = torch.eye(len(self.unit), dtype=self.unit.dtype, device=self.unit.device)
        return self.matvec(eye)


def population_fisher(beta: Tensor) -> PopulationFisher:
    """F at β, (D,)."""
    refuse_shape("β", beta, ("D",))
    refuse_nonfinite("β", beta)
    refuse_kind("β", beta)
    if not len(beta):
        raise PullbackError("β is empty", "it has no entries", "Pass at least one")
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
    wide = rho.clamp(min=1.0)
    count = int(_RANGE / _STEP)
    t = _STEP * torch.arange(-count, count + 1, dtype=torch.float64, device=size.device)
    z, slope = t / wide, t * (rho / wide)
    bell = (F.logsigmoid(slope) + F.logsigmoid(-slope) - 0.5 * z.square()).exp()
    unit = _STEP / (wide * sqrt(2 * pi))
    a, c = unit * bell.sum(), unit * (z.square() * bell).sum()
    return a.to(size.dtype), c.to(size.dtype)


class _Roots(Factor):
    """S = F^½ over all coordinates of β, which stand in the place of samples."""

    couples_samples = True

    def __init__(self, fisher: PopulationFisher, event: tuple[int, ...]) -> None:
        self._fisher, self.white = fisher, event

    def _power(self, r: Tensor, exponent: float) -> Tensor:
        flat = r.flatten(r.ndim - 1 - len(self.white))
        return self._fisher.power(flat, exponent).view(r.shape)

    def apply(self, r: Tensor) -> Tensor:
        return self._power(r, 0.5)

    def transpose(self, v: Tensor) -> Tensor:
        return self._power(v, 0.5)

    def whiten(self, g: Tensor, eps: float | None = None) -> Whitened:
        return Whitened.checked(self._power(g, -0.5))


class Population(Metric):
    """The population Fisher metric on β itself, for models whose `model()` is β.

    Give the optimizer an empty call as its metric's batch, so that the metric sees β and the loss
    its data: NaturalGradient(model, metric=Population(), metric_batch=()).
    """

    def factor(self, z: Tensor, *, inputs: Tensor | None = None) -> Factor:
        return _Roots(population_fisher(z.flatten()), tuple(z.shape[1:]))

    def samples(self, z: Tensor) -> int:
        """One: the mean over inputs is already taken."""
        return 1
