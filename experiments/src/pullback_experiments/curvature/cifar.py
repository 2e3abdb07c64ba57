"""Linear datamodeling score of ResNet-9 on cats and dogs of CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from pullback.curvature import margin

from ..attribution.cifar import TwoClasses, read_two_classes
from ..attribution.halves import ExplainedModel, Halves
from ..attribution.image_training import (
    RECIPES,
    ImageTrainer,
    Recipe,
    compute_accuracy,
    measure_margins,
)
from ..attribution.parts import cut_batches
from ..attribution.retrained_images import DAMPINGS
from ..attribution.retraining import draw_subsets
from ..framework.check import Check
from ..framework.experiment import Context, Experiment, Item
from ..framework.store import Results
from ..framework.tabular import Table
from ..learning import data
from .datamodeling import Methods, check_scores, draw_scores, judge_methods, list_trak

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: the damping that halves which do not judge chose on a GPU
DAMPING = "relative 0.001"


@dataclass(frozen=True, kw_only=True)
class InfluenceCIFAR(Experiment):
    """Half-size subsets of two classes of CIFAR-10, with several networks trained on each.

    Attributes:
        samples, queries: images.
        subsets, networks: halves, and networks trained on each.
        width: channels of ResNet-9's first layer.
        recipe: of all trainings.
        trak_models, trak_dimension: of TRAK.
        is_generated: whether the images are made up instead.
    """

    samples: int = 5000
    queries: int = 500
    subsets: int = 50
    networks: int = 24
    width: int = 64
    recipe: Recipe = field(default_factory=lambda: RECIPES["maximum pooling, 4 epochs"])
    trak_models: int = 10
    trak_dimension: int = 2048
    is_generated: bool = False
    seeds: Sequence[int] = (0,)

    def smoke(self) -> Self:
        few = replace(self.recipe, schedule=replace(self.recipe.schedule, epochs=1, batch=10))
        return replace(
            self, judged=False, samples=40, queries=4, subsets=3, networks=1, width=4, recipe=few,
            trak_models=2, trak_dimension=8, is_generated=True,
        )  # fmt: skip

    def _reduce_if_quick(self, quick: bool) -> Self:
        if not quick:
            return self
        return replace(self, samples=min(300, self.samples), queries=min(30, self.queries),
                       subsets=min(6, self.subsets), networks=1, width=min(8, self.width),
                       trak_models=2, trak_dimension=min(64, self.trak_dimension))  # fmt: skip

    def config(self, quick: bool) -> dict[str, Any]:
        sized = self._reduce_if_quick(quick)
        return {
            "network": f"ResNet-9, width {sized.width}",
            "samples": sized.samples,
            "queries": sized.queries,
            "subsets": sized.subsets,
            "networks per subset": sized.networks,
            "schedule": vars(sized.recipe.schedule),
            "TRAK": {"models": sized.trak_models, "dimension": sized.trak_dimension},
            "damping": DAMPING,
        }

    def items(self, quick: bool) -> list[Item]:
        return [
            Item(("datamodeling",), partial(measure_datamodeling, self._reduce_if_quick(quick)))
        ]

    def ready(self, quick: bool) -> None:
        if not self.is_generated:
            data.file("cifar10_train_a.npz")

    def judge(self, results: Results) -> list[Check]:
        if results.quick:
            return []
        return check_scores(results.of("datamodeling")[0]["scores"], 0.37)

    def tables(self, results: Results) -> list[Table]:
        record = results.of("datamodeling")[0]
        rows = [[name, score] for name, score in record["scores"].items()]
        return [Table(["method", "score"], rows, "Linear datamodeling score")]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        scores = results.of("datamodeling")[0]["scores"]
        return {"": draw_scores(scores, "ResNet-9 on CIFAR-2")}


def load_images(setting: InfluenceCIFAR, device: torch.device) -> TwoClasses:
    """Return cats and dogs, or made-up images of two classes."""
    if setting.is_generated:
        images = data.generate_pictures((3, 32, 32), 2, setting.samples)
    else:
        images = read_two_classes()
    images = images.first(setting.samples, setting.queries).to(device)
    return TwoClasses(images.x, images.y, images.test_x, images.test_y)


def measure_datamodeling(setting: InfluenceCIFAR, context: Context) -> dict[str, Any]:
    """Retrain on halves, and return how well every method's scores predict it."""
    images = load_images(setting, context.device)
    trainer = ImageTrainer(images, setting.width, setting.recipe)
    first_seed = 100_000 * (context.seed + 1)
    everything = torch.arange(len(images.x))
    models = []
    for number in range(setting.trak_models):
        models.append(trainer.train_copy(everything, first_seed + number))
    subsets = draw_subsets(len(images.x), setting.subsets, seed=first_seed)
    rounds = []
    for number in range(setting.networks):
        seed = first_seed + 1000 * (number + 1)
        rounds.append(measure_margins([trainer], images, subsets, seed))
        context.watch(0.8 * (number + 1) / setting.networks, f"round {number + 1}")
    halves = Halves(subsets, torch.stack(rounds).mean(0))
    methods = list_methods(setting, images, models)
    return {
        **judge_methods(methods, halves, context),
        "accuracy": compute_accuracy(models[0], *images.queries),
        "accuracy on training data": compute_accuracy(models[0], images.x, images.y),
    }


def list_methods(
    setting: InfluenceCIFAR, images: TwoClasses, models: Sequence[nn.Module]
) -> Methods:
    """Return the methods by name."""
    training = cut_batches(images.x, images.y, 250)
    explained = ExplainedModel.fit(models[0], images.queries, training, margin)
    return {
        "EK-FAC": partial(explained.score, DAMPINGS[DAMPING]),
        "EK-FAC, default damping": partial(explained.score, None),
        "gradient dot product": explained.score_dot_products,
        **list_trak(models, images.queries, (images.x, images.y), setting.trak_dimension),
    }
