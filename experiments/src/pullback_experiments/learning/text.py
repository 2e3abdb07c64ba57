"""Texts as windows of characters, of which each is to be foretold from those before it."""

from __future__ import annotations

import gzip
import zlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from pullback import PullbackError

from . import data
from .data import DataSet

FILE = "tiny_shakespeare.txt.gz"


def tiny_shakespeare(length: int = 256) -> DataSet:
    """1,115,394 characters of 65 kinds; the last tenth is held out."""
    return _of_file(data.file(FILE), length)


@lru_cache(maxsize=2)
def _of_file(path: Path, length: int) -> DataSet:
    try:
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise PullbackError(
            f"{path} cannot be read", str(error), "Replace it; it is a text of UTF-8, gzipped"
        ) from None
    return windows(text, length)


@lru_cache(maxsize=2)
def generate_text(length: int = 32, characters: int = 20_000, seed: int = 0) -> DataSet:
    """Twelve made-up words in random order: something to learn where there is no data."""
    generator = torch.Generator().manual_seed(seed)

    def draw(below: int, count: int) -> list[int]:
        return torch.randint(below, (count,), generator=generator).tolist()

    lengths = [2 + extra for extra in draw(5, 12)]
    words = []
    for letters in lengths:
        words.append("".join(chr(ord("a") + i) for i in draw(10, letters)))
    text = " ".join(words[i] for i in draw(len(words), characters))
    return windows(text[:characters], length)


def windows(text: str, length: int) -> DataSet:
    """x, y: (N, length), numbers of characters, y one place further on than x.

    Those to train on overlap by half: first those that begin at multiples of `length`, then those
    between. Those of the rest do not.
    """
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    codes = torch.tensor([number[c] for c in text])
    held_out = len(codes) // 10
    cut = len(codes) - held_out
    if held_out <= length:
        why = f"a tenth of {len(codes)} characters holds no window of {length} and one more"
        raise PullbackError("The text is too short", why, "Take a longer text, or a shorter window")

    def cuts(text: Tensor, start: int) -> Tensor:
        return text[start:].unfold(0, length + 1, length)

    train = torch.cat([cuts(codes[:cut], start) for start in (0, length // 2)])
    test = cuts(codes[cut:], 0)
    x = train[:, :-1].contiguous()
    y = train[:, 1:].contiguous()
    test_x = test[:, :-1].contiguous()
    test_y = test[:, 1:].contiguous()
    return DataSet(x, y, test_x, test_y, tuple(characters))
