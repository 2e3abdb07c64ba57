"""The tasks by name, at their full sizes and at those of the quick versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..bai_2024_sobolev import images
from ..framework.plain import Record
from ..kfac_training.tasks import large_digits
from . import corpus
from .decoder import Decoder
from .loop import Batches, RaceTask
from .vision import ImageData, ResNet, VisionTransformer


@dataclass(frozen=True)
class TextData:
    """Batches of windows of Python files.

    Attributes:
        length, batch: bytes of a window, and windows of a step.
        held: windows that the held-out loss is taken of.
        most: bytes of the corpus at most.
        packages: whether installed packages are read beside the standard library.
    """

    length: int
    batch: int
    held: int
    most: int = 80_000_000
    packages: bool = True

    def __call__(self, steps: int, seed: int, device: torch.device) -> tuple[Batches, Record]:
        files = corpus.python_files(self.most, self.packages)
        found = files.batches(self.length, self.batch, steps, seed, device, self.held)
        small = files.size < corpus.ENOUGH
        about = {"corpus bytes": files.size, "passes": found.passes}
        return found, about | ({"corpus": "below 20 MB"} if small else {})


def _text(title: str, steps: int, data: TextData, width: int, depth: int, heads: int) -> RaceTask:
    model = partial(Decoder, corpus.VOCABULARY, data.length, width, depth, heads)
    count = 24 if steps > 500 else 8
    return RaceTask(title, model, data, steps, count, held_batch=max(1, 65_536 // data.length))


def _images(title: str, model: Callable[[], nn.Module], batch: int, steps: int) -> RaceTask:
    data = ImageData(partial(images.load, "cifar10"), batch)
    kind = torch.channels_last if model is ResNet else torch.preserve_format
    return RaceTask(title, model, data, steps, 10, held_batch=2000, layout=kind)


def _quick_images(title: str, model: Callable[[], nn.Module]) -> RaceTask:
    data = ImageData(partial(large_digits, side=16), 32, margin=1)
    return RaceTask(title, model, data, 50, evaluations=5)


TASKS: dict[str, RaceTask] = {
    "text-quick": _text("Decoder of 2 layers", 80, TextData(64, 8, 64, 4_000_000, False), 64, 2, 4),
    "text": _text("Decoder of 6 layers", 800, TextData(256, 64, 2048), 384, 6, 6),
    "text-large": _text("Decoder of 12 layers", 400, TextData(512, 32, 512), 768, 12, 12),
    "resnet-quick": _quick_images("Small ResNet", partial(ResNet, width=8, depths=(1, 1))),
    "vit-quick": _quick_images("Small ViT", partial(VisionTransformer, 10, 32, 2, 2)),
    "resnet": _images("ResNet-18", ResNet, 512, 400),
    "vit": _images("ViT of 6 layers", VisionTransformer, 512, 500),
}
