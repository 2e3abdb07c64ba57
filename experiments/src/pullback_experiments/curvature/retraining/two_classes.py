"""Cats and dogs of CIFAR-10."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..sizes import Sizes

if TYPE_CHECKING:
    from ...learning.data import DataSet

#: of CIFAR-10's channels
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class TwoClasses:
    """Cats and dogs with mean 0 and variance 1, labels 0 and 1; queries are test images."""

    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor

    @classmethod
    def load(cls, sizes: Sizes, device: torch.device) -> TwoClasses:
        """Return the first images of `cifar2.pt`, or of CIFAR-10 where that file is not there.

        Both are looked for in the folder that PULLBACK_DATA names.
        """
        path = Path(os.environ.get("PULLBACK_DATA", "data")) / "cifar2.pt"
        if sizes.is_generated:
            images = cls._generate(sizes)
        elif path.is_file():
            images = cls._read_bytes(path)
        else:
            images = cls._read_images()
        return cls(
            images.x[: sizes.images].to(device),
            images.y[: sizes.images].to(device),
            images.query_x[: sizes.cifar_queries].to(device),
            images.query_y[: sizes.cifar_queries].to(device),
        )

    @classmethod
    def _read_bytes(cls, path: Path) -> TwoClasses:
        """Return the images of `save_two_classes`."""
        arrays = torch.load(path, weights_only=True)
        mean = torch.tensor(_MEAN).view(3, 1, 1)
        deviation = torch.tensor(_DEVIATION).view(3, 1, 1)

        def normalize(pixels: Tensor) -> Tensor:
            return (pixels.float() / 255 - mean) / deviation

        return cls(
            normalize(arrays["x"]),
            arrays["y"],
            normalize(arrays["test_x"]),
            arrays["test_y"],
        )

    @classmethod
    def _read_images(cls) -> TwoClasses:
        """Return the images of CIFAR-10's own files."""
        images = read_two_classes()
        return cls(images.x, images.y, images.test_x, images.test_y)

    @classmethod
    def _generate(cls, sizes: Sizes) -> TwoClasses:
        """Return made-up images of two classes."""
        from ...learning import data

        images = data.generate_pictures((3, 32, 32), 2, sizes.images + sizes.cifar_queries)
        return cls(images.x, images.y, images.test_x, images.test_y)

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        """Images and labels whose margin is explained."""
        return self.query_x, self.query_y


def read_two_classes(classes: tuple[int, int] = (3, 5)) -> DataSet:
    """Return cats and dogs of CIFAR-10, labels 0 and 1."""
    from ...learning import data

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
