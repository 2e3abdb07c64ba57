"""Blow-up of Burgers' equation u_t + u u_x = 0: its self-similar profile, with unknown exponent.

u = (1 − t)^λ U(x / (1 − t)^(1 + λ)) blows up at t = 1, with λU = ((1 + λ)y + U) U'. For every λ
there is a profile y + U + C·|U|^(1/λ)·U = 0, and those with λ = 1/2, 1/4, 1/6, … are smooth. They
differ by what vanishes at y = 0: U‴ does for all but the first. So U‴(0) = 6 and U'(0) = −1 fix the
scales and choose λ = 1/2, y + U + U³ = 0. With the value at y = −2 in place of U‴(0), one start of
three found 1/4. The third derivative of the equation holds for smooth profiles alone: it is one
more equation near 0.
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


def main(steps: int = 200, width: int = 20, seed: int = 0) -> float:
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
            pde.Equation(lambda u: u.yyy - 6, on=center, name="first profile"),
        ],
        unknowns={"lam": 0.4},
        exact=lambda y: -2 / 3**0.5 * torch.sinh(torch.asinh(y * 27**0.5 / 2) / 3),
        name="Blow-up of Burgers",
    )
    network = pde.Symmetric(pde.mlp(1, width, width, 1, seed=seed), axis=0, sign=-1)
    solution = pde.solve(problem, network, points=300, steps=steps, progress=False)
    print(solution)
    exponent = solution.unknowns["lam"]
    order = max(1, round(0.5 / exponent)) if exponent > 0 else 1
    exact = 1 / (2 * order)
    print(f"smooth profile {order}: exponent 1/{2 * order}, up to {abs(exponent - exact):.0e}")
    return abs(exponent - 0.5)


if __name__ == "__main__":
    main()
