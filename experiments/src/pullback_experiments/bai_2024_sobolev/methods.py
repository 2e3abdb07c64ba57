"""What is compared: a metric, a schedule of the learning rate, and a scaling of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from pullback import KFAC
from pullback.likelihoods import Categorical
from pullback.metrics import Fisher, Metric, Sobolev

from ..learning import schedules

DIVISOR = 20.0


def sobolev() -> Metric:
    """K⁻¹ between samples, K = e^(−d)(1 + d) with d = ‖x − x'‖; at K = I it is Gauss–Newton's."""
    return Sobolev(1.0)


def fisher() -> Metric:
    """The Fisher metric of the softmax."""
    return Fisher(Categorical())


@dataclass(frozen=True)
class Falls:
    """The rate is multiplied by `factor` at each of these shares of a run."""

    at: Sequence[float]
    factor: float

    def __call__(self, share: float) -> float:
        return schedules.falls(self.at, self.factor)(share)


THEIRS = Falls((0.4, 0.8), 0.1)  # the baseline's
OURS = Falls((0.4, 0.6), 0.2)  # the Sobolev gradient's


@dataclass(frozen=True)
class Method:
    """Something to compare.

    Attributes:
        name: in tables and figures.
        metric: on outputs, with its relation between samples.
        schedule: of the learning rate.
        divisor: of all inputs, for the network and the kernel alike.
    """

    name: str
    metric: Callable[[], Metric]
    schedule: Falls
    divisor: float = 1.0

    @property
    def draws(self) -> int:
        """Covectors per statistics: one that the batch shares is noisier than one per sample."""
        return 4 if self.metric().couples_samples else 1

    def described(self) -> dict[str, Any]:
        """Everything a run depends on."""
        schedule = {"factor": self.schedule.factor, "at": list(self.schedule.at)}
        return {
            "metric": repr(self.metric()),
            "schedule": schedule,
            "divisor": self.divisor,
            "draws": self.draws,
        }

    def optimizer(self, model: nn.Module, seed: int, **settings: Any) -> KFAC:
        """K-FAC in this metric."""
        return KFAC(model, metric=self.metric(), draws=self.draws, seed=seed, **settings)


#: Figures 3 and 5
METHODS = (
    Method("Sobolev", sobolev, OURS, DIVISOR),
    Method("K-FAC", fisher, THEIRS),
    Method("K-FAC + schedule", fisher, OURS),
    Method("K-FAC + scaling", fisher, THEIRS, DIVISOR),
    Method("K-FAC + both", fisher, OURS, DIVISOR),
    Method("Sobolev − schedule", sobolev, THEIRS, DIVISOR),
)
