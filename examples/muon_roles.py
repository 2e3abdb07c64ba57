"""`parameter_roles` for another optimizer: `torch.optim.Muon` on matrices, AdamW on the rest.

Fused queries, keys and values are three matrices: each gets a view of the weight's memory, and a
hook hands the gradient to the views.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb


class Copy(nn.Module):
    """One block of attention, which is to say what came two tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 32)
        self.positions = nn.Embedding(16, 32)
        self.fused = nn.Linear(32, 96)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.positions(torch.arange(x.shape[1]))
        q, k, v = self.fused(h).chunk(3, -1)
        return self.head(h + self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def matrix_views(weight: nn.Parameter, split: tuple[int, ...], axis: int) -> list[nn.Parameter]:
    """Each independent matrix of a weight as a parameter in the same memory."""
    views = [nn.Parameter(part) for part in weight.detach().split(split, axis)]

    def hand_on(weight: Tensor) -> None:
        for view, gradient in zip(views, weight.grad.split(split, axis), strict=True):
            view.grad = gradient

    weight.register_post_accumulate_grad_hook(hand_on)
    return views


def main(steps: int = 150) -> float:
    """Train, and return the share of tokens that are copied."""
    torch.manual_seed(0)
    model = Copy()
    x = torch.randint(0, 12, (256, 16))
    roles = pb.parameter_roles(model, x[:2])
    print(roles)
    weights = dict(model.named_parameters())
    views = []
    for row in roles:
        if row.role == "matrix":
            views += matrix_views(weights.pop(row.name), row.split, row.split_axis)
    muon = torch.optim.Muon(views, lr=0.02, weight_decay=0.0)
    adamw = torch.optim.AdamW(weights.values(), lr=3e-3)
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(x)[:, 2:].flatten(0, 1), x[:, :-2].flatten()).backward()
        muon.step()
        adamw.step()
    return (model(x)[:, 2:].argmax(-1) == x[:, :-2]).float().mean().item()


if __name__ == "__main__":
    print(f"copied {main():.1%}")
