"""Arguments of `KFAC`, of its rules and of param groups: what is not usable is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from sys import float_info
from typing import Any

from torch import Tensor

from ..._core.checks import convert_to_float
from ..._core.errors import PullbackError, describe_value
from ...steps import Step

#: what is read from a param group
_GROUPED = ("lr", "momentum", "weight_decay", "betas", "rule")
#: what a param group may be labeled with, by schedulers too
_LABELS = (
    "params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum",
    "max_momentum",
)  # fmt: skip


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_nonnegative(value: Any) -> bool:
    """Return True for a finite number ≥ 0; integers above all floating-point numbers are not."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value <= float_info.max


def _is_below_one(value: Any) -> bool:
    """Return True for a number in [0, 1)."""
    return _is_nonnegative(value) and value < 1


def _is_positive(value: Any) -> bool:
    return _is_nonnegative(value) and value > 0


def _is_positive_integer(value: Any) -> bool:
    return _is_integer(value) and value >= 1


def _is_nonnegative_integer(value: Any) -> bool:
    return _is_integer(value) and value >= 0


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_pair_below_one(value: Any) -> bool:
    """Return True for two numbers in [0, 1)."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_is_below_one, value))


def _is_auto_or_positive(value: Any) -> bool:
    return value == "auto" or _is_positive(value)


def _is_iterable(value: Any) -> bool:
    """Return True for a list and the like, and for a generator; not for a text or a dict."""
    return isinstance(value, Iterable) and not isinstance(value, (str, Mapping))


def _is_estimation(value: Any) -> bool:
    """Return True for an `Estimation`, whose class a rule imports after this table."""
    return hasattr(value, "with_metric") and not isinstance(value, type)


def _is_selector(value: Any) -> bool:
    """Return True for what selects an output: a key, an index or a function."""
    return isinstance(value, (str, int)) or callable(value)


#: arguments, what they must be, and the remedy
_TABLE: list[tuple[str, Callable[[Any], bool], str]] = [
    ("lr weight_decay eps rate size", _is_nonnegative, "Use a number ≥ 0"),
    ("momentum ema adapt", _is_below_one, "Use a number in [0, 1)"),
    ("betas", _is_pair_below_one, "Use two numbers in [0, 1)"),
    ("rule", ("adam",).__contains__, "Use 'adam', or None for the optimizer's own rule"),
    ("kl_clip", _is_auto_or_positive, "Use a number > 0, 'auto', or None"),
    ("statistics_every invert_every", _is_positive_integer, "Use a whole number ≥ 1"),
    ("draws max_factor", _is_positive_integer, "Use a whole number ≥ 1"),
    ("damping", _is_positive, "Use a number > 0"),
    ("warmup", _is_nonnegative_integer, "Use a whole number ≥ 0"),
    ("seed", _is_integer, "Use a whole number"),
    ("batch_dim", _is_nonnegative_integer, "Use 0, or 1 for sequences first"),
    ("joint ekfac whitening agreement head gentle_start cuda_graph", _is_bool, "Use True or False"),
    ("fisher", ("mc", "exact", "empirical").__contains__, "Use 'mc', 'exact' or 'empirical'"),
    ("sharing", ("expand", "reduce").__contains__, "Use 'expand' or 'reduce'"),
    ("reduction", ("mean", "sum").__contains__, "Use 'mean' or 'sum'"),
    ("params", _is_iterable, "Use a list of parameters or of param groups"),
    ("step", lambda v: isinstance(v, Step), "Use a rule of pullback.steps, or None"),
    ("grad_scaler", lambda v: hasattr(v, "get_scale"), "Use the torch.amp.GradScaler of the loss"),
    ("estimation", _is_estimation, "Use Estimation(...), or None"),
    ("output", _is_selector, "Use a key, an index or a function of the model's output"),
]
#: arguments that may be None
_OPTIONAL = (
    "kl_clip", "params", "step", "grad_scaler", "output", "rule", "reduction", "fisher", "joint",
    "cuda_graph", "estimation", "gentle_start",
)  # fmt: skip
_TESTS = {
    name: (is_usable, remedy) for names, is_usable, remedy in _TABLE for name in names.split()
}


def check(**arguments: Any) -> None:
    """Raise for the first argument whose value is not usable under its name."""
    for name, value in arguments.items():
        is_usable, remedy = _TESTS[name]
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, Tensor) or not is_usable(value):
            if isinstance(value, Tensor) and value.numel() == 1:
                remedy += ", such as value.item()"
            raise PullbackError(f"{name}= is not usable", f"got {describe_value(value)}", remedy)


def check_group(group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise for a param group's values that are not usable, or names that are not `options`."""
    for name in group:
        if name not in (*options, *_LABELS):
            raise PullbackError(
                f"A param group cannot have its own {name}=",
                f"with this rule only {', '.join(options)} are read from a group",
                "Give it to KFAC or its rule where it is one of their options, or leave it out",
            )
    check(**{name: group[name] for name in _GROUPED if name in group})


def check_rates(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise for values of param groups that schedulers or users have made unusable."""
    for group in groups:
        check(**{name: _as_number(group[name]) for name in _GROUPED if name in group})


def _as_number(value: Any) -> Any:
    """Return a number of numpy's or torch's as one of Python's, and 0 for one on a GPU."""
    if value is None or isinstance(value, (float, tuple)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item() if value.device.type == "cpu" else 0.0  # reading it would wait
    is_foreign = isinstance(value, Real) and not isinstance(value, bool)
    return convert_to_float(value) if is_foreign else value
