"""Blow-up of Burgers' equation u_t + u u_x = 0: its self-similar profile, with unknown exponent.

u = (1 − t)^λ U(x / (1 − t)^(1 + λ)) blows up at t = 1, with λU = ((1 + λ)y + U) U'. For every λ
there is a profile; λ = 1/2 has the first one that is smooth, y + U + U³ = 0. At y = 0 the third
derivative of the equation is (2λ − 1) U‴ = 0, which holds for smooth profiles alone: it is one more
equation near 0. A slope of −1 and the value at −2 fix the scales. Other starts may find 1/4 or 1/6.
"""

import torch

import pullback as pb

pde = pb.pde


def profile(u, lam, y):
    """What must vanish everywhere."""
    return ((1 + lam) * y + u) * u.y - lam * u


def third_derivative(u, lam, y):
    """The third derivative of the profile's equation."""
    cubic = (3 + 2 * lam + 4 * u.y) * u.yyy
    return cubic + 3 * u.yy**2 + ((1 + lam) * y + u) * u.yyyy


def main(steps: int = 200, width: int = 20) -> float:
    """Solve, and return the error of the exponent."""
    line = pde.Interval(-2, 2, name="y")
    near = line.where(lambda points: points[:, 0].abs() < 0.5)
    center = pde.PointSet(torch.zeros(1, 1, dtype=torch.float64), names=("y",))
    problem = pde.Problem(
        line,
        [
            pde.Equation(profile),
            pde.Equation(third_derivative, on=near, weight=1e-4, name="smooth"),
            pde.Equation(third_derivative, on=center, name="cubic"),
            pde.Equation(lambda u: u.y + 1, on=center, weight=1e4, name="slope"),
            pde.Dirichlet(1.0, on=line.face("y", "low"), weight=100),
        ],
        unknowns={"lam": 0.4},
        exact=lambda y: -2 / 3**0.5 * torch.sinh(torch.asinh(y * 27**0.5 / 2) / 3),
        name="Blow-up of Burgers",
    )
    network = pde.Symmetric(pde.mlp(1, width, width, 1, seed=0), axis=0, sign=-1)
    solution = pde.solve(problem, network, points=300, steps=steps, progress=False)
    print(solution)
    error = abs(solution.unknowns["lam"] - 0.5)
    print(f"exponent 1/2, found up to {error:.0e}")
    return error


if __name__ == "__main__":
    main()
