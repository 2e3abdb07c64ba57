"""Networks for many dimensions: sums and products of functions of one coordinate each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ...maps.jets.axes import add_axes, has_separate_axes, multiply_axes, split_axes
from ..arguments import check_count, check_seed, is_integer, require
from ..domains import Box, Interval
from .modules import ACTIVATIONS


class AxisNetwork(nn.Module):
    """Functions of one coordinate: a hidden layer, plus a linear function of the coordinate.

    Coordinates themselves, which many solutions contain, are then exact from the start.
    """

    def __init__(self, width: int, outputs: int, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, width, dtype=dtype)
        self.activation = ACTIVATIONS[activation]()
        self.outputs = nn.Linear(width, outputs, dtype=dtype)
        self.slopes = nn.Linear(1, outputs, bias=False, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return self.outputs(self.activation(self.hidden(x))) + self.slopes(x)


class Separable(nn.Module):
    """Σᵢ gᵢ(xᵢ) + Σₖ cₖ (Σᵢ aᵢₖ(xᵢ)) (Σᵢ bᵢₖ(xᵢ)) + Σᵣ cᵣ Πᵢ (1 + hᵢᵣ(xᵢ)).

    All gᵢ, aᵢ, bᵢ and hᵢ are networks of one coordinate. A general network of d coordinates must
    find out that a solution consists of functions of few of them; this one begins there. Its
    parameters grow with d, not with d². Factors begin near 1, so that products of a hundred of them
    neither vanish nor overflow. A product of two sums holds many products of two coordinates: one
    is enough for e^(−t) Σ sin xᵢ, which takes d products of all coordinates.

    Args:
        dim: d, the number of coordinates.
        fields: outputs; each has a sum and coefficients c of its own.
        rank: the number of products of all coordinates.
        width: of the hidden layer of every network of one coordinate.
        pairs: the number of products of two sums.
        activation: of the hidden layers, by name.
        seed: of the initial values.

    >>> network = Separable(10, rank=4, width=6, seed=0)
    >>> network(torch.rand(3, 10, dtype=torch.float64)).shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        dim: int,
        fields: int = 1,
        *,
        rank: int = 8,
        width: int = 8,
        pairs: int = 0,
        activation: str = "tanh",
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "fields": fields, "width": width}
        usable = all(is_integer(size, 1) for size in sizes.values())
        require(usable, "The sizes of a separable network", sizes, "Use integers ≥ 1")
        counts = {"rank": rank, "pairs": pairs}
        usable = all(is_integer(count, 0) for count in counts.values())
        require(usable, "The products of a separable network", counts, "Use integers ≥ 0")
        usable = activation in ACTIVATIONS
        require(usable, "The activation", activation, f"Use one of {', '.join(ACTIVATIONS)}")
        usable = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        require(usable, "dtype=", dtype, "Use torch.float64 or torch.float32")
        self.dim = dim
        self.fields = fields
        self.rank = rank
        self.pairs = pairs
        self._sums = fields + 2 * pairs
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(check_seed(seed))
            self.axes = nn.ModuleList()
            for _ in range(dim):
                axis = AxisNetwork(width, self._sums + rank, activation, dtype)
                with torch.no_grad():  # the factors 1 + h of a product differ little from 1
                    for parameter in (axis.outputs.weight, axis.outputs.bias, axis.slopes.weight):
                        parameter[fields:].div_(dim**0.5)
                self.axes.append(axis)
            if pairs:
                self.combine_pairs = nn.Linear(pairs, fields, bias=False, dtype=dtype)
            if rank:
                self.combine = nn.Linear(rank, fields, bias=False, dtype=dtype)

    def forward(self, x: Any) -> Any:
        if x.shape[1] != self.dim:
            raise PullbackError(
                "The points do not fit the separable network",
                f"they have {x.shape[1]} coordinates, the network has {self.dim}",
                f"Use Separable({x.shape[1]}, ...)",
            )
        sums, product = self._combine_axes(x)
        return self._add_products(sums, product)

    def average_over(self, box: Box, nodes: int = 32) -> Tensor:
        """Return the mean of every field over a box, (fields,), by Gauss's rule on each axis.

        ⟨Π (1 + hᵢ)⟩ = Π (1 + ⟨hᵢ⟩), and ⟨(Σ aᵢ)(Σ bᵢ)⟩ = ⟨Σ aᵢ⟩⟨Σ bᵢ⟩ + Σ (⟨aᵢbᵢ⟩ − ⟨aᵢ⟩⟨bᵢ⟩). So
        functions of one coordinate are integrated at d·nodes points; a rule in d dimensions has
        nodesᵈ. Inside `Rescaled` the coordinates run from −1 to 1.
        """
        usable = isinstance(box, Box) and box.dim == self.dim
        require(usable, "The box", box, f"Use a Box with {self.dim} sides")
        check_count(nodes, "nodes=")
        sums: Any = 0.0
        product: Any = 1.0
        covariance: Any = 0.0
        for network, (low, high) in zip(self.axes, box.bounds, strict=True):
            points = Interval(low, high).sample(nodes, "gauss")
            weight = next(network.parameters())
            values = network(points.x.to(weight))
            shares = points.weights.to(weight)[:, None] / (high - low)
            means = (shares * values).sum(0, keepdim=True)
            deviations = (values - means)[:, self.fields : self._sums]
            first = deviations[:, : self.pairs]
            second = deviations[:, self.pairs :]
            covariance = covariance + (shares * first * second).sum(0, keepdim=True)
            sums = sums + means[:, : self._sums]
            product = product * (1.0 + means[:, self._sums :])
        average = self._add_products(sums, product)
        if self.pairs:
            average = average + self.combine_pairs(covariance)
        return average[0]

    def _add_products(self, sums: Any, product: Any) -> Any:
        """Return the fields from all sums, (N, fields + 2 pairs), and products, (N, rank)."""
        total = sums[:, : self.fields]
        if self.pairs:
            middle = self.fields + self.pairs
            pair_products = sums[:, self.fields : middle] * sums[:, middle:]
            total = total + self.combine_pairs(pair_products)
        if self.rank:
            total = total + self.combine(product)
        return total

    def _combine_axes(self, x: Any) -> tuple[Any, Any]:
        """Return the sums over all axes, (N, fields + 2 pairs), and the products, (N, rank).

        Derivatives of one axis do not meet those of others, until these are combined.
        """
        if has_separate_axes(x):
            outputs = [axis(c) for axis, c in zip(self.axes, split_axes(x), strict=True)]
            sums = add_axes([jet[:, : self._sums] for jet in outputs], x.scheme)
            if not self.rank:
                return sums, None
            factors = [1.0 + jet[:, self._sums :] for jet in outputs]
            return sums, multiply_axes(factors, x.scheme)
        total: Any = 0.0
        product: Any = 1.0
        for axis, network in enumerate(self.axes):
            functions = network(x[:, axis : axis + 1])
            total = total + functions[:, : self._sums]
            if self.rank:
                product = product * (1.0 + functions[:, self._sums :])
        return total, product
