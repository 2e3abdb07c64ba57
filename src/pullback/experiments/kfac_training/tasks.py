"""What is trained: network, data and loss, in full and quick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from ...likelihoods import Bernoulli, Categorical, Likelihood
from ..bai_2024_slices.networks import convnet as digits_convnet
from ..bai_2024_sobolev.networks import convnet
from ..learning import data
from ..learning.data import DataSet
from ..learning.evaluation import Measure
from .networks import DIGITS, MNIST, autoencoder


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Attributes:
        title: in the figure.
        full, quick: network and data.
        loss: what is trained, a mean over samples.
        likelihood: whose Fisher information K-FAC takes.
    """

    title: str
    full: tuple[Callable[[], nn.Module], Callable[[], DataSet]]
    quick: tuple[Callable[[], nn.Module], Callable[[], DataSet]]
    loss: Measure
    likelihood: Callable[[], Likelihood]

    def made(self, quick: bool) -> tuple[nn.Module, DataSet]:
        """The network at its initial weights, and the data."""
        network, images = self.quick if quick else self.full
        return network(), images()


def bernoulli(z: Tensor, y: Tensor) -> Tensor:
    """−log likelihood of the pixels, summed over an image."""
    return F.binary_cross_entropy_with_logits(z, y, reduction="sum") / len(z)


def _itself(load: Callable[[], DataSet]) -> DataSet:
    """Images as vectors, which are to be given back."""
    some = load().flat()
    return replace(some, y=some.x, test_y=some.test_x)


def _clothes() -> DataSet:
    """10,000 and 10,000 pictures of 14×14: means over squares of four pixels."""
    some = data.fashion_mnist().first(10_000, 10_000)
    return replace(some, x=F.avg_pool2d(some.x, 2), test_x=F.avg_pool2d(some.test_x, 2))


AUTOENCODER = Task(
    "Deep autoencoder",
    (partial(autoencoder, MNIST), partial(_itself, data.mnist)),
    (partial(autoencoder, DIGITS), partial(_itself, data.digits)),
    bernoulli,
    partial(Bernoulli, event=1),
)
CONVNET = Task(
    "Convolutional network",
    (partial(convnet, 16), _clothes),
    (digits_convnet, data.digits),
    F.cross_entropy,
    Categorical,
)
