"""Small models that each carry one trap, for the law tables."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Pre-norm attention written by hand: (N, T, d) -> (N, m)."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)
        self.final = nn.LayerNorm(d)
        self.head = nn.Linear(d, m)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
        x = x + self.out(weights @ v)
        return self.head(self.final(x).mean(1))


class TorchAttention(nn.Module):
    """`nn.MultiheadAttention`, whose out_proj never calls its own hooks: (N, T, d) -> (N, m)."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.head = nn.Linear(d, m)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Words(nn.Module):
    """Tokens through an embedding with a padding index, pooled: (N, T) -> (N, m)."""

    def __init__(self, words: int, d: int, m: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, d, padding_idx=0)
        self.head = nn.Linear(d, m)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)).mean(1))


class TiedLanguageModel(nn.Module):
    """The output layer is the embedding's own table, and a position table is a bare parameter."""

    def __init__(self, words: int, d: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, d)
        self.position = nn.Parameter(0.5 * torch.randn(length, d))
        self.mix = nn.Linear(d, d)
        self.out = nn.Linear(d, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embedding(tokens) + self.position)))


class Twice(nn.Module):
    """One module called twice, on places of its own each time."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.mix = nn.Linear(d, d)
        self.head = nn.Linear(d, m)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(torch.tanh(self.mix(x)))))


class SharedWeight(nn.Module):
    """Two Linears with one weight between them and a bias each."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.one = nn.Linear(d, d)
        self.two = nn.Linear(d, d)
        self.head = nn.Linear(d, m)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Outside(nn.Module):
    """A layer's weight that is also used by hand, transposed; or a multiple of it, which hides."""

    def __init__(self, d: int, m: int, multiple: float | None = None) -> None:
        super().__init__()
        self.one = nn.Linear(d, d)
        self.head = nn.Linear(d, m)
        self.multiple = multiple

    def forward(self, x: Tensor) -> Tensor:
        if self.multiple is None:
            weight = self.one.weight
        else:
            weight = self.multiple * self.one.weight
        return self.head(torch.tanh(self.one(x)) @ weight)


class Norms(nn.Module):
    """Every elementwise gain at once: (N, 4, 4, 4) -> (N, m)."""

    def __init__(self, m: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.group = nn.GroupNorm(2, 4)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.slopes = nn.PReLU(4)
        self.slope = nn.PReLU()
        self.rms = nn.RMSNorm(16)
        self.head = nn.Linear(16, m)

    def forward(self, x: Tensor) -> Tensor:
        x = self.slopes(self.group(self.conv(x)))
        x = self.instance(x + self.conv(x))
        return self.head(self.rms(self.slope(x).mean(1).flatten(1)))


class SequenceFirst(nn.Module):
    """(T, N, d) -> (T, N, m), folded into (T·N, d) on the way."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.one = nn.Linear(d, d)
        self.two = nn.Linear(d, m)

    def forward(self, x: Tensor) -> Tensor:
        t, n, d = x.shape
        h = torch.tanh(self.one(x))
        return self.two(h.reshape(t * n, d)).reshape(t, n, -1)


class Several(nn.Module):
    """Two inputs, a flag and a keyword tensor that is shared by the batch."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.left = nn.Linear(d, d)
        self.right = nn.Linear(d, d)
        self.head = nn.Linear(d, m)

    def forward(self, x: Tensor, y: Tensor, flag: bool, *, gain: Tensor) -> Tensor:
        h = self.left(x) * gain + self.right(input=y)
        return self.head(torch.tanh(h) if flag else h)


class Buffered(nn.Module):
    """A buffer is read, and a counter of forward passes is written."""

    centre: Tensor
    calls: Tensor

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.register_buffer("centre", torch.linspace(-1, 1, d))
        self.register_buffer("calls", torch.zeros(()))
        self.body = nn.Linear(d, m)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(torch.sin(x - self.centre))


class Squeezed(nn.Module):
    """One number per sample, as (N,)."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(-1)


class SlopeOfScalars(nn.Module):
    """PReLU on an output of shape (N,)."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.body = nn.Linear(d, 1)
        self.slope = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(self.body(x).squeeze(-1))


class Coupled(nn.Module):
    """Samples interact (the batch mean is taken away): only reverse passes give its rows."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.one = nn.Linear(d, d)
        self.two = nn.Linear(d, m)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x))
        return self.two(h - h.mean(0))


class Functional(nn.Module):
    """Bare parameters only: no layer to know."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(m, d) / d**0.5)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * F.linear(torch.sin(self.gain * x), self.weight)


def mlp(*sizes: int, activation: nn.Module | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layers += [nn.Linear(a, b)] + [activation or nn.Tanh()] * (i < len(sizes) - 2)
    return nn.Sequential(*layers)


def conv2d() -> nn.Sequential:
    """Stride, groups, dilation, and zero, circular and 'same' padding."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, (2, 3), groups=2, dilation=(1, 2), padding=2, padding_mode="circular"),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 2, 2, padding="same", bias=False),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 2),
    )


def conv1d() -> nn.Sequential:
    """Depthwise, 'same' with dilation and an even kernel, reflected and replicated borders."""
    return nn.Sequential(
        nn.Conv1d(2, 4, 4, padding="same", dilation=2, padding_mode="reflect", groups=2),
        nn.Tanh(),
        nn.Conv1d(4, 2, 3, stride=2, padding=2, padding_mode="replicate"),
        nn.Flatten(),
    )


def conv3d() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(2, 2, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), groups=2),
        nn.Tanh(),
        nn.Conv3d(2, 1, 2),
        nn.Flatten(),
        nn.LazyLinear(2),
    )


def frozen() -> nn.Sequential:
    """A frozen weight beside a free bias, a frozen bias beside a free weight, a frozen layer."""
    model = mlp(3, 4, 4, 2)
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


def batch_norm() -> nn.Sequential:
    """Batch norm in evaluation mode, with statistics that are not trivial."""
    norm = nn.BatchNorm2d(3)
    norm.running_mean = torch.tensor([0.5, -1, 0])
    norm.running_var = torch.tensor([2.0, 0.5, 1])
    return nn.Sequential(nn.Conv2d(2, 3, 2), norm, nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).eval()


def dropout() -> nn.Sequential:
    """In training mode: the mask that the loss saw is the mask of the tangent."""
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 2)).train()
