"""The quadratic model in the exact natural gradient; in K-FAC: tests/optim/kfac/test_control.py."""

import torch
import torch.nn.functional as F
from torch import nn

import pullback as pb


def test_a_quadratic_problem_is_solved_although_the_damping_is_large() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(30, 3, dtype=torch.float64)
    y = torch.randn(30, 2, dtype=torch.float64)
    opt = pb.NaturalGradient(
        model, pb.metrics.Fisher(pb.likelihoods.MSE()),
        solver=pb.solvers.Cholesky(damping=1e-1), step=pb.steps.QuadraticModel(),
    )  # fmt: skip

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    infos = [opt.step(closure) for _ in range(12)]
    inputs = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    best = F.mse_loss(inputs @ torch.linalg.lstsq(inputs, y).solution, y)
    assert float(infos[-1].loss) <= float(best) * (1 + 1e-6)
