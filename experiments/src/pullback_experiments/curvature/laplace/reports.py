"""What a posterior says of test data, and how reports are averaged and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...framework.check import Check

#: central intervals whose coverage is held against their level
LEVELS = tuple(k / 10 for k in range(1, 10))


@dataclass(frozen=True)
class Report:
    """What a posterior says of test data.

    Attributes:
        nll: mean of −log p(y|x).
        calibration: expected calibration error, or mean gap of coverage in regression.
        marginal_likelihood: log p(D) per training sample.
        prior_precision: the one that maximizes it.
        best_prior_nll: the smallest NLL over a grid of prior precisions, seen on the test data.
        seconds: to fit, to choose the prior and to predict.
    """

    nll: float
    calibration: float
    marginal_likelihood: float | None = None
    prior_precision: float | None = None
    best_prior_nll: float | None = None
    seconds: float | None = None


def report_regression(mean: Tensor, variance: Tensor, targets: Tensor) -> Report:
    """Return the mean negative log-density, and the mean gap of coverage over nine levels."""
    normal = torch.distributions.Normal(mean, variance.sqrt())
    quantiles = normal.cdf(targets)
    gaps = []
    for level in LEVELS:
        is_inside = (quantiles - 0.5).abs() <= level / 2
        gaps.append(abs(float(is_inside.double().mean()) - level))
    return Report(-float(normal.log_prob(targets).mean()), sum(gaps) / len(gaps))


def report_classification(probabilities: Tensor, targets: Tensor, bins: int = 10) -> Report:
    """Return the mean negative log-probability and the expected calibration error."""
    chosen = probabilities.gather(1, targets[:, None]).clamp(min=1e-30)
    confidence, predicted = probabilities.max(1)
    is_right = (predicted == targets).double()
    error = 0.0
    edges = torch.linspace(0, 1, bins + 1)
    for low, high in pairwise(edges.tolist()):
        is_inside = (confidence > low) & (confidence <= high)
        if bool(is_inside.any()):
            gap = float(is_right[is_inside].mean() - confidence[is_inside].mean())
            error += abs(gap) * float(is_inside.double().mean())
    return Report(-float(chosen.log().mean()), error)


def average_reports(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of every number of equally nested reports; other values are the first's."""
    means: dict[str, Any] = {}
    for key, first in reports[0].items():
        values = [report[key] for report in reports]
        if isinstance(first, dict):
            means[key] = average_reports(values)
        elif isinstance(first, float):
            means[key] = sum(values) / len(values)
        else:
            means[key] = first
    return means


def compare_with_peer(
    name: str,
    method: str,
    ours: dict[str, float],
    theirs: dict[str, float],
    *,
    recorded: bool = True,
) -> Check:
    """Return whether NLL and calibration error are not worse than the peer's, up to rounding."""
    is_likely = ours["nll"] <= theirs["nll"] + 0.01
    is_calibrated = ours["calibration"] <= theirs["calibration"] + 0.01
    words = (
        f"NLL {ours['nll']:.3f} against {theirs['nll']:.3f}, "
        f"calibration {ours['calibration']:.3f} against {theirs['calibration']:.3f}"
    )
    claim = f"{name}: {method} is not worse than laplace-torch"
    return Check(claim, is_likely and is_calibrated, words, recorded, of_paper=False)
