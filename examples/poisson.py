"""Poisson's equation on a disk with a hole: state it, solve it, look at it.

−Δu = 1 between the circles of radius 1 and ½. On the outer one u = 0, on the inner one nothing
flows out: ∂u/∂n = 0. The solution depends on the radius alone: u = (1 − r²)/4 + log(r)/8.
"""

from pathlib import Path

import torch
from torch import Tensor

import pullback as pb


def exact(points: Tensor) -> Tensor:
    """The solution, (N,)."""
    r = points.norm(dim=1)
    return (1 - r**2) / 4 + torch.log(r) / 8


def main(steps: int = 200, out: str | Path | None = None) -> float:
    """Solve, write the picture to `out` if given, and return the relative L2 error."""
    ring = pb.pde.Disk((0, 0), 1.0) - pb.pde.Disk((0, 0), 0.5)
    outer = ring.boundary.where(lambda x: x.norm(dim=1) > 0.75)
    inner = ring.boundary.where(lambda x: x.norm(dim=1) < 0.75)
    problem = pb.pde.Problem(
        ring,
        [
            pb.pde.Equation(lambda u: u.laplacian + 1),
            pb.pde.Dirichlet(0.0, on=outer, weight=100),
            pb.pde.Neumann(0.0, on=inner, weight=100),
        ],
        exact=exact,
        name="Poisson on a ring",
    )
    network = pb.pde.mlp(2, 16, 16, 1, seed=0)
    solution = pb.pde.solve(problem, network, points=500, steps=steps, tol=2e-5)
    print(solution)
    if out is not None:
        solution.plot(out)
    return solution.error


if __name__ == "__main__":
    main(out="poisson.png")
