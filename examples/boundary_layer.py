"""−ε u″ + u′ = 1 on (0, 1) with u(0) = u(1) = 0 and ε = 1e-4: a layer of width ε at x = 1.

Points and units of a plain network miss a layer that is 1/10,000 of the interval. Two things help,
whatever the equation: the network also sees s = exp((x − 1)/ε), a coordinate that varies in the
layer alone, and an equation of its own holds at points in the layer. Both scales are then of size
1. In the layer derivatives are of size 1/ε², so its equation is multiplied by ε.
"""

import torch
from torch import nn

import pullback as pb

pde = pb.pde
EPSILON = 1e-4


class Layered(nn.Module):
    """A network of x and of s = exp((x − 1)/ε)."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.network = pde.mlp(2, width, 1, seed=seed)

    def forward(self, x):
        return self.network(torch.cat([x, torch.exp((x - 1) * (1 / EPSILON))], 1))


def residual(u):
    """What must vanish."""
    return u.x - EPSILON * u.xx - 1


def exact(x):
    """The solution, up to exp(−1/ε), which is 0."""
    return x - torch.exp((x - 1) / EPSILON)


def main(steps: int = 80) -> float:
    """Solve, and return the largest error at points of both scales."""
    line = pde.Interval(0, 1)
    depth = torch.linspace(0, 25, 120, dtype=torch.float64)[1:]
    layer = pde.PointSet(1 - EPSILON * depth[:, None], names=("x",))
    problem = pde.Problem(
        line,
        [
            pde.Equation(residual),
            pde.Equation(lambda u: EPSILON * residual(u), on=layer, name="layer"),
            pde.Dirichlet(0.0, weight=100),
        ],
        exact=exact,
    )
    solution = pde.solve(problem, Layered(12, seed=0), points=120, steps=steps, progress=False)
    print(solution)
    x = torch.cat([torch.linspace(0, 1, 201, dtype=torch.float64), 1 - EPSILON * depth])
    error = float((solution(x[:, None])[:, 0] - exact(x)).abs().max())
    print(f"largest error {error:.1e}")
    return error


if __name__ == "__main__":
    main()
