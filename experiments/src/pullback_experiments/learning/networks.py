"""Networks that several experiments train."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

_BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


def vgg16(classes: int = 10, narrow: int = 1) -> nn.Sequential:
    """VGG-16 with batch normalization and one linear layer, for 32×32 images of three colors.

    Convolutions start from N(0, 2/(9·channels out)), the linear layer from N(0, 0.01²), biases from
    zero, as in the code that the paper builds on. `narrow` divides all widths.
    """
    layers: list[nn.Module] = []
    channels = 3
    for width, count in _BLOCKS:
        out_channels = max(1, width // narrow)
        for _ in range(count):
            conv = nn.Conv2d(channels, out_channels, 3, padding=1)
            nn.init.normal_(conv.weight, std=math.sqrt(2 / (9 * out_channels)))
            nn.init.zeros_(conv.bias)  # pyright: ignore[reportArgumentType]
            layers += [conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]
            channels = out_channels
        layers.append(nn.MaxPool2d(2))
    head = nn.Linear(channels, classes)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    return nn.Sequential(*layers, nn.Flatten(), head)


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with ReLU between them, on images as vectors; torch's initial weights."""
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convnet(side: int, width: int = 8, classes: int = 10) -> nn.Sequential:
    """Two 3×3 convolutions with pools for gray images of side × side, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * (side // 4) ** 2, classes),
    )  # fmt: skip
