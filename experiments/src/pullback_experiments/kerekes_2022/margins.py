r"""Euclidean gradient flow of diagonal networks far into separability, β = w₁∘⋯∘w_L.

Three changes of variables, none of which alters the path of β, take the place of millions of steps:

- *Unknowns.* The flow keeps w_l² − w_m² for every coordinate. With v the smallest factor and
  d_l = w_l² − v² ≥ 0 fixed, w_l = √(v² + d_l): D unknowns instead of L·D. From w₁ = … = w_{L−1}
  = α, w_L = 0, that is d = α² and v = 0 at first, v keeps the sign of β and may change it.
- *Time.* With loss ℓ = mean log(1 + e^{−u}), u = y∘Xβ, and G = −∇_βℓ/ℓ in log domain, v' ∝ P∘G,
  P = ∏_{l<L} w_l, is finite at any loss. Time runs so that 1 − log ℓ and ‖v‖ both grow at
  most e-fold per unit; logits of 10⁴ are reached at times of about ten.
- *Stiffness.* The support vectors settle at rates of the order of the logits; `Stiff` is
  implicit, and solves at the size of the samples that still count. Up to a loss of e⁻² all of them
  do, and nothing is stiff: `Explicit` gets there without a linear system.

Errors are measured where they count. The path turns on differences between the logits of support
vectors, and where margins are small beside ‖β‖ logits are small differences of large terms: an
error of 10⁻⁴ in v can be one of ten in a logit. Weights then jump from sample to sample, and steps
that look fine by the size of v lead nowhere. So every step keeps to those differences too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback import PullbackError

from .integrators import Explicit, Jacobian, Stiff, march, relative


@dataclass(frozen=True)
class FlowLimits:
    """When samples count, and when the flow is stiff."""

    #: The weight, relative to the largest, below which a sample is left out of ∂f/∂v. The
    #: integrator's order does not depend on it; rates left out are below a millionth.
    least_weight: float = 1e-6
    #: the −log ℓ up to which steps are explicit
    explicit_level: float = 2.0
    #: the number of explicit steps after which implicit ones go on
    explicit_steps: int = 1000


LIMITS = FlowLimits()


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
        rtol: of one step, relative to every entry of v.
        logits: of one step, for differences between the logits of samples that count; and for
            their mean relative to −log ℓ.
    """

    def __init__(
        self,
        data: Signed,
        depths: Sequence[int] | int,
        scales: Sequence[float] | float,
        rtol: float = 1e-5,
        logits: float = 0.05,
    ) -> None:
        ones = data.rows.new_ones(len(data.rows), 1)
        self.data = data
        self.rtol = rtol
        self.logits = logits
        self.others = ones * ones.new_tensor(depths).reshape(-1, 1) - 1  # L − 1, (B, 1)
        self.scale = ones * ones.new_tensor(scales).reshape(-1, 1)
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

    def _local(self, v: Tensor) -> _FlowPoint:
        u = self._margins(v)
        weights, level = _weights(u, self.data.counts)
        gradient = (weights[:, None, :] @ self.data.rows)[:, 0]
        p = self._p(v)  # h² = Σ_l (β/w_l)² = P∘dβ/dv
        return _FlowPoint(u, weights, gradient, p, self._slope(v), p * gradient, level)

    def _slope(self, v: Tensor) -> Tensor:
        """dβ/dv."""
        return self._p(v) * (1 + self.others * (v / torch.hypot(v, self.scale)) ** 2)

    def velocity(self, v: Tensor) -> Tensor:
        """dv/dτ, (B, D)."""
        point = self._local(v)
        return point.move / self._speed(v, point)[0]

    def _speed(self, v: Tensor, point: _FlowPoint) -> tuple[Tensor, Tensor, Tensor]:
        """dτ/dt̂ = Q/(1 + λ) + ‖P∘G‖/(‖v‖ + α), Q = ‖h∘G‖² = dλ/dt̂; and both parts, (B, 1)."""
        fall = (point.p * point.slope * point.gradient.square()).sum(1, keepdim=True)
        fall = fall / (1 + point.level.clamp(min=0))
        growth = point.move.norm(dim=1, keepdim=True) / (v.norm(dim=1, keepdim=True) + self.scale)
        growth = torch.where(self.others > 0, growth, 0.0)
        return fall + growth, fall, growth

    def velocity_and_jacobian(self, v: Tensor) -> tuple[Tensor, Jacobian]:
        """f = dv/dτ = P∘G/ρ and ∂f/∂v, ρ = dτ/dt̂, of low rank but for a diagonal.

        ρ ∂f/∂v = diag(P'∘G) + diag(P)(GGᵀ − ZᵀZ)diag(dβ/dv) − f ∇ρᵀ
        """
        point = self._local(v)
        g = point.gradient
        p = point.p
        slope = point.slope
        p1 = self.others * v / (v.square() + self.scale.square()) * p  # P'
        z = self._curvature(point)
        rho, rho1 = self._speed_and_slope(v, point, p1, z)
        f = point.move / rho
        left = torch.cat([-z, g[:, None], -(f / p)[:, None]], 1).mT * (p / rho)[..., None]
        right = torch.cat([z, g[:, None], (rho1 / slope)[:, None]], 1).mT * slope[..., None]
        return f, Jacobian(p1 * g / rho, left, right)

    def _speed_and_slope(
        self, v: Tensor, point: _FlowPoint, p1: Tensor, z: Tensor
    ) -> tuple[Tensor, Tensor]:
        """ρ = dτ/dt̂ and ∇ρ, (B, 1) and (B, D)."""
        g = point.gradient
        p = point.p
        slope = point.slope

        def bend(t: Tensor) -> Tensor:
            """∂G/∂β t = G(Gᵀt) − Zᵀ(Z t)."""
            return g * (g * t).sum(1, keepdim=True) - _times(z.mT, _times(z, t))

        rho, fall, growth = self._speed(v, point)
        level = 1 + point.level.clamp(min=0)
        square = v.square() + self.scale.square()
        slope1 = p1 * (slope / p) + p * 2 * self.others * v * (self.scale / square).square()
        q1 = (p1 * slope + p * slope1) * g.square() + 2 * slope * bend(p * slope * g)
        rho1 = q1 / level - fall / level * torch.where(point.level > 0, g * slope, 0.0)
        size = point.move.norm(dim=1, keepdim=True)
        length = v.norm(dim=1, keepdim=True)
        grown = (slope * bend(p * point.move) + p1 * g * point.move) / size
        grown = (grown - size * v / length / (length + self.scale)) / (length + self.scale)
        return rho, rho1 + torch.where(growth > 0, grown, 0.0)

    def _curvature(self, point: _FlowPoint) -> Tensor:
        """Z, (B, k, D), the rows of weights that count, times √(weight φ(u))."""
        weights = point.weights * torch.sigmoid(point.margins)
        is_counted = _is_support(weights).any(0)
        return weights[:, is_counted, None].sqrt() * self.data.rows[:, is_counted]

    def size(self, v: Tensor, moved: Tensor, error: Tensor) -> Tensor:
        """Of the error e of a step, in units of what is allowed, (B,): the largest of

            |e| / rtol(|v| + α/10)    |δu − δ̄u| / logits    |δ̄u| / logits(1 + λ)

        with δu = X̃(dβ/dv∘e) where samples count after the step, and δ̄u its mean by their weights.
        """
        entries = relative(self.rtol, 0.1 * self.rtol * self.scale)(v, moved, error)
        weights, level = _weights(self._margins(moved), self.data.counts)
        is_counted = _is_support(weights)
        off = is_counted * _times(self.data.rows, self._slope(moved) * error)
        mean = (weights * off).sum(1, keepdim=True) / (weights * is_counted).sum(1, keepdim=True)
        deviation = (is_counted * (off - mean)).abs().amax(1)
        drift = (mean.abs() / (1 + level.clamp(min=0)))[:, 0]
        return entries.maximum(deviation.maximum(drift) / self.logits)

    def run(
        self, level: float, start: Tensor | None = None, watch: Callable[..., None] | None = None
    ) -> Tensor:
        """v (B, D) where −log ℓ is `level`, from `start` or from zero."""
        v = start
        if v is None:  # ‖v‖ has a corner at zero
            v = self.data.rows.sum(1)
            v = 1e-3 * self.scale * v / v.norm(dim=1, keepdim=True).clamp(min=1e-300)
        watch = watch or (lambda clock: None)
        gentle = Explicit(self.velocity, self.size)
        stiff = Stiff(self.velocity, self.velocity_and_jacobian, self.size)
        first_level = min(level, LIMITS.explicit_level)
        most = LIMITS.explicit_steps
        v, _ = march(gentle, v, self.level, first_level, max_steps=most, watch=watch)
        v, has_failed = march(stiff, v, self.level, level, watch=watch)
        if bool(has_failed.any()):
            raise PullbackError(
                "The flow did not arrive",
                f"{int(has_failed.sum())} of {len(v)} have not reached a loss of e^−{level:g}",
                "Change `rtol` and `logits`, or ask for a larger loss; are the data separable?",
            )
        return v


@dataclass(frozen=True)
class _FlowPoint:
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


def _weights(u: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of samples in −∇ log ℓ, (B, N), and λ = −log ℓ, (B, 1)."""
    slopes, log_loss = _log_loss(u, counts)
    return (slopes - log_loss[:, None]).exp() / counts[:, None], -log_loss[:, None]


def _is_support(weights: Tensor) -> Tensor:
    """Return which samples count in ∂f/∂v."""
    return weights > LIMITS.least_weight * weights.amax(1, keepdim=True)


def _log_loss(u: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """log φ(−u), −∞ beyond the counts, and log mean log(1 + e^{−u}); (B, N) and (B,)."""
    is_sample = torch.arange(u.shape[1], device=u.device) < counts[:, None]
    tail = u > 20  # log(1 + e^{−u}) = e^{−u}(1 − e^{−u}/2 + …)
    near = F.softplus(-torch.where(tail, 0.0, u)).log()
    losses = torch.where(tail, -u - 0.5 * (-u.clamp(min=0)).exp(), near)
    total = losses.masked_fill(~is_sample, -torch.inf).logsumexp(1) - counts.log()
    return F.logsigmoid(-u).masked_fill(~is_sample, -torch.inf), total
