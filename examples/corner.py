"""Δu = 0 on an L-shaped domain with given boundary values: singular functions beside the network.

At the corner that points inward, of angle 3π/2, u is a series in sₙ = r^(2n/3) sin(2nφ/3), and the
gradient of s₁ is infinite. No network follows that, whatever its points are. So u is Σ kₙ sₙ + w
for n = 1, 2. The sₙ are harmonic, so that the equation of w does not contain them; its
boundary values do. The intensities kₙ are unknowns.
For a corner of another angle ω write π/ω for 2/3.
"""

import math

import torch

import pullback as pb

pde = pb.pde
CORNERS = [(0, 0), (1, 0), (1, 1), (-1, 1), (-1, -1), (0, -1)]


def singular(n, x, y):
    """r^(2n/3) sin(2nφ/3)."""
    angle = torch.remainder(torch.atan2(y, x), 2 * math.pi)
    return (x**2 + y**2) ** (n / 3) * torch.sin(2 * n / 3 * angle)


def compute_u(w, k1, k2, x, y):
    """The solution, from its smooth part and the intensities."""
    return w + k1 * singular(1, x, y) + k2 * singular(2, x, y)


def exact(x, y):
    """The solution whose boundary values are given: intensities 1 and 1/2."""
    return compute_u(torch.exp(x) * torch.sin(y), 1.0, 0.5, x, y)


def main(steps: int = 80, points: int = 400) -> float:
    """Solve, and return the largest error of u inside."""
    domain = pde.Polygon(CORNERS)

    def boundary(w, k1, k2, x, y):
        return compute_u(w, k1, k2, x, y) - exact(x, y)

    problem = pde.Problem(
        domain,
        [
            pde.Equation(lambda w: w.laplacian),
            pde.Equation(boundary, on=domain.boundary, weight=100, points=300, name="boundary"),
        ],
        fields=("w",),
        unknowns={"k1": 0.0, "k2": 0.0},
    )
    network = pde.mlp(2, 20, 1, seed=0)
    solution = pde.solve(problem, network, points=points, steps=steps, progress=False)
    print(solution)
    points_inside = domain.sample(1000, "uniform", seed=1).x
    x, y = points_inside.T
    u = compute_u(solution(points_inside)[:, 0], **solution.unknowns, x=x, y=y)
    error = float((u - exact(x, y)).abs().max())
    print(f"intensity k₁ = {solution.unknowns['k1']:.9f}, largest error {error:.0e}")
    return error


if __name__ == "__main__":
    main()
