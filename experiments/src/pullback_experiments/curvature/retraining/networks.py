"""Networks whose samples are attributed: ResNet-9 and a decoder."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch."""
        return x + self.branch(x)


def conv_block(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, padding: int = 1):
    """Return a convolution without bias, batch normalization and ReLU."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


def resnet9(classes: int, width: int = 64) -> nn.Sequential:
    """Return ResNet-9 for 32×32 images as TRAK's authors train it: 2.3 million parameters."""
    doubled_width = 2 * width
    wider = 4 * width
    return nn.Sequential(
        conv_block(3, width),
        conv_block(width, doubled_width, 5, 2, 2),
        Residual(
            nn.Sequential(
                conv_block(doubled_width, doubled_width), conv_block(doubled_width, doubled_width)
            )
        ),
        conv_block(doubled_width, wider),
        nn.MaxPool2d(2),
        Residual(nn.Sequential(conv_block(wider, wider), conv_block(wider, wider))),
        conv_block(wider, doubled_width, padding=0),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(doubled_width, classes),
    )


class ShortcutBlock(nn.Module):
    """ReLU of a branch of two convolutions plus a convolution of 1×1 pixels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            conv_block(inputs, outputs, stride=stride), conv_block(outputs, outputs)
        )
        conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Add the branch and the shortcut."""
        return torch.relu(self.branch(x) + self.shortcut(x))


def average_resnet9(classes: int, width: int = 64) -> nn.Sequential:
    """Return ResNet-9 as the benchmark of dattri trains it: average pooling, 4.8 million."""
    return nn.Sequential(
        conv_block(3, width),
        ShortcutBlock(width, 2 * width, 1),
        ShortcutBlock(2 * width, 4 * width, 2),
        ShortcutBlock(4 * width, 8 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


class DecoderBlock(nn.Module):
    """Causal attention and a two-layer network, each after a normalization."""

    def __init__(self, width: int, heads: int, *, is_fused: bool) -> None:
        super().__init__()
        self.heads = heads
        self.is_fused = is_fused
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to the same."""
        samples, length, width = x.shape
        projected = self.qkv(self.attention_norm(x))
        q, k, v = projected.view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = self._attend(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.is_fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        length = q.shape[-2]
        is_later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(is_later, -torch.inf)
        return torch.softmax(scores, -1) @ v


class Decoder(nn.Module):
    """GPT-2's layout: (N, T) tokens to (N, T, words) logits.

    Args:
        words: size of the vocabulary.
        width, layers, heads: of the blocks; 768, 12 and 12 are GPT-2 small.
        context: the longest sequence.
        is_tied: whether the read-out is the embedding's table.
        is_fused: whether attention is torch's fused function, which `vmap` takes one by one.
    """

    def __init__(
        self,
        words: int,
        width: int,
        layers: int,
        heads: int,
        context: int,
        *,
        is_tied: bool,
        is_fused: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Embedding(context, width)
        blocks = [DecoderBlock(width, heads, is_fused=is_fused) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02 if width > 256 else 0.1)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next token at every position."""
        # one position per token of every sample: the embedding's gradients then have a sample axis
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        hidden = self.tokens(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(hidden)))
