"""Exact Fisher natural gradient on three spirals, in an ordinary PyTorch loop.

The network has 1251 parameters and the batch 300 samples with 3 outputs, so the solve runs on
the smaller side, that of the samples, and J is never formed.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb


def spirals(per_class: int = 100) -> tuple[Tensor, Tensor]:
    """Points (3·per_class, 2) on three arms, and the arm of each."""
    t = torch.linspace(0.1, 1, per_class)
    arms = [1.5 * math.pi * t + 2 * math.pi * k / 3 for k in range(3)]
    x = torch.cat([t[:, None] * torch.stack([a.cos(), a.sin()], 1) for a in arms])
    return x + 0.02 * torch.randn(x.shape), torch.arange(3).repeat_interleave(per_class)


def main(steps: int = 30) -> float:
    """Train, and return the training accuracy."""
    torch.manual_seed(0)
    x, y = spirals()
    model = nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
    )
    opt = pb.NaturalGradient(
        model,
        metric=pb.metrics.Fisher(pb.likelihoods.Categorical()),
        solver=pb.solvers.Cholesky(),
        step=pb.steps.LevenbergMarquardt(damping=1e-2),
    )

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for k in range(steps):
        info = opt.step(closure)
        if k % 5 == 0 or k == steps - 1:
            print(f"step {k:2d}  loss {info.loss:.2e}  damping {info.damping:.1e}")
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"gram: {info.gram}, {info.rows} rows, {info.parameters} parameters")
    print(f"training accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
