"""What K-FAC's cost is measured on: models with their batches, losses and ratios aimed at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

from ..kfac_training.tasks import autoencoder
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


def bernoulli(z: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(z, y, reduction="sum") / len(z)


def categorical(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, -2), y.flatten())


def images(n: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, size, size), torch.randint(0, classes, (n,))


def same(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def text(n: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, vocabulary, (n, length + 1))
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def cases(device: torch.device, quick: bool) -> dict[str, Case]:
    likelihoods = pb.likelihoods
    if device.type == "cpu":
        if quick:
            widths = (64, 40, 12)
        else:
            widths = (784, 1000, 500, 250, 30)
        n, width = (32, 4) if quick else (512, 32)
        return {
            "autoencoder": Case(
                lambda: autoencoder(widths),
                lambda: same(torch.rand(n, widths[0])),
                bernoulli,
                lambda: likelihoods.Bernoulli(event=1),
                {"every step": 3.8, "10/100": 2.1},
            ),
            "convnet": Case(
                lambda: convnet(width),
                lambda: images(8 if quick else 128, 32, 10),
                categorical,
                likelihoods.Categorical,
                {"every step": 2.0, "10/100": 1.05},
            ),
        }
    targets = {"10/100": 1.20, "25/250": 1.10, "statistics": 2.0, "memory": 1.3}
    rules = {"spectral": 1.15, "eigenbasis": 1.25}
    of_rules = rules | {f"{rule}, memory": 1.3 for rule in rules}
    depths, length = ((1, 1, 1, 1), 64) if quick else ((3, 4, 6, 3), 1024)
    return {
        "resnet50": Case(
            lambda: resnet50(depths=depths),
            lambda: images(8 if quick else 64, 224, 1000),
            categorical,
            likelihoods.Categorical,
            targets,
        ),
        "gpt2": Case(
            lambda: GPT(length=length, depth=2 if quick else 12),
            lambda: text(8, length, 50257),
            categorical,
            likelihoods.Categorical,
            targets | of_rules,
            torch.bfloat16,
        ),
    }
