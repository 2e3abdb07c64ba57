r"""The Gram K = ZZᵀ of a scaling group's generators: half the Hessian of Φ in the log-scales."""

from __future__ import annotations

import torch
from torch import Tensor

from .energies import Energies

_DENSE = 1024


class OrbitGram:
    """K (U, U) at t over e^top·unit²: dense where it is small, else by products.

    Dead units have no generator: they stand apart with a 1 on the diagonal.

    Attributes:
        slope: Σ_legs power·energies of each unit over e^top, the gradient of Φ; 0 for dead ones.
        top: log of what K and the slope are divided by.
    """

    def __init__(self, energies: Energies, t: Tensor) -> None:
        self._energies, self._point = energies, energies.at(t)
        self.top = torch.stack(self._point.shifts).amax()
        self._scales = [(shift - self.top).exp() for shift in self._point.shifts]
        self.slope, self._diagonal = torch.zeros_like(t), torch.zeros_like(t)
        ones = torch.ones_like(t)
        for k, energy in enumerate(energies.parts):
            for a, leg in enumerate(energy.part.legs):
                sums = self._cross(k, a, a, ones)
                self.slope += leg.power * sums
                self._diagonal += leg.power**2 * sums
        # legs of one parameter that meet in a unit, as on a skip, matter for the solver only
        self.slope = torch.where(energies.dead, 0.0, self.slope)
        bad = energies.dead | ~(self._diagonal > 0)
        self._diagonal = torch.where(bad, 1.0, self._diagonal)

    def _cross(self, k: int, a: int, b: int, v: Tensor) -> Tensor:
        """Σ of the energies of a unit's entries (by leg a) times v of their unit by leg b: (U,)."""
        energy, factors = self._energies.parts[k], self._point.factors[k]
        legs = energy.part.legs
        chosen = torch.cat([v, v.new_zeros(1)])[legs[b].unit]
        others = [f * chosen if i == b else f for i, f in enumerate(factors)]
        values = energy.contract(a, others) * others[a] * self._scales[k]
        return legs[a].sums(values, self._energies.units.total)

    def matvec(self, v: Tensor) -> Tensor:
        """K v on the living units, v on the dead ones."""
        dead = self._energies.dead
        masked = torch.where(dead, 0.0, v)
        out = torch.zeros_like(v)
        for k, energy in enumerate(self._energies.parts):
            legs = energy.part.legs
            for a, leg in enumerate(legs):
                for b, other in enumerate(legs):
                    out += leg.power * other.power * self._cross(k, a, b, masked)
        return torch.where(dead, v, out)

    def dense(self) -> Tensor:
        """The matrix."""
        dead = self._energies.dead
        u = len(dead) + 1  # the last is nobody's
        flat = self._diagonal.new_zeros(u * u)
        for k, energy in enumerate(self._energies.parts):
            part, values = energy.part, energy.squares * self._scales[k]
            for f in self._point.factors[k]:
                values = values * f
            for leg in part.legs:
                for other in part.legs:
                    index = ((leg.unit % u) * u + other.unit % u).expand(part.shape)
                    power = leg.power * other.power
                    flat.index_add_(0, index.reshape(-1), power * values.reshape(-1))
        k = flat.view(u, u)[:-1, :-1]
        alive = ~dead
        return torch.where(alive[:, None] & alive, k, 0.0) + dead.to(k.dtype).diag()

    def solve(self, rhs: Tensor, tolerance: float | None = None) -> Tensor:
        """K⁻¹ rhs, 0 on dead units; to round-off, or with a relative residual of this size."""
        rhs = torch.where(self._energies.dead, 0.0, rhs)
        if len(rhs) > _DENSE:
            return self._conjugate_gradients(rhs, tolerance)
        # unit diagonal: units of very different size do not spoil each other
        k = self.dense()
        diagonal = k.diagonal()
        normal = diagonal > torch.finfo(k.dtype).tiny  # below that products would overflow
        scale = torch.where(normal, diagonal, 1.0).rsqrt()
        k = k * scale[:, None] * scale
        factor, info = torch.linalg.cholesky_ex(k)
        if not bool(info):
            return scale * torch.cholesky_solve((scale * rhs)[:, None], factor)[:, 0]
        return scale * (torch.linalg.pinv(k, hermitian=True) @ (scale * rhs))

    def _conjugate_gradients(
        self, rhs: Tensor, tolerance: float | None, most: int = 1000
    ) -> Tensor:
        x = torch.zeros_like(rhs)
        r, z = rhs, rhs / self._diagonal
        p, rz = z, torch.dot(r, z)
        goal = float(rz) * (tolerance or torch.finfo(rhs.dtype).eps) ** 2
        for _ in range(most):
            if not float(rz) > goal:
                break
            kp = self.matvec(p)
            step = rz / torch.dot(p, kp)
            x, r = x + step * p, r - step * kp
            z = r / self._diagonal
            rz, before = torch.dot(r, z), rz
            p = z + (rz / before) * p
        return x
