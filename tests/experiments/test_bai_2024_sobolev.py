"""The Sobolev experiments: parts against plain torch, claims on made-up curves, quick runs."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError
from pullback_experiments import bai_2024_sobolev
from pullback_experiments.bai_2024_sobolev.curves import clearly_fewer, epochs, final, find_epoch
from pullback_experiments.bai_2024_sobolev.digits import METRICS, TASKS, Tuned
from pullback_experiments.bai_2024_sobolev.vgg import (
    METHODS,
    OURS,
    SETTINGS,
    THEIRS,
    SobolevMethod,
    VGGTraining,
    paper_claims,
)
from pullback_experiments.framework import executor
from pullback_experiments.learning import data, images
from pullback_experiments.learning.networks import convnet, mlp, vgg16

from .small import quiet, said

FULL, HUNDRED, TUNED = bai_2024_sobolev.EXPERIMENTS


def test_vgg_is_the_papers() -> None:
    net = vgg16()
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convs] == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    assert sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) == 13
    assert sum(p.numel() for p in net.parameters()) == 14_728_266
    assert abs(float(convs[-1].weight.detach().std()) - math.sqrt(2 / (9 * 512))) < 1e-4
    assert vgg16(100, 8)(torch.randn(2, 3, 32, 32)).shape == (2, 100)
    assert mlp(64, 5, 3)(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert convnet(14)(torch.randn(2, 1, 14, 14)).shape == (2, 10)


def test_schedules_and_scalings_are_the_papers() -> None:
    shares = (0.0, 0.39, 0.41, 0.61, 0.81)
    assert [round(OURS(t), 9) for t in shares] == [1, 1, 0.2, 0.04, 0.04]
    assert [round(THEIRS(t), 9) for t in shares] == [1, 1, 0.1, 0.1, 0.01]
    assert {m.name: m.divisor for m in METHODS if m.divisor != 1} == dict.fromkeys(
        ("Sobolev", "K-FAC + scaling", "K-FAC + both", "Sobolev − schedule"), 20.0
    )
    assert [m.draws for m in METHODS] == [4, 1, 1, 1, 1, 4]
    assert (SETTINGS["lr"], SETTINGS["damping"]) == (0.01, 0.03)
    # decoupled decay shrinks as decay inside a momentum of 0.9 does in the long run
    assert math.isclose(SETTINGS["weight_decay"], 0.003 / (1 - SETTINGS["momentum"]))


def windows(image: Tensor, black: Tensor) -> list[Tensor]:
    """All crops of a framed image, and their mirror images, by slices."""
    _, h, w = image.shape
    framed = black[:, None, None].repeat(1, h + 8, w + 8)
    framed[:, 4 : 4 + h, 4 : 4 + w] = image
    crops = [framed[:, i : i + h, j : j + w] for i, j in product(range(9), range(9))]
    return crops + [crop.flip(2) for crop in crops]


def test_crops_are_windows_of_the_framed_image() -> None:
    x = torch.rand(30, 3, 6, 5, dtype=torch.float64) + torch.tensor([0.0, -1.0, 2.0])[:, None, None]
    augment = images.CropAndFlip.of(x)
    torch.testing.assert_close(augment.black, x.amin((0, 2, 3)))
    out = augment(x, torch.Generator().manual_seed(0))
    assert out.shape == x.shape
    positions = set()
    for image, actual in zip(x, out, strict=True):
        near = [i for i, w in enumerate(windows(image, augment.black)) if torch.allclose(w, actual)]
        assert near
        positions.add(near[0])
    assert len(positions) > 15
    repeated = augment(x, torch.Generator().manual_seed(0))
    assert torch.equal(out, repeated)


def test_scaled_data_are_divided_on_both_sides() -> None:
    actual = data.generate_pictures((3, 4, 4), 2, 6)
    small = images.shrunk(actual, 20.0)
    torch.testing.assert_close(small.x * 20, actual.x)
    torch.testing.assert_close(small.test_x * 20, actual.test_x)
    assert small.y is actual.y


def test_cifar100_is_read_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    images.load.cache_clear()
    with pytest.raises(PullbackError, match=r"cifar100\.npz"):
        images.load("cifar100")
    x = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    y = np.array([0, 99, 5, 7], dtype=np.uint8)
    np.savez(
        tmp_path / "cifar100.npz",
        train_images=x, train_labels=y, test_images=x[:2], test_labels=y[:2],
    )  # fmt: skip
    loaded = images.load("cifar100")
    assert loaded.x.shape == (4, 3, 32, 32)
    assert loaded.y.tolist() == [0, 99, 5, 7]
    torch.testing.assert_close(
        float(loaded.x[1, 2, 3, 4]), (float(x[1, 3, 4, 2]) / 255 - 0.4408) / 0.2761
    )
    images.load.cache_clear()
    np.savez(tmp_path / "cifar100.npz", train_images=x)
    with pytest.raises(PullbackError, match="train_labels"):
        images.load("cifar100")
    with pytest.raises(PullbackError, match="no data set 'svhn'"):
        images.load("svhn")
    with pytest.raises(PullbackError, match="no data set"):
        replace(FULL, dataset="svhn").config(False)


def curve(rate: float, top: float = 0.9) -> dict[str, Any]:
    """A loss that falls at this rate, and an accuracy that rises to the top."""
    at = list(range(51))
    loss = [2.3 * math.exp(-rate * t) for t in at]
    accuracy = [top - (top - 0.1) * math.exp(-rate * t) for t in at]
    return {"epoch": at, "train loss": loss, "test accuracy": accuracy}


def test_levels_are_found_between_epochs() -> None:
    fast = curve(0.4, 0.95)
    slow = curve(0.1, 0.95)
    assert find_epoch(fast, "train loss", 5.0) == 0
    assert abs(find_epoch(slow, "train loss", 0.5) - 10 * math.log(2.3 / 0.5)) < 0.1
    assert find_epoch(slow, "test accuracy", 0.96) == math.inf
    lost = {"epoch": [0, 1], "train loss": [2.3, math.nan], "test accuracy": [0.1, 0.9]}
    assert find_epoch(lost, "train loss", 0.5) == math.inf
    assert epochs([fast, slow, lost], "train loss", 0.5) == find_epoch(slow, "train loss", 0.5)
    assert final([lost], "test accuracy") == 0
    assert final([lost], "train loss") == math.inf
    assert clearly_fewer(8.9, 10)
    assert not clearly_fewer(9.5, 10)
    assert not clearly_fewer(math.inf, math.inf)


def test_claims_follow_the_curves() -> None:
    fast = [curve(0.4, 0.925)]
    slow = [curve(0.15, 0.925)]
    actual = {m.name: fast if "Sobolev" in m.name else slow for m in METHODS}
    assert all(c.holds for c in paper_claims(actual, (True,) * 8))
    rotated = {m.name: slow if "Sobolev" in m.name else fast for m in METHODS}
    outcomes = [c.holds for c in paper_claims(rotated, (True,) * 8)]
    assert outcomes == [False] * 4 + [True, True] + [False] * 2
    better = {**actual, "K-FAC + both": [curve(0.15, 0.97)]}
    assert not paper_claims(better, (True,) * 8)[5].holds
    assert sum(c.of_paper for c in paper_claims(actual, (True,) * 8)) == 6


def test_every_figure_names_methods_of_its_experiment() -> None:
    for experiment in (FULL, HUNDRED):
        assert isinstance(experiment, VGGTraining)
        names = {m.name for m in experiment.methods}
        for chosen in experiment.figures.values():
            assert set(chosen) <= names
        assert len(
            experiment.claims({n: [curve(0.2)] for n in names}, experiment.expected_outcomes)
        ) == len(experiment.expected_outcomes)


def tiny(experiment: VGGTraining, monkeypatch: pytest.MonkeyPatch) -> VGGTraining:
    """A few pictures in place of CIFAR-10."""
    actual = data.generate_pictures((3, 32, 32), 10, 60)
    monkeypatch.setattr(images, "load", lambda dataset, sheets: actual)
    return experiment


@pytest.mark.parametrize(
    ("experiment", "methods"),
    [
        pytest.param(FULL, METHODS[:1], id="10", marks=pytest.mark.slow),
        pytest.param(HUNDRED, METHODS[5:], id="100", marks=pytest.mark.slow),
    ],
)
def test_quick_training(
    experiment: VGGTraining, methods: Sequence[SobolevMethod], tmp_path: Path
) -> None:
    names = [m.name for m in methods]
    shown = {figure_name: names for figure_name in experiment.figures}
    experiment = replace(experiment.smoke(), methods=methods, figures=shown)
    outcome = executor.run(experiment, True, None, tmp_path, quiet())
    assert outcome.status == 0
    assert outcome.finished == len(experiment.methods)
    state = json.loads((tmp_path / f"{experiment.name}-quick.json").read_text())
    for run in state["runs"]:
        assert all(math.isfinite(v) for v in run["record"]["train loss"]), run["key"]
    names = [path.name for path in outcome.files]
    for figure_name in experiment.figures:
        assert f"{experiment.name}-quick{f'-{figure_name}' if figure_name else ''}.png" in names


@pytest.mark.slow
def test_a_paused_run_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = replace(tiny(FULL, monkeypatch), methods=METHODS[:1], figures={"": ("Sobolev",)})
    for name in ("whole", "sliced"):
        status = 3
        count = 0
        while status == 3:
            seconds = 0.0 if name == "sliced" else None
            status = executor.run(one, True, [2], tmp_path / name, quiet(), seconds=seconds).status
            count += 1
        assert count == (2 if name == "sliced" else 1)
    curves = [
        json.loads((tmp_path / name / f"{one.name}-quick.json").read_text())["runs"][0]["record"]
        for name in ("whole", "sliced")
    ]
    assert curves[0]["train loss"] == curves[1]["train loss"]


@pytest.mark.slow
def test_the_tuned_comparison_runs_and_shows_both_settings(tmp_path: Path) -> None:
    assert isinstance(TUNED, Tuned)
    console = quiet()
    outcome = executor.run(replace(TUNED, epochs=2), True, [0], tmp_path, console)
    assert outcome.finished == outcome.total
    assert [c.of_paper for c in outcome.checks] == [True, True, False, False, False, False]
    assert "K-FAC's settings" in said(console)
    state = json.loads((tmp_path / f"{TUNED.name}-quick.json").read_text())
    runs = {tuple(r["key"]): r["record"] for r in state["runs"]}
    net = next(iter(TASKS))
    for method in METRICS:
        tried = [r for k, r in runs.items() if k[:3] == ("search", net, method)]
        finals = [r for k, r in runs.items() if k[:3] == ("final", net, method)]
        assert max(r["score"] for r in finals) >= max(r["score"] for r in tried)
        best = min(finals, key=lambda r: r["score"])
        assert runs[net, method, "own settings"]["settings"] == [best["lr"], best["damping"]]
    shared = runs[net, "K-FAC", "own settings"]["settings"]
    assert runs[net, "Sobolev", "K-FAC's settings"]["settings"] == shared
    assert len(TUNED.expected_outcomes) == 6 * len(TASKS)


def test_the_grid_has_no_pair_twice() -> None:
    assert isinstance(TUNED, Tuned)
    grid = TUNED.config(False)["grid"]
    assert len(grid) == 24
    assert len({tuple(pair) for pair in grid}) == 24
