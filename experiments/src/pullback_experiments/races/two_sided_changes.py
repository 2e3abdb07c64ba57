"""Changes of the two-sided rule for `race-changes`: its options, rates of single layers, and more.

A row's name is the arguments that it changes, or words for what is no argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback import KFAC
from pullback.optim.kfac import AdamW, Estimation, TwoSided
from pullback.optim.kfac.rules.spectral import SpectralState

from .optimizers import Build, make_decay_groups

#: the row by which the others are judged
UNCHANGED = "the two-sided rule"
#: weights of the decoder, by endings of their names
_TABLES = ("tokens.weight", "positions.weight")
_GAINS = ("norm.weight", "norm1.weight", "norm2.weight")
_QUERIES_AND_KEYS = (".q.weight", ".k.weight")
_VALUES_AND_OUTPUTS = (".v.weight", ".out.weight")
_UP = (".up.weight",)
_DOWN = (".down.weight",)
_HEAD = ("head.weight",)


# --- rules ----------------------------------------------------------------------------------------


class RootLengthTwoSided(TwoSided):
    """`TwoSided` with steps as long as the root of the agreement; those of noise keep theirs."""

    name: ClassVar = "root-length-two-sided"
    #: the size of steps where gradients are noise, whose momentum has 0.3 of their size
    noise_size: ClassVar = 0.75 * 0.3

    def find_step_size(self, squares: Tensor, mean_squares: Tensor) -> Tensor | float:
        size = super().find_step_size(squares, mean_squares)
        assert isinstance(size, Tensor)
        return (self.noise_size * size).sqrt()


class WholePowerInputs(TwoSided):
    """`TwoSided` with the power -1 of C in the place of -½."""

    name: ClassVar = "whole-power-inputs"

    def set_roots(self, state: SpectralState, roots: Sequence[Tensor]) -> None:
        input_root, *output_roots = roots
        super().set_roots(state, [square_keeping_norm(input_root), *output_roots])


class WholePowers(TwoSided):
    """`TwoSided` with the power -1 of both factors."""

    name: ClassVar = "whole-powers"

    def set_roots(self, state: SpectralState, roots: Sequence[Tensor]) -> None:
        super().set_roots(state, [square_keeping_norm(root) for root in roots])


def square_keeping_norm(root: Tensor) -> Tensor:
    """Return Z², as large as the root Z, (B, n, n); a diagonal, (B, n), stays as it is."""
    if root.ndim < 3:
        return root
    fine_root = root.float()
    square = fine_root @ fine_root
    norm = torch.linalg.matrix_norm(square, keepdim=True)
    return square * (torch.linalg.matrix_norm(fine_root, keepdim=True) / norm)


# --- rows -----------------------------------------------------------------------------------------


def _change_options(
    make_rule: Callable[..., TwoSided] = TwoSided, *, schedule: Mapping[str, Any] | None = None,
    **options: Any,
) -> Build:  # fmt: skip
    """Return a row with other arguments of the rule, or another `schedule` of statistics."""

    def build(model: nn.Module, lr: float, settings: Any) -> list[Optimizer]:
        rule = make_rule(**options)
        return [KFAC(model, lr, rule=rule, params=make_decay_groups(model), **(schedule or {}))]

    return build


def _change_rate(endings: Sequence[str], multiple: float, **options: Any) -> Build:
    """Return a row in which weights with these endings of names have a multiple of the rate."""

    def build(model: nn.Module, lr: float, settings: Any) -> list[Optimizer]:
        names = {id(p): name for name, p in model.named_parameters()}
        groups = []
        for group in make_decay_groups(model):
            changed = [p for p in group["params"] if names[id(p)].endswith(tuple(endings))]
            changed_ids = {id(p) for p in changed}
            others = [p for p in group["params"] if id(p) not in changed_ids]
            for params, rate in ((changed, multiple * lr), (others, lr)):
                if params:
                    groups.append({**group, "params": params, "lr": rate})
        return [KFAC(model, lr, rule=TwoSided(**options), params=groups)]

    return build


def _change_whole_rate(multiple: float, **options: Any) -> Build:
    """Return a row in which all parameters have a multiple of the rate."""
    return lambda model, lr, settings: _change_options(**options)(model, multiple * lr, settings)


def _change_decay(weight_decay: float, **options: Any) -> Build:
    """Return a row with another weight decay of all matrices."""

    def build(model: nn.Module, lr: float, settings: Any) -> list[Optimizer]:
        groups = make_decay_groups(model, weight_decay)
        return [KFAC(model, lr, rule=TwoSided(**options), params=groups)]

    return build


_change_with_warm_up = partial(_change_options, warmup=20)
_EVERY_STEP = {"statistics_every": 1, "invert_every": 1}

_ROWS: dict[str, Build] = {
    # options of the rule
    "damping=0.05": _change_options(damping=0.05),
    "damping=0.02": _change_options(damping=0.02),
    "adapt=0.9": _change_options(adapt=0.9),
    "head=True": _change_options(head=True),
    "gentle_start=True": _change_options(gentle_start=True),
    "fisher='mc'": _change_options(estimation=Estimation(fisher="mc")),
    "AdamW's betas (0.8, 0.95)": _change_options(others=AdamW((0.8, 0.95))),
    "AdamW's betas (0.9, 0.98)": _change_options(others=AdamW((0.9, 0.98))),
    # when statistics are taken
    "warmup=20": _change_with_warm_up(),
    "warmup=40": _change_options(warmup=40),
    "warmup=100": _change_options(warmup=100),
    "warmup=40, ema=0.9": _change_options(warmup=40, estimation=Estimation(ema=0.9)),
    "statistics_every=1, invert_every=1": _change_options(schedule=_EVERY_STEP),
    "statistics_every=1, invert_every=1, ema=0.95": _change_options(
        schedule=_EVERY_STEP, estimation=Estimation(ema=0.95)
    ),
    "statistics_every=2, invert_every=10, ema=0.95": _change_options(
        schedule={"statistics_every": 2, "invert_every": 10}, estimation=Estimation(ema=0.95)
    ),
    "warmup=20, statistics_every=5, invert_every=5": _change_with_warm_up(
        schedule={"statistics_every": 5, "invert_every": 5}
    ),
    # both
    "warmup=5, damping=0.05": _change_options(warmup=5, damping=0.05),
    "warmup=10, damping=0.05": _change_options(warmup=10, damping=0.05),
    "warmup=20, damping=0.05": _change_with_warm_up(damping=0.05),
    "warmup=20, damping=0.02": _change_with_warm_up(damping=0.02),
    "warmup=20, damping=0.05, statistics_every=5, invert_every=10": _change_with_warm_up(
        damping=0.05, schedule={"statistics_every": 5, "invert_every": 10}
    ),
    "warmup=20, momentum=0.8": _change_with_warm_up(momentum=0.8),
    "warmup=20, momentum=0.9": _change_with_warm_up(momentum=0.9),
    "warmup=20, fisher='mc'": _change_with_warm_up(estimation=Estimation(fisher="mc")),
    "warmup=20, AdamW's betas (0.9, 0.98)": _change_with_warm_up(others=AdamW((0.9, 0.98))),
    # other powers and lengths
    "C to the power -1": _change_options(WholePowerInputs),
    "C and R to the power -1": _change_options(WholePowers),
    "length by the root of the agreement": _change_options(RootLengthTwoSided),
    "warmup=20, C to the power -1": _change_with_warm_up(WholePowerInputs),
    "warmup=20, length by the root of the agreement": _change_with_warm_up(RootLengthTwoSided),
    "warmup=20, damping=0.05, length by the root of the agreement": _change_with_warm_up(
        RootLengthTwoSided, damping=0.05
    ),
    # rates and decay
    "tables at 3 times the rate": _change_rate(_TABLES, 3.0),
    "tables at 0.4 times the rate": _change_rate(_TABLES, 0.4),
    "head at 2.5 times the rate": _change_rate(_HEAD, 2.5),
    "head at 0.4 times the rate": _change_rate(_HEAD, 0.4),
    "gains at 3 times the rate": _change_rate(_GAINS, 3.0),
    "down at 0.6 times the rate": _change_rate(_DOWN, 0.6),
    "down at 1.5 times the rate": _change_rate(_DOWN, 1.5),
    "up at 0.6 times the rate": _change_rate(_UP, 0.6),
    "up at 1.5 times the rate": _change_rate(_UP, 1.5),
    "q and k at 0.6 times the rate": _change_rate(_QUERIES_AND_KEYS, 0.6),
    "q and k at 1.5 times the rate": _change_rate(_QUERIES_AND_KEYS, 1.5),
    "v and out at 0.6 times the rate": _change_rate(_VALUES_AND_OUTPUTS, 0.6),
    "v and out at 1.5 times the rate": _change_rate(_VALUES_AND_OUTPUTS, 1.5),
    "warmup=20, up at 1.5 times the rate": _change_rate(_UP, 1.5, warmup=20),
    "warmup=20, 0.85 times the rate": _change_whole_rate(0.85, warmup=20),
    "warmup=20, 1.2 times the rate": _change_whole_rate(1.2, warmup=20),
    "weight decay 0.02": _change_decay(0.02),
    "weight decay 0.3": _change_decay(0.3),
    "warmup=20, weight decay 0.3": _change_decay(0.3, warmup=20),
}

ROWS: dict[str, Build] = {f"{UNCHANGED}, {change}": build for change, build in _ROWS.items()}
