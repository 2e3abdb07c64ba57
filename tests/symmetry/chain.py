"""Scalings of plain chains, written down by hand: what the tests of slices stand on."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from pullback.symmetry.actions.scaling import Leg, Scaling


def mlp(*widths: int, bias: bool = True, seed: int = 0, dtype=torch.float64) -> nn.Sequential:
    """A ReLU network with weights of order one."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) / max(1, p.shape[-1]) ** 0.5)
    return model.to(dtype)


def convnet(bias: bool = True, seed: int = 0) -> nn.Sequential:
    """Two convolutions, a pool, flattened into two linear layers; for 6×6 images."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=bias),
        nn.LeakyReLU(0.2),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 2, bias=bias),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 5, bias=bias),
        nn.ReLU(),
        nn.Linear(5, 2, bias=bias),
    ).double()


def scalings(model: nn.Sequential) -> list[Scaling]:
    """One scaling per hidden layer, of its units: rows with bias, and columns of the next."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    out = []
    for (name, a), (following, b) in pairwise(layers):
        units = a.weight.shape[0]
        rows = torch.arange(units)
        legs = [Leg(f"{name}.weight", rows.view(-1, *[1] * (a.weight.ndim - 1)), 1)]
        if a.bias is not None:
            legs.append(Leg(f"{name}.bias", rows, 1))
        columns = rows.repeat_interleave(b.weight.shape[1] // units)
        legs.append(Leg(f"{following}.weight", columns.view(1, -1, *[1] * (b.weight.ndim - 2)), -1))
        out.append(Scaling(units, legs, f"units of {name}"))
    return out


def shake(model: nn.Module, group: list[Scaling], size: float, seed: int = 0) -> None:
    """Move the model along its orbits by a random element of size 10^±size."""
    generator = torch.Generator().manual_seed(seed)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for s in group:
            t = (2 * torch.rand(s.units, generator=generator).double() - 1) * size * 2.302585093
            for name, value in s.act(params, t).items():
                params[name].copy_(value)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())
