r"""The interface of group actions on parameters that leave a network's function as it is.

Each acts on a dict of parameters by name and returns the changed ones, never touching its
argument. `generators` are the tangents of its orbits, Z = d/dt (exp(t·e_i)·w) at t = 0, one per
dimension of the group: vectors in the kernel of J.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

Parameters = Mapping[str, Tensor]


class Action(ABC):
    """A group that acts on some of a network's parameters."""

    #: a description for people
    about: str
    #: whether `act` and `tangent` read parameters that they do not move
    reads: bool = False

    @property
    @abstractmethod
    def dimension(self) -> int:
        """The dimension of the group."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the parameters that are moved."""

    @abstractmethod
    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        """exp(element)·w for an element (dimension,) of the Lie algebra: the moved parameters."""

    @abstractmethod
    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        """Zᵀ·element = d/dt exp(t·element)·w at t = 0, without forming Z."""

    def generators(self, params: Parameters) -> dict[str, Tensor]:
        """Z at w: (dimension, *shape) for each parameter that is moved."""
        first = params[self.names[0]]
        identity = torch.eye(self.dimension, dtype=first.dtype, device=first.device)
        return torch.func.vmap(lambda element: self.tangent(params, element))(identity)

    def pairing(self, params: Parameters, covector: Parameters) -> Tensor:
        """Z·v: the inner product of each generator with a vector, (dimension,).

        The tangent is linear in its element, so Z·v is the gradient of ⟨tangent(element), v⟩.
        """
        first = params[self.names[0]]
        zero = torch.zeros(self.dimension, dtype=first.dtype, device=first.device)

        def product_with_tangent(element: Tensor) -> Tensor:
            tangent = self.tangent(params, element)
            products = [(tangent[name] * covector[name]).sum() for name in self.names]
            return torch.stack(products).sum()

        return torch.func.grad(product_with_tangent)(zero)
