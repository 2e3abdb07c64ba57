"""Arguments that K-FAC refuses, with the reason and the remedy."""

from __future__ import annotations

from typing import Any

from ..._core.errors import PullbackError

_CHOICES = {
    "fisher": ("mc", "exact", "empirical"),
    "sharing": ("expand", "reduce"),
    "reduction": ("mean", "sum"),
}


def check(**given: Any) -> None:
    """Raise for the first argument that is not usable."""
    for name, value in given.items():
        if name in _CHOICES:
            good, remedy = value in _CHOICES[name], f"Use one of {_CHOICES[name]}"
        elif name in ("statistics_every", "invert_every", "draws", "max_factor"):
            whole = isinstance(value, int) and not isinstance(value, bool)
            good, remedy = whole and value >= 1, "Use a whole number ≥ 1"
        elif name == "ema" or name == "momentum":
            good, remedy = _number(value) and 0 <= value < 1, "Use a number in [0, 1)"
        elif name == "kl_clip":
            good = value is None or (_number(value) and value > 0)
            remedy = "Use a number > 0, or None"
        else:
            good, remedy = _number(value) and value >= 0, "Use a number ≥ 0"
        if not good:
            raise PullbackError(f"{name}= is not usable", f"got {value!r}", remedy)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
