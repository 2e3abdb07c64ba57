"""A decoder of bytes without biases, in plain torch; its blocks serve images too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AttentionBlock(nn.Module):
    """Pre-norm attention, with a layer each for q, k and v, and a GELU perceptron; no biases."""

    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) ↦ the same; if causal, a place sees those before it alone."""
        y, split = self.norm1(x), (self.heads, -1)
        q, k, v = (f(y).unflatten(-1, split).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


@torch.no_grad()
def initialize(model: nn.Module, depth: int) -> None:
    """GPT-2's start: σ = 0.02, and 0.02/√(2·depth) for what is added to the stream."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            added = name.endswith(("out.weight", "down.weight"))
            p.normal_(std=0.02 * (2 * depth) ** -0.5 if added else 0.02)


class Decoder(nn.Module):
    """Learned positions, blocks, and a head of its own; 10.9M at depth 6 and width 384."""

    def __init__(
        self, vocabulary: int, length: int, width: int = 384, depth: int = 6, heads: int = 6
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(AttentionBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        initialize(self, depth)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes (N, T) ↦ logits of the next ones, (N, T, vocabulary)."""
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(x)))
