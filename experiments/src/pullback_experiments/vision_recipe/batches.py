"""Images of the speed recipe: alternating flips, small shifts, and the views of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from pullback import PullbackError

from ..learning.data import DataSet


@dataclass
class RecipeBatches:
    """Epochs over the training images, in a random order.

    Each image is mirrored at random once, and all of them again in every second epoch, so that two
    epochs in a row see both sides. Shifts are drawn anew in every epoch.

    Args:
        images: on the device where training takes place.
        size: images of a batch; an incomplete last batch is left out.
        seed: of the order, the shifts and the first flips.
        shift: pixels by which images are moved at most.
    """

    images: DataSet
    size: int
    seed: int
    shift: int = 2
    _draw: torch.Generator = field(init=False)
    #: the images with a reflected frame, (N, H + 2 shift, W + 2 shift, 3)
    _framed: Tensor = field(init=False)

    def __post_init__(self) -> None:
        x = self.images.x
        if len(x) < self.size:
            raise PullbackError(
                "The training images are too few",
                f"there are {len(x)}, and a batch has {self.size}",
                "Take more images, or a smaller batch",
            )
        self._draw = torch.Generator(x.device).manual_seed(self.seed)
        is_mirrored = torch.rand(len(x), generator=self._draw, device=x.device) < 0.5
        mirrored = torch.where(is_mirrored[:, None, None, None], x.flip(-1), x)
        framed = F.pad(mirrored, (self.shift,) * 4, "reflect")
        self._framed = framed.permute(0, 2, 3, 1).contiguous()

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return len(self.images.x) // self.size

    def iterate_epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch, images (size, 3, H, W) and labels (size,).

        The channels of images come last in memory.
        """
        shifted = self._shift()
        if epoch % 2 == 1:
            shifted = shifted.flip(2)
        count = len(shifted)
        order = torch.randperm(count, generator=self._draw, device=shifted.device)
        for chosen in order[: self.steps_per_epoch * self.size].split(self.size):
            yield shifted[chosen].permute(0, 3, 1, 2), self.images.y[chosen]

    def _shift(self) -> Tensor:
        """Return all images, each moved by up to `shift` pixels along both axes, (N, H, W, 3)."""
        count, _, height, width = self.images.x.shape
        device = self._framed.device
        rows = self._draw_offsets(count) + torch.arange(height, device=device)
        columns = self._draw_offsets(count) + torch.arange(width, device=device)
        image = torch.arange(count, device=device)[:, None, None]
        return self._framed[image, rows[:, :, None], columns[:, None, :]]

    def _draw_offsets(self, count: int) -> Tensor:
        device = self._framed.device
        return torch.randint(2 * self.shift + 1, (count, 1), generator=self._draw, device=device)


def list_views(images: Tensor) -> list[tuple[float, Tensor]]:
    """Return six views of images with their weights: three positions, mirrored and not.

    The image in its place counts half, and moved by one pixel along both axes, to either side, a
    quarter each.
    """
    height, width = images.shape[-2:]
    framed = F.pad(images, (1,) * 4, "reflect")
    positions = [
        (0.5, images),
        (0.25, framed[..., :height, :width]),
        (0.25, framed[..., 2:, 2:]),
    ]
    views = []
    for weight, view in positions:
        views.append((weight / 2, view))
        views.append((weight / 2, view.flip(-1)))
    return views
