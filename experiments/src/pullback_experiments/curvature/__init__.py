"""Records of `pullback.curvature`: influence of training samples, and posteriors beside a peer.

influence/     experiments: scores of samples against retraining, wrong labels, seconds
laplace/       experiments: posteriors beside laplace-torch
retraining/    networks trained again on halves of their data, and the score of a prediction
device/        the long parts of the influence experiments, for a GPU where torch alone is
sizes.py       how large those parts are
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pullback._core.lazy import attach

if TYPE_CHECKING:
    from .experiments import EXPERIMENTS
else:
    # `device` works where torch alone is installed
    __getattr__, __dir__ = attach(__name__, {"experiments": "EXPERIMENTS"})

__all__ = ["EXPERIMENTS"]
