r"""Euclidean gradient flow of diagonal networks far into separability, β = w₁∘⋯∘w_L.

Three changes of variables, none of which alters the path of β, take the place of millions of steps:

- *Unknowns.* The flow keeps w_l² − w_m² for every coordinate. With v the smallest factor and
  d_l = w_l² − v² ≥ 0 fixed, w_l = √(v² + d_l): D unknowns instead of L·D. From w₁ = … = w_{L−1}
  = α, w_L = 0, that is d = α² and v = 0 at first, v keeps the sign of β and may change it.
- *Time.* With loss ℓ = mean log(1 + e^{−u}), u = y∘Xβ, and G = −∇_βℓ/ℓ in log domain, v' ∝ P∘G,
  P = ∏_{l<L} w_l, is finite at any loss. Time runs so that 1 − log ℓ and ‖v‖ both grow at
  most e-fold per unit; logits of 10⁴ are reached at times of about ten.
- *Stiffness.* The support vectors settle at rates of the order of the logits; `rosenbrock` is
  implicit, and solves at the size of the samples that still count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .jacobian import Jacobian
from .rosenbrock import Stiff

#: The weight, relative to the largest, below which a sample is left out of ∂f/∂v. The integrator's
#: order does not depend on it; rates left out are below a millionth of the largest.
_COUNTS = 1e-6


@dataclass(frozen=True)
class Signed:
    """Several data sets as y∘X, (B, N, D), padded to one N.

    Attributes:
        rows: y_n x_n, zero where there is no sample.
        counts: the number of samples of each, (B,).
    """

    rows: Tensor
    counts: Tensor

    @classmethod
    def of(cls, data: list[tuple[Tensor, Tensor]]) -> Signed:
        """From pairs of x (N, D) and y = ±1 (N,)."""
        signed = [y[:, None] * x for x, y in data]
        most = max(len(z) for z in signed)
        rows = torch.stack([F.pad(z, (0, 0, 0, most - len(z))) for z in signed])
        counts = [len(z) for z in signed]
        return cls(rows, torch.tensor(counts, dtype=rows.dtype, device=rows.device))


class EuclideanFlow:
    """The flows of B networks from w₁ = … = w_{L−1} = α, w_L = 0.

    Args:
        data: B data sets.
        depths: L of each, or one for all.
        scales: α of each, or one for all; irrelevant for L = 1.
        rtol: of one step.
    """

    def __init__(
        self,
        data: Signed,
        depths: Sequence[int] | int,
        scales: Sequence[float] | float,
        rtol: float = 1e-5,
    ) -> None:
        like = data.rows.new_ones(len(data.rows), 1)
        self.data, self.rtol = data, rtol
        self.others = like * like.new_tensor(depths).reshape(-1, 1) - 1  # L − 1, (B, 1)
        self.scale = like * like.new_tensor(scales).reshape(-1, 1)
        self.scale = torch.where(self.others > 0, self.scale, 1.0)

    def beta(self, v: Tensor) -> Tensor:
        """β = v∘P of v, (B, D)."""
        return v * self._p(v)

    def _p(self, v: Tensor) -> Tensor:
        """P = ∏_{l<L} w_l = (v² + α²)^{(L−1)/2}."""
        return torch.hypot(v, self.scale) ** self.others

    def level(self, v: Tensor) -> Tensor:
        """−log ℓ, (B,)."""
        return -_log_loss(self._margins(v), self.data.counts)[1]

    def _margins(self, v: Tensor) -> Tensor:
        return (self.data.rows @ self.beta(v)[..., None])[..., 0]

    def gradient(self, v: Tensor) -> Tensor:
        """G = −∇_β log ℓ, (B, D)."""
        return self._local(v).gradient

    def _local(self, v: Tensor) -> _Local:
        rows, counts = self.data.rows, self.data.counts
        u = self._margins(v)
        slopes, log_loss = _log_loss(u, counts)
        weights = (slopes - log_loss[:, None]).exp() / counts[:, None]
        gradient = (weights[:, None, :] @ rows)[:, 0]
        share = (v / torch.hypot(v, self.scale)) ** 2
        p = self._p(v)
        slope = p * (1 + self.others * share)  # dβ/dv; and h² = Σ_l (β/w_l)² = P∘dβ/dv
        return _Local(u, weights, gradient, p, slope, p * gradient, -log_loss[:, None])

    def velocity(self, v: Tensor) -> Tensor:
        """dv/dτ, (B, D)."""
        here = self._local(v)
        return here.move / self._speed(v, here)[0]

    def _speed(self, v: Tensor, here: _Local) -> tuple[Tensor, Tensor, Tensor]:
        """dτ/dt̂ = Q/(1 + λ) + ‖P∘G‖/(‖v‖ + α), Q = ‖h∘G‖² = dλ/dt̂; and both parts, (B, 1)."""
        fall = (here.p * here.slope * here.gradient.square()).sum(1, keepdim=True)
        fall = fall / (1 + here.level.clamp(min=0))
        growth = here.move.norm(dim=1, keepdim=True) / (v.norm(dim=1, keepdim=True) + self.scale)
        growth = torch.where(self.others > 0, growth, 0.0)
        return fall + growth, fall, growth

    def both(self, v: Tensor) -> tuple[Tensor, Jacobian]:
        """f = dv/dτ = P∘G/ρ and ∂f/∂v, ρ = dτ/dt̂, of low rank but for a diagonal.

        ρ ∂f/∂v = diag(P'∘G) + diag(P)(GGᵀ − ZᵀZ)diag(dβ/dv) − f ∇ρᵀ
        """
        here = self._local(v)
        g, p, slope = here.gradient, here.p, here.slope
        p1 = self.others * v / (v.square() + self.scale.square()) * p  # P'
        z = self._curvature(here)
        rho, rho1 = self._speed_and_slope(v, here, p1, z)
        f = here.move / rho
        left = torch.cat([-z, g[:, None], -(f / p)[:, None]], 1).mT * (p / rho)[..., None]
        right = torch.cat([z, g[:, None], (rho1 / slope)[:, None]], 1).mT * slope[..., None]
        return f, Jacobian(p1 * g / rho, left, right)

    def _speed_and_slope(
        self, v: Tensor, here: _Local, p1: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor]:
        """ρ = dτ/dt̂ and ∇ρ, (B, 1) and (B, D)."""
        g, p, slope = here.gradient, here.p, here.slope

        def bend(t: Tensor) -> Tensor:
            """∂G/∂β t = G(Gᵀt) − Zᵀ(Z t)."""
            return g * (g * t).sum(1, keepdim=True) - _times(z.mT, _times(z, t))

        rho, fall, growth = self._speed(v, here)
        level = 1 + here.level.clamp(min=0)
        square = v.square() + self.scale.square()
        slope1 = p1 * (slope / p) + p * 2 * self.others * v * (self.scale / square).square()
        q1 = (p1 * slope + p * slope1) * g.square() + 2 * slope * bend(p * slope * g)
        rho1 = q1 / level - fall / level * torch.where(here.level > 0, g * slope, 0.0)
        size, length = here.move.norm(dim=1, keepdim=True), v.norm(dim=1, keepdim=True)
        grown = (slope * bend(p * here.move) + p1 * g * here.move) / size
        grown = (grown - size * v / length / (length + self.scale)) / (length + self.scale)
        return rho, rho1 + torch.where(growth > 0, grown, 0.0)

    def _curvature(self, here: _Local) -> Tensor:
        """Z, (B, k, D), the rows of weights that count, times √(weight φ(u))."""
        weights = here.weights * torch.sigmoid(here.margins)
        some = (weights > _COUNTS * weights.amax(1, keepdim=True)).any(0)
        return weights[:, some, None].sqrt() * self.data.rows[:, some]

    def run(
        self, level: float, start: Tensor | None = None, watch: Callable[..., None] | None = None
    ) -> Tensor:
        """v (B, D) where −log ℓ first exceeds `level`, from `start` or from zero."""
        v = start
        if v is None:  # ‖v‖ has a corner at zero
            v = self.data.rows.sum(1)
            v = 1e-3 * self.scale * v / v.norm(dim=1, keepdim=True)
        stiff = Stiff(self.velocity, self.both, self.rtol, 0.1 * self.rtol * self.scale)
        return stiff.march(v, self.level, level, watch=watch or (lambda clock: None))


@dataclass(frozen=True)
class _Local:
    """u, the samples' weights in G, G, P, dβ/dv, P∘G and λ = −log ℓ at some v."""

    margins: Tensor
    weights: Tensor
    gradient: Tensor
    p: Tensor
    slope: Tensor
    move: Tensor
    level: Tensor


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _log_loss(u: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """log φ(−u), −∞ beyond the counts, and log mean log(1 + e^{−u}); (B, N) and (B,)."""
    there = torch.arange(u.shape[1], device=u.device) < counts[:, None]
    tail = u > 20  # log(1 + e^{−u}) = e^{−u}(1 − e^{−u}/2 + …)
    near = F.softplus(-torch.where(tail, 0.0, u)).log()
    losses = torch.where(tail, -u - 0.5 * (-u.clamp(min=0)).exp(), near)
    total = losses.masked_fill(~there, -torch.inf).logsumexp(1) - counts.log()
    return F.logsigmoid(-u).masked_fill(~there, -torch.inf), total
