"""Choose a network for a problem by its dimension, waves and linearity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..arguments import check_seed, is_integer, is_number, require, require_problem
from ..domains import Region
from ..problem.conditions import Periodic
from .wavenumbers import SMOOTH, is_linear, oscillation

if TYPE_CHECKING:
    from ..problem.problem import Problem
from .modules import PeriodicEmbedding, Rescaled, Sine, mlp

_FEW = 3  # dimensions up to which a network has two or three hidden layers


_LARGEST = 1000  # parameters beyond these dimensions: a step takes about a second on two cores


_MANY = 8.0  # half waves that are too many for two layers of tanh


_WAVES = 64, 256  # the fewest and the most neurons in a layer of sines


_HARMONICS = 4  # the most of a periodic coordinate


_BEYOND = 1.25  # of the estimated wave numbers, that a layer of sines begins with


def network_for(
    problem: Problem,
    *,
    parameters: int | None = None,
    frequency: float | Sequence[float] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Choose a network for a problem by its dimension, waves and linearity.

    Let n be the half waves that the solution may have across the domain, along each axis; they are
    estimated from the data and the linear part of the equations (`oscillation`).

    1. Linear equations with waves, n > 3 along some axis, of at most three: one hidden layer
       sin(Kx + φ). K is uniform up to 5/4 of the estimated wave numbers, φ uniform, and both are
       trained. Its width is 2Π(n + 2), at least 64 and at most 256.
    2. Else two hidden layers of 20 tanh, or three of 16 where the equations are not linear. A
       coordinate in which all fields are periodic enters by sines and cosines of n/2 harmonics,
       at most 4, so that the network is periodic. Where there are waves with n > 8 along another
       axis, the first layer is one of sines as in rule 1.
    3. Beyond three dimensions one hidden layer of 64 tanh, which is cheaper for the smooth
       solutions that are feasible there; narrower from 14 dimensions on, with 1000 parameters.

    Coordinates are mapped to [−1, 1], and fields share the hidden layers.

    Args:
        problem: what is to be solved; its data are evaluated on lines through the domain.
        parameters: about so many instead, by another width.
        frequency: the largest wave number in radians a length, for all axes or for each, instead
            of the estimated ones.
        seed: of the initial values.

    >>> from pullback.pde import Helmholtz, Poisson
    >>> sum(p.numel() for p in network_for(Poisson(dim=2)).parameters())
    501
    >>> network_for(Helmholtz(a1=4, a2=4)).network
    Sequential(
      (0): Linear(in_features=2, out_features=192, bias=True)
      (1): Sine()
      (2): Linear(in_features=192, out_features=1, bias=True)
    )
    """
    require_problem(problem, "network_for()")
    usable = parameters is None or is_integer(parameters, 1)
    require(usable, "The number of parameters", parameters, "Use an integer ≥ 1, or None")
    domain, fields = problem.domain, len(problem.fields)
    if domain.dim > _FEW and frequency is None:
        narrow = _width(_LARGEST if parameters is None else parameters, domain.dim, fields, 1)
        width = min(64, narrow) if parameters is None else narrow
        return Rescaled(mlp(domain.dim, width, fields, seed=seed), domain)
    if frequency is None:
        found = oscillation(problem)
        turns, waves = found.half_waves, found.waves
    else:
        turns = _checked_frequency(frequency, domain) * (domain.high - domain.low) / math.pi
        waves = float(turns.max()) > SMOOTH
    if waves and is_linear(problem):
        width = min(max(int(2 * (turns + 2).prod()), _WAVES[0]), _WAVES[1])
        width = width if parameters is None else _width(parameters, domain.dim, fields, 1)
        network = mlp(domain.dim, width, fields, activation="sin", seed=seed)
        _begin_with_waves(network, turns, seed)
        return Rescaled(network, domain)
    embeddings: list[nn.Module] = []
    for axis in _periodic_axes(problem):
        dim, at = len(turns), axis + len(turns) - domain.dim
        harmonics = min(max(1, math.ceil(float(turns[at]) / 2)), _HARMONICS)
        embeddings.append(PeriodicEmbedding(dim, at, 2.0, harmonics))
        turns = torch.cat([turns.new_zeros(2 * harmonics), turns[:at], turns[at + 1 :]])
    layers, width = (2, 20) if is_linear(problem) else (3, 16)
    width = width if parameters is None else _width(parameters, len(turns), fields, layers)
    network = mlp(len(turns), *[width] * layers, fields, seed=seed)
    if waves and float(turns.max()) > _MANY:
        network[1] = Sine()
        _begin_with_waves(network, turns, seed)
    return Rescaled(nn.Sequential(*embeddings, *network) if embeddings else network, domain)


def _begin_with_waves(network: nn.Sequential, turns: Tensor, seed: int) -> None:
    """Let the first layer have up to so many half waves across [−1, 1]^d."""
    first = network[0]
    assert isinstance(first, nn.Linear)
    generator = torch.Generator().manual_seed(check_seed(seed))
    shape = first.out_features, first.in_features + 1
    uniform = 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
    with torch.no_grad():
        first.weight.copy_(uniform[:, :-1] * (_BEYOND * turns.clamp(min=1) * math.pi / 2))
        first.bias.copy_(uniform[:, -1] * math.pi)


def _width(parameters: int, inputs: int, fields: int, layers: int) -> int:
    """The width w of hidden layers with (L − 1)w² + (inputs + fields + L)w + fields parameters."""
    linear, rest, square = inputs + fields + layers, fields - parameters, layers - 1
    if not square:
        return max(1, round(-rest / linear))
    root = math.sqrt(max(linear**2 - 4 * square * rest, 0))
    return max(1, round((root - linear) / (2 * square)))


def _checked_frequency(frequency: Any, domain: Region) -> Tensor:
    listed = list(frequency) if isinstance(frequency, Sequence) else [frequency] * domain.dim
    usable = len(listed) == domain.dim and all(is_number(k) and k >= 0 for k in listed)
    remedy = "Use a number ≥ 0 in radians a length, or one for each coordinate"
    require(usable, "The frequency", frequency, remedy)
    return torch.tensor(listed, dtype=torch.float64)


def _periodic_axes(problem: Problem) -> list[int]:
    """Coordinates in which all fields are periodic."""
    found: dict[str, set[str]] = {}
    for c in problem.conditions:
        if isinstance(c, Periodic) and c.on is None:
            found.setdefault(c.axis, set()).update([c.field] if c.field else problem.fields)
    names = problem.domain.names
    return [i for i, n in enumerate(names) if found.get(n) == set(problem.fields)]
