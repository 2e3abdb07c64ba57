"""The neural tangent kernel of a network: what it predicts, and what one step of training does.

Θ(x, x') = J(x)J(x')ᵀ is how the value at x moves when the one at x' is pulled. A step of gradient
descent moves the function by −lr·Θ·c at all points to first order, also where there are no data; a
natural gradient step moves it by −lr·c on the data, as there Θ is the identity.
"""

import copy

import torch
from torch import Tensor, nn

import pullback as pb


def main(lr: float = 1e-3) -> tuple[float, float, float]:
    """The errors of both first-order predictions, and Θ's condition number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    nn.init.normal_(model[0].weight, std=3.0)  # units that turn at different places
    x = torch.linspace(-2, 2, 8, dtype=torch.float64)[:, None]
    grid = torch.linspace(-3, 3, 61, dtype=torch.float64)[:, None]
    y = torch.sin(2 * x)

    theta = pb.kernels.ntk(model, grid, x)[..., 0, 0]  # (61, 8)
    gram = pb.kernels.ntk(model, x)[..., 0, 0]  # (8, 8)
    condition = float(torch.linalg.cond(gram))
    residual = (model(x) - y).detach()
    before = model(grid).detach()
    at_data = model(x).detach()

    def closure(net: nn.Module, opt: torch.optim.Optimizer) -> Tensor:
        opt.zero_grad()
        loss = 0.5 * (net(x) - y).square().sum(1).mean()
        loss.backward()
        return loss

    plain = copy.deepcopy(model)
    sgd = torch.optim.SGD(plain.parameters(), lr=lr)
    closure(plain, sgd)
    sgd.step()
    predicted = -lr * theta @ residual / len(x)
    first = float((plain(grid).detach() - before - predicted).norm() / predicted.norm())

    natural = copy.deepcopy(model)
    ngd = pb.NaturalGradient(natural, solver=pb.solvers.PseudoInverse(), step=pb.steps.Constant(lr))
    ngd.step(lambda: closure(natural, ngd))
    moved = natural(x).detach() - at_data
    second = float((moved + lr * residual).norm() / (lr * residual).norm())
    print(f"condition number of the kernel {condition:.1e}")
    print(f"relative errors of the predicted moves: SGD {first:.1e}, NGD {second:.1e}")
    return first, second, condition


if __name__ == "__main__":
    main()
