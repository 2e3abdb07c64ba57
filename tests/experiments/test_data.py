"""Data sets: formats, and what is said where they cannot be had."""

import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pullback import PullbackError
from pullback_experiments.learning import data

HELD = Path(os.environ.get("PULLBACK_DATA", "data"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path))
    return tmp_path


def write_mnist(path: Path, **more: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (5, 28, 28), dtype=np.uint8)
    y = np.arange(5, dtype=np.uint8)
    arrays = {"train_images": x, "train_labels": y, "test_images": x[:2], "test_labels": y[:2]}
    np.savez(path, **arrays, **more)
    return x


def write_cifar(path: Path, count: int, seed: int) -> np.ndarray:
    """Sheets of three images each."""
    image = pytest.importorskip("PIL.Image")
    x = np.random.default_rng(seed).integers(0, 256, (count * 3, 32, 32, 3), dtype=np.uint8)
    sheets = b""
    ends = [0]
    for i in range(count):
        buffer = io.BytesIO()
        sheet = x[3 * i : 3 * i + 3].reshape(-1, 32, 3)
        image.fromarray(sheet).save(buffer, "webp", lossless=True, exact=True)
        sheets += buffer.getvalue()
        ends.append(len(sheets))
    names = np.array([f"c{i}" for i in range(10)])
    labels = np.arange(3 * count, dtype=np.uint8) % 10
    webp = np.frombuffer(sheets, np.uint8)
    np.savez(path, webp=webp, offsets=np.array(ends), labels=labels, class_names=names)
    return x


def test_mnist_and_fashion(folder: Path) -> None:
    x = write_mnist(folder / "mnist.npz")
    mnist = data.mnist()
    assert mnist.x.shape == (5, 1, 28, 28)
    assert mnist.test_x.shape == (2, 1, 28, 28)
    np.testing.assert_allclose(mnist.x[:, 0].numpy() * 255, x, atol=1e-4)
    assert mnist.y.dtype == torch.int64
    write_mnist(folder / "fashion_mnist.npz", class_names=np.array(["coat", "bag"]))
    assert data.fashion_mnist().classes == ("coat", "bag")
    assert mnist.flat().x.shape == (5, 784)
    assert len(mnist.first(3, 1).x) == 3
    assert mnist.to("cpu", torch.float64).test_x.dtype == torch.float64
    assert mnist.to("cpu", torch.float64).y.dtype == torch.int64


def test_cifar_sheets(folder: Path) -> None:
    one, two, three = (
        write_cifar(folder / f"cifar10_{n}.npz", c, i)
        for i, (n, c) in enumerate((("train_a", 2), ("train_b", 2), ("test", 1)))
    )
    actual = data.cifar10()
    assert actual.x.shape == (12, 3, 32, 32)
    assert actual.test_x.shape == (3, 3, 32, 32)
    mean, std = (np.array(v).reshape(3, 1, 1) for v in (data._MEAN, data._STD))
    result = (actual.x.numpy() * std + mean) * 255
    np.testing.assert_allclose(result.transpose(0, 2, 3, 1), np.concatenate([one, two]), atol=1e-3)
    assert actual.y.tolist() == [0, 1, 2, 3, 4, 5] * 2
    assert len(data.cifar10(sheets=1).x) == 6
    assert len(data.cifar10(halves=["b"]).x) == 6
    assert len(three) == 3


def test_pillow_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file_name in ("train_a", "train_b", "test"):
        np.savez(folder / f"cifar10_{file_name}.npz", webp=np.zeros(1, np.uint8))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(PullbackError, match="pip install pillow"):
        data.cifar10()


@pytest.mark.parametrize("load", [data.mnist, data.fashion_mnist, data.cifar10])
def test_missing_data_says_what_to_set_and_where_to_get_it(
    load: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(load)
    monkeypatch.delenv("PULLBACK_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PullbackError, match=r"is not set.*Set PULLBACK_DATA.*http"):
        load()
    monkeypatch.setenv("PULLBACK_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(PullbackError, match=r"nowhere.* is not there"):
        load()


def test_unreadable_data_is_named(folder: Path) -> None:
    (folder / "mnist.npz").write_bytes(b"nothing")
    with pytest.raises(PullbackError, match=r"mnist\.npz cannot be read"):
        data.mnist()
    np.savez(folder / "fashion_mnist.npz", train_images=np.zeros(3))
    with pytest.raises(PullbackError, match="train_labels"):
        data.fashion_mnist()


def test_empty_files_and_broken_sheets_are_named(folder: Path) -> None:
    (folder / "mnist.npz").touch()
    with pytest.raises(PullbackError, match=r"mnist\.npz cannot be read"):
        data.mnist()
    for name in ("train_a", "train_b", "test"):
        write_cifar(folder / f"cifar10_{name}.npz", 1, 0)
    with pytest.raises(PullbackError, match=r"cifar10_train_a\.npz cannot be decoded"):
        data.cifar10(sheets=0)
    labels = np.zeros(1, np.uint8)
    noise = np.zeros(9, np.uint8)
    path = folder / "cifar10_train_b.npz"
    np.savez(path, webp=noise, offsets=np.array([0, 9]), labels=labels)
    with pytest.raises(PullbackError, match=r"cifar10_train_b\.npz cannot be decoded"):
        data.cifar10()


def test_digits_from_either_source_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    load_digits = datasets.load_digits()
    one = data.digits()
    images = load_digits.images.astype(np.uint8)
    labels = load_digits.target.astype(np.uint8)
    np.savez(folder / "digits8x8.npz", images=images, labels=labels)
    two = data.digits()
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.test_y, two.test_y)
    assert (len(one.x), len(one.test_x)) == (1347, 450)
    (folder / "digits8x8.npz").unlink()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(PullbackError, match="scikit-learn"):
        data.digits()


def test_generated_data_can_be_learned() -> None:
    actual = data.generate_pictures(shape=(5,), classes=3, samples=90)
    assert (len(actual.x), len(actual.test_x)) == (90, 90)
    means = torch.stack([actual.x[actual.y == c].mean(0) for c in range(3)])
    guess = torch.cdist(actual.test_x, means).argmin(1)
    assert float((guess == actual.test_y).double().mean()) > 0.8
    assert torch.equal(actual.x, data.generate_pictures(shape=(5,), classes=3, samples=90).x)


@pytest.mark.slow
@pytest.mark.skipif(not (HELD / "cifar10_test.npz").exists(), reason="PULLBACK_DATA has no CIFAR")
def test_the_real_cifar() -> None:
    actual = data.cifar10(sheets=20)
    pixels = actual.test_x.permute(1, 0, 2, 3).flatten(1)
    assert pixels.mean(1).abs().max() < 0.05
    assert (pixels.std(1) - 1).abs().max() < 0.05
