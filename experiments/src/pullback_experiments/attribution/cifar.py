"""ResNet-9 retrained on halves of two classes of CIFAR-10, and TRAK beside it."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.curvature import Relative, margin

from .halves import Halves, score_dampings, score_dot_products, split_subsets
from .networks import resnet9
from .parts import PartContext, Sizes, cut_batches
from .retraining import draw_subsets
from .scores import trak

if TYPE_CHECKING:
    from ..learning.data import DataSet

#: of CIFAR-10's channels
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
#: what `score_cifar` leaves for `score_trak`
_LEFT = "cifar2-halves.pt"


@dataclass(frozen=True)
class TwoClasses:
    """Cats and dogs with mean 0 and variance 1, labels 0 and 1; queries are test images."""

    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor

    @classmethod
    def load(cls, sizes: Sizes, device: torch.device) -> TwoClasses:
        """Return the first images of `cifar2.pt` in the folder that PULLBACK_DATA names."""
        path = Path(os.environ["PULLBACK_DATA"]) / "cifar2.pt"
        arrays = torch.load(path, weights_only=True)
        mean = torch.tensor(_MEAN, device=device).view(3, 1, 1)
        deviation = torch.tensor(_DEVIATION, device=device).view(3, 1, 1)

        def normalize(pixels: Tensor) -> Tensor:
            return (pixels.to(device).float() / 255 - mean) / deviation

        return cls(
            normalize(arrays["x"][: sizes.images]),
            arrays["y"][: sizes.images].to(device),
            normalize(arrays["test_x"][: sizes.cifar_queries]),
            arrays["test_y"][: sizes.cifar_queries].to(device),
        )

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        """Images and labels whose margin is explained."""
        return self.query_x, self.query_y


def read_two_classes(classes: tuple[int, int] = (3, 5)) -> DataSet:
    """Return cats and dogs of CIFAR-10, labels 0 and 1."""
    from ..learning import data

    images = data.cifar10()
    is_chosen = (images.y == classes[0]) | (images.y == classes[1])
    is_tested = (images.test_y == classes[0]) | (images.test_y == classes[1])
    return data.DataSet(
        images.x[is_chosen],
        (images.y[is_chosen] == classes[1]).long(),
        images.test_x[is_tested],
        (images.test_y[is_tested] == classes[1]).long(),
    )


def save_two_classes(folder: Path) -> Path:
    """Write cats and dogs of CIFAR-10 to `cifar2.pt`, 36 MB, which needs no other package."""
    images = read_two_classes()
    mean = torch.tensor(_MEAN).view(3, 1, 1)
    deviation = torch.tensor(_DEVIATION).view(3, 1, 1)

    def to_bytes(x: Tensor) -> Tensor:
        return ((x * deviation + mean) * 255).round().clamp(0, 255).to(torch.uint8)

    arrays = {
        "x": to_bytes(images.x),
        "y": images.y,
        "test_x": to_bytes(images.test_x),
        "test_y": images.test_y,
    }
    path = folder / "cifar2.pt"
    torch.save(arrays, path)
    return path


@dataclass(frozen=True)
class ImageSchedule:
    """SGD with Nesterov's momentum 0.9, whose rate rises for a fifth of the steps and then falls.

    Attributes:
        epochs, batch: passes over a subset, and samples of a step.
        rate: the highest.
        decay: of the weights.
    """

    epochs: int
    batch: int
    rate: float
    decay: float

    def rates(self, steps: int) -> Tensor:
        """Return the rate of every step."""
        positions = torch.arange(steps) / max(1, steps)
        rising = (positions + 1 / max(1, steps)) / 0.2
        falling = (1 - positions) / 0.8
        return self.rate * torch.minimum(rising, falling).clamp(max=1.0)


#: candidates, of which networks that do not judge choose one. A network that fits every label has
#: hardly any gradient left to attribute by: on images of 16×16 pixels (width 12, 2,000 samples, two
#: networks per half) ten epochs gave 0.13 and four gave 0.30. At full size both fit nearly every
#: label (98 % after four), and the score is 0.21 and 0.19 with two networks per half.
SCHEDULES: dict[str, ImageSchedule] = {
    "4 epochs": ImageSchedule(epochs=4, batch=64, rate=0.01, decay=0.0),
}
#: multiples of each block's mean eigenvalue to choose the damping among; between 0.001 and 1 they
#: were equally good on small images, and 10 was behind
DAMPINGS = {"relative 0.1": Relative(0.1), "relative 1": Relative(1.0)}


class ResNetTrainer:
    """ResNet-9 trained again and again on subsets of the same images.

    On a GPU it works in bfloat16, and a step is captured as a graph: it has 300 short kernels, and
    starting them one by one takes longer than they do.
    """

    momentum = 0.9
    warm_up_steps = 3

    def __init__(self, images: TwoClasses, width: int, schedule: ImageSchedule) -> None:
        self._images = images
        self._width = width
        self._schedule = schedule
        self._device = images.x.device
        self._x = images.x.to(memory_format=torch.channels_last)
        network = resnet9(2, width).to(self._device, memory_format=torch.channels_last)  # pyright: ignore
        self._network: nn.Module = network
        self._parameters = list(network.parameters())
        self._momenta = [torch.zeros_like(p) for p in self._parameters]
        self._batch = torch.zeros(schedule.batch, dtype=torch.long, device=self._device)
        self._rate = torch.zeros((), device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._device.type == "cuda":
            self._graph = self._capture()

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.warm_up_steps):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _step(self) -> None:
        """Move the parameters by the images in `_batch` at the rate in `_rate`."""
        is_cuda = self._device.type == "cuda"
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=is_cuda, cache_enabled=False
        ):
            x = self._x[self._batch].contiguous(memory_format=torch.channels_last)
            loss = F.cross_entropy(self._network(x), self._images.y[self._batch])
        gradients = list(torch.autograd.grad(loss, self._parameters))
        with torch.no_grad():
            torch._foreach_add_(gradients, self._parameters, alpha=self._schedule.decay)
            torch._foreach_mul_(self._momenta, self.momentum)
            torch._foreach_add_(self._momenta, gradients)
            moves = torch._foreach_add(gradients, self._momenta, alpha=self.momentum)
            torch._foreach_mul_(moves, self._rate)
            torch._foreach_sub_(self._parameters, moves)

    def train(self, subset: Tensor, seed: int) -> nn.Module:
        """Return the network after training on a subset; the next call overwrites it."""
        self._reset(seed)
        size = self._schedule.batch
        steps_per_epoch = len(subset) // size
        generator = torch.Generator().manual_seed(seed)
        orders = []
        for _ in range(self._schedule.epochs):
            order = subset[torch.randperm(len(subset), generator=generator)]
            orders.append(order[: steps_per_epoch * size].view(steps_per_epoch, size))
        batches = torch.cat(orders).to(self._device)
        rates = self._schedule.rates(len(batches)).to(self._device)
        self._network.train()
        for batch, rate in zip(batches, rates, strict=True):
            self._batch.copy_(batch)
            self._rate.copy_(rate)
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        return self._network.eval()

    def _reset(self, seed: int) -> None:
        torch.manual_seed(seed)
        fresh = resnet9(2, self._width).state_dict()
        with torch.no_grad():
            for name, tensor in self._network.state_dict().items():
                tensor.copy_(fresh[name])
            torch._foreach_zero_(self._momenta)

    def train_copy(self, subset: Tensor, seed: int) -> nn.Module:
        """Return a trained network with parameters of its own."""
        network = copy.deepcopy(self.train(subset, seed))
        return network.to(memory_format=torch.contiguous_format)  # pyright: ignore

    def measure_margins(self, subset: Tensor, seed: int) -> Tensor:
        """Return the margins of all queries after training on a subset."""
        network = self.train(subset, seed)
        return margin(compute_outputs(network, self._images.query_x), self._images.query_y)


def compute_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return outputs in panels."""
    with torch.no_grad():
        return torch.cat([model(panel) for panel in x.split(1000)])


def compute_accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the share of images whose class is predicted."""
    return round(float((compute_outputs(model, x).argmax(1) == y).float().mean()), 4)


@dataclass(frozen=True)
class Pilot:
    """One schedule as networks for tuning see it.

    Attributes:
        schedule: of all its trainings.
        model: trained on all images.
        damping: the best one for the halves for tuning.
        score: the datamodeling score of that damping there.
        scores: of every sample for every query, with that damping.
        dot_products: the same without curvature.
    """

    schedule: ImageSchedule
    model: nn.Module
    damping: str
    score: float
    scores: Tensor
    dot_products: Tensor


def run_pilot(
    name: str, trainer: ResNetTrainer, schedule: ImageSchedule, images: TwoClasses,
    subsets: Tensor, context: PartContext,
) -> Pilot:  # fmt: skip
    """Train on all images and on the halves for tuning, and choose a damping there."""
    everything = torch.arange(len(images.x))
    model, trained = context.measure(partial(trainer.train_copy, everything, 0))
    accuracy = compute_accuracy(model, images.query_x, images.query_y)
    training_accuracy = compute_accuracy(model, images.x, images.y)
    rows = []
    for number, subset in enumerate(subsets):
        rows.append(trainer.measure_margins(subset, 500 + number))
    training = cut_batches(images.x, images.y, context.sizes.batch)
    fit = partial(pb.curvature.fit, model, training, likelihood=pb.likelihoods.Categorical())
    curvature, fitting = context.measure(fit)
    candidates = score_dampings(curvature, images.queries, training, margin, DAMPINGS)
    best, by_damping = Halves(subsets, torch.stack(rows)).choose(candidates)
    context.record.add(
        **{f"pilot {name}": {"accuracy": accuracy, "accuracy on training data": training_accuracy,
                             "training": trained, "fit": fitting,
                             "tuning": by_damping, "damping": best}}
    )  # fmt: skip
    dot_products = score_dot_products(curvature, images.queries, training, margin)
    return Pilot(schedule, model, best, by_damping[best], candidates[best], dot_products)


#: seconds that a last round of trainings may leave for writing its numbers
_MARGIN_SECONDS = 1.5


def score_cifar(context: PartContext) -> None:
    """Measure how well influence predicts ResNet-9 retrained on halves of two classes."""
    sizes = context.sizes
    images = TwoClasses.load(sizes, context.device)
    subsets = draw_subsets(len(images.x), sizes.tuning + sizes.subsets, seed=0)
    tuning, judging = split_subsets(subsets, sizes.tuning)
    pilots: dict[str, Pilot] = {}
    trainers: dict[str, ResNetTrainer] = {}
    for name, schedule in SCHEDULES.items():
        has_spent_half = context.record.seconds > context.record.seconds_left
        if pilots and has_spent_half:
            break
        epochs = max(1, round(schedule.epochs * sizes.epoch_factor))
        shortened = replace(schedule, epochs=epochs)
        trainers[name] = ResNetTrainer(images, sizes.width, shortened)
        pilots[name] = run_pilot(name, trainers[name], shortened, images, tuning, context)
    chosen = max(pilots, key=lambda name: pilots[name].score)
    pilot = pilots[chosen]
    context.record.add(schedule=chosen, settings=vars(pilot.schedule), damping=pilot.damping)
    totals = torch.zeros(len(judging), len(images.query_x), device=context.device)
    for number in range(sizes.rounds):
        start = context.record.seconds
        for row, subset in enumerate(judging):
            totals[row] += trainers[chosen].measure_margins(subset, 1000 * (number + 1) + row)
        halves = Halves(judging, totals / (number + 1))
        by_method = {
            "EK-FAC": halves.score(pilot.scores),
            "gradient dot product": halves.score(pilot.dot_products),
        }
        context.record.add(**{f"networks per half: {number + 1}": by_method})
        _leave(context, pilot, halves)
        if context.record.seconds_left < context.record.seconds - start + _MARGIN_SECONDS:
            return


def _leave(context: PartContext, pilot: Pilot, halves: Halves) -> None:
    left = {
        "schedule": vars(pilot.schedule),
        "state": pilot.model.state_dict(),
        "subsets": halves.subsets,
        "measured": halves.measured,
    }
    torch.save(left, context.folder / _LEFT)


def score_trak(context: PartContext) -> None:
    """Measure TRAK with one and with several networks on the same halves."""
    sizes = context.sizes
    left = torch.load(context.folder / _LEFT, weights_only=True)
    images = TwoClasses.load(sizes, context.device)
    halves = Halves(left["subsets"], left["measured"].to(context.device))
    model = resnet9(2, sizes.width).to(context.device).eval()
    model.load_state_dict(left["state"])
    trainer = ResNetTrainer(images, sizes.width, ImageSchedule(**left["schedule"]))
    torch.set_float32_matmul_precision("high")
    models: list[nn.Module] = [model]
    _add_trak(context, images, halves, models)
    everything = torch.arange(len(images.x))
    for seed in range(1, sizes.trak_models):
        models.append(trainer.train_copy(everything, seed))
    _add_trak(context, images, halves, models)


def _add_trak(
    context: PartContext, images: TwoClasses, halves: Halves, models: Sequence[nn.Module]
) -> None:
    attribute = partial(
        trak, models, images.queries, (images.x, images.y), context.sizes.trak_dimension, seed=0,
        batch=250,
    )  # fmt: skip
    scores, seconds = context.measure(attribute)
    numbers: dict[str, Any] = {"score": halves.score(scores), **seconds}
    context.record.add(**{f"TRAK, {len(models)} models": numbers})
