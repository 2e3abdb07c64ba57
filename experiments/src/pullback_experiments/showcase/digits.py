"""Classification of scikit-learn's 8×8 digits by a small network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback import KFAC, HessianFree, NaturalGradient, PullbackError
from pullback.likelihoods import Categorical

from . import baselines
from .contender import Contender
from .problem import Supervised

_TRAIN = 1347  # of 1797 images; the other 450 are for testing
_BATCH, _KFAC_BATCH = 64, 256


def load() -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1], (1797, 64), and labels, in a fixed random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise PullbackError(
            "The digits are not available",
            "they come with scikit-learn, which is not installed",
            'Install it with `pip install scikit-learn` or `pip install -e ".[dev]"`',
        ) from error
    data: Any = load_digits()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(data.data).double() / 16
    return x[order], torch.from_numpy(data.target).long()[order]


class Digits(Supervised):
    """Cross-entropy of a 64-32-10 tanh network on 1347 images; 450 others test it."""

    title = "Digits"
    setting = "64-32-10 tanh network, 1347 images"

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        x, y = load()
        self.x, self._test = x[:_TRAIN], x[_TRAIN:]
        self.y, self._truth = y[:_TRAIN], y[_TRAIN:]
        self.contenders = (
            Contender("SGD", baselines.sgd, {"lr": 0.3}, {"lr": (0.03, 0.1, 0.3, 1.0)}, _BATCH),
            Contender(
                "Adam", baselines.adam, {"lr": 0.03}, {"lr": (0.003, 0.01, 0.03, 0.1)}, _BATCH
            ),
            Contender("K-FAC", _kfac, {"lr": 0.3}, {"lr": (0.03, 0.1, 0.3, 1.0)}, _KFAC_BATCH),
            Contender("Natural gradient", _natural_gradient),
        )

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> dict[str, float]:
        right = model(self._test).argmax(1) == self._truth
        return {
            "training loss": float(F.cross_entropy(model(self.x), self.y)),
            "test accuracy": float(right.double().mean()),
        }


def _natural_gradient(model: nn.Module) -> NaturalGradient:
    """The exact Fisher metric by conjugate gradients, on all images; nothing is tuned."""
    return HessianFree(model, Categorical())


def _kfac(model: nn.Module, lr: float) -> KFAC:
    """Sampled Fisher, statistics every fifth step, inverses every tenth, steps held by a clip."""
    return KFAC(
        model, lr, likelihood=Categorical(), damping=1e-3, kl_clip=1e-3,
        statistics_every=5, invert_every=10,
    )  # fmt: skip
