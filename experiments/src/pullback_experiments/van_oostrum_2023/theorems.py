"""Theorems 1 and 2, Proposition 2 and section 4, on random maps with superfluous parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import jacrev

from pullback.geometry import MoorePenrose, Point, RandomInverse, WeightedNorm
from pullback.solvers import Cholesky, Solver

from ..framework.experiment import Context
from ..framework.records import Record

DAMPED = "damped"


@dataclass(frozen=True)
class RandomModelSizes:
    """The dimensions of a random map φ, whose differential has not full rank."""

    #: of the parameters
    inputs: int = 8
    #: through which the map goes: its rank
    inner: int = 3
    #: of the space that the model lies in
    outputs: int = 5


SIZES = RandomModelSizes()
#: the generalized inverses, and what is none
INVERSES: dict[str, Callable[[int], Solver]] = {
    "Moore–Penrose": lambda seed: MoorePenrose(1e-10),
    "random": lambda seed: RandomInverse(seed, scale=3.0),
    "weighted": lambda seed: WeightedNorm(
        torch.linspace(0.2, 5.0, SIZES.inputs, dtype=torch.float64)
    ),
    DAMPED: lambda seed: Cholesky(damping=1e-2),
}


class RandomModel:
    """φ: R⁸ → (R⁵, g) of rank 3, f on R⁸, L on R⁵; all random, in float64.

    Attributes:
        theta, xi: f(θ) = ξ.
        metric: g, symmetric and positive definite.
    """

    def __init__(self, context: Context) -> None:
        source = torch.Generator().manual_seed(context.seed)

        def draw(*shape: int) -> Tensor:
            matrix = torch.randn(*shape, generator=source, dtype=torch.float64)
            return matrix.to(context.device)

        self.seed = context.seed
        self._b = draw(SIZES.inner, SIZES.inputs)
        self._c = draw(SIZES.outputs, SIZES.inner)
        self._mix = torch.linalg.qr(draw(SIZES.inputs, SIZES.inputs))[0]
        root = draw(SIZES.outputs, SIZES.outputs)
        self.metric = root @ root.T + torch.eye(SIZES.outputs).to(root)
        self.theta = 0.5 * draw(SIZES.inputs)
        self.xi = self.f(self.theta)

    def phi(self, x: Tensor) -> Tensor:
        """Five functions of three combinations of the parameters."""
        return torch.tanh(self._c @ torch.sin(self._b @ x)) + 0.1 * (self._c @ (self._b @ x))

    def f(self, t: Tensor) -> Tensor:
        """θ ↦ ξ, a diffeomorphism: stretched by up to 5, turned, and bent."""
        stretch = torch.linspace(0.5, 2.5, SIZES.inputs).to(t)
        return self._mix @ (stretch * (t + t**3 / 3))

    def psi(self, t: Tensor) -> Tensor:
        """φ∘f."""
        return self.phi(self.f(t))

    @staticmethod
    def loss(z: Tensor) -> Tensor:
        """L, on R⁵."""
        return (z**3).sum() / 3 + z[0] * z[1] + z[2]

    def points(self) -> tuple[Point, Point]:
        """φ at ξ and ψ at θ."""
        return Point(self.phi, self.xi, self.metric), Point(self.psi, self.theta, self.metric)

    def project_gradient(self) -> Tensor:
        """Return Π grad L by a dense projector that shares no code with `Point`."""
        jacobian = jacrev(self.phi)(self.xi)
        u, sigma, _ = torch.linalg.svd(jacobian, full_matrices=False)
        basis = u[:, sigma > 1e-9 * sigma[0]]
        slope = jacrev(self.loss)(self.phi(self.xi))
        return basis @ torch.linalg.solve(basis.T @ self.metric @ basis, basis.T @ slope)


def _relative(one: Tensor, two: Tensor) -> float:
    return float((one - two).norm() / two.norm())


def _coefficients(point: Point, solver: Solver) -> Tensor:
    gradient = point.natural_gradient(RandomModel.loss, solver)
    assert isinstance(gradient, Tensor)
    return gradient


def theorems(context: Context) -> Record:
    """By inverse: how far dφ·G⁻∇L is from Π grad L, from ψ's move, and df·x from x, relative."""
    scene = RandomModel(context)
    one, two = scene.points()
    truth = scene.project_gradient()
    jacobian = jacrev(scene.f)(scene.theta)
    projection = {}
    model = {}
    space = {}
    for name, make in INVERSES.items():
        coefficients, other = (_coefficients(p, make(scene.seed)) for p in (one, two))
        push = one.pushforward(coefficients)
        projection[name] = _relative(push, truth)
        model[name] = _relative(two.pushforward(other), push)
        space[name] = _relative(jacobian @ other, coefficients)
    still = Point(lambda t: scene.phi(scene.xi + t**3), torch.zeros_like(scene.xi), scene.metric)
    nothing = still.pushforward(_coefficients(still, MoorePenrose(1e-10)))
    return {
        "projection": projection,
        "model": model,
        "space": space,
        "cubic": float(nothing.norm() / truth.norm()),
    }


def steps(sizes: Sequence[float], context: Context) -> Record:
    """‖φ(ξ − ηx) − ψ(θ − ηx')‖ over how far φ moved, for every η: Moore–Penrose and damped."""
    scene = RandomModel(context)
    differences = {}
    one, two = scene.points()
    for name in ("Moore–Penrose", DAMPED):
        coefficients, other = (_coefficients(p, INVERSES[name](scene.seed)) for p in (one, two))
        ends = []
        for eta in sizes:
            first_point = scene.phi(scene.xi - eta * coefficients)
            second_point = scene.psi(scene.theta - eta * other)
            ends.append(
                float((first_point - second_point).norm() / (first_point - one.value).norm())
            )
        differences[name] = ends
    return {"size": list(sizes), "apart": differences}
