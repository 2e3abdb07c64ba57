"""Linear datamodeling score of ResNet-9 on cats and dogs of CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pullback.curvature.scores import DEFAULT_DAMPING

from ...framework.check import Check
from ...framework.experiment import Context, Experiment, Item
from ...framework.store import Results
from ...framework.tabular import Table
from ...learning import data
from ..device.images import (
    name_rounds,
    score_cifar,
    score_dampings,
    score_trak,
)
from ..retraining.halves import MULTIPLES, name_relative
from ..retraining.image_training import RECIPES
from ..sizes import FULL, TINY, Sizes
from .comparison import check_scores, draw_scores, tabulate_dampings
from .part_items import PartNumbers, run_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: 24 networks per half is what four minutes of an H200 gave
RECORDED = replace(FULL, rounds=24)
PARTS = {"cifar2": score_cifar, "dampings": score_dampings, "trak": score_trak}


@dataclass(frozen=True, kw_only=True)
class InfluenceCIFAR(Experiment):
    """Half-size subsets of two classes of CIFAR-10, with several networks trained on each.

    Halves that do not judge choose the recipe of training and the damping.

    Attributes:
        sizes: of the parts; `rounds` is the number of networks per half.
    """

    sizes: Sizes = RECORDED
    seeds: Sequence[int] = (0,)

    def smoke(self) -> Self:
        sizes = replace(TINY, rounds=1, subsets=3, is_generated=True)
        return replace(self, judged=False, sizes=sizes)

    def _sizes(self, quick: bool) -> Sizes:
        if not quick or self.sizes.is_generated:
            return self.sizes
        return replace(TINY, images=300, cifar_queries=30, subsets=6, width=8, trak_dimension=64)

    def config(self, quick: bool) -> dict[str, Any]:
        sizes = self._sizes(quick)
        return {
            "images": sizes.images,
            "queries": sizes.cifar_queries,
            "width": sizes.width,
            "halves": {"judging": sizes.subsets, "tuning": sizes.tuning},
            "networks per half": {"judging": sizes.rounds, "tuning": sizes.tuning_rounds},
            "recipes": {name: vars(recipe.schedule) for name, recipe in RECIPES.items()},
            "TRAK": {"models": sizes.trak_models, "dimension": sizes.trak_dimension},
        }

    def items(self, quick: bool) -> list[Item]:
        return [Item(("datamodeling",), partial(measure_datamodeling, self._sizes(quick)))]

    def require_data(self, quick: bool) -> None:
        if not self.sizes.is_generated and not data.available("cifar2.pt"):
            data.file("cifar10_train_a.npz")

    def judge(self, results: Results) -> list[Check]:
        if results.quick:
            return []
        return check_scores(results.of("datamodeling")[0]["scores"], 0.37)

    def tables(self, results: Results) -> list[Table]:
        record = results.of("datamodeling")[0]
        rows = [[name, score] for name, score in record["scores"].items()]
        rounds = [
            [count, numbers["EK-FAC"], numbers["gradient dot product"], numbers["reliability"]]
            for count, numbers in record["by networks per half"].items()
        ]
        columns = ["networks per half", "EK-FAC", "gradient dot product", "reliability"]
        return [
            Table(["method", "score"], rows, "Linear datamodeling score"),
            Table(columns, rounds, "Score by the number of networks that are averaged"),
            tabulate_dampings(record["by damping"]),
        ]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        scores = results.of("datamodeling")[0]["scores"]
        return {"": draw_scores(scores, "ResNet-9 on CIFAR-2")}


def measure_datamodeling(sizes: Sizes, context: Context) -> dict[str, Any]:
    """Retrain on halves, and return how well every method's scores predict it."""
    parts = {name: run_part(name, work, sizes, context) for name, work in PARTS.items()}
    return summarize(parts, sizes)


def summarize(parts: Mapping[str, PartNumbers], sizes: Sizes) -> dict[str, Any]:
    """Return the record of the experiment from the numbers of its three parts."""
    cifar = parts["cifar2"]
    dampings = parts["dampings"]
    trak = parts["trak"]
    by_count = {str(count): cifar[name_rounds(count)] for count in range(1, sizes.rounds + 1)}
    last = by_count[str(sizes.rounds)]
    several = f"TRAK, {sizes.trak_models} models"
    scores = {
        "EK-FAC": last["EK-FAC"],
        "EK-FAC, default damping": dampings[name_relative(DEFAULT_DAMPING.value)],
        "gradient dot product": last["gradient dot product"],
        "TRAK, 1 model": trak["TRAK, 1 models"]["score"],
        several: trak[several]["score"],
    }
    by_damping = {f"{k:g}": dampings[name_relative(k)] for k in MULTIPLES}
    chosen = cifar[f"pilot {cifar['recipe']}"]
    return {
        "scores": scores,
        "by damping": by_damping,
        "by networks per half": by_count,
        "recipe": cifar["recipe"],
        "damping": cifar["damping"],
        "accuracy": chosen["accuracy"],
        "accuracy on training data": chosen["accuracy on training data"],
        "pilots": {name: cifar[f"pilot {name}"] for name in RECIPES if f"pilot {name}" in cifar},
        "seconds of TRAK": {name: trak[name]["seconds"] for name in ("TRAK, 1 models", several)},
    }
