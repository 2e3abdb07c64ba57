"""−u″ = f on (0, 1) with u(0) = u(1) = 0, by residuals that contain derivatives of the network.

The objective is a function of the parameter dict. It returns named residuals, here with a weight
on the boundary; the loss is half their weighted mean square. The exact solution is sin(πx).
"""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import pullback as pb


def main(steps: int = 60) -> float:
    """Solve, and return the relative L2 error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    inside = torch.linspace(0, 1, 102, dtype=torch.float64)[1:-1]
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    f = math.pi**2 * torch.sin(math.pi * inside)

    def u(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, params, (x.reshape(1, 1),)).squeeze()

    def objective(params: dict[str, Tensor]) -> dict[str, object]:
        second = vmap(grad(grad(lambda x: u(params, x))))(inside)
        boundary = vmap(lambda x: u(params, x))(ends)
        return {"equation": second + f, "boundary": (boundary, 100.0)}

    opt = pb.NaturalGradient(
        model, solver=pb.solvers.PseudoInverse(), step=pb.steps.TargetRatio(radii=48)
    )
    for k in range(steps):
        info = opt.step(objective=objective)
        if k % 10 == 0 or k == steps - 1:
            print(f"step {k:3d}  loss {info.loss:.1e}  damping {info.damping:.1e}")

    x = torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None]
    exact = torch.sin(math.pi * x)
    error = ((model(x) - exact).norm() / exact.norm()).item()
    print(f"relative L2 error {error:.1e}")
    return error


if __name__ == "__main__":
    main()
