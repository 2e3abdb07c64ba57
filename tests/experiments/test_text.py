"""Texts as windows of characters."""

import gzip
from pathlib import Path

import pytest
import torch

from pullback import PullbackError
from pullback_experiments.learning import text


def test_windows_foretell_the_next_character() -> None:
    written = "abcdefghij" * 20
    windows = text.windows(written, 4)
    assert windows.classes == tuple("abcdefghij")
    assert windows.x.dtype == torch.int64
    for x, y in ((windows.x, windows.y), (windows.test_x, windows.test_y)):
        assert x.shape == y.shape
        assert x.shape[1] == 4
        assert torch.equal(y, (x + 1) % 10)
    # 180 characters: 44 windows from 0, 44 from 2
    assert len(windows.x) == 88
    assert len(windows.test_x) == 4
    assert windows.x[:3, 0].tolist() == [0, 4, 8]
    assert windows.x[44:47, 0].tolist() == [2, 6, 0]


def test_nothing_of_the_held_out_part_is_trained_on() -> None:
    windows = text.windows("a" * 90 + "b" * 10, 3)
    assert not bool(windows.x.any())
    assert not bool(windows.y.any())
    assert bool(windows.test_x.all())


def test_shakespeare_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path))
    with pytest.raises(PullbackError, match="char-rnn"):
        text.tiny_shakespeare()
    path = tmp_path / text.FILE
    path.write_bytes(b"To be, or not to be")
    with pytest.raises(PullbackError, match="cannot be read"):
        text.tiny_shakespeare()
    path.write_bytes(gzip.compress(b"To be, or not to be: " * 30))
    tiny_shakespeare = text.tiny_shakespeare(8)
    assert tiny_shakespeare.x.shape[1] == 8
    assert (
        "".join(tiny_shakespeare.classes[i] for i in tiny_shakespeare.x[0].tolist()) == "To be, o"
    )
    assert text.tiny_shakespeare(8) is tiny_shakespeare


def test_a_text_that_holds_no_window() -> None:
    with pytest.raises(PullbackError, match="too short"):
        text.windows("abc" * 20, 6)
    with pytest.raises(PullbackError, match="too short"):
        text.windows("", 6)


def test_the_made_up_text() -> None:
    actual = text.generate_text()
    assert len(actual.classes) == 11
    assert actual.x.shape[1] == 32
    assert torch.equal(actual.x, text.generate_text(32).x)
    assert not torch.equal(actual.x[:99], text.generate_text(seed=1).x[:99])
