"""A decoder of text, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and a GELU perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) ↦ the same; a place sees those before it."""
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
        self._begin(depth)
        if tied:
            self.head.weight = self.tokens.weight

    @torch.no_grad()
    def _begin(self, depth: int) -> None:
        """GPT-2's start: what is added to the stream becomes smaller with the depth."""
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                m.weight.normal_(std=0.02)
            if isinstance(m, nn.Linear) and m.bias is not None:
                m.bias.zero_()
        for m in self.modules():
            if isinstance(m, TransformerBlock):
                for last in (m.out, m.down):
                    last.weight.normal_(std=0.02 * (2 * depth) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, T) ↦ logits of the next ones, (N, T, vocabulary)."""
        places = torch.arange(x.shape[1], device=x.device)
        x = self.tokens(x) + self.places(places)
        return self.head(self.norm(self.blocks(x)))
