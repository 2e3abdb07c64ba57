"""Slices by name, and which scalings have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from ..._core.errors import PullbackError
from ..actions.scaling import Scaling
from .balanced import Balanced
from .chains import chain, components
from .layer_slice import EqualNorm
from .slice import Slice

SLICES = ("balanced", "layer-balanced", "equal-norm", "equal-weights")


def make_slice(
    kind: str, scalings: Sequence[Scaling], model: nn.Module | Mapping[str, Tensor]
) -> Slice:
    """A slice by name: one of `SLICES`."""
    if kind == "balanced":
        return Balanced(scalings, model)
    if kind == "layer-balanced":
        return Balanced([s.merged() for s in scalings], model)
    if kind in ("equal-norm", "equal-weights"):
        return EqualNorm(scalings, model, biases=kind == "equal-norm")
    raise PullbackError(f"There is no slice {kind!r}", "it is not known", f"Use one of {SLICES}")


def layer_slice(scalings: Sequence[Scaling]) -> str:
    """Equal norms where all layers stand in chains, else the balanced slice of layers."""
    chains = all(chain(scalings, part) for part in components(scalings))
    return "equal-norm" if chains else "layer-balanced"


def two_sided(actions: Iterable[object]) -> list[Scaling]:
    """The scalings among some actions that have something to balance.

    Those with one side only (weights before a norm, whose scale means nothing) have not.
    """
    scalings = [a for a in actions if isinstance(a, Scaling)]
    return [s for s in scalings if len({leg.power > 0 for leg in s.legs}) == 2]
