r"""Twins: the same network in other affine coordinates, with weights of its own.

With coordinates a† = Ωa + γ of activations and z = Φz† + τ of pre-activations, a layer
z = Wa + b becomes z† = W†a† + b† with

    W† = Φ⁻¹ W Ω⁻¹,    b† = Φ⁻¹(b − τ) − W†γ,

and the activation function φ becomes φ†(z†) = Ωφ(Φz† + τ) + γ. Convolutions change channels.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

_Layer = TypeVar("_Layer", bound=nn.Linear | nn.Conv2d)


@dataclass(frozen=True)
class Change:
    """An affine change of basis x ↦ Mx + v, with M (n, n) and v (n,)."""

    matrix: Tensor
    shift: Tensor

    @property
    def trivial(self) -> bool:
        """Whether nothing changes."""
        eye = torch.eye(len(self.shift), dtype=self.matrix.dtype)
        return bool((self.matrix == eye).all()) and not bool(self.shift.any())

    def inverse(self) -> Change:
        """x ↦ M⁻¹(x − v)."""
        back = torch.linalg.inv(self.matrix)
        return Change(back, -back @ self.shift)

    def linear(self) -> Change:
        """Without the shift."""
        return Change(self.matrix, torch.zeros_like(self.shift))


class Affine(nn.Module):
    """Mx + v along one axis, without parameters."""

    matrix: Tensor
    shift: Tensor

    def __init__(self, change: Change, dim: int = 1) -> None:
        super().__init__()
        self.register_buffer("matrix", change.matrix)
        self.register_buffer("shift", change.shift)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Change the basis of (..., n, ...)."""
        return (x.movedim(self.dim, -1) @ self.matrix.mT + self.shift).movedim(-1, self.dim)


def same(size: int) -> Change:
    """No change."""
    return Change(torch.eye(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64))


def scaled(size: int, by: float, shift: float = 0.0) -> Change:
    """by·x + shift in every coordinate."""
    return Change(by * same(size).matrix, same(size).shift + shift)


def drawn(size: int, generator: torch.Generator, condition: float = 10.0) -> Change:
    """Random, with singular values within a factor `condition` of each other around 1."""
    left, right = (
        torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]
        for _ in range(2)
    )
    values = condition ** (torch.rand(size, dtype=torch.float64, generator=generator) - 0.5)
    shift = torch.randn(size, dtype=torch.float64, generator=generator)
    return Change((left * values) @ right, shift)


def whitening(x: Tensor) -> Change:
    """Coordinates in which the rows of (N, n) have mean zero and covariance 1."""
    values, vectors = torch.linalg.eigh(torch.cov(x.T))
    root = (vectors * values.rsqrt()) @ vectors.T
    return Change(root, -root @ x.mean(0))


@torch.no_grad()
def changed(layer: _Layer, before: Change, after: Change) -> _Layer:
    """The layer for inputs `before`(a), whose outputs `after` maps back to the old ones."""
    out, back = copy.deepcopy(layer), after.inverse().matrix
    weight = torch.einsum("po,oi...->pi...", back, layer.weight)
    weight = torch.einsum("pi...,ij->pj...", weight, before.inverse().matrix)
    out.weight.copy_(weight)
    if layer.bias is not None:
        assert out.bias is not None
        taps = weight.flatten(2).sum(2) if weight.ndim > 2 else weight
        out.bias.copy_(back @ (layer.bias - after.shift) - taps @ before.shift)
    return out


@dataclass(frozen=True)
class Coordinates:
    """Ω, γ of every layer's input and Φ, τ of its output."""

    inputs: Sequence[Change]
    outputs: Sequence[Change]


def layers(model: nn.Sequential) -> list[nn.Linear | nn.Conv2d]:
    """The layers with parameters."""
    return [m for m in model if isinstance(m, (nn.Linear, nn.Conv2d))]


def random_coordinates(
    model: nn.Sequential, generator: torch.Generator, *, shifted: bool = True
) -> Coordinates:
    """Random coordinates everywhere; without γ if not `shifted`."""
    inputs = [drawn(m.weight.shape[1], generator) for m in layers(model)]
    outputs = [drawn(m.weight.shape[0], generator) for m in layers(model)]
    return Coordinates(inputs if shifted else [c.linear() for c in inputs], outputs)


def twin(
    model: nn.Sequential, to: Coordinates, activation: type[nn.Module] | None = None
) -> nn.Sequential:
    """The same function in other coordinates; what lies between layers belongs to φ.

    `activation` computes φ† by itself, where it has a name of its own. Inputs and outputs stay in
    the old coordinates: the first and the last change are applied inside.
    """
    modules: list[nn.Module] = []
    number = 0

    def enter(change: Change) -> None:
        if not change.trivial:
            modules.append(Affine(change))

    for module in model:
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            if activation is None:
                modules.append(copy.deepcopy(module))
            continue
        before, after = to.inputs[number], to.outputs[number]
        if number and activation is not None:
            modules.append(activation())
        else:
            enter(before)
        modules.append(changed(module, before, after))
        number += 1
        if activation is None or number == len(to.outputs):
            enter(after)
    return nn.Sequential(*modules)


def tanh_twin(model: nn.Sequential, first: Change) -> nn.Sequential:
    """A sigmoid network as a tanh network: tanh(z) = 2σ(2z) − 1, so Φ = 2, Ω = 2 and γ = −1."""
    sizes = [m.weight.shape for m in layers(model)]
    inputs = [first, *(scaled(s[1], 2.0, -1.0) for s in sizes[1:])]
    outputs = [*(scaled(s[0], 2.0) for s in sizes[:-1]), same(sizes[-1][0])]
    return twin(model, Coordinates(inputs, outputs), nn.Tanh)
