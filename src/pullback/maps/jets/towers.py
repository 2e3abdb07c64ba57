"""Elementwise functions with all their derivatives: f, f', …, f⁽ᵏ⁾ at a."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp

#: (a, order, options of the function) ↦ [f, f', …]
Tower = Callable[..., list[Tensor]]

TOWERS: dict[Any, Tower] = {}


def tower(*functions: Any):
    """Decorator: these functions of torch have this tower."""

    def enter(build: Tower) -> Tower:
        TOWERS.update(dict.fromkeys(functions, build))
        return build

    return enter


def by_forward_mode(function: Callable[[Tensor], Tensor]) -> Tower:
    """The tower of any elementwise function, by nested forward-mode differentiation."""

    def build(a: Tensor, order: int) -> list[Tensor]:
        out = [function(a)]
        f = function
        for _ in range(order):
            f = _derivative(f)
            out.append(f(a))
        return out

    return build


def _derivative(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda a: jvp(f, (a,), (torch.ones_like(a),))[1]


@lru_cache
def _polynomials(slope: tuple[int, ...], order: int) -> tuple[tuple[int, ...], ...]:
    """P_k with s⁽ᵏ⁾ = P_k(s) where s' = slope(s), lowest coefficient first."""
    polynomials: list[tuple[int, ...]] = [(0, 1)]
    for _ in range(order):
        derivative = [i * c for i, c in enumerate(polynomials[-1])][1:]
        out = [0] * (len(derivative) + len(slope) - 1)
        for i, c in enumerate(derivative):
            for j, d in enumerate(slope):
                out[i + j] += c * d
        polynomials.append(tuple(out))
    return tuple(polynomials)


def _horner(coefficients: tuple[int, ...], s: Tensor) -> Tensor:
    out: Tensor | float = float(coefficients[-1])
    for c in reversed(coefficients[:-1]):
        if c:
            out = out * s + c
        else:
            out = out * s
    assert isinstance(out, Tensor)
    return out


@tower(torch.tanh, F.tanh, Tensor.tanh)
def tanh(a: Tensor, order: int) -> list[Tensor]:
    """s' = 1 − s²; up to the third derivative s' is kept as a factor."""
    s = torch.tanh(a)
    if order == 0:
        return [s]
    zero = s.new_zeros(())
    slope = torch.addcmul(zero + 1, s, s, value=-1)  # in one pass over the entries
    out = [s, slope]
    if order >= 2:
        out.append(torch.addcmul(zero, s, slope, value=-2))
    if order >= 3:
        out.append(slope * (4 - 6 * slope))  # s'(6s² − 2)
    for k in range(4, order + 1):
        out.append(_horner(_polynomials((1, 0, -1), order)[k], s))
    return out


@tower(torch.sigmoid, F.sigmoid, Tensor.sigmoid)
def sigmoid(a: Tensor, order: int) -> list[Tensor]:
    """s' = s − s²."""
    s = torch.sigmoid(a)
    return [s, *(_horner(p, s) for p in _polynomials((0, 1, -1), order)[1 : order + 1])]


@tower(torch.sin, Tensor.sin)
def sin(a: Tensor, order: int) -> list[Tensor]:
    """Sin, cos, −sin, −cos, …"""
    s = torch.sin(a)
    c = torch.cos(a)
    return [(s, c, -s, -c)[k % 4] for k in range(order + 1)]


@tower(torch.cos, Tensor.cos)
def cos(a: Tensor, order: int) -> list[Tensor]:
    """Cos, −sin, −cos, sin, …"""
    return sin(a, order + 1)[1:]


@tower(torch.exp, Tensor.exp)
def exp(a: Tensor, order: int) -> list[Tensor]:
    """All alike."""
    return [torch.exp(a)] * (order + 1)


@tower(F.silu)
def silu(a: Tensor, order: int, inplace: bool = False) -> list[Tensor]:
    """(a s)⁽ᵏ⁾ = a s⁽ᵏ⁾ + k s⁽ᵏ⁻¹⁾."""
    s = sigmoid(a, order)
    return [a * s[0], *(a * s[k] + k * s[k - 1] for k in range(1, order + 1))]


@tower(F.gelu)
def gelu(a: Tensor, order: int, approximate: str = "none") -> list[Tensor]:
    """(aΦ)⁽ᵏ⁾ = aΦ⁽ᵏ⁾ + kΦ⁽ᵏ⁻¹⁾, where Φ' = φ and φ⁽ᵏ⁾ = (−1)ᵏ He_k φ."""
    if approximate != "none":
        return by_forward_mode(lambda x: F.gelu(x, approximate=approximate))(a, order)
    normal = [0.5 * (1 + torch.erf(a / math.sqrt(2)))]
    if order:
        normal.append(torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi))
    for k in range(2, order + 1):  # φ⁽ᵏ⁾ = −aφ⁽ᵏ⁻¹⁾ − (k−1)φ⁽ᵏ⁻²⁾
        derivative = -a * normal[k - 1]
        if k > 2:
            derivative = derivative - (k - 2) * normal[k - 2]
        normal.append(derivative)
    return [a * normal[0], *(a * normal[k] + k * normal[k - 1] for k in range(1, order + 1))]


@tower(F.softplus)
def softplus(a: Tensor, order: int, beta: float = 1.0, threshold: float = 20.0) -> list[Tensor]:
    """log(1 + e^{βa})/β, then the tower of the sigmoid."""
    s = sigmoid(beta * a, max(order - 1, 0))
    return [
        F.softplus(a, beta, threshold),
        *(beta ** (k - 1) * s[k - 1] for k in range(1, order + 1)),
    ]


@tower(F.relu, torch.relu, Tensor.relu)
def relu(a: Tensor, order: int, inplace: bool = False) -> list[Tensor]:
    """Its second derivative is zero almost everywhere: a network of these solves no PDE."""
    step = (a > 0).to(a.dtype)
    return [a * step, step, *[torch.zeros_like(a)] * max(order - 1, 0)][: order + 1]


@tower(torch.pow, Tensor.pow, Tensor.__pow__)
def power(a: Tensor, order: int, exponent: float = 1.0) -> list[Tensor]:
    """a^c, c a^{c−1}, c(c−1) a^{c−2}, …"""
    out = []
    factor = 1.0
    for k in range(order + 1):
        if factor:
            out.append(factor * torch.pow(a, exponent - k))
        else:
            out.append(torch.zeros_like(a))
        factor *= exponent - k
    return out


for _plain, _exponent in ((torch.square, 2.0), (torch.reciprocal, -1.0), (torch.sqrt, 0.5)):
    TOWERS[_plain] = partial(power, exponent=_exponent)
    TOWERS[getattr(Tensor, _plain.__name__)] = TOWERS[_plain]
for _plain in (
    *(torch.log, torch.log1p, torch.expm1, torch.erf, torch.sinh, torch.cosh, torch.tan),
    *(torch.atan, torch.asinh, torch.rsqrt, torch.sinc),
):
    TOWERS[_plain] = TOWERS[getattr(Tensor, _plain.__name__)] = by_forward_mode(_plain)
for _plain in (F.softsign, F.logsigmoid):
    TOWERS[_plain] = by_forward_mode(_plain)
# its own backward pass has no forward mode
TOWERS[F.mish] = by_forward_mode(lambda a: a * torch.tanh(F.softplus(a)))
