"""Networks for PDEs: plain ones, periodic and Fourier embeddings, hard constraints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError, refuse_unknown
from ..arguments import check_seed, is_integer, is_number, require
from ..domains import Region
from ..problem.fields import call_by_name

if TYPE_CHECKING:
    pass


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


_ACTIVATION_REMEDY = (
    "Use a name, or what makes a module when called without arguments, such as nn.Tanh"
)


def mlp(
    *sizes: int,
    activation: str | Callable[[], nn.Module] = "tanh",
    seed: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> nn.Sequential:
    """Return a fully connected network, in float64 unless said otherwise.

    >>> sum(p.numel() for p in mlp(2, 32, 1, seed=0).parameters())
    129
    """
    usable = len(sizes) >= 2 and all(isinstance(s, int) and s > 0 for s in sizes)
    require(usable, "The list of sizes", sizes, "Pass inputs, widths, outputs: mlp(2, 32, 1)")
    make: Any = activation
    if isinstance(activation, str):
        refuse_unknown("activation", activation, ACTIVATIONS)
        make = ACTIVATIONS[activation]
    require(callable(make), "The activation", make, _ACTIVATION_REMEDY)
    _check_dtype(dtype)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(check_seed(seed))
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            if layers:
                layers.append(_make_activation(make))
            layers.append(nn.Linear(inputs, outputs, dtype=dtype))
    return nn.Sequential(*layers)


def _make_activation(make: Callable[[], nn.Module]) -> nn.Module:
    try:
        activation = make()
    except TypeError as error:  # a function of x, or a module instead of its class
        what = "The activation is not usable"
        raise PullbackError(what, str(error), _ACTIVATION_REMEDY) from error
    require(isinstance(activation, nn.Module), "The activation", activation, _ACTIVATION_REMEDY)
    return activation


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
        template = next(network.parameters(), torch.empty(0, dtype=torch.float64))
        has_volume = bool((region.high > region.low).all())
        require(has_volume, "The region", region, "Use one with volume")
        self.register_buffer("low", region.low.to(template))
        self.register_buffer("high", region.high.to(template))

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
        arguments = {"dim": dim, "features": features, "scale": scale}
        require(usable, "The Fourier embedding", arguments, "Use integers ≥ 1 and a finite scale")
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
        self.axis = axis
        self.omega = 2 * math.pi / period
        self.harmonics = harmonics
        self.others = [i for i in range(dim) if i != axis]

    def forward(self, x: Any) -> Any:
        angle = self.omega * x[:, self.axis : self.axis + 1]
        columns = []
        for k in range(1, self.harmonics + 1):
            columns += [torch.sin(k * angle), torch.cos(k * angle)]
        columns += [x[:, i : i + 1] for i in self.others]
        return torch.cat(columns, -1)


class Symmetric(nn.Module):
    """½(N(x) + sign·N(x̄)), x̄ with one coordinate turned around: even (+1) or odd (−1) in it.

    Where the solution is known to be, half of the network's work is saved.
    """

    def __init__(self, network: nn.Module, axis: int, sign: int) -> None:
        super().__init__()
        require(sign in (1, -1), "The sign", sign, "Use 1 or −1")
        require(isinstance(network, nn.Module), "The network", network, "Pass a module")
        require(is_integer(axis, 0), "The axis", axis, "Use the index of a coordinate: 0, 1, …")
        self.network = network
        self.axis = axis
        self.sign = sign

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
        slab = torch.bucketize(x[:, -1].contiguous(), self.edges[1:-1].to(x.dtype))
        first, *later = self.networks
        values = first(x)
        for number, network in enumerate(later, start=1):
            values = torch.where((slab == number)[:, None], network(x), values)
        return values


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
        self.network = network
        self.names = tuple(region.names)
        self.distance = distance
        self.lift = lift

    def forward(self, x: Any) -> Any:
        values = self.distance_at(x) * self.network(x)
        if self.lift is None:
            return values
        return values + _join_fields(call_by_name(self.lift, self._offer(x), "The lift"))

    def distance_at(self, x: Any) -> Any:
        """Return the distance at points (N, d): (N, fields), or (N, 1) for all of them."""
        return _join_fields(call_by_name(self.distance, self._offer(x), "The distance"))

    def _offer(self, x: Any) -> dict[str, Any]:
        """Return all that a function of coordinates may name."""
        columns = {name: x[:, i : i + 1] for i, name in enumerate(self.names)}
        return {**columns, "points": x}


def _join_fields(values: Any) -> Any:
    """Return the values of several fields side by side; those of one field as they are."""
    if isinstance(values, Sequence):
        return torch.cat(list(values), -1)
    return values
