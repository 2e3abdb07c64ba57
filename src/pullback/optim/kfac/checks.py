"""Arguments that K-FAC refuses, with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..._core.capture import plain
from ..._core.errors import PullbackError
from ...steps import QuadraticModel
from ..checks import refuse_parameter

_CHOICES = {
    "fisher": ("mc", "exact", "empirical"),
    "sharing": ("expand", "reduce"),
    "reduction": ("mean", "sum"),
}
#: what is read from a param group, and what it may be labeled with, by schedulers too
_OPTIONS = ("lr", "momentum", "weight_decay")
_LABELS = (
    "params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum",
    "max_momentum",
)  # fmt: skip
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
        elif name == "step":
            good = value is None or isinstance(value, QuadraticModel)
            remedy = "Use steps.QuadraticModel(), or None"
        elif name == "grad_scaler":
            good = value is None or callable(getattr(value, "get_scale", None))
            remedy = "Use the torch.amp.GradScaler that scales the loss"
        elif name == "params":
            good = value is None or isinstance(value, Iterable)
            remedy = "Use a list of parameters or of param groups"
        else:
            good, remedy = _number(value) and value >= 0, "Use a number ≥ 0"
        if not good:
            raise PullbackError(f"{name}= is not usable", f"got {value!r}", remedy)


def check_group(group: Mapping[str, Any]) -> None:
    """Raise for options of a param group that are not usable, or that nothing would read."""
    for name in group:
        if name not in (*_OPTIONS, *_LABELS):
            raise PullbackError(
                f"A param group cannot have its own {name}=",
                f"only {', '.join(_OPTIONS)} are read from a group",
                "Give it to KFAC itself where it is one of its options, or leave it out",
            )
    check(**{name: group[name] for name in _OPTIONS if name in group})


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
