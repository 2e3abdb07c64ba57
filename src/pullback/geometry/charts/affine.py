r"""Affine coordinates of activations and pre-activations, and layers in them.

With coordinates a† = Ωa + γ of activations and z = Φz† + τ of pre-activations, a layer
z = Wa + b becomes z† = W†a† + b† with

    W† = Φ⁻¹ W Ω⁻¹,    b† = Φ⁻¹(b − τ) − W†γ,

and the activation function φ becomes φ†(z†) = Ωφ(Φz† + τ) + γ. Convolutions change channels.
Luk and Grosse (2018) print z = Φz in place of z = Φz† + τ; the formulas above build the network.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_Layer = TypeVar("_Layer", nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Change:
    """An affine change of basis x ↦ Mx + v, with M (n, n) and v (n,)."""

    matrix: Tensor
    shift: Tensor

    @property
    def trivial(self) -> bool:
        """Whether nothing changes."""
        eye = torch.eye(len(self.shift), dtype=self.matrix.dtype, device=self.matrix.device)
        return bool((self.matrix == eye).all()) and not bool(self.shift.any())

    def inverse(self) -> Change:
        """x ↦ M⁻¹(x − v); raises where M has none."""
        back, info = torch.linalg.inv_ex(self.matrix)
        eps = torch.finfo(self.matrix.dtype).eps
        size = torch.linalg.matrix_norm(self.matrix, 1) * torch.linalg.matrix_norm(back, 1)
        if int(info) or not bool(size * eps < 1e-2):
            raise PullbackError(
                "The change of basis is not invertible",
                f"its matrix of side {len(self.shift)} is singular to working precision",
                "Use a matrix of full rank; whiten only inputs that vary in every direction",
            )
        return Change(back, -back @ self.shift)

    def linear(self) -> Change:
        """Without the shift."""
        return Change(self.matrix, torch.zeros_like(self.shift))

    def to(self, like: Tensor) -> Change:
        """On the device and in the dtype of a tensor."""
        return Change(self.matrix.to(like), self.shift.to(like))


@dataclass(frozen=True)
class Coordinates:
    """Ω, γ of every layer's input and Φ, τ of its output."""

    inputs: Sequence[Change]
    outputs: Sequence[Change]


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


def whitening(x: Tensor, *, centered: bool = True) -> Change:
    """Coordinates in which the rows of (N, n) have mean zero and covariance 1.

    Not `centered`, the mean stays and E xxᵀ becomes 1: for layers that have no bias to shift.
    """
    x = x.detach().to(torch.float64)
    moments = torch.cov(x.T).reshape(x.shape[1], -1) if centered else x.T @ x / len(x)
    sound = len(x) > 1 and bool(torch.isfinite(moments).all())
    values, vectors = torch.linalg.eigh(moments if sound else torch.zeros_like(moments))
    if not bool(values[0] > 1e-12 * values[-1]):
        raise PullbackError(
            "The inputs cannot be whitened",
            f"{len(x)} samples do not vary in all {x.shape[1]} directions, or are not finite",
            "Take more samples, or drop inputs that are constant or depend on others",
        )
    root = (vectors * values.rsqrt()) @ vectors.T
    return Change(root, -root @ x.mean(0) if centered else torch.zeros_like(values))


@torch.no_grad()
def changed(layer: _Layer, before: Change, after: Change) -> _Layer:
    """The layer for inputs `before`(a), whose outputs `after` maps back to the old ones.

    A layer without a bias cannot take up shifts: that is left to whoever adds its output.
    """
    out, wide = copy.deepcopy(layer), layer.weight.to(torch.float64)
    _fits(layer, before, after)
    before, after = before.to(wide), after.to(wide)
    back = after.inverse().matrix
    weight = torch.einsum("po,oi...->pi...", back, wide)
    weight = torch.einsum("pi...,ij->pj...", weight, before.inverse().matrix)
    out.weight.copy_(weight)
    if layer.bias is not None:
        assert out.bias is not None
        taps = weight.flatten(2).sum(2) if weight.ndim > 2 else weight
        bias = layer.bias.to(wide) - after.shift
        out.bias.copy_(back @ bias - taps @ before.shift)
    return out


def is_layer(module: nn.Module) -> TypeGuard[Layer]:
    """Whether a module is a linear or an ungrouped convolution layer, and no more than that."""
    if isinstance(module, _CONVOLUTIONS):
        return type(module) in _CONVOLUTIONS and module.groups == 1
    return type(module) is nn.Linear


def layers(model: nn.Module) -> list[Layer]:
    """The layers that can change coordinates, in the order in which the model holds them."""
    return [m for m in model.modules() if is_layer(m)]


class Wrapped(nn.Sequential):
    """A layer in other coordinates between the changes of its input and its output."""


def wrapped(layer: Layer, before: Change, after: Change) -> Wrapped:
    """[Ω·+γ, layer†, Φ·+τ]: the same function of old coordinates; what does not change is left out.

    Linear layers see coordinates along the last axis, convolutions along the channels.
    """
    dim = -1 if isinstance(layer, nn.Linear) else 1
    like = layer.weight.detach()
    inner: list[nn.Module] = [changed(layer, before, after)]  # pyright: ignore[reportArgumentType]
    if not before.trivial:
        inner.insert(0, Affine(before.to(like), dim))
    if not after.trivial:
        inner.append(Affine(after.to(like), dim))
    return Wrapped(*inner)


def _fits(layer: Layer, before: Change, after: Change) -> None:
    """Raise where a change has another size than the layer's side."""
    outputs, inputs = layer.weight.shape[:2]
    for side, size, change in (("inputs", inputs, before), ("outputs", outputs, after)):
        if change.matrix.shape != (size, size) or change.shift.shape != (size,):
            raise PullbackError(
                f"A change of basis does not fit the layer's {side}",
                f"{type(layer).__name__} has {size} {side}, the matrix has shape "
                f"{tuple(change.matrix.shape)} and the shift {tuple(change.shift.shape)}",
                "Give one n×n matrix and one vector of length n per side",
            )
