"""Seconds and memory of influence at scale: ResNet-9, a decoder of GPT-2 small's size, growth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from ...framework.check import Check
from ...framework.experiment import Context, Experiment, Item
from ...framework.store import Results
from ...framework.tabular import Table
from ..device.timing import PRECISIONS, time_decoder, time_growth, time_resnet
from ..sizes import FULL, TINY, Sizes
from .part_items import PartNumbers, PartWork, run_part

PARTS: dict[str, PartWork] = {
    "resnet9": time_resnet,
    "growth": time_growth,
    "gpt2": time_decoder,
}


@dataclass(frozen=True)
class Bounds:
    """What the numbers are held against."""

    #: published seconds of kronfluence on an A100 to fit ResNet-9 and to score 2,000 × 25,000
    float32_seconds: float = 106.0
    #: the same with mixed precision
    mixed_seconds: float = 36.0
    #: twice the samples may take so many times as long: twice, and a tenth for noise
    growth: float = 2.2


BOUNDS = Bounds()


@dataclass(frozen=True, kw_only=True)
class InfluenceScale(Experiment):
    """Fits and scores of networks with random weights, on random data.

    Attributes:
        sizes: of the parts.
    """

    sizes: Sizes = FULL
    seeds: Sequence[int] = (0,)

    def smoke(self) -> Self:
        return replace(self, judged=False, sizes=replace(TINY, samples=32, queries=4))

    def _sizes(self, quick: bool) -> Sizes:
        if quick and self.judged:
            return TINY
        return self.sizes

    def config(self, quick: bool) -> dict[str, Any]:
        sizes = self._sizes(quick)
        return {
            "ResNet-9": {"samples": sizes.samples, "queries": sizes.queries, "width": sizes.width,
                         "batch": sizes.batch},
            "decoder": list(sizes.decoder),
            "sequences": {"samples": sizes.sequences, "length": sizes.length,
                          "queries": sizes.text_queries},
        }  # fmt: skip

    def items(self, quick: bool) -> list[Item]:
        sizes = self._sizes(quick)
        return [Item((name,), partial(time_part, name, sizes)) for name in PARTS]

    def judge(self, results: Results) -> list[Check]:
        if results.quick:
            return []
        images = results.of("resnet9")[0]
        slowest, _, fastest = [sum_seconds(images, precision.name) for precision in PRECISIONS]
        first, second = find_doubling(results.of("growth")[0]["rows"])
        growth = second["fit"]["seconds"] / first["fit"]["seconds"]
        sequences = f"{self.sizes.sequences} sequences"
        decoder = results.of("gpt2")[0]
        return [
            Check(f"ResNet-9 in float32 takes less than {BOUNDS.float32_seconds:g} s",
                  slowest < BOUNDS.float32_seconds, f"{slowest:.1f} s", of_paper=False),
            Check(f"ResNet-9 with mixed precision takes less than {BOUNDS.mixed_seconds:g} s",
                  fastest < BOUNDS.mixed_seconds, f"{fastest:.1f} s", of_paper=False),
            Check("the seconds of a fit grow at most in proportion to the samples",
                  growth <= BOUNDS.growth, f"{growth:.2f} for twice the samples", of_paper=False),
            Check(f"a decoder of GPT-2 small's size is fitted and scored with {sequences}",
                  sequences in decoder, describe_decoder(decoder.get(sequences)),
                  of_paper=False),
        ]  # fmt: skip

    def tables(self, results: Results) -> list[Table]:
        images = results.of("resnet9")[0]
        columns = ["fit, s", "fit, GB", "score, s", "score, GB"]
        by_precision = []
        for precision in PRECISIONS:
            timings = (images[f"{precision.name}: fit"], images[f"{precision.name}: score"])
            by_precision.append([precision.name, *list_numbers(timings)])
        growth = []
        for row in results.of("growth")[0]["rows"]:
            growth.append(
                [row["samples"], row["parameters"], *list_numbers((row["fit"], row["score"]))]
            )
        by_length = []
        for name, numbers in results.of("gpt2")[0].items():
            if isinstance(numbers, dict) and "score" in numbers:
                by_length.append([name, *list_numbers((numbers["fit"], numbers["score"]))])
        return [
            Table(["numbers", *columns], by_precision, "ResNet-9"),
            Table(["samples", "parameters", *columns], growth, "Growth"),
            Table(["decoder of GPT-2 small's size", *columns], by_length, "Decoder"),
        ]


def time_part(name: str, sizes: Sizes, context: Context) -> PartNumbers:
    """Return the seconds and the memory of a part."""
    return run_part(name, PARTS[name], sizes, context)


def sum_seconds(images: PartNumbers, precision: str) -> float:
    """Return the seconds of a fit and of its scores."""
    return images[f"{precision}: fit"]["seconds"] + images[f"{precision}: score"]["seconds"]


def find_doubling(rows: Sequence[PartNumbers]) -> tuple[PartNumbers, PartNumbers]:
    """Return the two largest fits of one network, of which one has twice the other's samples."""
    largest = max(rows, key=lambda row: row["samples"])
    for row in rows:
        is_same = row["parameters"] == largest["parameters"]
        if is_same and 2 * row["samples"] == largest["samples"]:
            return row, largest
    return largest, largest


def list_numbers(timings: Sequence[dict[str, float]]) -> list[float | None]:
    """Return the seconds and gigabytes of a fit and of its scores; None where not measured."""
    numbers: list[float | None] = []
    for timing in timings:
        numbers += [timing["seconds"], timing.get("gigabytes")]
    return numbers


def describe_decoder(numbers: PartNumbers | None) -> str:
    """Return the seconds of the decoder's fit and scores in words."""
    if numbers is None:
        return "not finished"
    return f"{numbers['fit']['seconds']:.1f} s and {numbers['score']['seconds']:.1f} s"
