"""The tasks by name, at their full sizes and at those of the quick versions, and their text.

The text is Python source files as bytes: it is on every machine, and enough not to be seen twice.
Files, not windows, are held out: a held-out window never continues a text that is trained on.
Files with equal contents count once, since packages carry copies of each other.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor, nn

from pullback import PullbackError

from ..framework.records import Record
from ..kfac_training.tasks import large_digits
from ..learning import images
from .loop import Batches, RaceTask
from .networks import Decoder, ImageData, ResNet, VisionTransformer

VOCABULARY = 256
_INSTALLED = {"site-packages", "dist-packages"}
_BETWEEN = b"\0"  # ends a file

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Corpus:
    """Bytes of files to train on and of held-out files, uint8 of one axis."""

    train: Tensor
    held_out: Tensor

    @property
    def size(self) -> int:
        """Bytes of both parts."""
        return len(self.train) + len(self.held_out)

    def batches(
        self, length: int, batch: int, steps: int, seed: int, device: torch.device, held_out: int
    ) -> Windows:
        """Windows of this length in a random order that follows from the seed."""
        count = min(len(self.train), len(self.held_out)) - 1
        if count < length:
            why = f"its smaller part has {count + 1} bytes, a window and its next byte {length + 1}"
            raise PullbackError("The corpus is too short", why, "Take more files")
        starts = torch.arange((len(self.train) - 1) // length) * length
        draw = torch.Generator().manual_seed(seed)
        passes = -(-steps * batch // len(starts))
        order = torch.cat([torch.randperm(len(starts), generator=draw) for _ in range(passes)])
        chosen = starts[order[: steps * batch]].view(steps, batch)
        room = (len(self.held_out) - 1) // length
        count = min(held_out, room)
        last = torch.arange(count) * room // count * length  # evenly apart
        tensors = (
            self.train.to(device),
            chosen.to(device),
            self.held_out.to(device),
            last.to(device),
        )
        return Windows(*tensors, length, steps * batch / len(starts))


@dataclass(frozen=True)
class Windows:
    """Windows of a corpus on the device.

    Attributes:
        train, held_out_text: bytes.
        chosen: where the windows of every step begin, (steps, batch).
        last: where those begin that are held out.
        length: bytes of a window.
        passes: how often the training text is seen; at most 1 unless it is too short.
    """

    train: Tensor
    chosen: Tensor
    held_out_text: Tensor
    last: Tensor
    length: int
    passes: float

    def of(self, steps: range) -> list[Batch]:
        """Return the batches of these steps: (batch, length) bytes, and those one position further
        on.
        """
        return [self._cut(self.train, self.chosen[i]) for i in steps]

    def held_out(self, size: int) -> Iterator[Batch]:
        """Yield all held-out windows, so many at a time."""
        for starts in self.last.split(size):
            yield self._cut(self.held_out_text, starts)

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        offsets = torch.arange(self.length + 1, device=text.device)
        windows = text[starts[:, None] + offsets].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@lru_cache(maxsize=2)
def python_files(most: int, packages: bool) -> Corpus:
    """Files of Python's standard library, and of the installed packages if asked for.

    Args:
        most: bytes, at most so many.
        packages: whether site-packages is read too.
    """
    largest = 500_000  # bytes of a file; larger ones are mostly tables
    contents: tuple[list[bytes], list[bytes]] = [], []
    sizes = [0, 0]
    hashes = set()
    for path in _paths(packages):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        digest = sha256(content).digest()
        if not 0 < len(content) <= largest or digest in hashes:
            continue
        hashes.add(digest)
        # a twentieth is held out; files in a random order fill both sides evenly
        side = int(sizes[1] * 20 <= sum(sizes))
        contents[side].append(content + _BETWEEN)
        sizes[side] += len(content) + 1
        if sum(sizes) >= most:
            break
    train, held_out = (
        torch.from_numpy(np.frombuffer(b"".join(p), np.uint8).copy()) for p in contents
    )
    return Corpus(train, held_out)


def _paths(packages: bool) -> list[Path]:
    """Python files in a random order that depends on their names alone."""
    known = sysconfig.get_paths()
    library = Path(known["stdlib"])
    paths = [p for p in library.rglob("*.py") if not _INSTALLED & set(p.parts)]
    named = [(str(p.relative_to(library)), p) for p in paths]
    if packages:
        site_packages = {Path(known["purelib"]), Path(known["platlib"])}
        site_packages |= {Path(p) for p in sys.path if Path(p).name in _INSTALLED}
        for folder in site_packages:
            named += [(str(p.relative_to(folder)), p) for p in folder.rglob("*.py")]
    named.sort()
    Random(0).shuffle(named)
    return [path for _, path in named]


@dataclass(frozen=True)
class TextData:
    """Batches of windows of Python files.

    Attributes:
        length, batch: bytes of a window, and windows of a step.
        held_out: windows that the held-out loss is taken of.
        most: bytes of the corpus at most.
        packages: whether installed packages are read beside the standard library.
    """

    length: int
    batch: int
    held_out: int
    most: int = 80_000_000
    packages: bool = True

    def __call__(self, steps: int, seed: int, device: torch.device) -> tuple[Batches, Record]:
        files = python_files(self.most, self.packages)
        batches = files.batches(self.length, self.batch, steps, seed, device, self.held_out)
        about = {"corpus bytes": files.size, "passes": batches.passes}
        if files.size < 20_000_000:
            about["corpus"] = "below 20 MB"
        return batches, about


def _text(title: str, steps: int, data: TextData, width: int, depth: int, heads: int) -> RaceTask:
    model = partial(Decoder, VOCABULARY, data.length, width, depth, heads)
    evaluations = 8
    if steps > 500:
        evaluations = 12
    return RaceTask(
        title, model, data, steps, evaluations, held_batch=max(1, 65_536 // data.length)
    )


def _images(title: str, model: Callable[[], nn.Module], batch: int, steps: int) -> RaceTask:
    data = ImageData(partial(images.load, "cifar10"), batch)
    memory_format = torch.preserve_format
    if model is ResNet:
        memory_format = torch.channels_last
    return RaceTask(title, model, data, steps, 10, held_batch=2000, layout=memory_format)


def _quick_images(title: str, model: Callable[[], nn.Module]) -> RaceTask:
    data = ImageData(partial(large_digits, side=16), 32, margin=1)
    return RaceTask(title, model, data, 50, evaluations=5)


TASKS: dict[str, RaceTask] = {
    "text-quick": _text("Decoder of 2 layers", 80, TextData(64, 8, 64, 4_000_000, False), 64, 2, 4),
    "text-small": _text(
        "Decoder of 4 layers", 250, TextData(128, 16, 128, 20_000_000, False), 96, 4, 4
    ),
    "text": _text("Decoder of 6 layers", 800, TextData(256, 64, 2048), 384, 6, 6),
    "text-large": _text("Decoder of 12 layers", 400, TextData(512, 32, 512), 768, 12, 12),
    "text-largest": _text("Decoder of 24 layers", 300, TextData(512, 32, 256), 1024, 24, 16),
    "text-short": _text("Decoder of 24 layers", 150, TextData(512, 32, 256), 1024, 24, 16),
    "resnet-quick": _quick_images("Small ResNet", partial(ResNet, width=8, depths=(1, 1))),
    "vit-quick": _quick_images("Small ViT", partial(VisionTransformer, 10, 32, 2, 2)),
    "resnet": _images("ResNet-18", ResNet, 512, 400),
    "vit": _images("ViT of 6 layers", VisionTransformer, 512, 500),
}
