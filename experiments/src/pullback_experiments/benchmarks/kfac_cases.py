"""Models with batches, losses and target ratios, on which K-FAC's cost is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import pullback as pb

from ..kfac_training.tasks import autoencoder, bernoulli, categorical
from .kfac_models import GPT, convnet, resnet50


@dataclass(frozen=True)
class Case:
    """A model with its batch and loss, and the ratios that are aimed at."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    likelihood: Callable[[], pb.likelihoods.Likelihood]
    targets: dict[str, float]
    half: torch.dtype | None = None
    naive: bool = True


def images(n: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, size, size), torch.randint(0, classes, (n,))


def pair_with_itself(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def text(n: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, vocabulary, (n, length + 1))
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def cases(device: torch.device, quick: bool) -> dict[str, Case]:
    """Return what is measured on this kind of device; small models where `quick`."""
    if device.type == "cpu":
        return _cpu_cases(quick)
    return _gpu_cases(quick)


def _cpu_cases(quick: bool) -> dict[str, Case]:
    widths = (784, 1000, 500, 250, 30)
    samples = 512
    channels = 32
    pictures = 128
    if quick:
        widths = (64, 40, 12)
        samples = 32
        channels = 4
        pictures = 8
    return {
        "autoencoder": Case(
            lambda: autoencoder(widths),
            lambda: pair_with_itself(torch.rand(samples, widths[0])),
            bernoulli,
            lambda: pb.likelihoods.Bernoulli(event=1),
            {"every step": 3.8, "10/100": 2.1},
        ),
        "convnet": Case(
            lambda: convnet(channels),
            lambda: images(pictures, 32, 10),
            categorical,
            pb.likelihoods.Categorical,
            {"every step": 2.0, "10/100": 1.05},
        ),
    }


def _gpu_cases(quick: bool) -> dict[str, Case]:
    targets = {"10/100": 1.20, "25/250": 1.10, "statistics": 2.0, "memory": 1.3}
    rules = {"spectral": 1.15, "eigenbasis": 1.25}
    rule_targets = rules | {f"{rule}, memory": 1.3 for rule in rules}
    stages = (3, 4, 6, 3)
    pictures = 64
    length = 1024
    blocks = 12
    if quick:
        stages = (1, 1, 1, 1)
        pictures = 8
        length = 64
        blocks = 2
    return {
        "resnet50": Case(
            lambda: resnet50(depths=stages),
            lambda: images(pictures, 224, 1000),
            categorical,
            pb.likelihoods.Categorical,
            targets,
        ),
        "gpt2": Case(
            lambda: GPT(length=length, depth=blocks),
            lambda: text(8, length, 50257),
            categorical,
            pb.likelihoods.Categorical,
            targets | rule_targets,
            torch.bfloat16,
        ),
    }
