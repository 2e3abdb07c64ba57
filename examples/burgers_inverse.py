"""The viscosity of Burgers' equation, found from measured values of the solution.

u_t + u u_x = ν u_xx on [−1, 1] × [0, 1]. The initial and boundary values are known, ν is not; 50
values of the solution at ν = 0.1 are. An unknown coefficient is one more parameter of the solve.
"""

import math
from pathlib import Path

import torch

import pullback as pb
from pullback.pde.catalog.references import Burgers

TRUTH = 0.1


def main(steps: int = 60, noise: float = 0.0, out: str | Path | None = None) -> float:
    """Solve, write the picture to `out` if given, and return the viscosity that was found."""
    domain = pb.pde.SpaceTime(pb.pde.Interval(-1, 1), (0, 1))
    reference = Burgers(TRUTH)
    points = domain.sample(50, "sobol", seed=0).x
    values = reference(points)
    values = values + noise * torch.randn(values.shape, generator=torch.Generator().manual_seed(0))

    problem = pb.pde.Problem(
        domain,
        [
            pb.pde.Equation(lambda u, nu: u.t + u * u.x - nu * u.xx),
            pb.pde.Dirichlet(0.0),
            pb.pde.Initial(lambda x: -torch.sin(math.pi * x)),
            pb.pde.Data(points, values, weight=10),
        ],
        unknowns={"nu": 0.5},
        reference=reference,
        name="Burgers, unknown viscosity",
    )
    network = pb.pde.mlp(2, 16, 16, 1, seed=0)
    solution = pb.pde.solve(problem, network, points=600, steps=steps)
    print(solution)
    if out is not None:
        solution.plot(out)
    return solution.unknowns["nu"]


if __name__ == "__main__":
    main(out="burgers_inverse.png")
