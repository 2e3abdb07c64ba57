"""Networks for PDEs: plain ones, periodic and Fourier embeddings, hard constraints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError, refuse_unknown
from .conditions import Periodic
from .domains import Region
from .fields import call
from .kinds import check_seed, is_integer, is_number, require, require_problem
from .wavenumbers import SMOOTH, is_linear, oscillation

if TYPE_CHECKING:
    from .problem import Problem


class Sine(nn.Module):
    """sin(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "sin": Sine,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
}
_FEW = 3  # dimensions up to which a network has two or three hidden layers
_LARGEST = 1000  # parameters beyond these dimensions: a step takes about a second on two cores
_MANY = 8.0  # half waves that are too many for two layers of tanh
_WAVES = 64, 256  # the fewest and the most neurons in a layer of sines
_HARMONICS = 4  # the most of a periodic coordinate
_BEYOND = 1.25  # of the estimated wave numbers, that a layer of sines begins with
_ACTIVATE = "Use a name, or what makes a module when called without arguments, such as nn.Tanh"


def mlp(
    *sizes: int,
    activation: str | Callable[[], nn.Module] = "tanh",
    seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> nn.Sequential:
    """A fully connected network, in float64 unless said otherwise.

    >>> sum(p.numel() for p in mlp(2, 32, 1, seed=0).parameters())
    129
    """
    usable = len(sizes) >= 2 and all(isinstance(s, int) and s > 0 for s in sizes)
    require(usable, "The list of sizes", sizes, "Pass inputs, widths, outputs: mlp(2, 32, 1)")
    if isinstance(activation, str):
        refuse_unknown("activation", activation, ACTIVATIONS)
    make = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    require(callable(make), "The activation", make, _ACTIVATE)
    _check_dtype(dtype)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(check_seed(seed))
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise(sizes)):
            layers += [_make_activation(make)] if i else []
            layers.append(nn.Linear(a, b, dtype=dtype))
    return nn.Sequential(*layers)


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


def _make_activation(make: Callable[[], nn.Module]) -> nn.Module:
    try:
        found = make()
    except TypeError as error:  # a function of x, or a module instead of its class
        raise PullbackError("The activation is not usable", str(error), _ACTIVATE) from error
    require(isinstance(found, nn.Module), "The activation", found, _ACTIVATE)
    return found


def _check_dtype(dtype: object) -> None:
    usable = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    require(usable, "The dtype", dtype, "Use a floating one, such as torch.float64")


def _check_wrapped(network: object, region: object) -> None:
    require(isinstance(network, nn.Module), "The network", network, "Pass a module")
    require(isinstance(region, Region), "The region", region, "Pass the problem's domain")


class Rescaled(nn.Module):
    """The domain's bounding box mapped to [−1, 1]^d, before the network."""

    low: Tensor
    high: Tensor

    def __init__(self, network: nn.Module, region: Region) -> None:
        super().__init__()
        _check_wrapped(network, region)
        self.network = network
        like = next(network.parameters(), torch.empty(0, dtype=torch.float64))
        require(bool((region.high > region.low).all()), "The region", region, "Use one with volume")
        self.register_buffer("low", region.low.to(like))
        self.register_buffer("high", region.high.to(like))

    def forward(self, x: Any) -> Any:
        return self.network((x - 0.5 * (self.low + self.high)) * (2 / (self.high - self.low)))


class FourierFeatures(nn.Module):
    """x ↦ (sin 2πBx, cos 2πBx) with Gaussian frequencies B of the given scale: 2·features."""

    frequencies: Tensor

    def __init__(
        self,
        dim: int,
        features: int,
        scale: float = 1.0,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        usable = is_integer(dim, 1) and is_integer(features, 1) and is_number(scale)
        got = {"dim": dim, "features": features, "scale": scale}
        require(usable, "The Fourier embedding", got, "Use integers ≥ 1 and a finite scale")
        _check_dtype(dtype)
        generator = torch.Generator().manual_seed(check_seed(seed))
        b = torch.randn(features, dim, generator=generator, dtype=torch.float64) * scale
        self.register_buffer("frequencies", (2 * math.pi * b).to(dtype))

    def forward(self, x: Any) -> Any:
        phase = torch.nn.functional.linear(x, self.frequencies)
        return torch.cat([torch.sin(phase), torch.cos(phase)], -1)


class PeriodicEmbedding(nn.Module):
    """Coordinate `axis` becomes (sin kωx, cos kωx), k = 1…harmonics: exactly periodic.

    The other coordinates follow unchanged; the output has dim − 1 + 2·harmonics entries.
    """

    def __init__(self, dim: int, axis: int, period: float, harmonics: int = 1) -> None:
        super().__init__()
        integers = is_integer(dim, 1) and is_integer(axis, 0) and is_integer(harmonics, 1)
        require(
            integers and axis < dim and is_number(period) and period > 0,
            "The periodic embedding",
            {"dim": dim, "axis": axis, "period": period, "harmonics": harmonics},
            "Use an axis of the input, a positive period and at least one harmonic",
        )
        self.axis, self.omega, self.harmonics = axis, 2 * math.pi / period, harmonics
        self.others = [i for i in range(dim) if i != axis]

    def forward(self, x: Any) -> Any:
        angle = self.omega * x[:, self.axis : self.axis + 1]
        waves = [f(k * angle) for k in range(1, self.harmonics + 1) for f in (torch.sin, torch.cos)]
        return torch.cat([*waves, *(x[:, i : i + 1] for i in self.others)], -1)


class Symmetric(nn.Module):
    """½(N(x) + sign·N(x̄)), x̄ with one coordinate turned around: even (+1) or odd (−1) in it.

    Where the solution is known to be, half of the network's work is saved.
    """

    def __init__(self, network: nn.Module, axis: int, sign: int) -> None:
        super().__init__()
        require(sign in (1, -1), "The sign", sign, "Use 1 or −1")
        require(isinstance(network, nn.Module), "The network", network, "Pass a module")
        require(is_integer(axis, 0), "The axis", axis, "Use the index of a coordinate: 0, 1, …")
        self.network, self.axis, self.sign = network, axis, sign

    def forward(self, x: Any) -> Any:
        i = self.axis
        if i >= x.shape[-1]:  # slices would be empty, and an odd network silently zero
            raise PullbackError(
                f"There is no axis {i} to mirror",
                f"the points have {x.shape[-1]} coordinates",
                f"Use axis < {x.shape[-1]}",
            )
        mirrored = torch.cat([x[:, :i], -x[:, i : i + 1], x[:, i + 1 :]], -1)
        return 0.5 * (self.network(x) + self.sign * self.network(mirrored))


class Slabs(nn.Module):
    """One network per slab of time; the last coordinate says which."""

    edges: Tensor

    def __init__(self, networks: list[nn.Module], edges: Tensor) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        which = torch.bucketize(x[:, -1].contiguous(), self.edges[1:-1].to(x.dtype))
        out = self.networks[0](x)
        for i, network in enumerate(self.networks):
            if i:
                out = torch.where((which == i)[:, None], network(x), out)
        return out


class Hard(nn.Module):
    """u = lift(x) + distance(x)·N(x): conditions that hold whatever the parameters are.

    Args:
        network: N.
        region: its coordinate names are the arguments of the functions.
        distance: zero just where u is prescribed; for several fields a tuple, or one for all.
        lift: what is prescribed there.

    >>> from pullback.pde import Interval
    >>> u = Hard(mlp(1, 8, 1, seed=0), Interval(0, 1), distance=lambda x: x * (1 - x))
    >>> u(torch.tensor([[0.0], [1.0]], dtype=torch.float64)).abs().max().item()
    0.0
    """

    def __init__(
        self,
        network: nn.Module,
        region: Region,
        *,
        distance: Callable[..., Any],
        lift: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        _check_wrapped(network, region)
        require(callable(distance), "The distance", distance, "Pass a function of coordinates")
        usable = lift is None or callable(lift)
        require(usable, "The lift", lift, "Pass a function of coordinates, or None")
        self.network, self.names = network, tuple(region.names)
        self.distance, self.lift = distance, lift

    def forward(self, x: Any) -> Any:
        columns = {n: x[:, i : i + 1] for i, n in enumerate(self.names)}
        offered = {**columns, "points": x}
        out = _joined(call(self.distance, offered, "The distance")) * self.network(x)
        if self.lift is None:
            return out
        return out + _joined(call(self.lift, offered, "The lift"))


def _joined(values: Any) -> Any:
    return torch.cat(list(values), -1) if isinstance(values, Sequence) else values
