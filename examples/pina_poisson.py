"""−Δu = 2π² sin πx sin πy on the unit square, written for PINA and trained by the natural gradient.

The problem, the points and the model are PINA's; `train_pina` takes the place of its `Trainer`.
Needs `pip install pina-mathlab`.
"""

import math
from typing import ClassVar

import torch
from pina import Condition, LabelTensor
from pina.domain import CartesianDomain
from pina.equation import Equation
from pina.equation.zoo import FixedValue
from pina.model import FeedForward
from pina.operator import laplacian
from pina.problem import SpatialProblem
from pina.solver import PhysicsInformedSingleModelSolver
from pina.weighting import ScalarWeighting

import pullback as pb

pi = math.pi


def sines(points: LabelTensor) -> LabelTensor:
    """The exact solution."""
    return torch.sin(pi * points.extract(["x"])) * torch.sin(pi * points.extract(["y"]))


def residual(points: LabelTensor, u: LabelTensor) -> torch.Tensor:
    """What must vanish inside."""
    return laplacian(u, points, components=["u"], d=["x", "y"]) + 2 * pi**2 * sines(points)


class Poisson(SpatialProblem):
    """As PINA's users write it."""

    output_variables: ClassVar = ["u"]
    spatial_domain = CartesianDomain({"x": [0, 1], "y": [0, 1]})
    domains: ClassVar = {"inside": spatial_domain, "walls": spatial_domain.partial()}
    conditions: ClassVar = {
        "inside": Condition(domain="inside", equation=Equation(residual)),
        "walls": Condition(domain="walls", equation=FixedValue(0.0)),
    }


def main(steps: int = 100) -> float:
    """Solve, and return the largest error at random points."""
    torch.manual_seed(0)
    problem = Poisson()
    problem.discretise_domain(200, "lh", domains=["inside"])
    problem.discretise_domain(60, "random", domains=["walls"])
    model = FeedForward(2, 1, inner_size=16, n_layers=1).double()
    weighting = ScalarWeighting({"walls": 100.0})
    solver = PhysicsInformedSingleModelSolver(problem, model, weighting=weighting)
    losses = pb.pde.adapters.train_pina(solver, steps)
    print(f"loss {losses[0]:.1e} before, {losses[-1]:.1e} after {steps} steps")

    points = LabelTensor(torch.rand(1000, 2, dtype=torch.float64), ["x", "y"])
    error = float((solver(points) - sines(points)).abs().max().detach())
    print(f"error {error:.1e}")
    return error


if __name__ == "__main__":
    main()
