"""One run of the speed recipe: 200 steps, then accuracy with six views and the training loss."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain, islice
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback import KFAC

from ..framework.records import Record
from ..framework.timing import synchronize
from ..learning.data import DataSet
from ..learning.training import autocast
from .batches import RecipeBatches, list_views
from .network import RecipeNetwork
from .optimizers import Entrant


@dataclass(frozen=True)
class Recipe:
    """The published settings of a run.

    Attributes:
        batch: images of a step.
        epochs: over the training images.
        patch_epochs: after which the bias of the first layer stays as it is.
        smoothing: of labels.
        widths: channels of the three groups of convolutions.
        whitened_images: how many training images set the first filters.
        measured_images: training images on which loss and accuracy are measured at the end.
    """

    batch: int = 2000
    epochs: int = 8
    patch_epochs: int = 3
    smoothing: float = 0.2
    widths: tuple[int, int, int] = (64, 256, 256)
    whitened_images: int = 5000
    measured_images: int = 10_000

    def make_model(self, images: DataSet, seed: int) -> RecipeNetwork:
        """Seed torch, and return the network at random weights, on the images' device."""
        torch.manual_seed(seed)
        model = RecipeNetwork(self.widths)
        model = model.to(images.x.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        model.whiten_patches(images.x[: self.whitened_images])
        return model


def train(recipe: Recipe, entrant: Entrant, images: DataSet, seed: int) -> Record:
    """Train once and return the record of the run.

    `images` lie on the device, in the dtype of the computation. Seconds are those of all steps,
    shifts of the images included. `training loss` has the mean of the smoothed loss over every
    epoch; `final training loss` is that of unshifted images without smoothing, after training.
    """
    device = images.x.device
    model = recipe.make_model(images, seed)
    batches = RecipeBatches(images, recipe.batch, seed)
    optimizers = entrant.build(model)
    run = _Run(recipe, entrant, model, optimizers, batches)
    try:
        synchronize(device)
        start = time.perf_counter()
        for epoch in range(ceil(run.epochs)):
            run.train_epoch(epoch)
        run.average_weights()
        synchronize(device)
        seconds = time.perf_counter() - start
    finally:
        for optimizer in optimizers:
            if isinstance(optimizer, KFAC):
                optimizer.close()
    return {
        "steps": run.steps_done,
        "seconds": seconds,
        "training loss": [float(loss) / recipe.batch for loss in run.epoch_losses],
        **evaluate(model, images, recipe.measured_images),
    }


class _Run:
    """The state of a run."""

    def __init__(
        self,
        recipe: Recipe,
        entrant: Entrant,
        model: RecipeNetwork,
        optimizers: list[Optimizer],
        batches: RecipeBatches,
    ) -> None:
        self._recipe = recipe
        self._entrant = entrant
        self._model = model
        self._optimizers = optimizers
        self._batches = batches
        self._half = None
        if batches.images.x.dtype != torch.float32:
            self._half = batches.images.x.dtype
        self._groups = list(chain.from_iterable(o.param_groups for o in optimizers))
        self._rates = [group["lr"] for group in self._groups]
        self._filters = model.filters
        entrant.normalization.apply(self._filters)  # running moments are of normalized filters
        self.epochs = entrant.epochs or recipe.epochs
        self.steps_done = 0
        self._total_steps = round(self.epochs * batches.steps_per_epoch)
        self._mean = _RunningMean(model)
        #: the mean over each epoch of the loss of a batch
        self.epoch_losses: list[Tensor] = []

    def train_epoch(self, epoch: int) -> None:
        """Take the steps of an epoch."""
        self._model.train()
        patches = self._model.patches.bias
        assert patches is not None
        if self._entrant.freezes_patches and epoch == self._recipe.patch_epochs:
            patches.requires_grad_(False)
            patches.grad = None
        losses = []
        steps_left = self._total_steps - self.steps_done
        for x, y in islice(self._batches.iterate_epoch(epoch), steps_left):
            self._set_rates(patches)
            losses.append(self._step(x, y))
            if self._total_steps - self.steps_done < self._entrant.averaged_steps:
                self._mean.update()
        self.epoch_losses.append(torch.stack(losses).mean())

    def average_weights(self) -> None:
        """Give the model the mean over the last steps, if the entrant asks for it."""
        if self._entrant.averaged_steps:
            self._mean.copy_to_model()

    def _set_rates(self, patches: Tensor) -> None:
        """Let all rates fall along a line, and that of the first layer's bias to zero sooner."""
        epochs_done = self.steps_done / self._batches.steps_per_epoch
        factor = 1 - (1 - self._entrant.final_rate) * epochs_done / self.epochs
        patch_factor = max(0.0, 1 - epochs_done / self._recipe.patch_epochs)
        for group, rate in zip(self._groups, self._rates, strict=True):
            is_of_patches = len(group["params"]) == 1 and group["params"][0] is patches
            if is_of_patches:
                group["lr"] = rate * patch_factor
            else:
                group["lr"] = rate * factor

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one step, and return the loss summed over the batch."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        with autocast(x, self._half):
            z = self._model(x)
        smoothing = self._recipe.smoothing
        loss = F.cross_entropy(z.float(), y, label_smoothing=smoothing, reduction="sum")
        loss.backward()
        self._entrant.normalization.apply(self._filters)
        for optimizer in self._optimizers:
            optimizer.step()
        self.steps_done += 1
        return loss.detach()


class _RunningMean:
    """The mean over some steps of a model's parameters and running moments."""

    def __init__(self, model: nn.Module) -> None:
        tensors = chain(model.parameters(), model.buffers())
        self._tensors = [t for t in tensors if t.is_floating_point()]
        self._means: list[Tensor] = []
        self._count = 0

    @torch.no_grad()
    def update(self) -> None:
        """Take the model as it is now into the mean."""
        self._count += 1
        if not self._means:
            self._means = [t.detach().clone() for t in self._tensors]
        torch._foreach_lerp_(self._means, self._tensors, 1 / self._count)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Write the mean into the model."""
        torch._foreach_copy_(self._tensors, self._means)


@torch.no_grad()
def evaluate(model: nn.Module, images: DataSet, measured_images: int) -> Record:
    """Return accuracies and losses on test images, with and without views, and on training ones."""
    model.eval()
    plain = _predict(model, images.test_x, with_views=False)
    with_views = _predict(model, images.test_x, with_views=True)
    train_y = images.y[:measured_images]
    training = _predict(model, images.x[:measured_images], with_views=False)
    return {
        "accuracy": _measure_accuracy(plain, images.test_y),
        "accuracy with views": _measure_accuracy(with_views, images.test_y),
        "test loss": float(F.cross_entropy(plain, images.test_y)),
        "final training loss": float(F.cross_entropy(training, train_y)),
        "final training accuracy": _measure_accuracy(training, train_y),
    }


def _predict(model: nn.Module, images: Tensor, *, with_views: bool) -> Tensor:
    """Return logits in float32, means over six views if asked for."""
    half = None
    if images.dtype != torch.float32:
        half = images.dtype
    logits = []
    for batch in images.split(2000):
        views = [(1.0, batch)]
        if with_views:
            views = list_views(batch)
        with autocast(batch, half):
            logits.append(sum(weight * model(view).float() for weight, view in views))
    return torch.cat(logits)


def _measure_accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) == labels).double().mean())
