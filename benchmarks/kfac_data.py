"""Data for the training comparisons, from the folder named by PULLBACK_DATA.

Where a file is absent something small stands in for it: scikit-learn's digits, or noise.
"""

from __future__ import annotations

import gzip
import io
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def _file(name: str) -> Path | None:
    path = Path(os.environ.get("PULLBACK_DATA", "data")) / name
    return path if path.exists() else None


@lru_cache
def mnist(limit: int | None = None) -> Tensor:
    """Training images (60000, 784) in [0, 1]."""
    path = _file("mnist.npz")
    if path is not None:
        x = torch.from_numpy(np.load(path)["train_images"][:limit]).flatten(1).float()
        return x / 255
    from sklearn.datasets import load_digits

    x = torch.from_numpy(load_digits().images[:limit]).float() / 16  # pyright: ignore[reportAttributeAccessIssue]
    return torch.nn.functional.interpolate(x[:, None], 28, mode="bilinear").flatten(1)


@lru_cache
def cifar(limit: int | None = None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images (N, 3, 32, 32), normalized by channel, and labels."""
    names = [n for n in ("train_a", "train_b", "test") if _file(f"cifar10_{n}.npz")]
    if "train_a" not in names:
        noise = torch.randn(512, 3, 32, 32), torch.randint(0, 10, (512,))
        return noise, noise
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    std = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    found = {}
    for name in names:
        x, y = _sheets(f"cifar10_{name}.npz", limit)
        images = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255
        found[name] = (images - mean) / std, torch.from_numpy(y).long()
    x, y = (torch.cat([found[n][i] for n in names if n != "test"]) for i in range(2))
    if "test" in names:
        return (x, y), found["test"]
    cut = len(x) * 9 // 10  # a half of the data without a test set: a tenth of it is held out
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def _sheets(name: str, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Lossless WebP sheets of 500 images each."""
    from PIL import Image

    path = _file(name)
    assert path is not None
    held = np.load(path)
    data, ends = held["webp"].tobytes(), held["offsets"]
    count = len(ends) - 1 if limit is None else min(len(ends) - 1, -(-limit // 1000))
    sheets = [Image.open(io.BytesIO(data[ends[i] : ends[i + 1]])) for i in range(count)]
    x = np.concatenate([np.asarray(s.convert("RGB")).reshape(-1, 32, 32, 3) for s in sheets])
    return x, held["labels"][: len(x)]


@lru_cache
def shakespeare(limit: int | None = None) -> tuple[Tensor, Tensor, int]:
    """Characters as numbers, nine tenths to train on and one to test, and how many kinds."""
    path = _file("tiny_shakespeare.txt.gz")
    if path is None:
        text = "the quick brown fox jumps over the lazy dog. " * 500
    else:
        text = gzip.decompress(path.read_bytes()).decode()[:limit]
    kinds = sorted(set(text))
    codes = torch.tensor([kinds.index(c) for c in text])
    cut = len(codes) * 9 // 10
    return codes[:cut], codes[cut:], len(kinds)
