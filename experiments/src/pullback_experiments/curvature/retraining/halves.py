"""Networks retrained on halves of the data: some choose settings, the others judge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import pullback as pb
from pullback.curvature import Relative
from pullback.curvature.measures import Measure

from .scores import datamodeling_score

Damping = float | Relative

#: multiples of each block's mean eigenvalue, and numbers, that are tried as dampings beside the
#: weight decay of training. Training that stops early acts as a damping of one over its time.
MULTIPLES: tuple[float, ...] = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
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


def name_relative(multiple: float) -> str:
    """Return the name of a relative damping in records."""
    return f"relative {multiple:g}"


def list_dampings(decay: float) -> dict[str, Damping]:
    """Return the dampings to choose among, by name."""
    dampings: dict[str, Damping] = {name_relative(k): Relative(k) for k in MULTIPLES}
    dampings.update({f"{number:g}": number for number in NUMBERS})
    if decay > 0:
        dampings["weight decay"] = decay
    return dampings


@dataclass(frozen=True)
class ExplainedModel:
    """A fitted network, and the samples and queries that are scored with it.

    Attributes:
        curvature: of the network.
        queries, training: what `pb.curvature.influence` takes.
        measure: of the queries; None for their loss.
    """

    curvature: pb.curvature.Curvature
    queries: Any
    training: Any
    measure: Measure | None

    @classmethod
    def fit(
        cls, model: nn.Module, queries: Any, training: Any, measure: Measure | None,
        structure: str = "ekfac",
    ) -> ExplainedModel:  # fmt: skip
        """Return the network with the curvature that is fitted to its training data."""
        curvature = pb.curvature.fit(
            model, training, likelihood=pb.likelihoods.Categorical(), structure=structure
        )
        return cls(curvature, queries, training, measure)

    def score(self, damping: Damping | None) -> Tensor:
        """Return scores (queries, samples), large for samples that raise the measure if trained on.

        None is the default damping.
        """
        return -pb.curvature.influence(
            self.curvature, self.queries, self.training, damping=damping, measure=self.measure,
            query_bytes=2**35,
        )  # fmt: skip

    def score_all(self, dampings: Mapping[str, Damping]) -> dict[str, Tensor]:
        """Return the scores of every damping, by its name."""
        return {name: self.score(damping) for name, damping in dampings.items()}

    def score_dot_products(self) -> Tensor:
        """Return the scores of plain gradient dot products."""
        return self.score(HUGE_DAMPING)

    def tune(self, dampings: Mapping[str, Damping], halves: Halves) -> TunedScores:
        """Return the scores of the damping that predicts these halves best, and of peers."""
        candidates = self.score_all(dampings)
        by_damping = {name: halves.score(scores) for name, scores in candidates.items()}
        best = max(by_damping, key=lambda name: by_damping[name])
        by_method = {
            "EK-FAC": candidates[best],
            "EK-FAC, default damping": self.score(None),
            "gradient dot product": self.score_dot_products(),
        }
        return TunedScores(best, by_damping, by_method, candidates)


@dataclass(frozen=True)
class TunedScores:
    """Scores with a damping that halves which do not judge have chosen.

    Attributes:
        damping: the chosen one's name.
        by_damping: the datamodeling score of every damping on those halves.
        by_method: scores (queries, samples) of the chosen damping and of methods without a choice.
        candidates: scores of every damping.
    """

    damping: str
    by_damping: dict[str, float]
    by_method: dict[str, Tensor]
    candidates: dict[str, Tensor]

    def judge(self, halves: Halves) -> dict[str, float]:
        """Return the datamodeling score of every method on halves that judge."""
        return {name: halves.score(scores) for name, scores in self.by_method.items()}


def split_subsets(subsets: Tensor, tuning: int) -> tuple[Tensor, Tensor]:
    """Return the subsets that choose settings, and those that judge."""
    return torch.split(subsets, [tuning, len(subsets) - tuning])  # pyright: ignore
