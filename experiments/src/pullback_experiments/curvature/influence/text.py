"""Linear datamodeling score of a decoder of characters."""

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
from ...learning import data, text
from ..device.text import score_text
from ..retraining.halves import MULTIPLES, name_relative
from ..sizes import FULL, TINY, Sizes
from .comparison import check_lead, draw_scores, tabulate_dampings
from .part_items import PartNumbers, run_part

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class InfluenceText(Experiment):
    """A small decoder retrained on halves of its sequences; other halves choose the damping.

    Attributes:
        sizes: of the part `text`.
    """

    sizes: Sizes = FULL
    seeds: Sequence[int] = (0,)

    def smoke(self) -> Self:
        return replace(self, judged=False, sizes=replace(TINY, text_rounds=1, is_generated=True))

    def _sizes(self, quick: bool) -> Sizes:
        if not quick or self.sizes.is_generated:
            return self.sizes
        return replace(TINY, text_rounds=1)

    def config(self, quick: bool) -> dict[str, Any]:
        sizes = self._sizes(quick)
        return {
            "decoder": "two blocks of width 64 with 4 heads, characters",
            "sequences": sizes.text_samples,
            "length": sizes.text_length,
            "epochs": sizes.text_epochs,
            "halves": {"judging": sizes.subsets, "tuning": sizes.tuning},
            "networks per half": sizes.text_rounds,
            "TRAK": {"models": sizes.trak_models, "dimension": sizes.text_trak_dimension},
        }

    def items(self, quick: bool) -> list[Item]:
        return [Item(("datamodeling",), partial(measure_datamodeling, self._sizes(quick)))]

    def require_data(self, quick: bool) -> None:
        if not self.sizes.is_generated:
            data.file(text.FILE)

    def judge(self, results: Results) -> list[Check]:
        if results.quick:
            return []
        return [check_lead(results.of("datamodeling")[0]["scores"])]

    def tables(self, results: Results) -> list[Table]:
        record = results.of("datamodeling")[0]
        rows = [[name, score] for name, score in record["scores"].items()]
        return [
            Table(["method", "score"], rows, "Linear datamodeling score"),
            tabulate_dampings(record["by damping"]),
        ]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        scores = results.of("datamodeling")[0]["scores"]
        return {"": draw_scores(scores, "decoder of characters")}


def measure_datamodeling(sizes: Sizes, context: Context) -> dict[str, Any]:
    """Retrain on halves, and return how well every method's scores predict it."""
    return summarize(run_part("text", score_text, sizes, context), sizes)


def summarize(numbers: PartNumbers, sizes: Sizes) -> dict[str, Any]:
    """Return the record of the experiment from the numbers of the part `text`."""
    by_damping = {f"{k:g}": numbers[f"EK-FAC, {name_relative(k)}"] for k in MULTIPLES}
    several = f"TRAK, {sizes.trak_models} models"
    scores = {
        "EK-FAC": numbers["EK-FAC"],
        "EK-FAC, default damping": by_damping[f"{DEFAULT_DAMPING.value:g}"],
        "gradient dot product": numbers["gradient dot product"],
        "TRAK, 1 model": numbers["TRAK, 1 models"],
        several: numbers[several],
    }
    return {
        "scores": scores,
        "by damping": by_damping,
        "damping": numbers["damping"],
        "tuning": numbers["tuning"],
        "held-out loss": numbers["loss"],
        "fit": numbers["fit"],
    }
