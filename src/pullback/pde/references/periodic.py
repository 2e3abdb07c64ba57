"""One-dimensional periodic evolution equations by a Fourier pseudospectral method."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import scipy

from ..._core.errors import PullbackError
from .base import Array, Reference, positive, relative, resolved
from .cache import cached
from .etdrk4 import Trajectory, integrate

_DEGREE = 10
_TAIL = 1e-11  # modes of a smaller relative norm over space and time are not stored


class Resolution(NamedTuple):
    """Number of modes, panels in time, and the longest time step."""

    modes: int
    edges: Array
    longest: float


class Periodic(Reference):
    """u_t = L u + N(u) on x ∈ [−1, 1] periodic, t ∈ [0, 1], L diagonal in Fourier space.

    Solved by ETDRK4 at two resolutions; the finer is kept, and the difference of the two is
    `accuracy`, an upper estimate as it is mostly the error of the coarser one. A subclass may keep
    a part of u that is known in closed form apart (`known`); the rest is stored.
    """

    domain = ((-1.0, 1.0), (0.0, 1.0))
    name: ClassVar[str]
    version: ClassVar[int] = 1

    @property
    @abstractmethod
    def parameters(self) -> dict[str, float | bool]:
        """What the solution depends on."""

    @abstractmethod
    def resolution(self, coarse: bool) -> Resolution:
        """Where, when and how finely to solve."""

    @abstractmethod
    def equation(self, modes: int) -> tuple[Array, Array]:
        """Symbol of L and coefficients of u at t = 0, each (modes,)."""

    @abstractmethod
    def nonlinear(self, c: Array) -> Array:
        """Coefficients of N(u) from those of u, (modes,)."""

    def known(self, x: Array, t: Array) -> Array:
        """The part of u in closed form, (N,)."""
        return np.zeros_like(x)

    def known_coefficients(self, modes: int, t: Array) -> Array:
        """Coefficients of `known` at times t (...), shape (..., modes)."""
        return np.zeros((*t.shape, modes))

    def values(self, points: Array) -> Array:
        x, t = points[:, 0], points[:, 1]
        return (self.known(x, t) + self._trajectory(x, t))[:, None]

    @property
    def accuracy(self) -> float:
        return float(self._arrays["accuracy"])

    @cached_property
    def _trajectory(self) -> Trajectory:
        return Trajectory(self._arrays["edges"], self._arrays["coefficients"])

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        keys = ("edges", "coefficients", "accuracy")
        return cached(self.name, self.parameters, self.version, keys, self._compute)

    def _compute(self) -> dict[str, Array]:
        fine, coarse = self.solve(coarse=False), self.solve(coarse=True)
        unit = np.random.default_rng(0).random((8192, 2))
        x, t = 2 * unit[:, 0] - 1, unit[:, 1]
        known = self.known(x, t)
        error = relative(known + coarse(x, t), known + fine(x, t))
        resolved(error, f"{type(self).__name__} with {self.parameters}")
        return {
            "edges": fine.edges,
            "coefficients": fine.coefficients,
            "accuracy": np.array(error),
        }

    def solve(self, *, coarse: bool) -> Trajectory:
        """The part of u that is not `known`."""
        modes, edges, longest = self.resolution(coarse)
        linear, start = self.equation(modes)
        with np.errstate(over="ignore", invalid="ignore"):  # a blow-up shows in the accuracy
            c = integrate(linear, self.nonlinear, start, edges, _DEGREE, longest)
        nodes = np.linspace(edges[:-1], edges[1:], _DEGREE + 1, axis=1)
        c = c - self.known_coefficients(modes, nodes)
        return Trajectory(edges, _without_tail(edges, c))


def _without_tail(edges: Array, c: Array) -> Array:
    """The leading modes: what is cut has a norm below _TAIL of all, over space and time."""
    energy = np.diff(edges) @ (np.abs(c) ** 2).mean(axis=1)  # (K,)
    tail = np.cumsum(energy[::-1])[::-1]
    needed = tail > _TAIL**2 * tail[0]
    return np.ascontiguousarray(c[..., : max(1, int(needed.sum()))])


class AllenCahn(Periodic):
    r"""u_t = D u_xx + ρ(u − u³), u(x, 0) = x² cos πx.

    The periodic initial value has a kink at x = ±1, the one of −x²: slope −2 to the left of x = 1,
    +2 to the right. The heat equation's solution from the periodic −x² is known,

        w(x, t) = −x² − 2Dt + 4√(Dt) Σ_m ierfc(|x − 1 − 2m| / √(4Dt)),

    and u − w is smooth enough at t = 0 (coefficients k⁻⁴, not k⁻²) to be stored. Panels in time
    shrink geometrically toward t = 0, where the kink's layer √(4Dt) opens. u is even: cosines.
    """

    name = "allen-cahn"

    def __init__(self, diffusion: float, reaction: float) -> None:
        self.diffusion = positive("diffusion", diffusion)
        self.reaction = positive("reaction", reaction)

    @property
    def parameters(self) -> dict[str, float | bool]:
        return {"diffusion": self.diffusion, "reaction": self.reaction}

    def resolution(self, coarse: bool) -> Resolution:
        factor = 2 if coarse else 1
        rate = max(1.0, self.reaction / 5)
        layer = 2.0 ** (np.arange(-40, -5, factor) / 2)  # up to 1/8
        panels = math.ceil(14 * rate / factor)
        edges = np.concatenate([[0.0], layer, np.linspace(layer[-1], 1, panels + 1)[1:]])
        sharpness = math.sqrt(self.reaction / 5 * 1e-4 / self.diffusion)
        modes = 2 ** math.ceil(12 + math.log2(min(1.0, max(1 / 16, sharpness))))
        return Resolution(modes // factor + 1, edges, factor * 5e-4 / rate)

    def equation(self, modes: int) -> tuple[Array, Array]:
        x = np.linspace(-1, 0, modes)
        rest = _to_cosines(x**2 * (1 + np.cos(math.pi * x)))
        wave = math.pi * np.arange(modes)
        return -self.diffusion * wave**2, rest + self.known_coefficients(modes, np.zeros(()))

    def nonlinear(self, c: Array) -> Array:
        u = _from_cosines(c)
        return self.reaction * _to_cosines(u - u * u * u)

    def known(self, x: Array, t: Array) -> Array:
        dt = self.diffusion * t
        width = np.sqrt(4 * dt)
        w = -(x**2) - 2 * dt
        images = 1 + int(3.5 * math.sqrt(4 * self.diffusion))
        for m in range(images):
            for gap in (2 * m + 1 - x, 2 * m + 1 + x):
                w += 2 * width * _ierfc(gap / np.maximum(width, gap / 30 + 1e-300))
        return w

    def known_coefficients(self, modes: int, t: Array) -> Array:
        k = np.arange(1, modes)
        decay = np.exp(-self.diffusion * (math.pi * k) ** 2 * t[..., None])
        mean = np.full((*t.shape, 1), -1 / 3)
        return np.concatenate([mean, -2 / (math.pi * k) ** 2 * decay], axis=-1)

    def values(self, points: Array) -> Array:
        x, t = points[:, :1], points[:, 1:]
        return np.where(t == 0, x**2 * np.cos(math.pi * x), super().values(points))


def _ierfc(z: Array) -> Array:
    """∫_z^∞ erfc."""
    return np.exp(-z * z) / math.sqrt(math.pi) - z * scipy.special.erfc(z)


def _to_cosines(u: Array) -> Array:
    """Coefficients c of Σ' from values on [−1, 0]: u = c_0 + 2 Σ c_k cos πk(x+1)."""
    c = np.asarray(scipy.fft.dct(u, type=1)) / (2 * (len(u) - 1))
    c[-1] *= 0.5
    return c


def _from_cosines(c: Array) -> Array:
    doubled = c.copy()
    doubled[-1] *= 2
    return np.asarray(scipy.fft.dct(doubled, type=1))


class KortewegDeVries(Periodic):
    """u_t + η u u_x + μ² u_xxx = 0, u(x, 0) = cos πx; Zabusky and Kruskal (1965).

    The product is dealiased: u² is formed on 3/2 as many points as u needs.
    """

    name = "kdv"

    def __init__(self, eta: float, mu: float) -> None:
        self.eta = positive("eta", eta)
        self.mu = positive("mu", mu)
        # solitons have width ∝ μ/√η and speed ∝ η; at least what cos πx and its harmonics need
        self._sharpness = max(0.3, math.sqrt(self.eta) * 0.022 / self.mu)
        self._rate = max(1.0, self.eta) * self._sharpness
        if self._sharpness * self._rate > 8:
            raise PullbackError(
                f"There is no reference for eta={eta}, mu={mu}",
                "its solitons are too narrow and fast for a solution within a minute",
                "Choose mu ≥ 0.022·√eta/3",
            )

    @property
    def parameters(self) -> dict[str, float | bool]:
        return {"eta": self.eta, "mu": self.mu}

    def resolution(self, coarse: bool) -> Resolution:
        factor = 2 if coarse else 1
        panels = math.ceil(100 * self._rate)
        edges = np.linspace(0, 1, panels // factor + 1)
        longest = factor / (16 * _DEGREE * panels)
        modes = math.ceil((160 if coarse else 256) * self._sharpness)
        return Resolution(modes, edges, longest)

    def equation(self, modes: int) -> tuple[Array, Array]:
        wave = math.pi * np.arange(modes)
        start = np.zeros(modes, dtype=complex)
        start[1] = -0.5  # cos πx = −cos π(x+1)
        return 1j * self.mu**2 * wave**3, start

    def nonlinear(self, c: Array) -> Array:
        modes = len(c)
        n = scipy.fft.next_fast_len(3 * modes, real=True)
        u = np.asarray(scipy.fft.irfft(c, n)) * n
        square = np.asarray(scipy.fft.rfft(u * u))[:modes] / n
        return -0.5j * self.eta * math.pi * np.arange(modes) * square


def allen_cahn(diffusion: float = 1e-4, reaction: float = 5.0) -> AllenCahn:
    """The Allen–Cahn equation u_t = D u_xx + ρ(u − u³), periodic, from x² cos πx."""
    return AllenCahn(diffusion, reaction)


def kdv(eta: float = 1.0, mu: float = 0.022) -> KortewegDeVries:
    """The Korteweg–de Vries equation u_t + η u u_x + μ² u_xxx = 0, periodic, from cos πx."""
    return KortewegDeVries(eta, mu)
