"""Networks for bytes and for images of 32×32, in plain torch, and batches of random crops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..framework.records import Record
from ..learning.data import DataSet
from ..learning.images import CropAndFlip
from .loop import Batch, Batches


class AttentionBlock(nn.Module):
    """Pre-norm attention, with a layer each for q, k and v, and a GELU perceptron; no biases."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) ↦ the same; if causal, a position attends only to those before it."""
        y = self.norm1(x)
        split = (self.heads, -1)
        q, k, v = (f(y).unflatten(-1, split).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


@torch.no_grad()
def initialize(model: nn.Module, depth: int) -> None:
    """Initialize as GPT-2: σ = 0.02, and 0.02/√(2·depth) for what is added to the stream."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            std = 0.02
            if name.endswith(("out.weight", "down.weight")):  # which are added to the stream
                std *= (2 * depth) ** -0.5
            p.normal_(std=std)


class Decoder(nn.Module):
    """Learned positions, blocks, and a head of its own; 10.9M at depth 6 and width 384."""

    def __init__(
        self, vocabulary: int, length: int, width: int = 384, depth: int = 6, heads: int = 6
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(AttentionBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        initialize(self, depth)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes (N, T) ↦ logits of the next ones, (N, T, vocabulary)."""
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch normalization around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.norm2 = nn.BatchNorm2d(width)
        self.skip = nn.Sequential()
        if stride != 1 or channels != width:
            conv = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) ↦ (N, width, H/stride, W/stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-18 for small images: a 3×3 stem and no pool after it; 11.2M at width 64."""

    def __init__(
        self, classes: int = 10, width: int = 64, depths: tuple[int, ...] = (2, 2, 2, 2)
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks = []
        channels = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                out = width * 2**stage
                stride = 1
                if stage and i == 0:  # later stages begin at half the resolution
                    stride = 2
                blocks.append(ResidualBlock(channels, out, stride))
                channels = out
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W) ↦ logits (N, classes)."""
        y = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(y.mean((-2, -1)))


class VisionTransformer(nn.Module):
    """Patches as tokens with learned positions, attention blocks, and the mean of all tokens."""

    def __init__(
        self, classes: int = 10, width: int = 192, depth: int = 6, heads: int = 3, patch: int = 4
    ) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Linear(3 * patch**2, width, bias=False)
        self.positions = nn.Embedding((32 // patch) ** 2, width)
        self.blocks = nn.Sequential(
            *(AttentionBlock(width, heads, causal=False) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, classes, bias=False)
        initialize(self, depth)

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, H, W), at most of 32×32, ↦ logits (N, classes)."""
        x = self.patches(F.unfold(x, self.patch, stride=self.patch).mT)
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)).mean(1))


@dataclass(frozen=True)
class ImageData:
    """Batches of images, cropped and mirrored at random.

    Attributes:
        load: the images.
        batch: images of a step.
        margin: pixels by which crops are moved at most.
    """

    load: Callable[[], DataSet]
    batch: int
    margin: int = 4

    def __call__(self, steps: int, seed: int, device: torch.device) -> tuple[Batches, Record]:
        images = self.load().to(device)
        draw = torch.Generator().manual_seed(seed)
        size = min(self.batch, len(images.x))
        epochs = -(-steps * size // len(images.x))
        order = torch.cat([torch.randperm(len(images.x), generator=draw) for _ in range(epochs)])
        chosen = order[: steps * size].view(steps, size).to(device)
        augment = replace(CropAndFlip.of(images.x), margin=self.margin)
        batches = ImageBatches(images, chosen, augment, seed)
        return batches, {"passes": steps * size / len(images.x)}


@dataclass(frozen=True)
class ImageBatches:
    """Images on the device, and which of them every step takes, (steps, batch)."""

    images: DataSet
    chosen: Tensor
    augment: CropAndFlip
    seed: int

    def of(self, steps: range) -> list[Batch]:
        """Return the batches of these steps; crops follow from the seed and the step."""
        out = []
        for step in steps:
            draw = torch.Generator(self.chosen.device).manual_seed(self.seed * 1_000_003 + step)
            index = self.chosen[step]
            out.append((self.augment(self.images.x[index], draw), self.images.y[index]))
        return out

    def held_out(self, size: int) -> Iterator[Batch]:
        """Yield the test images without crops, so many at a time."""
        yield from zip(self.images.test_x.split(size), self.images.test_y.split(size), strict=True)
