r"""Group actions on parameters that leave a network's function as it is.

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

    #: what it is, for people
    about: str

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Of the group."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The parameters that are moved."""

    @abstractmethod
    def act(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        """exp(element)·w for an element (dimension,) of the Lie algebra: the moved parameters."""

    @abstractmethod
    def tangent(self, params: Parameters, element: Tensor) -> dict[str, Tensor]:
        """Zᵀ·element = d/dt exp(t·element)·w at t = 0, without forming Z."""

    def generators(self, params: Parameters) -> dict[str, Tensor]:
        """Z at w: (dimension, *shape) for each parameter that is moved."""
        one = params[self.names[0]]
        lines = [
            self.tangent(params, e)
            for e in torch.eye(self.dimension, dtype=one.dtype, device=one.device)
        ]
        return {n: torch.stack([line[n] for line in lines]) for n in self.names}

    def pairing(self, params: Parameters, covector: Parameters) -> Tensor:
        """Z·v: the inner product of each generator with a vector, (dimension,).

        The tangent is linear in its element, so that this is its transpose.
        """
        one = params[self.names[0]]
        zero = torch.zeros(self.dimension, dtype=one.dtype, device=one.device)

        def against(element: Tensor) -> Tensor:
            moved = self.tangent(params, element)
            return sum((moved[n] * covector[n]).sum() for n in self.names)  # pyright: ignore

        return torch.func.grad(against)(zero)
