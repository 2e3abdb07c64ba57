"""K-FAC as a drop-in: the loop is the one of any torch optimizer.

The Fisher information is sampled inside the forward pass now and then, so nothing is added to the
loop. `coverage()` has a row for every parameter: which block it is in, or why it has none.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb


def pictures(count: int) -> tuple[Tensor, Tensor]:
    """Noisy (1, 8, 8) images of four patterns, and which one each is."""
    patterns = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.arange(count) % 4
    return patterns[y] + 0.8 * torch.randn(count, 1, 8, 8), y


def main(epochs: int = 5) -> float:
    """Train, and return the accuracy on other images."""
    torch.manual_seed(0)
    x, y = pictures(1024)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    opt = pb.KFAC(model, lr=0.05, likelihood=pb.likelihoods.Categorical(), damping=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)

    for epoch in range(epochs):
        for index in torch.randperm(len(x)).split(128):
            opt.zero_grad()
            loss = F.cross_entropy(model(x[index]), y[index])
            loss.backward()
            opt.step()
        schedule.step()
        print(f"epoch {epoch}  loss {loss.item():.4f}")
    print(opt.coverage())

    test, truth = pictures(512)
    model.eval()
    accuracy = (model(test).argmax(1) == truth).float().mean().item()
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
