"""K-FAC fine-tunes a network of torchvision: a new head, and a smaller rate for the rest.

With `weights="DEFAULT"` it begins from ImageNet; here from random weights, so that nothing is
downloaded. Needs `pip install torchvision`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import shufflenet_v2_x0_5

import pullback as pb

CLASSES = 5


def waves(count: int) -> tuple[Tensor, Tensor]:
    """Images of waves in noise, and which direction they have."""
    y = torch.randint(0, CLASSES, (count,))
    angle = (math.pi * y / CLASSES)[:, None, None]
    place = torch.arange(48) / 3
    wave = torch.sin(place[:, None] * angle.cos() + place * angle.sin())
    return wave[:, None] + 0.5 * torch.randn(count, 3, 48, 48), y


def main(steps: int = 40) -> float:
    """Train, and return the accuracy on other images."""
    torch.manual_seed(0)
    model = shufflenet_v2_x0_5(weights=None)
    model.fc = nn.Linear(model.fc.in_features, CLASSES)
    body = [p for name, p in model.named_parameters() if not name.startswith("fc.")]
    opt = pb.KFAC(
        model, 1e-2, params=[{"params": model.fc.parameters()}, {"params": body, "lr": 5e-3}]
    )
    for k in range(steps):
        x, y = waves(32)
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        if k % 10 == 9:
            print(f"step {k + 1}  loss {loss.item():.3f}")
    with torch.no_grad():  # by batches: running averages are young
        x, y = waves(128)
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
