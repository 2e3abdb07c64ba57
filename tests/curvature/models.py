"""Small models for the tables of tests, each with inputs, targets and a likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from pullback.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood


@dataclass
class Case:
    """A model with data."""

    model: Any
    inputs: Any
    targets: Tensor
    likelihood: Likelihood

    @property
    def data(self) -> tuple[Any, Tensor]:
        return self.inputs, self.targets

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)


class Attention(nn.Module):
    """A pre-norm block with attention by hand: (N, T, d) -> (N, m)."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.head = nn.Linear(d, m)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        return self.head((x + weights @ v).mean(1))


class TorchAttention(nn.Module):
    """`nn.MultiheadAttention`: (N, T, d) -> (N, m)."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d, 2, batch_first=True)
        self.head = nn.Linear(d, m)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class TiedText(nn.Module):
    """A language model whose read-out is its embedding: (N, T) -> (N, T, words)."""

    def __init__(self, words: int, d: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, d)
        self.mix = nn.Linear(d, d)
        self.out = nn.Linear(d, words, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix(self.embedding(tokens)))
        return self.out(hidden.cumsum(1))


class LowRankAdapter(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is (inputs, outputs)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(0.3 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(0.1 * torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], self.outputs)


class Recurrent(nn.Module):
    """An LSTM with a read-out of its last state: (N, T, d) -> (N, m)."""

    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d, 3, batch_first=True)
        self.head = nn.Linear(3, m)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def _mlp() -> Case:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return Case(model, torch.randn(12, 4), torch.randint(0, 3, (12,)), Categorical())


def _conv() -> Case:
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 4, 2, stride=2, groups=1)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 2))
    return Case(model, torch.randn(9, 2, 4, 4), torch.randn(9, 2), Gaussian(0.5))


def _grouped() -> Case:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    return Case(model, torch.randn(7, 4, 4, 4), torch.randint(0, 2, (7,)), Categorical())


def _norms() -> Case:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, 4), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(16, 3), nn.LayerNorm(3))
    model(torch.randn(20, 1, 4, 4))
    return Case(model.eval(), torch.randn(8, 1, 4, 4), torch.randint(0, 3, (8,)), Categorical())


def _attention() -> Case:
    return Case(Attention(4, 3), torch.randn(8, 5, 4), torch.randint(0, 3, (8,)), Categorical())


def _torch_attention() -> Case:
    model = TorchAttention(4, 3)
    return Case(model, torch.randn(8, 5, 4), torch.randint(0, 3, (8,)), Categorical())


def _tied() -> Case:
    tokens = torch.randint(0, 5, (7, 3))
    return Case(TiedText(5, 4), tokens, torch.randint(0, 5, (7, 3)), Categorical())


def _adapter() -> Case:
    layers = LowRankAdapter(nn.Linear(4, 5), 2), nn.Tanh(), nn.Linear(5, 3).requires_grad_(False)
    model = nn.Sequential(*layers)
    return Case(model, torch.randn(10, 4), torch.randint(0, 3, (10,)), Categorical())


def _conv1d() -> Case:
    model = nn.Sequential(Conv1D(5, 4), nn.GELU(), Conv1D(3, 5))
    return Case(model, torch.randn(6, 2, 4), torch.randint(0, 3, (6, 2)), Categorical())


def _lstm() -> Case:
    return Case(Recurrent(2, 2), torch.randn(6, 4, 2), torch.rand(6, 2).round(), Bernoulli())


CASES: dict[str, Callable[[], Case]] = {
    "mlp": _mlp,
    "conv": _conv,
    "grouped conv": _grouped,
    "norms": _norms,
    "attention": _attention,
    "torch attention": _torch_attention,
    "tied": _tied,
    "adapter": _adapter,
    "conv1d": _conv1d,
    "lstm": _lstm,
}


#: one of each kind of model: layers, convolutions, normalizations, attention, tied weights, LoRA
KINDS = ("mlp", "conv", "norms", "attention", "tied", "adapter")


def make_case(name: str, seed: int = 0) -> Case:
    """Return a case in float64, the same one for the same seed."""
    torch.manual_seed(seed)
    return CASES[name]()


@dataclass
class Oracle:
    """The same quantities by dense matrices from `jacrev`.

    Attributes:
        outputs: z, (N, m) with all events in one axis.
        jacobian: (N, m, p).
        gram: the mean of Jᵀ M J, (p, p).
    """

    case: Case

    def __post_init__(self) -> None:
        model = self.case.model
        parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

        def outputs(values: dict[str, Tensor]) -> Tensor:
            return functional_call(model, values, self.case.arguments)

        jacobians = jacrev(outputs)(parameters)
        self.raw = outputs(parameters).detach()
        samples = len(self.raw)
        blocks = [jacobians[name].reshape(samples, -1, p.numel()) for name, p in parameters.items()]
        self.jacobian = torch.cat(blocks, -1)
        self.metric = self._metric()
        moved = torch.einsum("nab,nbp->nap", self.metric, self.jacobian)
        self.gram = torch.einsum("nap,naq->pq", self.jacobian, moved) / samples

    def _metric(self) -> Tensor:
        """Return the Hessian of the loss where that is the Fisher information, (N, m, m)."""
        z = self.raw
        samples = len(z)

        def loss(flat: Tensor, y: Tensor, event: torch.Size) -> Tensor:
            return self.case.likelihood.nll(flat.view(1, *event), y[None]).sum()

        hessians = []
        for n in range(samples):
            y = self.case.targets[n]
            hessians.append(
                torch.autograd.functional.hessian(
                    lambda flat, y=y: loss(flat, y, z.shape[1:]), z[n].flatten()
                )
            )
        return torch.stack(hessians)

    def gradients(self, measure: Any = None) -> Tensor:
        """Return ∇f of every sample, (N, p)."""
        z = self.raw.clone().requires_grad_()
        if measure is None:
            values = self.case.likelihood.nll(z, self.case.targets)
        else:
            values = measure(z, self.case.targets)
        (covector,) = torch.autograd.grad(values.sum(), z)
        return torch.einsum("na,nap->np", covector.flatten(1), self.jacobian)
