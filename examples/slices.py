"""A ReLU network whose units are badly scaled: SGD breaks, SliceSGD does not notice.

Multiplying a unit's incoming weights by α > 0 and dividing the outgoing ones by it changes nothing
about the function. `symmetry.find` lists these directions, `SliceSGD` descends on one point of each
orbit, and `Sliced` does that for any optimizer.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb


def trained(
    model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int
) -> float:
    """The last loss."""
    for _ in range(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return F.cross_entropy(model(x), y).item()


def main(steps: int = 60) -> dict[str, tuple[float, float]]:
    """Final losses from the network as it was, and from the same function rescaled."""
    torch.manual_seed(0)
    x = torch.randn(200, 4, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    start = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2)).double()
    rescaled = copy.deepcopy(start)
    symmetry = pb.symmetry.find(rescaled, x)
    print(f"{symmetry.dimension} directions that do not change the function")
    symmetry.move_(torch.randn(symmetry.dimension, dtype=torch.float64) * 4)
    print(f"moved along them; outputs differ by {(rescaled(x) - start(x)).abs().max():.0e}")

    losses = {}
    for name in ("SGD", "SliceSGD", "Sliced Adam"):
        ends = []
        for model in (copy.deepcopy(start), copy.deepcopy(rescaled)):
            if name == "SGD":
                opt: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
            elif name == "SliceSGD":
                opt = pb.SliceSGD(model, lr=0.3)
            else:
                opt = pb.symmetry.Sliced(torch.optim.Adam(model.parameters(), lr=0.02), model)
            ends.append(trained(model, opt, x, y, steps))
        losses[name] = (ends[0], ends[1])
        print(f"{name:12s} {ends[0]:.4f} as it was, {ends[1]:.4f} rescaled")
    return losses


if __name__ == "__main__":
    main()
