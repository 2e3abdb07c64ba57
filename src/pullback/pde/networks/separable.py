"""Networks for many dimensions: sums and products of functions of one coordinate each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..arguments import check_seed, is_integer, require
from .modules import ACTIVATIONS


class Separable(nn.Module):
    """Σᵢ gᵢ(xᵢ) + Σᵣ cᵣ Πᵢ (1 + hᵢᵣ(xᵢ)), where gᵢ and hᵢ are networks of one coordinate.

    A general network of d coordinates must find out that a solution consists of functions of few of
    them; this one begins there. Its parameters grow with d, not with d². Factors begin near 1, so
    that products of a hundred of them neither vanish nor overflow.

    Args:
        dim: d, the number of coordinates.
        fields: outputs; each has a sum and coefficients cᵣ of its own.
        rank: the number of products.
        width: of the hidden layer of every gᵢ and hᵢ.
        activation: of that layer, by name.
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
        activation: str = "tanh",
        seed: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "fields": fields, "rank": rank, "width": width}
        usable = all(is_integer(size, 1) for size in sizes.values())
        require(usable, "The sizes of a separable network", sizes, "Use integers ≥ 1")
        usable = activation in ACTIVATIONS
        require(usable, "The activation", activation, f"Use one of {', '.join(ACTIVATIONS)}")
        self.fields = fields
        self.rank = rank
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(check_seed(seed))
            self.axes = nn.ModuleList()
            for _ in range(dim):
                hidden = nn.Linear(1, width, dtype=dtype)
                outputs = nn.Linear(width, fields + rank, dtype=dtype)
                with torch.no_grad():  # the factors 1 + h of a product differ little from 1
                    outputs.weight[fields:].div_(dim**0.5)
                    outputs.bias[fields:].div_(dim**0.5)
                self.axes.append(nn.Sequential(hidden, ACTIVATIONS[activation](), outputs))
            self.combine = nn.Linear(rank, fields, bias=False, dtype=dtype)

    def forward(self, x: Any) -> Any:
        total: Any = 0.0
        product: Any = 1.0
        for axis, network in enumerate(self.axes):
            outputs = network(x[:, axis : axis + 1])
            total = total + outputs[:, : self.fields]
            product = product * (1.0 + outputs[:, self.fields :])
        return total + self.combine(product)
