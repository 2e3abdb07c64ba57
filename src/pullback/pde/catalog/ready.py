"""A problem that knows its equation in words and how to build in what a network can satisfy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..arguments import is_integer, is_number, require
from ..domains import Box, Domain
from ..networks.modules import Hard, PeriodicEmbedding
from ..problem.conditions import Condition
from ..problem.problem import Problem


class Ready(Problem):
    """A problem from the literature.

    Args:
        domain, conditions, options: as for `Problem`.
        equation: what reports show.
        hard: builds the conditions that are not in the loss into a network, where there are any.
    """

    def __init__(
        self,
        domain: Domain,
        conditions: Sequence[Condition],
        *,
        equation: str,
        hard: Callable[[nn.Module], nn.Module] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(domain, conditions, **options)
        self.equation, self._wrap = equation, hard
        self.hard = hard is not None

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network with the hard conditions built in; itself where there are none.

        A periodic problem in d coordinates wants a network of d + 1 inputs: the periodic one
        becomes a sine and a cosine, which come first.
        """
        return network if self._wrap is None else self._wrap(network)


def distance(
    domain: Domain, factor: Callable[..., Any], lift: Callable[..., Any] | None = None
) -> Callable[[nn.Module], nn.Module]:
    """N ↦ lift + factor·N."""
    return lambda network: Hard(network, domain, distance=factor, lift=lift)


def periodic(
    domain: Domain, initial: Callable[..., Any], period: float
) -> Callable[[nn.Module], nn.Module]:
    """N ↦ initial + t·N(sin ωx, cos ωx, t), ω = 2π/period."""

    def wrap(network: nn.Module) -> nn.Module:
        embedded = nn.Sequential(PeriodicEmbedding(2, 0, period), network)
        return Hard(embedded, domain, distance=lambda t: t, lift=initial)

    return wrap


def bump(box: Box) -> Callable[[Any], Any]:
    """Π 4(xᵢ − aᵢ)(bᵢ − xᵢ)/(bᵢ − aᵢ)²: zero on the faces, 1 in the middle; (N, ≥d) ↦ (N, 1)."""

    def factor(points: Any) -> Any:
        out: Any = 1.0
        for i, (a, b) in enumerate(box.bounds):
            x = points[:, i : i + 1]
            out = out * ((x - a) * (b - x) * (4 / (b - a) ** 2))
        return out

    return factor


def check_dim(what: str, dim: int, high: int | None = None) -> int:
    """The dimension, if there is such a problem."""
    usable = is_integer(dim, 1) and (high is None or dim <= high)
    remedy = "Use dim ≥ 1" if high is None else f"Use dim from 1 to {high}"
    require(usable, f"The dimension of the {what}", dim, remedy)
    return dim


def check_number(what: str, value: float) -> float:
    """The coefficient, if it is a finite number."""
    require(is_number(value), f"The {what}", value, "Use a finite number")
    return value


def prefix(coefficient: float, space: str = "") -> str:
    """A coefficient in front of a symbol: nothing for 1.

    >>> prefix(1.0), prefix(0.25), prefix(40.0, " ")
    ('', '0.25', '40 ')
    """
    return "" if coefficient == 1 else f"{coefficient:.4g}{space}"
