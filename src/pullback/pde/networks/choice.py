"""Choose a network for a problem by its dimension, waves and linearity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import check_seed, is_integer, is_number, require, require_problem
from ..discretization.homogeneity import find_constant_state, has_ground_state_without_nodes
from ..domains import Region
from ..problem.problem import Problem
from .field_sizes import choose_units
from .modules import PeriodicEmbedding, Rescaled, Sine, mlp
from .state import InUnits
from .wavenumbers import THRESHOLDS as WAVES
from .wavenumbers import estimate_oscillation, is_linear


@dataclass(frozen=True)
class ChoiceThresholds:
    """Sizes of networks by default."""

    #: dimensions up to which a network has two or three hidden layers
    few_dimensions: int = 3
    #: beyond these: the width, and parameters with which a step takes about a second on two cores
    width_of_many_dimensions: int = 64
    parameters_of_many_dimensions: int = 1000
    #: half waves that are too many for layers of tanh: each takes about two neurons along a line,
    #: and layers have 16 or 20
    many_half_waves: float = 8.0
    #: bounds of the neurons in a layer of sines
    fewest_sines: int = 64
    most_sines: int = 256
    #: the most harmonics of a periodic coordinate
    most_harmonics: int = 4
    #: wave numbers that a layer of sines begins with, in units of the estimated ones
    beyond_estimate: float = 1.25
    #: share of the usual weights with which a network begins near a constant; with all of them one
    #: of two seeds of a Bose–Einstein condensate ended in an excited state
    varying_share: float = 0.1


THRESHOLDS = ChoiceThresholds()


def network_for(
    problem: Problem,
    *,
    parameters: int | None = None,
    frequency: float | Sequence[float] | None = None,
    seed: int = 0,
) -> nn.Module:
    """Choose a network for a problem by its dimension, waves and linearity.

    Let n be the half waves that the solution may have across the domain, along each axis; they are
    estimated from the data and the linear part of the equations (`estimate_oscillation`).

    1. Linear equations with waves, n > 3 along some axis, of at most three: one hidden layer
       sin(Kx + φ). K is uniform up to 5/4 of the estimated wave numbers, φ uniform, and both are
       trained. Its width is 2Π(n + 2), at least 64 and at most 256.
    2. Else two hidden layers of 20 tanh, or three of 16 where the equations are not linear. A
       coordinate in which all fields are periodic enters by sines and cosines of n/2 harmonics,
       at most 4, so that the network is periodic. Where there are waves with n > 8 along another
       axis, the first layer is one of sines as in rule 1.
    3. Beyond three dimensions one hidden layer of 64 tanh, which is cheaper for the smooth
       solutions that are feasible there; narrower from 14 dimensions on, with 1000 parameters.

    Coordinates are mapped to [−1, 1], and fields share the hidden layers. A field whose data are
    above 30 or below 1/30 is in units of their size. For an eigenvalue problem it begins near a
    constant, which has no nodes.

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
    if problem.domain.dim > THRESHOLDS.few_dimensions and frequency is None:
        network = _network_of_many_dimensions(problem, parameters, seed)
        return _wrap_in_units(network, problem)
    waves = _find_waves(problem, frequency)
    if waves.are_waves and is_linear(problem):
        network = _network_of_sines(problem, waves.half_waves, parameters, seed)
    else:
        network = _network_of_layers(problem, waves, parameters, seed)
    return _wrap_in_units(network, problem)


def _wrap_in_units(network: nn.Module, problem: Problem) -> Rescaled:
    """Return a network of coordinates in [−1, 1], with fields far from 1 in units of their own.

    Where an eigenvalue problem is solved by its ground state, the network's last layer is first
    set to one sign.
    """
    if has_ground_state_without_nodes(problem):
        _begin_with_one_sign(network, find_constant_state(problem))
    units = choose_units(problem)
    if bool((units != 1).any()):
        network = InUnits(network, units)
    return Rescaled(network, problem.domain)


@dataclass(frozen=True)
class Waves:
    """Half waves across the domain along each axis, (d,), and whether they are waves."""

    half_waves: Tensor
    are_waves: bool


def _find_waves(problem: Problem, frequency: Any) -> Waves:
    """Return the waves of a frequency, or those that the problem lets expect."""
    if frequency is None:
        estimate = estimate_oscillation(problem)
        return Waves(estimate.half_waves, estimate.has_waves)
    domain = problem.domain
    wavenumbers = _check_frequency(frequency, domain)
    half_waves = wavenumbers * (domain.high - domain.low) / math.pi
    return Waves(half_waves, float(half_waves.max()) > WAVES.smooth_half_waves)


def _network_of_many_dimensions(
    problem: Problem, parameters: int | None, seed: int
) -> nn.Sequential:
    """Return a network of one hidden layer."""
    dim = problem.domain.dim
    fields = len(problem.fields)
    if parameters is None:
        width = _find_width(THRESHOLDS.parameters_of_many_dimensions, dim, fields, layers=1)
        width = min(THRESHOLDS.width_of_many_dimensions, width)
    else:
        width = _find_width(parameters, dim, fields, layers=1)
    return mlp(dim, width, fields, seed=seed)


def _network_of_sines(
    problem: Problem, half_waves: Tensor, parameters: int | None, seed: int
) -> nn.Sequential:
    """Return a network of one layer of sines, which begins with the wave numbers."""
    dim = problem.domain.dim
    fields = len(problem.fields)
    if parameters is None:
        width = int(2 * (half_waves + 2).prod())
        width = min(max(width, THRESHOLDS.fewest_sines), THRESHOLDS.most_sines)
    else:
        width = _find_width(parameters, dim, fields, layers=1)
    network = mlp(dim, width, fields, activation="sin", seed=seed)
    _begin_with_waves(network, half_waves, seed)
    return network


def _network_of_layers(
    problem: Problem, waves: Waves, parameters: int | None, seed: int
) -> nn.Sequential:
    """Return a network of two or three layers; periodic coordinates are embedded."""
    half_waves = waves.half_waves
    embeddings: list[nn.Module] = []
    for axis in _find_periodic_axes(problem):
        inputs = len(half_waves)
        column = axis + inputs - problem.domain.dim  # embedded coordinates come first
        harmonics = max(1, math.ceil(float(half_waves[column]) / 2))
        harmonics = min(harmonics, THRESHOLDS.most_harmonics)
        embeddings.append(PeriodicEmbedding(inputs, column, 2.0, harmonics))
        embedded = half_waves.new_zeros(2 * harmonics)
        half_waves = torch.cat([embedded, half_waves[:column], half_waves[column + 1 :]])
    inputs = len(half_waves)
    fields = len(problem.fields)
    layers = 2 if is_linear(problem) else 3
    if parameters is None:
        width = {2: 20, 3: 16}[layers]
    else:
        width = _find_width(parameters, inputs, fields, layers)
    network = mlp(inputs, *[width] * layers, fields, seed=seed)
    if waves.are_waves and float(half_waves.max()) > THRESHOLDS.many_half_waves:
        network[1] = Sine()
        _begin_with_waves(network, half_waves, seed)
    if not embeddings:
        return network
    return nn.Sequential(*embeddings, *network)


@torch.no_grad()
def _begin_with_one_sign(network: nn.Module, value: float) -> None:
    """Initialize a network near a constant: eigenvalue problems then find the ground state."""
    output = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    output.weight.mul_(THRESHOLDS.varying_share * value)
    output.bias.fill_(value)


def _begin_with_waves(network: nn.Sequential, half_waves: Tensor, seed: int) -> None:
    """Set weights of the first layer to up to so many half waves across [−1, 1]^d."""
    first = network[0]
    assert isinstance(first, nn.Linear)
    generator = torch.Generator().manual_seed(check_seed(seed))
    shape = (first.out_features, first.in_features + 1)
    uniform = 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
    largest = THRESHOLDS.beyond_estimate * half_waves.clamp(min=1) * math.pi / 2
    with torch.no_grad():
        first.weight.copy_(uniform[:, :-1] * largest)
        first.bias.copy_(uniform[:, -1] * math.pi)


def _find_width(parameters: int, inputs: int, fields: int, layers: int) -> int:
    """Return the width w of L hidden layers for about so many parameters.

    They have (L − 1)w² + (inputs + fields + L)w + fields of them.
    """
    square = layers - 1
    linear = inputs + fields + layers
    constant = fields - parameters
    if not square:
        return max(1, round(-constant / linear))
    root = math.sqrt(max(linear**2 - 4 * square * constant, 0))
    return max(1, round((root - linear) / (2 * square)))


def _check_frequency(frequency: Any, domain: Region) -> Tensor:
    """Return wave numbers (d,), one for each axis; raise if they are not usable."""
    if isinstance(frequency, Sequence):
        wavenumbers = list(frequency)
    else:
        wavenumbers = [frequency] * domain.dim
    usable = len(wavenumbers) == domain.dim and all(is_number(k) and k >= 0 for k in wavenumbers)
    remedy = "Use a number ≥ 0 in radians a length, or one for each coordinate"
    require(usable, "The frequency", frequency, remedy)
    return torch.tensor(wavenumbers, dtype=torch.float64)


def _find_periodic_axes(problem: Problem) -> list[int]:
    """Return the coordinates in which all fields are periodic."""
    periodic_fields: dict[str, set[str]] = {name: set() for name in problem.domain.names}
    for condition in problem.conditions:
        if condition.periodic_axis in periodic_fields:
            periodic_fields[condition.periodic_axis] |= condition.fields_among(problem.fields)
    fields = set(problem.fields)
    names = problem.domain.names
    return [axis for axis, name in enumerate(names) if periodic_fields[name] == fields]
