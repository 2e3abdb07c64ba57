"""Small training tasks of many kinds, for `small_tasks`: ten to choose by, five aside, a Trainer's.

Data are handwritten digits, characters of Shakespeare and functions that are drawn at random; every
task trains in seconds on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ..learning.data import digits
from ..learning.text import tiny_shakespeare

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """Networks, one step of their training, and how they are judged.

    Attributes:
        models: the networks, of which each has an optimizer of its own.
        train: takes these optimizers and the numbers of a batch's samples, and does one step.
        judge: the held-out loss; smaller is better.
        samples: how many samples there are to train on.
    """

    models: tuple[nn.Module, ...]
    train: Callable[[Sequence[Optimizer], Tensor], None]
    judge: Callable[[], float]
    samples: int
    batch: int
    steps: int


def minimize(optimizer: Optimizer, loss: Tensor) -> None:
    """Do one step of a loop that every torch optimizer knows."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def measure(model: nn.Module, loss: Callable[[], Tensor]) -> float:
    """Return a loss in evaluation mode, and go back to training mode."""
    model.eval()
    with torch.no_grad():
        value = float(loss())
    model.train()
    return value


@dataclass(frozen=True)
class Split:
    """Inputs and targets to train on, and others to judge by."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor

    @classmethod
    def cut(cls, x: Tensor, y: Tensor, train: int) -> Split:
        """Train on the first samples; the rest is held out."""
        return cls(x[:train], y[:train], x[train:], y[train:])


def make_supervised_task(model: nn.Module, data: Split, loss: Loss, batch: int, steps: int) -> Task:
    """Inputs and targets."""

    def train(optimizers: Sequence[Optimizer], rows: Tensor) -> None:
        minimize(optimizers[0], loss(model(data.x[rows]), data.y[rows]))

    def judge() -> float:
        return measure(model, lambda: loss(model(data.held_x), data.held_y))

    return Task((model,), train, judge, len(data.x), batch, steps)


def classify(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with classes on the last axis."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def make_mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def generator(seed: int = 0) -> torch.Generator:
    """Random numbers of data, which do not depend on the seed of a run."""
    return torch.Generator().manual_seed(seed)


def load_digits() -> Split:
    """Handwritten digits, (N, 1, 8, 8)."""
    images = digits(1400)
    return Split(images.x, images.y, images.test_x, images.test_y)


def load_characters(length: int = 48) -> Split:
    """Windows of Shakespeare, and each window one character further on."""
    text = tiny_shakespeare(length)
    return Split(text.x[:4000], text.y[:4000], text.test_x[:150], text.test_y[:150])


# --- ten tasks to choose by -------------------------------------------------------------------


def tabular() -> Task:
    """Regression: a noisy function of five among ten columns."""
    draws = generator()
    x = torch.randn(21_000, 10, generator=draws)
    signal = torch.sin(2 * x[:, 0]) * x[:, 1] + x[:, 2].abs() - (x[:, 3] * x[:, 4]).tanh()
    y = (signal + 0.1 * torch.randn(21_000, generator=draws))[:, None]
    return make_supervised_task(
        make_mlp(10, 64, 64, 1), Split.cut(x, y, 20_000), F.mse_loss, 64, 600
    )


def checkers() -> Task:
    """Classification: two classes on a checkerboard in the first two of eight columns."""
    x = 4 * torch.rand(21_000, 8, generator=generator()) - 2
    y = (x[:, 0].floor() + x[:, 1].floor()).long() % 2
    model = make_mlp(8, 64, 64, 2)
    return make_supervised_task(model, Split.cut(x, y, 20_000), classify, 128, 400)


def convolutions() -> Task:
    """Digits, convolutions with batch norm."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    return make_supervised_task(model, load_digits(), classify, 64, 120)


class CharacterGRU(nn.Module):
    """The next character by a recurrent network."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.recurrent = nn.GRU(32, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(text))[0])


def character_gru() -> Task:
    """Shakespeare by a GRU of width 96."""
    return make_supervised_task(CharacterGRU(65, 96), load_characters(), classify, 32, 250)


class VariationalAutoencoder(nn.Module):
    """Reconstruction, mean and log-variance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make_mlp(64, 128, 16)
        self.decoder = make_mlp(8, 128, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean
        if self.training:
            code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def variational() -> Task:
    """Digits by a variational autoencoder; the loss is the negative evidence bound."""
    data = load_digits()
    model = VariationalAutoencoder()

    def bound(images: Tensor) -> Tensor:
        x = images.flatten(1)
        logits, mean, log_variance = model(x)
        fit = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum()
        return (fit + divergence) / len(x)

    def train(optimizers: Sequence[Optimizer], rows: Tensor) -> None:
        minimize(optimizers[0], bound(data.x[rows]))

    def judge() -> float:
        return measure(model, lambda: bound(data.held_x))

    return Task((model,), train, judge, len(data.x), 64, 300)


class SequenceClassifier(nn.Module):
    """A transformer encoder whose mean is classified."""

    def __init__(self, vocabulary: int, length: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 48)
        self.positions = nn.Parameter(0.02 * torch.randn(length, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(48, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.positions).mean(1))


def transformer() -> Task:
    """Classification: how many different kinds of tokens follow a marker in a sequence."""
    tokens = torch.randint(0, 12, (4000, 24), generator=generator())
    follows = F.pad(tokens[:, :-1] == 0, (1, 0))
    present = torch.stack([(follows & (tokens == token)).any(1) for token in range(12)], 1)
    y = present.sum(1).clamp(max=4)
    model = SequenceClassifier(12, 24, 5)
    return make_supervised_task(model, Split.cut(tokens, y, 3200), classify, 64, 300)


def energy_distance(samples: Tensor, others: Tensor) -> Tensor:
    """Return 2E‖X − Y‖ − E‖X − X'‖ − E‖Y − Y'‖, zero for equal distributions."""
    between = torch.cdist(samples, others).mean()
    return 2 * between - torch.cdist(samples, samples).mean() - torch.cdist(others, others).mean()


def adversarial() -> Task:
    """Eight Gaussians on a ring by a generator and a discriminator; judged by energy distance."""
    draws = generator()
    angles = torch.randint(0, 8, (4000,), generator=draws) * (torch.pi / 4)
    centers = 2 * torch.stack([angles.cos(), angles.sin()], 1)
    x = centers + 0.1 * torch.randn(4000, 2, generator=draws)
    maker = make_mlp(8, 64, 64, 2)
    critic = make_mlp(2, 64, 64, 1, activation=nn.Tanh)
    held_noise = torch.randn(1000, 8, generator=draws)

    def train(optimizers: Sequence[Optimizer], rows: Tensor) -> None:
        real = x[rows]
        outputs = maker(torch.randn(len(rows), 8))
        critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(outputs.detach())).mean()
        minimize(optimizers[1], critic_loss)
        minimize(optimizers[0], F.softplus(-critic(outputs)).mean())

    def judge() -> float:
        return measure(maker, lambda: energy_distance(maker(held_noise), x[-1000:]))

    return Task((maker, critic), train, judge, 3000, 128, 300)


def siamese() -> Task:
    """Pairs of digits, equal or not, by the distance of their embeddings."""
    data = load_digits()
    model = nn.Sequential(nn.Flatten(), make_mlp(64, 128, 64, 16))

    def contrast(images: Tensor, labels: Tensor) -> Tensor:
        half = len(images) // 2  # a half is sorted, so that many neighbors are equal
        order = labels[:half].argsort()
        images = torch.cat([images[:half][order], images[half:]])
        labels = torch.cat([labels[:half][order], labels[half:]])
        others = images.roll(1, 0)
        labels_of_others = labels.roll(1, 0)
        distances = (model(images) - model(others)).square().sum(1).add(1e-9).sqrt()
        is_positive = labels == labels_of_others
        return torch.where(
            is_positive, distances.square(), (1 - distances).clamp(min=0).square()
        ).mean()

    def train(optimizers: Sequence[Optimizer], rows: Tensor) -> None:
        minimize(optimizers[0], contrast(data.x[rows], data.y[rows]))

    def judge() -> float:
        return measure(model, lambda: contrast(data.held_x, data.held_y))

    return Task((model,), train, judge, len(data.x), 128, 120)


def autoencoder() -> Task:
    """Digits through a bottleneck of eight numbers, five hidden layers."""
    data = load_digits()
    x = data.x.flatten(1)
    held_out = data.held_x.flatten(1)
    model = make_mlp(64, 96, 48, 8, 48, 96, 64, activation=nn.Tanh)
    return make_supervised_task(model, Split(x, x, held_out, held_out), F.mse_loss, 128, 300)


class CharacterDecoder(nn.Module):
    """The next character by a causal transformer of two blocks."""

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.positions = nn.Embedding(length, 64)
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, vocabulary)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        embedded = self.embedding(text) + self.positions(torch.arange(length))
        return self.head(self.norm(self.blocks(embedded, mask=mask, is_causal=True)))


def character_decoder() -> Task:
    """Shakespeare by a causal transformer of width 64."""
    return make_supervised_task(CharacterDecoder(65, 48), load_characters(), classify, 32, 250)


# --- five tasks kept aside --------------------------------------------------------------------


class Forecaster(nn.Module):
    """The next value of a series by an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(1, 48, batch_first=True)
        self.head = nn.Linear(48, 1)

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.recurrent(series)[0])


def forecast() -> Task:
    """Sums of two sines of random frequency and phase, one step ahead, by an LSTM."""
    draws = generator()
    time = torch.arange(41.0)
    frequencies = 0.2 + 0.8 * torch.rand(2000, 2, 1, generator=draws)
    phases = 6.28 * torch.rand(2000, 2, 1, generator=draws)
    series = torch.sin(frequencies * time + phases).sum(1)[..., None]
    data = Split.cut(series[:, :-1], series[:, 1:], 1600)
    return make_supervised_task(Forecaster(), data, F.mse_loss, 64, 300)


class SetRegressor(nn.Module):
    """Attention over the elements of a set, then their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = make_mlp(3, 48, 48)
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.norm = nn.LayerNorm(48)
        self.head = make_mlp(48, 48, 1)

    def forward(self, points: Tensor) -> Tensor:
        hidden = self.elements(points)
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0])
        return self.head(hidden.mean(1))


def point_sets() -> Task:
    """The largest distance between two of twelve points, by attention."""
    points = torch.randn(3000, 12, 3, generator=generator())
    y = torch.cdist(points, points).amax((1, 2))[:, None]
    return make_supervised_task(SetRegressor(), Split.cut(points, y, 2200), F.mse_loss, 64, 300)


class GraphNetwork(nn.Module):
    """Two rounds of messages along the edges of one graph."""

    propagation: Tensor

    def __init__(self, adjacency: Tensor, features: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("propagation", adjacency / adjacency.sum(1, keepdim=True))
        self.first = nn.Linear(features, 64)
        self.second = nn.Linear(64, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, nodes: Tensor) -> Tensor:
        hidden = torch.relu(self.first(self.propagation @ nodes))
        return self.head(torch.relu(self.second(self.propagation @ hidden)))


def graph() -> Task:
    """Six communities of a random graph with noisy features; two thirds of the labels are known."""
    draws = generator()
    labels = torch.randint(0, 6, (600,), generator=draws)
    chance = torch.where(labels[:, None] == labels, 0.06, 0.012)
    edges = (torch.rand(600, 600, generator=draws) < chance).float().triu(1)
    adjacency = edges + edges.T + torch.eye(600)
    prototypes = torch.randn(6, 32, generator=draws)
    nodes = 0.5 * prototypes[labels] + torch.randn(600, 32, generator=draws)
    model = GraphNetwork(adjacency, 32, 6)

    def train(optimizers: Sequence[Optimizer], rows: Tensor) -> None:
        minimize(optimizers[0], classify(model(nodes)[rows], labels[rows]))

    def judge() -> float:
        return measure(model, lambda: classify(model(nodes)[400:], labels[400:]))

    return Task((model,), train, judge, 400, 100, 60)


def denoiser() -> Task:
    """The noise in noisy points of two moons, given its size: a small diffusion model."""
    draws = generator()
    angles = torch.pi * torch.rand(4000, generator=draws)
    moons = torch.stack([angles.cos(), angles.sin()], 1)
    moons[::2] = torch.tensor([1.0, 0.5]) - moons[::2]
    noise = torch.randn(4000, 2, generator=draws)
    amount = torch.rand(4000, 1, generator=draws)
    noisy = (1 - amount).sqrt() * moons + amount.sqrt() * noise
    x = torch.cat([noisy, amount, amount.sqrt()], 1)
    model = make_mlp(4, 96, 96, 96, 2, activation=nn.SiLU)
    return make_supervised_task(model, Split.cut(x, noise, 3200), F.mse_loss, 128, 400)


class ResidualBlock(nn.Module):
    """Two convolutions with group norm, and the identity beside them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def residual() -> Task:
    """Digits by a residual network with group norm."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), ResidualBlock(16), nn.MaxPool2d(2), ResidualBlock(16),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    return make_supervised_task(model, load_digits(), classify, 64, 120)


# --- a task that needs transformers -----------------------------------------------------------


def distilbert() -> Task:
    """Do a sequence's tokens weigh more than zero? A small DistilBERT; steps are the Trainer's.

    Gradients are clipped at length 1, as the Trainer does by default.
    """
    transformers = import_module("transformers")
    draws = generator()
    tokens = torch.randint(2, 60, (3000, 24), generator=draws)
    weights = torch.randn(60, generator=draws)
    labels = (weights[tokens].sum(1) > 0).long()
    data = Split.cut(tokens, labels, 2400)
    config = transformers.DistilBertConfig(
        vocab_size=60, max_position_embeddings=24, n_layers=2, n_heads=4, dim=64, hidden_dim=128
    )
    model = transformers.DistilBertForSequenceClassification(config)
    with TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to="none")
    trainer = transformers.Trainer(model, arguments)
    trainer.current_gradient_accumulation_steps = 1  # otherwise set by trainer.train()

    def train(optimizers: Sequence[Optimizer], rows: Tensor) -> None:
        optimizers[0].zero_grad()
        batch = {"input_ids": data.x[rows], "labels": data.y[rows]}
        trainer.training_step(model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
        optimizers[0].step()

    def judge() -> float:
        return measure(model, lambda: classify(model(data.held_x).logits, data.held_y))

    return Task((model,), train, judge, len(data.x), 32, 80)


#: tasks by which defaults may be chosen
OPEN_TASKS: dict[str, Callable[[], Task]] = {
    "tabular": tabular,
    "checkers": checkers,
    "convolutions": convolutions,
    "character-gru": character_gru,
    "variational": variational,
    "transformer": transformer,
    "adversarial": adversarial,
    "siamese": siamese,
    "autoencoder": autoencoder,
    "character-decoder": character_decoder,
}
#: tasks on which nothing is chosen: they are run once, at the end
ASIDE_TASKS: dict[str, Callable[[], Task]] = {
    "forecast": forecast,
    "point-sets": point_sets,
    "graph": graph,
    "denoiser": denoiser,
    "residual": residual,
}
#: tasks of other packages, where these are installed
LIBRARY_TASKS: dict[str, Callable[[], Task]] = {}
if find_spec("transformers") is not None and find_spec("accelerate") is not None:
    LIBRARY_TASKS["distilbert"] = distilbert
TASKS = OPEN_TASKS | ASIDE_TASKS | LIBRARY_TASKS
