"""Who trains in the speed recipe: Muon as published, K-FAC's rules, and one change at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pullback import KFAC
from pullback.optim.kfac import AdamW, Filters, Spectral
from pullback.optim.kfac.rules import RuleState, StepContext

from .network import RecipeNetwork
from .optimizers import (
    PUBLISHED_RATES,
    Build,
    Entrant,
    Normalization,
    kfac,
    make_sgd,
    muon,
    spectral,
)


@dataclass(frozen=True)
class Rates:
    """Learning rates of filters, and the size of filters that they are for."""

    #: of steps with entries of 0.2, on filters with entries of 0.02: 0.24 of a filter's length,
    #: which is the published rate of Muon
    even: float = 0.024
    #: the same length of steps where gradients are noise alone and momentum is 0.6
    agreeing: float = 0.0096


RATES = Rates()
_PLAIN = {"whitening": False, "agreement": False}


class PartlyAgreeing(Spectral):
    """Steps whose length follows one part of the agreement of gradients.

    Args:
        shares_schedule: True for the geometric mean over all filters, which changes with time
            alone; False for each tensor's share of it, which differs between layers alone.
    """

    def __init__(self, *, shares_schedule: bool, **options: Any) -> None:
        super().__init__(**options)
        self.shares_schedule = shares_schedule
        self._logarithms: dict[tuple[int, ...], Tensor] = {}
        self._shape: tuple[int, ...] = ()

    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        self._shape = tuple(gradient.shape)
        return super().direction(gradient, state, step)

    def find_step_size(self, squares: Tensor, mean_squares: Tensor) -> Tensor | float:
        size = super().find_step_size(squares, mean_squares)
        assert isinstance(size, Tensor)
        self._logarithms[self._shape] = size.detach().flatten().log()
        mean = torch.cat(list(self._logarithms.values())).mean().exp()
        if self.shares_schedule:
            return mean.expand_as(size)
        noise = 0.5  # the size for noise alone
        return noise * size / mean


def _rule(**options: Any) -> Any:
    return lambda: Spectral(**{"momentum": 0.6, "filters": None, **options})


def _partly(**options: Any) -> Any:
    return lambda: PartlyAgreeing(momentum=0.6, whitening=False, filters=None, **options)


def _make_normalized(title: str, lr: float = RATES.even, **options: Any) -> Entrant:
    """Return K-FAC without agreement on filters whose entries are normalized; SGD on the rest."""
    build = spectral(lr, _rule(**{"agreement": False, **options}))
    return Entrant(title, build, Normalization.ENTRIES)


def _agreeing(title: str, lr: float = RATES.agreeing) -> Entrant:
    return Entrant(title, spectral(lr, _rule(whitening=False)), Normalization.ENTRIES)


def whiten_later_layers(lr: float) -> Build:
    """Return whitened steps for all filters but those of the first convolution."""

    def build(model: RecipeNetwork) -> list[Optimizer]:
        first, *later = model.filters
        return [
            KFAC(model, lr, rule=_rule(**_PLAIN)(), params=[first]),
            KFAC(model, lr, rule=_rule(agreement=False)(), params=later),
            make_sgd(model),
        ]

    return build


def _everything(title: str, build: Build) -> Entrant:
    return Entrant(title, build, Normalization.NONE, freezes_patches=False)


#: whose accuracies and seconds the claims compare
MAIN: dict[str, Entrant] = {
    "muon": Entrant("Muon, as published", muon()),
    "plain": _make_normalized("Spectral(whitening=False, agreement=False)", whitening=False),
    "default": _everything("KFAC(model)", kfac()),
}
#: one change of `plain` each
CHANGES: dict[str, Entrant] = {
    "whitening": _make_normalized("whitened"),
    "whitening, later layers": Entrant(
        "whitened but for the first convolution",
        whiten_later_layers(RATES.even),
        Normalization.ENTRIES,
    ),
    "agreement": _agreeing("length by agreement"),
    "agreement, schedule": Entrant(
        "length by the agreement of all filters together",
        spectral(RATES.agreeing, _partly(shares_schedule=True)),
        Normalization.ENTRIES,
    ),
    "agreement, layers": Entrant(
        "length by each layer's share of the agreement",
        spectral(RATES.agreeing, _partly(shares_schedule=False)),
        Normalization.ENTRIES,
    ),
    "momentum 0.9": _make_normalized("momentum 0.9", whitening=False, momentum=0.9),
    "not normalized": replace(
        MAIN["plain"], title="weights not normalized", normalization=Normalization.NONE
    ),
}


def _whole(title: str, multiple: float = 1.0, **options: Any) -> Entrant:
    """Return a change of what `KFAC(model)` is for this network."""

    def build(model: RecipeNetwork) -> list[Optimizer]:
        rule = Spectral(**{"head": True, "others": AdamW(), **options})
        return [KFAC(model, multiple * rule.defaults.lr, rule=rule)]

    return _everything(title, build)


#: changes of `default`
ALL_PARAMETERS: dict[str, Entrant] = {
    "default, rate x0.5": _whole("KFAC(model), half the rate", 0.5),
    "default, rate x2": _whole("KFAC(model), twice the rate", 2.0),
    "default, not whitened": _whole(
        "not whitened, steps of filters alone", whitening=False, agreement=True
    ),
    "default, damping 1": _whole("damping 1", damping=1.0),
    "filters, size 1": _whole("filters: size 1", filters=Filters(size=1.0)),
    "filters, momentum 0.9": _whole("filters: momentum 0.9", filters=Filters(momentum=0.9)),
    "no filters": _whole("filters like other weights", filters=None, others=AdamW(rate=0.5)),
}


def _shorten(title: str, entrant: Entrant, **changes: Any) -> Entrant:
    """Return an entrant that trains for 188 steps instead of 200."""
    return replace(entrant, title=f"{title}, 188 steps", epochs=7.5, **changes)


def _make_plain(lr: float = RATES.even, sgd: float = 1.0, **options: Any) -> Entrant:
    """Return `plain` with other options of its rule, or rates of SGD so many times as large."""
    published = PUBLISHED_RATES
    rates = replace(published, bias=sgd * published.bias, head=sgd * published.head)
    rule = _rule(**{**_PLAIN, **options})

    def build(model: RecipeNetwork) -> list[Optimizer]:
        return [KFAC(model, lr, rule=rule(), params=model.filters), make_sgd(model, rates)]

    return Entrant("", build, Normalization.ENTRIES)


#: runs of fewer steps, and what may make up for them
FEWER_STEPS: dict[str, Entrant] = {
    "muon, 188 steps": _shorten("Muon, as published", MAIN["muon"]),
    "plain, 188 steps": _shorten("Spectral(whitening=False, agreement=False)", MAIN["plain"]),
    "plain, 188 steps, rate x1.2": _shorten("rate × 1.2", _make_plain(1.2 * RATES.even)),
    "plain, 188 steps, rate x0.83": _shorten("rate × 0.83", _make_plain(RATES.even / 1.2)),
    "plain, 188 steps, momentum 0.7": _shorten("momentum 0.7", _make_plain(momentum=0.7)),
    "plain, 188 steps, momentum 0.5": _shorten("momentum 0.5", _make_plain(momentum=0.5)),
    "plain, 188 steps, SGD x1.25": _shorten("rates of SGD × 1.25", _make_plain(sgd=1.25)),
    "plain, 188 steps, average of 12": _shorten(
        "average of the last 12 steps, rates fall to a tenth",
        MAIN["plain"],
        final_rate=0.1,
        averaged_steps=12,
    ),
    "plain, 188 steps, average of 25": _shorten(
        "average of the last 25 steps, rates fall to a fifth",
        MAIN["plain"],
        final_rate=0.2,
        averaged_steps=25,
    ),
}
ENTRANTS = {**MAIN, **CHANGES, **ALL_PARAMETERS, **FEWER_STEPS}
