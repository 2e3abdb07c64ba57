"""K-FAC on a Hugging Face model: Llama's architecture, small, from random weights.

The model returns an object with logits, and its loss over the next tokens is computed outside, so
that the likelihood of a sample, here one position, is plain to see. Nothing is downloaded.
Needs `pip install transformers`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import pullback as pb


class Logits(nn.Module):
    """Tokens (N, T) ↦ logits (N, T, vocabulary)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens, use_cache=False).logits


def main(steps: int = 80) -> tuple[float, float]:
    """Train on counting modulo 11 in steps of 1 to 3, and return the first and the last loss."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=16,
    )  # fmt: skip
    model = Logits(LlamaForCausalLM(config)).train()
    opt = pb.KFAC(
        model, lr=0.1, likelihood=pb.likelihoods.Categorical(), damping=1e-2, kl_clip=1e-2,
        statistics_every=2, invert_every=10,
    )  # fmt: skip
    print(opt.coverage())
    losses = []
    for k in range(steps):
        first, stride = torch.randint(11, (32, 1)), torch.randint(1, 4, (32, 1))
        tokens = (first + stride * torch.arange(13)) % 11
        opt.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if k % 10 == 0 or k == steps - 1:
            print(f"step {k:2d}  loss {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
