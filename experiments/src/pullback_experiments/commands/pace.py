"""How long quick versions take on this machine, before any of them has run here."""

from __future__ import annotations

import time
from functools import lru_cache

import torch
from torch import nn

#: seconds that the quick versions took on one core of another machine
QUICK: dict[str, float] = {
    "kerekes-2022-figure2": 9,
    "kerekes-2022-figure3": 1.0,
    "kerekes-2022-figure4": 10,
    "kerekes-2022-figure5": 14,
    "kerekes-2022-figure6": 4,
    "kerekes-2022-theorems": 15,
    "kerekes-2022-support": 1.3,
    "bai-2024-projection": 2,
    "bai-2024-slices-figure2": 47,
    "bai-2024-slices-rescaled": 10,
    "bai-2024-sobolev-cifar10": 16,
    "bai-2024-sobolev-cifar100": 16,
    "bai-2024-sobolev-digits": 26,
    "van-oostrum-2023-examples": 1.6,
    "invariance-audit": 40,
    "luk-grosse-2018": 22,
    "demo": 6,
    "kfac-autoencoder": 46,
    "kfac-convnet": 67,
    "kfac-vgg": 29,
    "kfac-shakespeare": 42,
    "race-text": 60,
    "race-text-large": 50,
    "race-vision": 80,
    "pde-benchmarks": 69,
    "yin-2024-shallow": 10,
    "yin-2024-deep": 22,
    "yin-2024-poisson": 24,
}
_THERE = 0.037  # seconds of `_work` there


def expected(name: str) -> float | None:
    """Seconds of an experiment's quick version, by and large."""
    return QUICK[name] * _slower() if name in QUICK else None


@lru_cache(maxsize=1)
def _slower() -> float:
    """How many times longer a short piece of work takes here: the best of three."""

    def once() -> float:
        start = time.perf_counter()
        _work()
        return time.perf_counter() - start

    return min(once() for _ in range(3)) / _THERE


def _work() -> None:
    """Some steps of a small network, and some linear algebra: what quick versions do."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 10)).double()
        x, eye = torch.randn(64, 20).double(), torch.eye(200).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for _ in range(40):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        torch.linalg.cholesky(eye + 1e-3 * eye @ eye)
