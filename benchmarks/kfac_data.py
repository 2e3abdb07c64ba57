"""Data for the training comparisons, from the folder named by PULLBACK_DATA.

Where a file is absent something small stands in for it: scikit-learn's digits, or noise.
"""

from __future__ import annotations

import gzip
from functools import lru_cache

import torch
from torch import Tensor

from pullback.experiments.learning import data


@lru_cache
def mnist(limit: int | None = None) -> Tensor:
    """Training images (60000, 784) in [0, 1]."""
    if data.available("mnist.npz"):
        return data.mnist().x[:limit].flatten(1)
    images = data.digits().x[:limit]
    return torch.nn.functional.interpolate(images, 28, mode="bilinear").flatten(1)


@lru_cache
def cifar(limit: int | None = None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images (N, 3, 32, 32), normalized by channel, and labels."""
    halves = [h for h in ("a", "b") if data.available(f"cifar10_train_{h}.npz")]
    if not halves:
        noise = torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,))
        return noise, noise
    found = data.cifar10(None if limit is None else -(-limit // 1000), halves)
    return (found.x, found.y), (found.test_x, found.test_y)


@lru_cache
def shakespeare(limit: int | None = None) -> tuple[Tensor, Tensor, int]:
    """Characters as numbers, nine tenths to train on and one to test, and how many kinds."""
    if data.available("tiny_shakespeare.txt.gz"):
        held = data.file("tiny_shakespeare.txt.gz").read_bytes()
        text = gzip.decompress(held).decode()[:limit]
    else:
        text = "the quick brown fox jumps over the lazy dog. " * 500
    kinds = sorted(set(text))
    codes = torch.tensor([kinds.index(c) for c in text])
    cut = len(codes) * 9 // 10
    return codes[:cut], codes[cut:], len(kinds)
