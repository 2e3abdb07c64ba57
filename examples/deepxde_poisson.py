"""−u″ = π² sin πx on (0, 1), written for DeepXDE and trained by the natural gradient.

The geometry, the conditions and the network are DeepXDE's; `train_deepxde` takes the place of
`model.train`. Needs `pip install deepxde`; the backend is chosen before its import.
"""

import math
import os

os.environ["DDE_BACKEND"] = "pytorch"

import deepxde as dde
import numpy as np
import torch
from torch import Tensor

import pullback as pb


def equation(x: Tensor, u: Tensor) -> Tensor:
    """What must vanish inside."""
    return -dde.grad.hessian(u, x) - math.pi**2 * torch.sin(math.pi * x)


def main(steps: int = 80) -> float:
    """Solve, and return the largest error."""
    dde.config.set_default_float("float64")
    dde.config.set_random_seed(0)
    interval = dde.geometry.Interval(0, 1)
    ends = dde.icbc.DirichletBC(interval, lambda x: 0, lambda x, on_boundary: on_boundary)
    data = dde.data.PDE(interval, equation, ends, num_domain=30, num_boundary=2)
    model = dde.Model(data, dde.nn.FNN([1, 10, 1], "tanh", "Glorot uniform"))
    model.compile("adam", lr=1e-3, loss_weights=[1, 100])
    losses = pb.pde.adapters.train_deepxde(model, steps)
    print(f"loss {losses[0]:.1e} before, {losses[-1]:.1e} after {steps} steps")

    x = np.linspace(0, 1, 101)[:, None]
    error = float(np.abs(model.predict(x) - np.sin(math.pi * x)).max())
    print(f"error {error:.1e}")
    return error


if __name__ == "__main__":
    main()
