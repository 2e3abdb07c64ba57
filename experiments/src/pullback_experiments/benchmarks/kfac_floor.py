"""What K-FAC's extra work costs at least: its products at the machine's own rates.

For a layer with weight (O, I) and P places: an extra reverse pass without weight gradients, the
symmetric products P(O² + I²), inverses O³ + I³, and the apply 2·O·I·(O + I). The input side of a
k×k convolution of stride 1 needs no more than ((2k-1)² + 1)/2 products of C×C blocks. Averages are
read and written, and inverses read, once each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..framework.timing import synchronize
from .naive_kfac import LONGEST


@dataclass(frozen=True)
class Rates:
    """Flops per second of products in the training's precision and in float32; bytes per second."""

    half: float
    full: float
    bytes: float

    def best(self, other: Rates) -> Rates:
        """Return the faster of two measurements: other programs can only slow one down."""
        return Rates(
            max(self.half, other.half), max(self.full, other.full), max(self.bytes, other.bytes)
        )


def rates(device: torch.device, half: torch.dtype | None) -> Rates:
    """Return measured rates: the best of a few large products and copies."""
    n = 1024
    copied = 2**25
    if device.type == "cuda":
        n = 8192
        copied = 2**28
    x = torch.randn(n, n, device=device)
    if half is None:
        y = x
    else:
        y = x.to(half)
    product = 2.0 * n**3
    large = torch.empty(copied, device=device)
    return Rates(
        product / _best(lambda: y @ y, device),
        product / _best(lambda: x @ x, device),
        2 * large.nbytes / _best(large.clone, device),
    )


def _best(call: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass(frozen=True)
class Floor:
    """Flops of a step's parts, and bytes of the state that they move."""

    gradient: float
    reverse: float
    products: float
    inverses: float
    apply: float
    state: float

    def seconds(self, at: Rates) -> dict[str, float]:
        """Return the least seconds of each part, by the kind of step it belongs to."""
        return {
            "gradient": self.gradient / at.half,
            "statistics": (self.reverse + self.products) / at.half + 2 * self.state / at.bytes,
            "inversion": self.inverses / at.full,
            "apply": max(self.apply / at.full, self.state / at.bytes),
        }


def floor(model: nn.Module, forward: Callable[[], Tensor], loss: Callable[[Tensor], Any]) -> Floor:
    """Return the counts of one forward and backward pass."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append((module, args[0].detach(), output))

    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    handles = [m.register_forward_hook(keep) for m in layers]
    with FlopCounterMode(display=False) as whole:
        z = forward()
        value = loss(z)
        with FlopCounterMode(display=False) as back:
            torch.autograd.grad(
                z,
                [y for _, _, y in calls],
                torch.ones_like(z),
                retain_graph=True,
                allow_unused=True,
            )
        value.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    sums = [0.0, 0.0, 0.0, 0.0]
    for module, x, y in calls:
        sums = [s + t for s, t in zip(sums, _layer(module, x, y), strict=True)]
    reverse = back.get_total_flops()
    return Floor(whole.get_total_flops() - reverse, reverse, *sums)


def _layer(module: Any, x: Tensor, y: Tensor) -> tuple[float, float, float, float]:
    """Flops of products, inverses and the apply; bytes of both sides."""
    o = module.weight.shape[0]
    i = module.weight[0].numel()
    if isinstance(module, nn.Conv2d):
        positions = len(y) * prod(y.shape[2:])
        k = module.kernel_size[0]
        channels = x.shape[1]
        inputs = float(positions * i**2)
        if k > 1 and module.stride == (1, 1):
            inputs = min(inputs, ((2 * k - 1) ** 2 + 1) * positions * channels**2)
    else:
        positions = x.numel() // x.shape[-1]
        inputs = float(positions * i**2)
    i += module.bias is not None
    products = inputs
    inverses = 0.0
    apply = 0.0
    state = 0.0
    if o <= LONGEST:
        products += positions * o**2
    for n in (o, i):
        if n <= LONGEST:
            inverses += float(n) ** 3
            apply += 2.0 * o * i * n
            state += 4.0 * n * n
    return products, inverses, apply, state
