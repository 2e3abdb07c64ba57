"""Networks the benchmarks share."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CIFAR_MLP = [3072, 2634, 2196, 1758, 1320, 882, 444, 10]  # 21.6M parameters
WIDE_MLP = [3072, 5120, 5120, 5120, 5120, 10]  # 94.4M parameters


def mlp(dims: list[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(dims):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


def small_conv(width: int = 16, classes: int = 10) -> nn.Sequential:
    """Four convolutions, strided and grouped, for 3×32×32 images."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * width * 4 * 4, classes),
    )


class Attention(nn.Module):
    """A pre-norm transformer block over a short sequence, with a linear read-out."""

    def __init__(self, width: int = 64, heads: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.read = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.mT * (d // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(n, t, d))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.read(x.mean(1))


class Block(nn.Module):
    """A residual block of two 3×3 convolutions with group normalization."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, out)
        self.norm2 = nn.GroupNorm(32, out)
        self.skip = nn.Identity()
        if stride != 1 or channels != out:
            self.skip = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


def resnet18(classes: int = 10) -> nn.Sequential:
    """ResNet-18 for 32×32 images, 11.2M parameters."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 3, 1, 1, bias=False),
        nn.GroupNorm(32, 64),
        nn.ReLU(),
    ]
    channels = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(channels, out, stride), Block(out, out, 1)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))
