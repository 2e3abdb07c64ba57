"""Color images: where they come from, and random crops and flips of them on their device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pullback import PullbackError

from . import data
from .data import DataSet

CLASSES = {"cifar10": 10, "cifar100": 100, "generated": 10}
_MEAN = (0.5071, 0.4867, 0.4408)
_STD = (0.2675, 0.2565, 0.2761)


def require_known_dataset(dataset: str) -> str:
    """Return the name of a data set that is known here; refuse others."""
    if dataset not in CLASSES:
        raise PullbackError(
            f"There is no data set {dataset!r}",
            "it is none that VGG-16 is trained on",
            f"Use one of {', '.join(CLASSES)}",
        )
    return dataset


@lru_cache(maxsize=2)
def load(dataset: str, sheets: int | None = None) -> DataSet:
    """Return normalized CIFAR-10 or CIFAR-100; cached, since decoding takes seconds.

    Args:
        dataset: "cifar10", "cifar100", or "generated", a hundred made-up images. `cifar100.npz`
            holds train_images (50000, 32, 32, 3) of uint8, train_labels (fine), test_images and
            test_labels.
        sheets: only so many times 500 images of each file.
    """
    if require_known_dataset(dataset) == "cifar10":
        return data.cifar10(sheets)
    if dataset == "generated":
        return data.generate_pictures((3, 32, 32), CLASSES[dataset], samples=100)
    if sheets is None:
        images = None
    else:
        images = 500 * sheets
    path = data.file("cifar100.npz")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, tx = (_normalize(arrays[k][:images]) for k in ("train_images", "test_images"))
            y, ty = (arrays[k][:images].astype(np.int64) for k in ("train_labels", "test_labels"))
    except (OSError, ValueError, KeyError) as error:
        why = "it needs train_images, train_labels, test_images and test_labels"
        raise PullbackError(f"{path} cannot be read", f"{error}; {why}", "Replace it") from None
    return DataSet(x, torch.from_numpy(y), tx, torch.from_numpy(ty))


def _normalize(images: np.ndarray) -> Tensor:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (_MEAN, _STD))
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - mean) / std


def shrunk(images: DataSet, divisor: float) -> DataSet:
    """Inputs divided by a number."""
    x = images.x / divisor
    test = images.test_x / divisor
    return DataSet(x, images.y, test, images.test_y, images.classes)


@dataclass(frozen=True)
class CropAndFlip:
    """A random window of the image with a frame of `margin` black pixels, mirrored half the time.

    `black` is the value of a black pixel, (channels,).
    """

    black: Tensor
    margin: int = 4

    @classmethod
    def of(cls, x: Tensor) -> CropAndFlip:
        """Return the augmentation for images; the fill is the least value of each channel."""
        return cls(x.amin((0, 2, 3)))

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = images.shape
        device = images.device
        m = self.margin
        black = self.black.to(images)[:, None, None]
        framed = F.pad(images - black, (m, m, m, m)) + black

        def draw(count: int) -> Tensor:
            return torch.randint(count, (n, 1), generator=generator, device=device)

        rows = draw(2 * m + 1) + torch.arange(height, device=device)
        columns = draw(2 * m + 1) + torch.arange(width, device=device)
        columns = torch.where(draw(2) == 1, columns.flip(1), columns)
        sample = torch.arange(n, device=device)[:, None, None]
        # indices on both sides of a slice: (n, height, width, channels)
        out = framed[sample, :, rows[:, :, None], columns[:, None, :]]
        return out.permute(0, 3, 1, 2)
