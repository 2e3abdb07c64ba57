"""One-dimensional periodic evolution equations by a Fourier pseudospectral method."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import scipy

from pullback._core.errors import PullbackError
from pullback.pde.arguments import check_positive

from .base import Array, Reference, load_or_compute, relative, require_resolved
from .etdrk4 import FourierTrajectory, integrate


@dataclass(frozen=True)
class StoredSolution:
    """How a reference is stored: polynomials in time of its leading modes in space."""

    #: of the polynomial in time on each panel
    degree: int = 10
    #: modes of a smaller relative norm over space and time are not stored
    tail: float = 1e-11


STORED = StoredSolution()


class Resolution(NamedTuple):
    """Number of modes, panels in time, and the longest time step."""

    modes: int
    edges: Array
    longest: float


class Pseudospectral(Reference):
    """u_t = L u + N(u), periodic in x, for t from 0 on; L is diagonal in Fourier space.

    Solved by ETDRK4 at two resolutions; the finer is kept, and the difference of the two is
    `accuracy`, an upper estimate as it is mostly the error of the coarser one. A subclass may keep
    a part of u that is known in closed form apart (`known`); the rest is stored. Coefficients are
    those of ξ = −1 + 2(x − low)/(high − low).
    """

    domain = ((-1.0, 1.0), (0.0, 1.0))
    name: ClassVar[str]
    version: ClassVar[int] = 1
    #: what the solution depends on
    parameters: dict[str, float]

    @abstractmethod
    def resolution(self, coarse: bool) -> Resolution:
        """Where, when and how finely to solve."""

    @abstractmethod
    def equation(self, modes: int) -> tuple[Array, Array]:
        """Symbol of L and coefficients of u at t = 0, each (modes,), or (m, modes) of m fields."""

    @abstractmethod
    def nonlinear(self, c: Array) -> Array:
        """Coefficients of N(u) from those of u, in the same shape."""

    def known(self, x: Array, t: Array) -> Array:
        """The part of u in closed form, (N,)."""
        return np.zeros_like(x)

    def known_coefficients(self, modes: int, t: Array) -> Array:
        """Coefficients of `known` at times t (...), shape (..., modes)."""
        return np.zeros((*t.shape, modes))

    def values(self, points: Array) -> Array:
        return self._at(points, self._trajectories)

    def _at(self, points: Array, trajectories: list[FourierTrajectory]) -> Array:
        x = points[:, 0]
        t = points[:, 1]
        low, high = self.domain[0]
        scaled = -1 + 2 * (x - low) / (high - low)
        return np.stack([self.known(x, t) + field(scaled, t) for field in trajectories], axis=1)

    @property
    def accuracy(self) -> float:
        return float(self._arrays["accuracy"])

    @cached_property
    def _trajectories(self) -> list[FourierTrajectory]:
        return _by_field(self._arrays["edges"], self._arrays["coefficients"])

    @cached_property
    def _arrays(self) -> dict[str, Array]:
        keys = ("edges", "coefficients", "accuracy")
        return load_or_compute(self.name, self.parameters, self.version, keys, self._compute)

    def _compute(self) -> dict[str, Array]:
        fine = self.solve(coarse=False)
        coarse = self.solve(coarse=True)
        low, high = np.array(self.domain).T
        points = low + (high - low) * np.random.default_rng(0).random((8192, 2))
        error = relative(self._at(points, _by_field(*coarse)), self._at(points, _by_field(*fine)))
        require_resolved(error, f"{type(self).__name__} with {self.parameters}")
        return {"edges": fine[0], "coefficients": fine[1], "accuracy": np.array(error)}

    def solve(self, *, coarse: bool) -> tuple[Array, Array]:
        """Edges in time and coefficients of the part of u that is not `known`."""
        modes, edges, longest = self.resolution(coarse)
        linear, start = self.equation(modes)
        with np.errstate(over="ignore", invalid="ignore"):  # a blow-up shows in the accuracy
            c = integrate(linear, self.nonlinear, start, edges, STORED.degree, longest)
        if c.ndim == 3:  # one field
            nodes = np.linspace(edges[:-1], edges[1:], STORED.degree + 1, axis=1)
            c = c - self.known_coefficients(modes, nodes)
        return edges, _without_tail(edges, c)


def _by_field(edges: Array, c: Array) -> list[FourierTrajectory]:
    """Coefficients (P, q+1, K) of one field or (P, q+1, m, K) of m, a trajectory for each."""
    if c.ndim == 3:
        fields = c[:, :, None]
    else:
        fields = c
    return [FourierTrajectory(edges, np.ascontiguousarray(f)) for f in np.moveaxis(fields, 2, 0)]


def _coarsening(coarse: bool) -> int:
    """Return how many times longer the steps of a resolution are."""
    if coarse:
        return 2
    return 1


def _without_tail(edges: Array, c: Array) -> Array:
    """The leading modes: what is cut has a norm below 1e-11 of all, over space and time."""
    size = np.abs(c) ** 2
    energy = np.diff(edges) @ size.reshape(len(size), -1, size.shape[-1]).mean(axis=1)  # (K,)
    tail = np.cumsum(energy[::-1])[::-1]
    needed = tail > STORED.tail**2 * tail[0]
    return np.ascontiguousarray(c[..., : max(1, int(needed.sum()))])


class AllenCahn(Pseudospectral):
    r"""u_t = D u_xx + ρ(u − u³), u(x, 0) = x² cos πx.

    The periodic initial value has a kink at x = ±1, the one of −x²: slope −2 to the left of x = 1,
    +2 to the right. The heat equation's solution from the periodic −x² is known,

        w(x, t) = −x² − 2Dt + 4√(Dt) Σ_m ierfc(|x − 1 − 2m| / √(4Dt)),

    and u − w is smooth enough at t = 0 (coefficients k⁻⁴, not k⁻²) to be stored. Panels in time
    shrink geometrically toward t = 0, where the kink's layer √(4Dt) opens. u is even: cosines.
    """

    name = "allen-cahn"

    def __init__(self, diffusion: float = 1e-4, reaction: float = 5.0) -> None:
        self.diffusion = check_positive("diffusion", diffusion)
        self.reaction = check_positive("reaction", reaction)
        self.parameters = {"diffusion": self.diffusion, "reaction": self.reaction}

    def resolution(self, coarse: bool) -> Resolution:
        factor = _coarsening(coarse)
        rate = max(1.0, self.reaction / 5)
        layer = 2.0 ** (np.arange(-40, -5, factor) / 2)  # up to 1/8
        panels = math.ceil(14 * rate / factor)
        edges = np.concatenate([[0.0], layer, np.linspace(layer[-1], 1, panels + 1)[1:]])
        sharpness = math.sqrt(self.reaction / 5 * 1e-4 / self.diffusion)
        modes = 2 ** math.ceil(12 + math.log2(min(1.0, max(1 / 16, sharpness))))
        return Resolution(modes // factor + 1, edges, factor * 5e-4 / rate)

    def equation(self, modes: int) -> tuple[Array, Array]:
        x = np.linspace(-1, 0, modes)
        coefficients = _to_cosines(x**2 * (1 + np.cos(math.pi * x)))
        wave = math.pi * np.arange(modes)
        return -self.diffusion * wave**2, coefficients + self.known_coefficients(
            modes, np.zeros(())
        )

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
        x = points[:, :1]
        t = points[:, 1:]
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


class KortewegDeVries(Pseudospectral):
    """u_t + η u u_x + μ² u_xxx = 0, u(x, 0) = cos πx; Zabusky and Kruskal (1965)."""

    name = "kdv"

    def __init__(self, eta: float = 1.0, mu: float = 0.022) -> None:
        self.eta = check_positive("eta", eta)
        self.mu = check_positive("mu", mu)
        self.parameters = {"eta": self.eta, "mu": self.mu}
        # solitons have width ∝ μ/√η and speed ∝ η; at least what cos πx and its harmonics need
        self._sharpness = max(0.3, math.sqrt(self.eta) * 0.022 / self.mu)
        self._rate = max(1.0, self.eta) * self._sharpness
        if self._sharpness * self._rate > 8:
            raise PullbackError(
                f"There is no reference for eta={eta}, mu={mu}",
                "its solitons are too narrow and fast for a solution within a minute",
                "Choose mu ≥ 0.022·√eta/3",
            )

    def resolution(self, coarse: bool) -> Resolution:
        factor = _coarsening(coarse)
        panels = math.ceil(100 * self._rate)
        edges = np.linspace(0, 1, panels // factor + 1)
        longest = factor / (16 * STORED.degree * panels)
        modes = 256
        if coarse:
            modes = 160
        return Resolution(math.ceil(modes * self._sharpness), edges, longest)

    def equation(self, modes: int) -> tuple[Array, Array]:
        wave = math.pi * np.arange(modes)
        start = np.zeros(modes, dtype=complex)
        start[1] = -0.5  # cos πx = −cos π(x+1)
        return 1j * self.mu**2 * wave**3, start

    def nonlinear(self, c: Array) -> Array:
        return -0.5j * self.eta * math.pi * np.arange(len(c)) * _square(c)


class KuramotoSivashinsky(Pseudospectral):
    """u_t + 100ε u u_x + 100ε² u_xx + 100ε⁴ u_xxxx = 0 on [0, 2π], ε = 1/16.

    From cos x (1 + sin x). In x/ε and 100t the coefficients are 1. The equation is chaotic: from
    t = ½ to 1 differences grow some fiftyfold, those of this solution among them.
    """

    name = "kuramoto-sivashinsky"

    def __init__(self, time: float = 0.5) -> None:
        self.time = check_positive("time", time)
        if time > 1:
            raise PullbackError(
                f"There is no reference for time={time}",
                "the equation is chaotic, and round-off would grow too large",
                "Choose time ≤ 1",
            )
        self.domain = ((0.0, 2 * math.pi), (0.0, self.time))
        self.parameters = {"time": self.time}

    def resolution(self, coarse: bool) -> Resolution:
        factor = _coarsening(coarse)
        edges = np.linspace(0, self.time, math.ceil(200 * self.time / factor) + 1)
        modes = 224
        if coarse:
            modes = 160
        return Resolution(modes, edges, factor * 4e-5)

    def equation(self, modes: int) -> tuple[Array, Array]:
        scaled = np.arange(modes) / 16
        start = np.zeros(modes, dtype=complex)
        # cos x + ½ sin 2x
        start[1] = 0.5
        start[2] = -0.25j
        return 100 * (scaled**2 - scaled**4), start

    def nonlinear(self, c: Array) -> Array:
        return -50j / 16 * np.arange(len(c)) * _square(c)


def _square(c: Array) -> Array:
    """Coefficients of u² from those of u, dealiased: 3/2 as many points as u needs."""
    n = scipy.fft.next_fast_len(3 * len(c), real=True)
    u = np.asarray(scipy.fft.irfft(c, n)) * n
    return np.asarray(scipy.fft.rfft(u * u))[: len(c)] / n


class GrayScott(Pseudospectral):
    """u_t = D u_xx + 40(1 − u) − 1000uv², v_t = ½D v_xx − 100v + 1000uv² on [−1, 1].

    From u = 1 − ½b, v = ¼b with the bump b = e^{−10(1 − cos πx)}. Both are even: cosines.
    """

    outputs = 2
    name = "gray-scott"

    def __init__(self, diffusion: float = 0.2, time: float = 0.5) -> None:
        self.diffusion = check_positive("diffusion", diffusion)
        self.time = check_positive("time", time)
        self.domain = ((-1.0, 1.0), (0.0, self.time))
        self.parameters = {"diffusion": self.diffusion, "time": self.time}
        if time > 2 or not 0.05 <= diffusion <= 5:
            raise PullbackError(
                f"There is no reference for diffusion={diffusion}, time={time}",
                "its pulses are too narrow, or the time too long, for a solution within a minute",
                "Choose 0.05 ≤ diffusion ≤ 5 and time ≤ 2",
            )

    def resolution(self, coarse: bool) -> Resolution:
        factor = _coarsening(coarse)
        edges = np.linspace(0, self.time, math.ceil(100 * self.time / factor) + 1)
        modes = 192
        if coarse:
            modes = 128
        sharpness = max(0.5, math.sqrt(0.2 / self.diffusion))
        return Resolution(math.ceil(modes * sharpness) + 1, edges, factor * 8e-5)

    def equation(self, modes: int) -> tuple[Array, Array]:
        bump = np.exp(-10 * (1 - np.cos(math.pi * np.linspace(-1, 0, modes))))
        smooth = self.diffusion * (math.pi * np.arange(modes)) ** 2
        start = np.stack([_to_cosines(1 - 0.5 * bump), _to_cosines(0.25 * bump)])
        return -np.stack([smooth + 40, 0.5 * smooth + 100]), start

    def nonlinear(self, c: Array) -> Array:
        u, v = (_from_cosines(field) for field in c)
        reaction = 1000 * _to_cosines(u * v * v)
        fed = -reaction
        fed[0] += 40
        return np.stack([fed, reaction])
