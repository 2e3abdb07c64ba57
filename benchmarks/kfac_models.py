"""Networks on which K-FAC is measured, in plain torch."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convnet(width: int = 32, classes: int = 10) -> nn.Sequential:
    """Three 3×3 convolutions with pools for 3×32×32 images, and a linear read-out."""
    layers: list[nn.Module] = []
    for a, b in pairwise([3, width, 2 * width, 2 * width]):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * 16, classes))


def vgg16(classes: int = 10, narrow: int = 1) -> nn.Sequential:
    """VGG-16 with batch normalization for 32×32 images; `narrow` divides all widths."""
    layers: list[nn.Module] = []
    channels = 3
    for out, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            wide = out // narrow
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
            channels = wide
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3, self.skip = nn.BatchNorm2d(out), nn.Sequential()
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
            stride = 2 if stage and not i else 1
            layers.append(Bottleneck(channels, width * 2**stage, stride))
            channels = 4 * width * 2**stage
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and a GELU perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder with learned positions; by default GPT-2 small (124M), its head tied."""

    def __init__(
        self,
        vocabulary: int = 50304,
        length: int = 1024,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        *,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)
            if isinstance(m, nn.Linear) and m.bias is not None:
                nn.init.zeros_(m.bias)
            if isinstance(m, TransformerBlock):
                for last in (m.out, m.down):
                    nn.init.normal_(last.weight, std=0.02 * (2 * depth) ** -0.5)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = self.tokens(x) + self.places(places)
        return self.head(self.norm(self.blocks(x)))


def character_transformer(vocabulary: int = 65, length: int = 256, width: int = 256) -> GPT:
    """A small transformer over characters, 4.8M parameters by default."""
    return GPT(vocabulary, length, width, depth=6, heads=max(1, width // 64), tied=False)
