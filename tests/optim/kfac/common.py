"""Small models and loops for K-FAC."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from tests.kfac_options import kfac_of

from ..common import vector

DOUBLE = torch.float64


def net(dtype: torch.dtype = DOUBLE) -> Any:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).to(dtype)


def batch(samples: int = 8, dtype: torch.dtype = DOUBLE, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=g, dtype=dtype)
    return x, torch.randint(0, 4, (samples,), generator=g)


def kfac(model: Any, **options: Any) -> pb.KFAC:
    """The natural gradient, with no clip unless told otherwise."""
    settings = {"lr": 0.05, "damping": 0.1, "kl_clip": None}
    settings |= {"statistics_every": 2, "invert_every": 4} | options
    if "metric" not in settings:
        settings.setdefault("likelihood", pb.likelihoods.Categorical())
    return kfac_of(model, **settings)


def train(
    opt: pb.KFAC, call: Callable[[Tensor], Any], steps: int = 1, start: int = 0, **options: Any
) -> list[bool]:
    """An ordinary loop; says at which steps statistics were taken."""
    statistics_steps = []
    for i in range(start, start + steps):
        x, y = batch(seed=i, **options)
        opt.zero_grad()
        F.cross_entropy(call(x), y).backward()
        opt.step()
        statistics_steps.append(opt.info.took_statistics)
    return statistics_steps


def gram(
    model: nn.Module, x: Any, y: Tensor, loss: Any = F.cross_entropy, **options: Any
) -> Tensor:
    """The Gram of one exact statistics step, which leaves the model as it was."""
    with kfac(model, fisher="exact", lr=0.0, **options) as opt:
        loss(model(x), y).backward()
        opt.step()
        return opt.gram().dense()


class Then(nn.Module):
    """A function as a layer."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class Fused(nn.Module):
    """torch's own attention or recurrence, on sequences (of one place where x has no axis)."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            h = x
        else:
            h = x[:, None]
        attends = isinstance(self.fused, nn.MultiheadAttention)
        h = (self.fused(h, h, h, need_weights=False) if attends else self.fused(h))[0]
        if x.ndim == 3:
            return h
        return h[:, 0]


class Experts(nn.Module):
    """One position goes to one expert, all others to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.few_rows, self.many_rows, self.last = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        rows = h.flatten(0, 1)
        out = torch.cat([self.few_rows(rows[:1]), self.many_rows(rows[1:])])
        return self.last(h + torch.tanh(out).view_as(h))


def places(*layers: nn.Module, pooled: bool = False) -> nn.Sequential:
    """Convolutions whose output places are positions, or averaged: (N, C, *space) -> (N, T, C)."""
    last = Then(lambda h: h.flatten(2).mean(2) if pooled else h.flatten(2).mT)
    return nn.Sequential(*layers, last)


__all__ = [
    "DOUBLE", "Experts", "Fused", "Then", "batch", "gram", "kfac", "net", "places", "train",
    "vector",
]  # fmt: skip
