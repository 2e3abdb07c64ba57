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


def boundary_layer(width: float = 0.02) -> pde.Problem:
    """−εu'' + u' = 1 with a layer of width ε."""
    return pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u: -width * u.xx + u.x - 1), pde.Dirichlet(0.0)],
        exact=lambda x: x - torch.exp((x - 1) / width) * (1 - torch.exp(-x / width)),
        name=f"boundary layer {width:g}",
    )


def bose_einstein() -> pde.Problem:
    """−u''/2 + x²u/2 + 50u³ = μu with ∫u² = 1, from μ = 1: the true one is 8.9."""
    reference = CondensateReference(coupling=50.0, half_width=8.0)
    return pde.Problem(
        pde.Interval(-8, 8),
        [
            pde.Equation(lambda u, x, mu: -u.xx / 2 + x**2 * u / 2 + 50 * u**3 - mu * u),
            pde.Dirichlet(0.0),
            pde.Integral(lambda u: u**2, 1.0),
        ],
        unknowns={"mu": 1.0},
        reference=reference,
        name="Bose–Einstein condensate",
    )


class CondensateReference:
    """The ground state of a condensate by Newton's method on Chebyshev points.

    Args:
        coupling: factor of u³.
        half_width: of the interval.
    """

    def __init__(self, coupling: float, half_width: float, nodes: int = 160) -> None:
        angles = pi * np.arange(nodes + 1) / nodes
        self._nodes = half_width * np.cos(angles)
        self._half_width = half_width
        first = _differentiate_on_chebyshev_points(nodes) / half_width
        second = (first @ first)[1:-1, 1:-1]
        x = self._nodes[1:-1]
        weights = half_width * pi / nodes * np.sin(angles[1:-1])
        chemical_potential = 0.5 * (1.5 * coupling) ** (2 / 3)  # of Thomas and Fermi
        u = np.sqrt(np.maximum(chemical_potential - x**2 / 2, 1e-3 * np.exp(-(x**2))) / coupling)
        for _ in range(50):
            operator = -second / 2 + np.diag(x**2 / 2 + coupling * u**2 - chemical_potential)
            residual = np.append(operator @ u, (weights @ u**2 - 1) / 2)
            jacobian = np.zeros((nodes, nodes))
            jacobian[:-1, :-1] = operator + np.diag(2 * coupling * u**2)
            jacobian[:-1, -1] = -u
            jacobian[-1, :-1] = weights * u
            step = np.linalg.solve(jacobian, -residual)
            u = u + step[:-1]
            chemical_potential += step[-1]
        self._values = np.concatenate([[0.0], u, [0.0]])
        self.chemical_potential = float(chemical_potential)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the state at points (N, 1)."""
        coefficients = np.polynomial.chebyshev.chebfit(
            self._nodes / self._half_width, self._values, len(self._nodes) - 1
        )
        scaled = x[:, :1].cpu().double().numpy() / self._half_width
        return torch.from_numpy(np.polynomial.chebyshev.chebval(scaled, coefficients)).to(x)


def _differentiate_on_chebyshev_points(count: int) -> np.ndarray:
    """Return the matrix that differentiates values at cos(πj/count), (count + 1, count + 1)."""
    points = np.cos(pi * np.arange(count + 1) / count)
    ends = np.ones(count + 1)
    ends[[0, -1]] = 2.0
    signs = ends * (-1.0) ** np.arange(count + 1)
    differences = points[:, None] - points[None, :] + np.eye(count + 1)
    matrix = np.outer(signs, 1 / signs) / differences
    return matrix - np.diag(matrix.sum(1))


def naive_interface() -> pde.Problem:
    """(a u')' = −1 with a = 1 on the left and 10 on the right, written as a u'' = −1.

    That leaves out the jump of u', so its smooth solution is another one.
    """

    def coefficient(x: Tensor) -> Tensor:
        return torch.where(x < 0.5, 1.0, 10.0)

    def exact(x: Tensor) -> Tensor:
        flux = 13 / 44  # a u' at 0, so that u(1) = 0
        left = flux * x - x**2 / 2
        middle = flux / 2 - 1 / 8
        right = middle + (flux * (x - 0.5) - (x**2 - 0.25) / 2) / 10
        return torch.where(x < 0.5, left, right)

    return pde.Problem(
        pde.Interval(0, 1),
        [pde.Equation(lambda u, x: coefficient(x) * u.xx + 1), pde.Dirichlet(0.0)],
        exact=exact,
        name="interface in one field",
    )


def two_constants() -> pde.Problem:
    """u_t = κu_xx − ρu with measurements of 1 % noise; κ = 0.1 and ρ = 0.5 are to be found."""

    def exact(x: Tensor, t: Tensor) -> Tensor:
        slow = torch.exp(-(0.1 * pi**2 + 0.5) * t) * torch.sin(pi * x)
        fast = torch.exp(-(0.9 * pi**2 + 0.5) * t) * torch.sin(3 * pi * x)
        return slow + fast / 2

    domain = pde.SpaceTime(pde.Interval(0, 1), (0, 1))
    generator = torch.Generator().manual_seed(0)
    points = domain.sample(200, "sobol", seed=5).x
    noise = 0.01 * torch.randn(len(points), generator=generator, dtype=torch.float64)
    values = exact(points[:, 0], points[:, 1])
    return pde.Problem(
        domain,
        [
            pde.Equation(lambda u, kappa, rho: u.t - kappa * u.xx + rho * u),
            pde.Dirichlet(0.0),
            pde.Initial(lambda x: exact(x, torch.zeros_like(x))),
            pde.Data(points, values + noise),
        ],
        unknowns={"kappa": 1.0, "rho": 0.0},
        exact=exact,
        name="two constants",
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


def clamped_plate(boundary_weight: float | None = None) -> pde.Problem:
    """Δ²u = f with u = ∂u/∂n = 0 on the square; the boundary is balanced unless it has a weight."""

    def load(x: Tensor, y: Tensor) -> Tensor:
        cos_x = torch.cos(2 * pi * x)
        cos_y = torch.cos(2 * pi * y)
        return 4 * pi**4 * (4 * cos_x * cos_y - cos_x - cos_y)

    return pde.Problem(
        pde.Box([(0, 1), (0, 1)]),
        [
            pde.Equation(lambda u, x, y: u.xxxx + 2 * u.xxyy + u.yyyy - load(x, y)),
            pde.Dirichlet(0.0, weight=boundary_weight),
            pde.Neumann(0.0, weight=boundary_weight),
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
#: those with which solvers by defaults were stuck
STUCK: dict[str, Callable[[], pde.Problem]] = {
    "biharmonic": lambda: clamped_plate(boundary_weight=1.0),
    "bose-einstein": bose_einstein,
    "heat-space": lambda: pde.Heat(3),
    "naive-interface": naive_interface,
    "thin-layer": lambda: boundary_layer(1e-3),
    "two-constants": two_constants,
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
#: groups of problems by what they were chosen for
KINDS = {"unstable": UNSTABLE, "stuck": STUCK, "further": OTHERS, "ready": READY}
PROBLEMS = {**UNSTABLE, **STUCK, **OTHERS, **READY}
