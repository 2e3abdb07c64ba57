"""The networks that are trained, and the digits as they see them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import nn

from ..learning import data
from ..learning.data import DataSet

#: seven layers whose widths fall by the same number each, as in the paper
PAPER_WIDTHS = (3072, 2634, 2196, 1758, 1320, 882, 444, 10)
DIGITS_WIDTHS = (64, 112, 96, 80, 64, 48, 32, 10)


def mlp(*widths: int, bias: bool = False) -> nn.Sequential:
    """Linear layers with ReLU between them, on images as vectors; torch's initial weights."""
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convnet(width: int = 8, classes: int = 10) -> nn.Sequential:
    """Two 3×3 convolutions with biases and pools for 8×8 images, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * width, classes),
    )  # fmt: skip


@lru_cache(maxsize=2)
def load(name: str, device: str = "cpu") -> DataSet:
    """CIFAR-10 or the digits, of mean 0 and variance 1, kept: decoding takes seconds."""
    return (data.cifar10() if name == "cifar10" else digits()).to(device)


def digits(dtype: torch.dtype = torch.float32) -> DataSet:
    """1347 and 450 digits, (N, 1, 8, 8), of mean 0 and variance 1 over all pixels."""
    raw = data.digits()
    mean, std = raw.x.mean(), raw.x.std()
    x, test = ((t - mean) / std for t in (raw.x, raw.test_x))
    return replace(raw, x=x.to(dtype), test_x=test.to(dtype))
