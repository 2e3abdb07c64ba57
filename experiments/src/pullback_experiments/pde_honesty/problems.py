"""Problems with known solutions on which estimates of the error are tried.

Half of them amplify small violations, are stiff, or have parts of very different sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from pullback import pde

from ..problems import AllenCahn, KdV

pi = math.pi


def at_start(domain: Any) -> Any:
    """Return the beginning of an interval of time."""
    return domain.face("t", "low")


@dataclass(frozen=True)
class OrdinaryProblem:
    """u' = slope(u), u(0) = start, with a reference by an integrator of eighth order.

    Attributes:
        name: of the problem.
        slope: of the fields by the fields.
        start: initial values by field.
        end: the last time.
    """

    name: str
    slope: Callable[..., Sequence[Any]]
    start: dict[str, float]
    end: float

    def build(self) -> pde.Problem:
        """Return the problem, with the integrator's solution as the reference."""
        names = list(self.start)
        slope = self.slope

        def residual(**arguments: Any) -> list[Any]:
            fields = [arguments[name] for name in names]
            return [u.t - s for u, s in zip(fields, slope(*fields), strict=True)]

        equation = pde.Equation(residual)
        initial = [pde.Dirichlet(value, field=n, on=at_start) for n, value in self.start.items()]
        return pde.Problem(
            pde.Interval(0, self.end, name="t"),
            [equation, *initial],
            fields=tuple(names),
            reference=self._integrate(),
            name=self.name,
        )

    def _integrate(self) -> Callable[[Tensor], Tensor]:
        outcome = solve_ivp(
            lambda t, u: np.array(self.slope(*u)),
            (0, self.end),
            list(self.start.values()),
            method="DOP853",
            rtol=1e-12,
            atol=1e-14,
            dense_output=True,
        )
        return lambda x: torch.from_numpy(outcome.sol(x[:, 0].cpu().numpy()).T).to(x)


def epidemic() -> pde.Problem:
    """SIR with few infected: they grow by exp(0.2 t) at first."""
    return OrdinaryProblem(
        "epidemic",
        lambda s, i: (-0.3 * s * i, 0.3 * s * i - 0.1 * i),
        {"s": 1 - 1e-4, "i": 1e-4},
        80.0,
    ).build()


def lorenz() -> pde.Problem:
    """The chaotic system of Lorenz."""
    return OrdinaryProblem(
        "Lorenz",
        lambda a, b, c: (10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c),
        {"a": 1.0, "b": 1.0, "c": 1.0},
        2.0,
    ).build()


def van_der_pol() -> pde.Problem:
    """Relaxation oscillations, stiff for large parameters."""
    return OrdinaryProblem(
        "van der Pol",
        lambda u, v: (v, 10 * (1 - u * u) * v - u),
        {"u": 2.0, "v": 0.0},
        20.0,
    ).build()


def logistic() -> pde.Problem:
    """u' = u(1 − u) from 1e-6: growth for fourteen times, then saturation."""
    return OrdinaryProblem("logistic", lambda u: (u * (1 - u),), {"u": 1e-6}, 40.0).build()


def lotka_volterra() -> pde.Problem:
    """Predators and prey."""
    return OrdinaryProblem(
        "Lotka–Volterra",
        lambda u, v: (u * (1.5 - v), v * (u - 3.0)),
        {"u": 10.0, "v": 5.0},
        3.0,
    ).build()


def unlike_sizes() -> pde.Problem:
    """Two oscillators, one of them 1e-8 times the other."""
    return OrdinaryProblem(
        "unlike sizes",
        lambda u, v, p, q: (v, -u, 2 * q, -2 * p),
        {"u": 1.0, "v": 0.0, "p": 1e-8, "q": 0.0},
        6.0,
    ).build()


def decay() -> pde.Problem:
    """u' = −25 u: at the end it is 1e-11 of its start."""
    return pde.Problem(
        pde.Interval(0, 1, name="t"),
        [pde.Equation(lambda u: u.t + 25 * u), pde.Dirichlet(1.0, on=at_start)],
        exact=lambda t: torch.exp(-25 * t),
        name="decay",
    )


def falling_upwards() -> pde.Problem:
    """u'' = u with the decaying solution; what is off grows by eᵗ."""
    return pde.Problem(
        pde.Interval(0, 12, name="t"),
        [
            pde.Equation(lambda u: u.tt - u),
            pde.Dirichlet(1.0, on=at_start),
            pde.Equation(lambda u: u.t + 1, on=at_start, name="slope"),
        ],
        exact=lambda t: torch.exp(-t),
        name="u'' = u",
    )


def prothero_robinson() -> pde.Problem:
    """A stiff equation with a smooth solution."""
    return pde.Problem(
        pde.Interval(0, 3, name="t"),
        [
            pde.Equation(lambda u, t: u.t + 1e4 * (u - torch.cos(t)) + torch.sin(t)),
            pde.Dirichlet(1.0, on=at_start),
        ],
        exact=lambda t: torch.cos(t),
        name="Prothero–Robinson",
    )


def backward_heat() -> pde.Problem:
    """u_t = −u_xx: the n-th wave grows by exp(n²π²t)."""
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 0.3)),
        [
            pde.Equation(lambda u: u.t + u.xx),
            pde.Dirichlet(0.0),
            pde.Initial(lambda x: torch.sin(pi * x)),
        ],
        exact=lambda x, t: torch.exp(pi**2 * t) * torch.sin(pi * x),
        name="backward heat",
    )


def growing_wave() -> pde.Problem:
    """u_t + u_x = 4u, from the left."""
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 2)),
        [
            pde.Equation(lambda u: u.t + u.x - 4 * u),
            pde.Dirichlet(
                lambda t: torch.exp(4 * t) * torch.cos(t), on=lambda d: d.face("x", "low")
            ),
            pde.Initial(lambda x: torch.cos(x)),
        ],
        exact=lambda x, t: torch.exp(4 * t) * torch.cos(x - t),
        name="growing wave",
    )


def hidden_mode() -> pde.Problem:
    """u_t = 0.1u_xx + 8u from a decaying third wave: the first one grows where it is off."""
    rate = 9 * 0.1 * pi**2 - 8

    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 2)),
        [
            pde.Equation(lambda u: u.t - 0.1 * u.xx - 8 * u),
            pde.Dirichlet(0.0),
            pde.Initial(lambda x: torch.sin(3 * pi * x)),
        ],
        exact=lambda x, t: torch.exp(-rate * t) * torch.sin(3 * pi * x),
        name="hidden mode",
    )


def kuramoto_sivashinsky() -> pde.Problem:
    """The linear part u_t = −u_xx − u_xxxx, whose wave sin(x/√2) grows by e^(t/4)."""
    length = 2 * pi * 2**0.5
    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, length), (0, 6)),
        [
            pde.Equation(lambda u: u.t + u.xx + u.xxxx),
            pde.Periodic("x", order=3),
            pde.Initial(lambda x: torch.sin(x / 2**0.5)),
        ],
        exact=lambda x, t: torch.exp(t / 4) * torch.sin(x / 2**0.5),
        name="Kuramoto–Sivashinsky, linear",
    )


def fisher() -> pde.Problem:
    """The travelling wave of Ablowitz and Zeppetella into an unstable state."""

    def exact(x: Tensor, t: Tensor) -> Tensor:
        return (1 + torch.exp((x - 5 * t / 6**0.5) / 6**0.5)) ** -2

    return pde.Problem(
        pde.SpaceTime(pde.Interval(-10, 20), (0, 4)),
        [
            pde.Equation(lambda u: u.t - u.xx - u * (1 - u)),
            pde.Dirichlet(exact),
            pde.Initial(lambda x: exact(x, torch.zeros_like(x))),
        ],
        exact=exact,
        name="Fisher–KPP",
    )


def boundary_layer() -> pde.Problem:
    """−0.02u'' + u' = 1 with a layer of width 0.02."""
    width = 0.02
    return pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u: -width * u.xx + u.x - 1), pde.Dirichlet(0.0)],
        exact=lambda x: x - torch.exp((x - 1) / width) * (1 - torch.exp(-x / width)),
        name="boundary layer",
    )


def total_mass() -> pde.Problem:
    """Diffusion without flux whose mass is given: the mean is known by an integral alone."""
    return pde.Problem(
        pde.Interval(0, 1),
        [
            pde.Equation(lambda u, x: u.xx + pi**2 * torch.cos(pi * x)),
            pde.Neumann(0.0),
            pde.Integral(lambda u: u, 2.0),
        ],
        exact=lambda x: torch.cos(pi * x) + 2.0,
        name="total mass",
    )


def clamped_plate() -> pde.Problem:
    """Δ²u = f with u = ∂u/∂n = 0 on the square."""

    def load(x: Tensor, y: Tensor) -> Tensor:
        cos_x = torch.cos(2 * pi * x)
        cos_y = torch.cos(2 * pi * y)
        return 4 * pi**4 * (4 * cos_x * cos_y - cos_x - cos_y)

    return pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [
            pde.Equation(lambda u, x, y: u.xxxx + 2 * u.xxyy + u.yyyy - load(x, y)),
            pde.Dirichlet(0.0),
            pde.Neumann(0.0),
        ],
        exact=lambda x, y: (torch.sin(pi * x) * torch.sin(pi * y)) ** 2,
        name="clamped plate",
    )


def channel() -> pde.Problem:
    """Flow in a channel: the velocity across it is zero."""

    def profile(y: Tensor) -> Tensor:
        return 4 * y * (1 - y)

    return pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [
            pde.Equation(
                lambda u, v, p: (
                    u * u.x + v * u.y + p.x - 0.1 * u.laplacian,
                    u * v.x + v * v.y + p.y - 0.1 * v.laplacian,
                    u.x + v.y,
                )
            ),
            pde.Dirichlet(profile, field="u"),
            pde.Dirichlet(0.0, field="v"),
        ],
        fields=("u", "v", "p"),
        free=("p",),
        exact=lambda x, y: (profile(y), 0 * x, -0.8 * (x - 0.5)),
        name="channel flow",
    )


def bratu() -> pde.Problem:
    """u'' + eᵘ = 0 with the lower of two solutions."""
    theta = 1.5171645990507543
    return pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u: u.xx + torch.exp(u.value)), pde.Dirichlet(0.0)],
        exact=lambda x: -2 * torch.log(torch.cosh((x - 0.5) * theta / 2) / math.cosh(theta / 4)),
        name="Bratu",
    )


def heat_in_the_plane() -> pde.Problem:
    """The heat equation in two dimensions and time."""
    return pde.Heat(2)


def klein_gordon() -> pde.Problem:
    """u_tt − u_xx + u³ = f with the solution x cos 3t."""

    def source(x: Tensor, t: Tensor) -> Tensor:
        u = x * torch.cos(3 * t)
        return -9 * u + u**3

    return pde.Problem(
        pde.SpaceTime(pde.Interval(0, 1), (0, 2)),
        [
            pde.Equation(lambda u, x, t: u.tt - u.xx + u**3 - source(x, t)),
            pde.Dirichlet(lambda x, t: x * torch.cos(3 * t)),
            pde.Initial(lambda x: x, velocity=0.0),
        ],
        exact=lambda x, t: x * torch.cos(3 * t),
        name="Klein–Gordon",
    )


def stokes_in_a_disk() -> pde.Problem:
    """Stokes flow with the stream function (1 − r²)²/4 and pressure x."""

    def velocity(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        factor = 1 - x**2 - y**2
        return -y * factor, x * factor

    return pde.Problem(
        pde.Disk(),
        [
            pde.Equation(
                lambda u, v, p, x, y: (
                    -u.laplacian + p.x + 8 * y - 1,
                    -v.laplacian + p.y - 8 * x,
                    u.x + v.y,
                )
            ),
            pde.Dirichlet(0.0, field="u"),
            pde.Dirichlet(0.0, field="v"),
        ],
        fields=("u", "v", "p"),
        free=("p",),
        exact=lambda x, y: (*velocity(x, y), x),
        name="Stokes in a disk",
    )


#: those that amplify violations, are stiff or have parts of very different sizes
UNSTABLE: dict[str, Callable[[], pde.Problem]] = {
    "epidemic": epidemic,
    "lorenz": lorenz,
    "van-der-pol": van_der_pol,
    "logistic": logistic,
    "unlike-sizes": unlike_sizes,
    "decay": decay,
    "falling-upwards": falling_upwards,
    "prothero-robinson": prothero_robinson,
    "backward-heat": backward_heat,
    "growing-wave": growing_wave,
    "hidden-mode": hidden_mode,
    "kuramoto-sivashinsky": kuramoto_sivashinsky,
}
OTHERS: dict[str, Callable[[], pde.Problem]] = {
    "fisher": fisher,
    "boundary-layer": boundary_layer,
    "total-mass": total_mass,
    "clamped-plate": clamped_plate,
    "channel": channel,
    "bratu": bratu,
    "heat-plane": heat_in_the_plane,
    "klein-gordon": klein_gordon,
    "lotka-volterra": lotka_volterra,
    "stokes-disk": stokes_in_a_disk,
}

READY: dict[str, Callable[[], pde.Problem]] = {
    "poisson1d": lambda: pde.Poisson(1),
    "poisson2d": lambda: pde.Poisson(2),
    "poisson5d": lambda: pde.Poisson(5),
    "heat1d": lambda: pde.Heat(1),
    "heat4d": lambda: pde.Heat(4),
    "burgers": lambda: pde.Burgers(0.05),
    "wave": lambda: pde.Wave(),
    "convection": lambda: pde.Convection(beta=5.0),
    "helmholtz": lambda: pde.Helmholtz(),
    "kovasznay": lambda: pde.Kovasznay(),
    "schroedinger": lambda: pde.Schroedinger(),
    "allen-cahn": lambda: AllenCahn(),
    "kdv": lambda: KdV(initial_weight=100),
}
PROBLEMS = {**UNSTABLE, **OTHERS, **READY}
