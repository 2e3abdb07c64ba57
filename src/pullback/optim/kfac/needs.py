"""Which rules of `steps/` go with K-FAC."""

from __future__ import annotations

from ..._core.errors import PullbackError
from ...steps import Need, Step

#: what K-FAC offers to a step
_OFFERED = frozenset({Need.LOSSES, Need.PRODUCTS, Need.DAMPINGS})


def refuse_step(step: Step, *, has_control: bool) -> None:
    """Raise for a step that needs what K-FAC cannot give, or that competes with its damping."""
    missing = sorted(need.value for need in step.needs - _OFFERED)
    if missing:
        raise PullbackError(
            f"KFAC does not take {step!r}",
            f"it needs {' and '.join(missing)}; K-FAC has inverses for one damping at a time",
            "Use LevenbergMarquardt, QuadraticModel, TrustNorm, Backtracking or GridLineSearch",
        )
    if has_control and Need.DAMPINGS in step.needs:
        raise PullbackError(
            f"{step!r} does not go with an adaptive damping",
            "both choose λ",
            "Give KFAC a number as damping, or another step",
        )
