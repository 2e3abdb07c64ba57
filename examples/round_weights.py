"""Weights of a trained decoder rounded to 4, 3 and 2 bits, with and without its curvature.

Rounding W to Ŵ raises the loss by about ½ tr(R E C Eᵀ) with E = Ŵ − W, where R and C are the
Kronecker factors of the layer. Entries are rounded one after another, and each makes up for the
errors of those before it. With C alone, rows do not see each other (this is GPTQ); with both
factors, errors in one output are made up for in the others. The text is Python's own source.
"""

import argparse as source
import copy
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

CONTEXT = 48


class Block(nn.Module):
    """Causal attention and a two-layer network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_network = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.before_attention(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_network(x))))


class Decoder(nn.Module):
    """Characters (N, T) to logits of the next ones (N, T, letters)."""

    def __init__(self, letters: int, width: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(Block(width), Block(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, letters)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape)
        return self.head(self.blocks(self.letters(x) + self.positions(positions)))


def load_text() -> tuple[Tensor, Tensor, int]:
    """Return sequences to train on and held-out ones, (N, CONTEXT + 1), and how many letters."""
    text = Path(source.__file__).read_text("utf-8")
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text])
    rows = tokens[: len(tokens) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    rows = rows[torch.randperm(len(rows))]
    return rows[200:], rows[:200], len(letters)


def train(model: nn.Module, rows: Tensor, steps: int) -> None:
    """Train with AdamW on random batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (32,))]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def unit_lower(factor: Tensor, damping: float = 0.01) -> Tensor:
    """Return the L with ones on its diagonal for which L D Lᵀ is the damped factor."""
    damped = factor + damping * factor.diagonal().mean() * torch.eye(len(factor))
    cholesky = torch.linalg.cholesky(damped)
    return cholesky / cholesky.diagonal()


def round_to_grid(values: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the nearest of 2^bits levels, (k + ½)·scale around zero."""
    half = 2 ** (bits - 1)
    return ((values / scale).floor().clamp(-half, half - 1) + 0.5) * scale


def round_weight(weight: Tensor, rows: Tensor, columns: Tensor, bits: int) -> Tensor:
    """Return a weight rounded from its last entry to its first, with L of R and L of C."""
    scale = weight.abs().amax(1) / 2 ** (bits - 1)
    errors = torch.zeros_like(weight)
    is_diagonal = bool((rows == torch.eye(len(rows))).all())
    groups = [slice(None)] if is_diagonal else [slice(i, i + 1) for i in range(len(rows))]
    for group in reversed(groups):
        # errors of later rows, as this one has to make up for them
        carried = (rows[:, group].T @ errors) @ columns
        for j in reversed(range(weight.shape[1])):
            target = weight[group, j] - carried[:, j] - errors[group] @ columns[:, j]
            errors[group, j] = round_to_grid(target, scale[group], bits) - weight[group, j]
    return weight + errors


def measure_divergence(model: nn.Module, rounded: nn.Module, x: Tensor) -> float:
    """Return the mean KL divergence of the next letter's distribution."""
    with torch.no_grad():
        p = model(x).log_softmax(-1)
        q = rounded(x).log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def main(steps: int = 600, widths: Sequence[int] = (4, 3, 2)) -> dict[str, list[float]]:
    """Print and return the held-out KL divergence by bits for each way of rounding."""
    torch.manual_seed(0)
    training, held_out, letters = load_text()
    model = Decoder(letters)
    train(model, training, steps)
    data = (training[:1000, :-1], training[:1000, 1:])
    curvature = pb.curvature.fit(
        model.eval(), data, likelihood=pb.likelihoods.Categorical(), structure="kfac"
    )
    divergences: dict[str, list[float]] = {"plain": [], "input factor": [], "both factors": []}
    for bits in widths:
        for method, results in divergences.items():
            rounded = copy.deepcopy(model)
            for name, weight in rounded.named_parameters():
                if not name.startswith("blocks") or weight.ndim != 2:
                    continue
                pair = curvature.factors(name)
                rows = torch.eye(len(weight))
                columns = torch.eye(weight.shape[1])
                if method != "plain":  # the last input is the bias, which stays as it is
                    columns = unit_lower(pair.input_factor[0, :-1, :-1])
                if method == "both factors":
                    rows = unit_lower(pair.output_factor[0])
                weight.data = round_weight(weight.data, rows, columns, bits)
            results.append(measure_divergence(model, rounded, held_out[:, :-1]))
    print("KL divergence at", *widths, "bits")
    for method, results in divergences.items():
        print(f"{method:13}", *[f"{divergence:.4f}" for divergence in results])
    return divergences


if __name__ == "__main__":
    main()
