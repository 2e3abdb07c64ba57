"""Data sets from the folder named by `PULLBACK_DATA`, as tensors.

    mnist.npz, fashion_mnist.npz   train_images (60000, 28, 28) uint8, train_labels, test_images, …
    cifar10_{train_a,train_b,test}.npz   webp, offsets, labels: lossless sheets of 500 images
    cifar100.npz                   as mnist.npz, with train_images (50000, 32, 32, 3)
    tiny_shakespeare.txt.gz        see `text`
    digits8x8.npz                  images (1797, 8, 8) 0..16, labels; or scikit-learn's

Nothing stands in for a file that is not there: `generate_pictures` is for those who ask for it.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pullback import PullbackError

VARIABLE = "PULLBACK_DATA"
_SOURCES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion_mnist": "https://github.com/zalandoresearch/fashion-mnist",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar.html",
    "digits8x8": "scikit-learn",
    "tiny_shakespeare": "https://github.com/karpathy/char-rnn",
}
_MEAN = (0.4914, 0.4822, 0.4465)
_STD = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class DataSet:
    """Images and labels to train on, and others to test; or texts, see `text`.

    Attributes:
        x, test_x: (N, channels, height, width), floating; or (N, places), numbers of tokens.
        y, test_y: (N,), class numbers; or (N, places).
        classes: their names.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...] = ()

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> DataSet:
        """Return the data on a device; the dtype is that of the images."""
        x, test = (t.to(device, dtype) for t in (self.x, self.test_x))
        return DataSet(x, self.y.to(device), test, self.test_y.to(device), self.classes)

    def first(self, train: int, test: int | None = None) -> DataSet:
        """Return the first samples of both sets."""
        if test is None:
            test = train
        tensors = self.x[:train], self.y[:train], self.test_x[:test], self.test_y[:test]
        return DataSet(*tensors, self.classes)

    def flat(self) -> DataSet:
        """Images as vectors."""
        return DataSet(self.x.flatten(1), self.y, self.test_x.flatten(1), self.test_y, self.classes)


def file(name: str) -> Path:
    """Return a file of the folder; if it is missing, raise with what to set and where to get it."""
    folder = os.environ.get(VARIABLE)
    path = Path(folder or "data") / name
    if not path.is_file():
        if folder:
            where = f"{path} is not there"
        else:
            where = f"{VARIABLE} is not set, and {path} not there"
        source = next((s for stem, s in _SOURCES.items() if name.startswith(stem)), "its origin")
        raise PullbackError(
            f"The data {name} cannot be found",
            where,
            f"Set {VARIABLE} to a folder that holds it; the data come from {source}, the format "
            "is described in pullback_experiments.learning.data",
        )
    return path


def available(name: str) -> bool:
    """Return True if a file of the folder is there."""
    try:
        return file(name).is_file()
    except PullbackError:
        return False


@lru_cache(maxsize=4)
def _arrays(path: Path, names: tuple[str, ...]) -> tuple[np.ndarray, ...]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return tuple(arrays[name] for name in names)
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise PullbackError(
            f"{path} cannot be read", str(error), f"Replace it; it needs {', '.join(names)}"
        ) from None


_PARTS = ("train_images", "train_labels", "test_images", "test_labels")


def mnist(name: str = "mnist") -> DataSet:
    """60000 and 10000 handwritten digits, (N, 1, 28, 28) in [0, 1]."""
    x, y, tx, ty = _arrays(file(f"{name}.npz"), _PARTS)
    classes = tuple(map(str, range(10)))
    return DataSet(_gray(x, 255), _labels(y), _gray(tx, 255), _labels(ty), classes)


def fashion_mnist() -> DataSet:
    """60000 and 10000 pictures of clothes, (N, 1, 28, 28) in [0, 1]."""
    images = mnist("fashion_mnist")
    (classes,) = _arrays(file("fashion_mnist.npz"), ("class_names",))
    return DataSet(images.x, images.y, images.test_x, images.test_y, tuple(map(str, classes)))


def cifar10(sheets: int | None = None, halves: Sequence[str] = ("a", "b")) -> DataSet:
    """50000 and 10000 color pictures, (N, 3, 32, 32), each channel of mean 0 and variance 1.

    Args:
        sheets: only so many of 500 images from each file.
        halves: of the training set, which come in a file each.
    """
    halves_read = [_sheets(file(f"cifar10_train_{half}.npz"), sheets) for half in halves]
    x, y = map(torch.cat, zip(*halves_read, strict=True))
    tx, ty = _sheets(file("cifar10_test.npz"), sheets)
    (classes,) = _arrays(file("cifar10_test.npz"), ("class_names",))
    return DataSet(x, y, tx, ty, tuple(map(str, classes)))


def _sheets(path: Path, limit: int | None) -> tuple[Tensor, Tensor]:
    """Images and labels of a file."""
    try:
        from PIL import Image
    except ImportError:
        raise PullbackError(
            f"{path} cannot be decoded",
            "its images are WebP, for which Pillow is needed",
            "Install it with `pip install pillow`",
        ) from None
    data, ends, labels = _arrays(path, ("webp", "offsets", "labels"))
    content = data.tobytes()
    if limit is not None:
        ends = ends[: limit + 1]
    try:
        sheets = [Image.open(io.BytesIO(content[a:b])).convert("RGB") for a, b in pairwise(ends)]
        x = np.concatenate([np.asarray(s).reshape(-1, 32, 32, 3) for s in sheets])
    except (OSError, ValueError) as error:  # no image, one of another size, or none at all
        raise PullbackError(
            f"{path} cannot be decoded",
            str(error),
            "Replace it; it needs sheets of images of 32 × 32 pixels",
        ) from None
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (_MEAN, _STD))
    images = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255
    return (images - mean) / std, _labels(labels[: len(x)])


def digits(train: int = 1347) -> DataSet:
    """1797 handwritten digits, (N, 1, 8, 8) in [0, 1], in a fixed random order."""
    x, y = _digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x = _gray(x, 16)[order]
    y = _labels(y)[order]
    classes = tuple(map(str, range(10)))
    return DataSet(x[:train], y[:train], x[train:], y[train:], classes)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    if available("digits8x8.npz"):
        x, y = _arrays(file("digits8x8.npz"), ("images", "labels"))
        return x, y
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise PullbackError(
            "The digits are not available",
            f"scikit-learn is not installed, and {VARIABLE} names no folder with digits8x8.npz",
            'Install it with `pip install scikit-learn` or `pip install -e ".[dev]"`',
        ) from None
    bunch: Any = load_digits()
    return bunch.images, bunch.target


def generate_pictures(
    shape: tuple[int, ...] = (1, 8, 8), classes: int = 4, samples: int = 256, seed: int = 0
) -> DataSet:
    """Noisy copies of one random picture per class: something to learn where there is no data."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(classes, *shape, generator=generator)
    y = torch.arange(2 * samples) % classes
    x = pictures[y] + 0.7 * torch.randn(2 * samples, *shape, generator=generator)
    names = tuple(f"class {i}" for i in range(classes))
    return DataSet(x[:samples], y[:samples], x[samples:], y[samples:], names)


def _gray(x: np.ndarray, top: int) -> Tensor:
    return torch.from_numpy(x).float()[:, None] / top


def _labels(y: np.ndarray) -> Tensor:
    return torch.from_numpy(y.astype(np.int64))
