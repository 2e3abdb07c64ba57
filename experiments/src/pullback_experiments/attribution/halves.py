"""Networks retrained on halves of the data: some choose settings, the others judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pullback as pb
from pullback.curvature import Relative

from .scores import datamodeling_score

#: multiples of each block's mean eigenvalue, and numbers, that are tried as dampings beside the
#: weight decay of training. Training that stops early acts as a damping of one over its time.
MULTIPLES: tuple[float, ...] = (1.0, 10.0, 100.0)
NUMBERS: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
#: beside this damping G is nothing, and scores are gradient dot products
HUGE_DAMPING = 1e12


@dataclass(frozen=True)
class Halves:
    """Subsets of the training data, and what networks trained on them say.

    Attributes:
        subsets: (M, size), indices.
        measured: the measure of every query by the network of every subset, (M, queries). Where
            several were trained on a subset it is their mean.
    """

    subsets: Tensor
    measured: Tensor

    def score(self, scores: Tensor) -> float:
        """Return the mean linear datamodeling score of the queries."""
        by_query = datamodeling_score(scores, self.subsets, self.measured)
        return round(float(by_query.mean()), 4)

    def choose(self, candidates: Mapping[str, Tensor]) -> tuple[str, dict[str, float]]:
        """Return the best candidate's name, and the datamodeling score of each."""
        by_name = {name: self.score(scores) for name, scores in candidates.items()}
        return max(by_name, key=lambda name: by_name[name]), by_name


def list_dampings(decay: float) -> dict[str, float | Relative]:
    """Return the dampings to choose among, by name."""
    dampings: dict[str, float | Relative] = {f"relative {k:g}": Relative(k) for k in MULTIPLES}
    dampings.update({f"{number:g}": number for number in NUMBERS})
    if decay > 0:
        dampings["weight decay"] = decay
    return dampings


def score_dampings(
    curvature: pb.curvature.Curvature,
    queries: Any,
    training: Any,
    measure: Any,
    dampings: Mapping[str, float | Relative],
) -> dict[str, Tensor]:
    """Return the scores of every damping, by its name."""
    by_damping = {}
    for name, damping in dampings.items():
        by_damping[name] = score_samples(curvature, queries, training, measure, damping)
    return by_damping


def score_samples(
    curvature: pb.curvature.Curvature,
    queries: Any,
    training: Any,
    measure: Any,
    damping: float | Relative | None,
) -> Tensor:
    """Return scores that are large for samples that raise the measure when they are trained on."""
    return -pb.curvature.influence(
        curvature, queries, training, damping=damping, measure=measure, query_bytes=2**35
    )


def score_dot_products(
    curvature: pb.curvature.Curvature, queries: Any, training: Any, measure: Any
) -> Tensor:
    """Return the scores of plain gradient dot products."""
    return score_samples(curvature, queries, training, measure, HUGE_DAMPING)


def split_subsets(subsets: Tensor, tuning: int) -> tuple[Tensor, Tensor]:
    """Return the subsets that choose settings, and those that judge."""
    return torch.split(subsets, [tuning, len(subsets) - tuning])  # pyright: ignore
