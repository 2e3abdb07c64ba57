"""Networks on which K-FAC is measured, in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from ..kfac_training.tasks import GPT

__all__ = ["GPT", "Bottleneck", "convnet", "resnet50"]


def convnet(width: int = 32, classes: int = 10) -> nn.Sequential:
    """Three 3×3 convolutions with pools for 3×32×32 images, and a linear read-out."""
    layers: list[nn.Module] = []
    for a, b in pairwise([3, width, 2 * width, 2 * width]):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * 16, classes))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.norm2 = nn.BatchNorm2d(width)
        self.norm3 = nn.BatchNorm2d(out)
        self.skip = nn.Sequential()
        if stride != 1 or channels != out:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.skip(x))


def resnet50(
    classes: int = 1000, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64
) -> nn.Sequential:
    """ResNet-50 for 224×224 images, 25.6M parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage, depth in enumerate(depths):
        for i in range(depth):
            stride = 1
            if stage and i == 0:  # later stages begin at half the resolution
                stride = 2
            layers.append(Bottleneck(channels, width * 2**stage, stride))
            channels = 4 * width * 2**stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)
