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

#: builds conditions into a network
Wrap = Callable[[nn.Module], nn.Module]


class Ready(Problem):
    """A problem from the literature.

    Args:
        domain, options: as for `Problem`.
        conditions: those that are always in the loss.
        soft: those that are in the loss unless the network satisfies them.
        hard: whether the network is to satisfy the soft conditions.
        wrap: builds the soft conditions into a network.
        equation: what reports show.
    """

    def __init__(
        self,
        domain: Domain,
        conditions: Sequence[Condition],
        *,
        soft: Sequence[Condition] = (),
        hard: bool = False,
        wrap: Wrap | None = None,
        equation: str,
        **options: Any,
    ) -> None:
        in_loss = list(conditions)
        if not hard:
            in_loss += soft
        super().__init__(domain, in_loss, **options)
        self.equation = equation
        self.hard = hard
        self._wrap = wrap

    def wrap(self, network: nn.Module) -> nn.Module:
        """Return the network with the hard conditions built in; itself where there are none.

        A periodic problem in d coordinates wants a network of d + 1 inputs: the periodic one
        becomes a sine and a cosine, which come first.
        """
        if not self.hard or self._wrap is None:
            return network
        return self._wrap(network)


def wrap_by_distance(
    domain: Domain, factor: Callable[..., Any], lift: Callable[..., Any] | None = None
) -> Wrap:
    """Return N ↦ lift + factor·N."""
    return lambda network: Hard(network, domain, distance=factor, lift=lift)


def wrap_periodically(domain: Domain, initial: Callable[..., Any], period: float) -> Wrap:
    """Return N ↦ initial + t·N(sin ωx, cos ωx, t), ω = 2π/period."""

    def wrap(network: nn.Module) -> nn.Module:
        embedded = nn.Sequential(PeriodicEmbedding(2, 0, period), network)
        return Hard(embedded, domain, distance=lambda t: t, lift=initial)

    return wrap


def bump(box: Box) -> Callable[[Any], Any]:
    """Return Π 4(xᵢ − aᵢ)(bᵢ − xᵢ)/(bᵢ − aᵢ)², (N, ≥d) ↦ (N, 1).

    It is zero on the faces and 1 in the middle.
    """

    def factor(points: Any) -> Any:
        out: Any = 1.0
        for i, (a, b) in enumerate(box.bounds):
            x = points[:, i : i + 1]
            out = out * ((x - a) * (b - x) * (4 / (b - a) ** 2))
        return out

    return factor


def check_dim(what: str, dim: int, high: int | None = None) -> int:
    """Return the dimension; raise if there is no such problem."""
    usable = is_integer(dim, 1) and (high is None or dim <= high)
    if high is None:
        remedy = "Use dim ≥ 1"
    else:
        remedy = f"Use dim from 1 to {high}"
    require(usable, f"The dimension of the {what}", dim, remedy)
    return dim


def check_number(what: str, value: float) -> float:
    """Return the coefficient; raise if it is no finite number."""
    require(is_number(value), f"The {what}", value, "Use a finite number")
    return value


def prefix(coefficient: float, space: str = "") -> str:
    """Return a coefficient in front of a symbol: nothing for 1.

    >>> prefix(1.0), prefix(0.25), prefix(40.0, " ")
    ('', '0.25', '40 ')
    """
    if coefficient == 1:
        return ""
    return f"{coefficient:.4g}{space}"
