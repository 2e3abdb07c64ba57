"""Parts of the CIFAR-10 speed recipe that its results depend on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from pullback import PullbackError
from pullback.optim.kfac import Spectral
from pullback_experiments.learning import data
from pullback_experiments.learning.data import generate_pictures
from pullback_experiments.vision_recipe.batches import RecipeBatches, list_views
from pullback_experiments.vision_recipe.entrants import ENTRANTS, PartlyAgreeing
from pullback_experiments.vision_recipe.experiment import VisionRecipe
from pullback_experiments.vision_recipe.network import RecipeNetwork
from pullback_experiments.vision_recipe.training import Recipe, train


def test_missing_pictures_are_told_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    with pytest.raises(PullbackError):
        VisionRecipe().require_data(quick=False)
    VisionRecipe().require_data(quick=True)


def test_first_filters_whiten_patches() -> None:
    images = torch.randn(40, 3, 32, 32) @ torch.randn(32, 32)
    network = RecipeNetwork((4, 4, 4))
    network.whiten_patches(images, eps=0.0)
    outputs = F.conv2d(images, network.patches.weight).transpose(0, 1).flatten(1)
    first_half, second_half = outputs.chunk(2)
    moment = first_half @ first_half.T / first_half.shape[1]
    torch.testing.assert_close(moment, torch.eye(12), rtol=0, atol=1e-3)
    torch.testing.assert_close(second_half, -first_half)


def test_each_image_is_seen_from_both_sides_in_two_epochs() -> None:
    images = generate_pictures((3, 8, 8), classes=1, samples=1)
    batches = RecipeBatches(images, size=1, seed=3)
    sums = []
    for epoch in range(2):
        ((shifted, _),) = batches.iterate_epoch(epoch)
        differences = []
        for side in (images.x, images.x.flip(-1)):
            framed = F.pad(side, (2,) * 4, "reflect")
            crops = [framed[..., i : i + 8, j : j + 8] for i in range(5) for j in range(5)]
            differences.append(min(float((crop - shifted).abs().max()) for crop in crops))
        sums.append(differences.index(0.0))
    assert sorted(sums) == [0, 1]


def test_fewer_images_than_a_batch_has_are_refused() -> None:
    images = generate_pictures((3, 8, 8), classes=1, samples=3)
    assert RecipeBatches(images, size=3, seed=0).steps_per_epoch == 1
    with pytest.raises(PullbackError, match="there are 3, and a batch has 4"):
        RecipeBatches(images, size=4, seed=0)


def test_views_are_weighted_to_one() -> None:
    images = torch.randn(2, 3, 6, 6)
    views = list_views(images)
    assert sum(weight for weight, _ in views) == pytest.approx(1)
    assert {view.shape for _, view in views} == {images.shape}


def test_both_parts_of_the_agreement_make_the_whole() -> None:
    """Schedule times share of the layer is the step size of the rule itself."""
    squares, mean_squares = torch.rand(2, 3, 4, 1)
    sizes = {}
    for shares_schedule in (True, False):
        rule = PartlyAgreeing(shares_schedule=shares_schedule, momentum=0.6)
        sizes[shares_schedule] = rule.find_step_size(squares, mean_squares)
    whole = Spectral(momentum=0.6).find_step_size(squares, mean_squares)
    noise = 0.5
    torch.testing.assert_close(sizes[True] * sizes[False] / noise, whole)


def test_every_entrant_has_a_title_of_its_own() -> None:
    titles = [entrant.title for entrant in ENTRANTS.values()]
    assert all(titles)
    assert len(set(titles)) == len(titles)


def test_fewer_epochs_end_within_one_and_average_the_last_weights() -> None:
    """The average over one step is that of the run without any."""
    images = generate_pictures((3, 32, 32), classes=10, samples=40)
    recipe = Recipe(batch=20, epochs=2, patch_epochs=1, widths=(4, 4, 4), whitened_images=40)
    records = []
    for averaged_steps in (0, 1, 3):
        entrant = replace(ENTRANTS["plain"], epochs=1.5, averaged_steps=averaged_steps)
        records.append(train(recipe, entrant, images, seed=0))
    without, last, three = records
    assert without["steps"] == round(1.5 * len(images.x) / 20)
    assert last["test loss"] == without["test loss"]
    assert three["test loss"] != without["test loss"]
