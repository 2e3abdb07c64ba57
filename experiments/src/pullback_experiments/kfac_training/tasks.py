"""What is trained: network, data and loss, in full and quick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.likelihoods import Bernoulli, Categorical, Likelihood

from ..learning import data, images, schedules, text
from ..learning.data import DataSet
from ..learning.networks import convnet, vgg16
from ..learning.training import Measure

MNIST = (784, 1000, 500, 250, 30)
DIGITS = (64, 100, 50, 25, 10)


def autoencoder(widths: tuple[int, ...] = MNIST) -> nn.Sequential:
    """The mirrored autoencoder of Hinton and Salakhutdinov: tanh units, a linear code, logits.

    Weights are Glorot's: from torch's own start gradients vanish, and Adam and SGD stay for long
    at the mean image.
    """
    layers: list[nn.Module] = []
    for a, b in pairwise([*widths, *widths[-2::-1]]):
        layers += [nn.Linear(a, b), nn.Tanh()]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    code = 2 * (len(widths) - 1) - 1
    return nn.Sequential(*(x for i, x in enumerate(layers[:-1]) if i != code))


class TransformerBlock(nn.Module):
    """Pre-norm causal attention and a GELU perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, width) ↦ the same; a position attends to those before it."""
        n, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder with learned positions; by default GPT-2 small (124M), its head tied."""

    def __init__(
        self,
        vocabulary: int = 50304,
        length: int = 1024,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        *,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialize(depth)
        if tied:
            self.head.weight = self.tokens.weight

    @torch.no_grad()
    def _initialize(self, depth: int) -> None:
        """Initialize as GPT-2: what is added to the residual stream is smaller in deep networks."""
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                m.weight.normal_(std=0.02)
            if isinstance(m, nn.Linear) and m.bias is not None:
                m.bias.zero_()
        for m in self.modules():
            if isinstance(m, TransformerBlock):
                for last in (m.out, m.down):
                    last.weight.normal_(std=0.02 * (2 * depth) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, T) ↦ logits of the next ones, (N, T, vocabulary)."""
        positions = torch.arange(x.shape[1], device=x.device)
        x = self.tokens(x) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


@dataclass(frozen=True)
class TrainingTask:
    """Something to learn.

    Attributes:
        title: in the figure.
        full, quick: network and data.
        loss: what is trained, a mean over samples.
        likelihood: whose Fisher information K-FAC takes.
        evaluated: on how many of the training samples losses are measured, and how many at a time.
        warm: the share of a run in which the rate rises to its value, from which it falls.
        cropped: whether images are cropped and mirrored at random.
        half: whether CUDA computes in bfloat16 where it may, and products of float32 in TF32.
        layout: of the network's weights.
    """

    title: str
    full: tuple[Callable[[], nn.Module], Callable[[], DataSet]]
    quick: tuple[Callable[[], nn.Module], Callable[[], DataSet]]
    loss: Measure
    likelihood: Callable[[], Likelihood]
    evaluated: int = 60_000
    warm: float = 0.0
    cropped: bool = False
    half: bool = False
    layout: torch.memory_format = torch.preserve_format

    def describe(self) -> dict[str, Any]:
        """Return options other than those of most tasks."""
        description: dict[str, Any] = {"task": self.title}
        if self.evaluated != TrainingTask.evaluated:
            description["evaluated"] = self.evaluated
        if self.warm:
            description["warm-up"] = self.warm
        if self.cropped:
            description["augmentation"] = "crops and flips"
        if self.half:
            description["precision"] = "bfloat16 autocast and TF32 on CUDA"
        return description

    def build_parts(self, quick: bool, device: torch.device) -> tuple[nn.Module, DataSet]:
        """Return the network at its initial weights, and the data."""
        network, samples = self.full
        if quick:
            network, samples = self.quick
        model: Any = network()  # whose stub does not know memory_format
        return model.to(device=device, memory_format=self.layout), samples().to(device)

    def run(self, samples: DataSet) -> dict[str, Any]:
        """Return options of `TrainingOptions` for these samples."""
        schedule = schedules.linear
        if self.warm:
            schedule = schedules.add_warmup(schedule, self.warm)
        augment = None
        if self.cropped:
            augment = images.CropAndFlip.of(samples.x)
        half = None
        if self.half and samples.x.is_cuda:
            half = torch.bfloat16
        return {
            "schedule": schedule,
            "augment": augment,
            "half": half,
            "evaluated": self.evaluated,
        }


def bernoulli(z: Tensor, y: Tensor) -> Tensor:
    """−log likelihood of the pixels, summed over an image."""
    return F.binary_cross_entropy_with_logits(z, y, reduction="sum") / len(z)


def categorical(z: Tensor, y: Tensor) -> Tensor:
    """−log likelihood of a token, (N, T, vocabulary) and (N, T): a sample is one position."""
    return F.cross_entropy(z.flatten(0, -2), y.flatten())


def _itself(load: Callable[[], DataSet]) -> DataSet:
    """Return data whose targets are the images themselves, as vectors."""
    images = load().flat()
    return replace(images, y=images.x, test_y=images.test_x)


def _clothes() -> DataSet:
    """Return 10,000 and 10,000 pictures of 14×14: means over squares of four pixels."""
    images = data.fashion_mnist().first(10_000, 10_000)
    return replace(images, x=F.avg_pool2d(images.x, 2), test_x=F.avg_pool2d(images.test_x, 2))


def large_digits(train: int = 640, side: int = 32) -> DataSet:
    """Return digits as colored images, of 32×32 unless said otherwise."""
    images = data.digits(train).first(train, 256)
    x, test_x = (F.interpolate(t, side).expand(-1, 3, -1, -1) for t in (images.x, images.test_x))
    return replace(images, x=x, test_x=test_x)


AUTOENCODER = TrainingTask(
    "Deep autoencoder",
    (partial(autoencoder, MNIST), partial(_itself, data.mnist)),
    (partial(autoencoder, DIGITS), partial(_itself, data.digits)),
    bernoulli,
    partial(Bernoulli, event=1),
)
CONVNET = TrainingTask(
    "Convolutional network",
    (partial(convnet, 14, 16), _clothes),
    (partial(convnet, 8), data.digits),
    F.cross_entropy,
    Categorical,
)
VGG = TrainingTask(
    "VGG-16",
    (vgg16, partial(images.load, "cifar10")),
    (partial(vgg16, narrow=16), large_digits),
    F.cross_entropy,
    Categorical,
    evaluated=10_000,
    warm=0.05,  # without it the largest rates are lost
    cropped=True,
    half=True,
    layout=torch.channels_last,
)
SHAKESPEARE = TrainingTask(
    "Transformer",
    (partial(GPT, 65, 256, 256, 6, 4, tied=False), text.tiny_shakespeare),
    (partial(GPT, 11, 32, 32, 2, 2, tied=False), text.generate_text),
    categorical,
    Categorical,
    evaluated=1024,
    warm=0.05,  # without it the largest rates are lost
    half=True,
)
