"""Arguments that K-FAC refuses, with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..._core.capture import plain
from ..._core.errors import PullbackError
from ..checks import refuse_parameter

_CHOICES = {
    "fisher": ("mc", "exact", "empirical"),
    "sharing": ("expand", "reduce"),
    "reduction": ("mean", "sum"),
}
_COUNTS = ("statistics_every", "invert_every", "draws", "max_factor")


def check(**given: Any) -> None:
    """Raise for the first argument that is not usable."""
    for name, value in given.items():
        if name in _CHOICES:
            good, remedy = value in _CHOICES[name], f"Use one of {_CHOICES[name]}"
        elif name in _COUNTS:
            good, remedy = _whole(value) and value >= 1, "Use a whole number ≥ 1"
        elif name == "batch_dim":
            good, remedy = _whole(value) and value >= 0, "Use 0, or 1 for sequences first"
        elif name == "seed":
            good, remedy = _whole(value), "Use a whole number"
        elif name in ("joint", "ekfac"):
            good, remedy = isinstance(value, bool), "Use True or False"
        elif name == "output":
            good = value is None or isinstance(value, (str, int)) or callable(value)
            remedy = "Use a key, an index or a function of the model's output"
        elif name in ("ema", "momentum"):
            good, remedy = _number(value) and 0 <= value < 1, "Use a number in [0, 1)"
        elif name == "kl_clip":
            good = value is None or (_number(value) and value > 0)
            remedy = "Use a number > 0, or None"
        else:
            good, remedy = _number(value) and value >= 0, "Use a number ≥ 0"
        if not good:
            raise PullbackError(f"{name}= is not usable", f"got {value!r}", remedy)


def refuse_unready(model: nn.Module, params: Sequence[Any]) -> None:
    """Raise where there is nothing to optimize, or not yet."""
    for name, p in plain(model).named_parameters():
        if isinstance(p, UninitializedParameter):
            refuse_parameter(name, p)
    if not params:
        raise PullbackError(
            "There is nothing to optimize",
            "the model has no parameters, or params= is empty",
            "Pass a model with parameters",
        )


def refuse_inference() -> None:
    """Raise where averages would be made of tensors that nothing may change later."""
    if torch.is_inference_mode_enabled():
        raise PullbackError(
            "step() was called in inference mode",
            "what is made there cannot be updated later",
            "Leave torch.inference_mode() before stepping",
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
