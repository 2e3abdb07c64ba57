"""Parameters from which a stuck run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

_IDLE = 1e-3  # of the largest part that a neuron of the layer has in the next one
_NOISE = 0.01  # of the parameters' size


@torch.no_grad()
def kick(network: nn.Module, x: Tensor, generator: torch.Generator) -> None:
    """Copy live neurons onto idle ones; where none is idle, add one per cent of noise."""
    pairs = [_split(network, *layers, x, generator) for layers in _hidden(network)]
    if any(pairs):
        return
    for p in network.parameters():
        if p.requires_grad:
            p += _NOISE * p.square().mean().sqrt() * _normal(p, generator)


def _split(
    network: nn.Module, first: nn.Linear, second: nn.Linear, x: Tensor, generator: torch.Generator
) -> bool:
    """Give idle neurons h of a hidden layer the work of live ones; whether there were any.

    Neuron i is idle where std(h_i)‖w_i‖, w_i its weights in the next layer, is below a thousandth
    of the largest: the network is smaller than it seems. It becomes a copy of a live neuron, and
    they share that one's w, so that the function hardly changes (Net2Net, arXiv:1511.05641). Noise
    on the copies' incoming weights lets them part.
    """
    inputs: list[Tensor] = []
    hook = second.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    network(x)
    hook.remove()
    h, w = torch.cat(inputs), second.weight
    sizes, order = (h.std(0) * w.norm(dim=0)).sort(descending=True)
    count = int((sizes > _IDLE * sizes[0]).sum())
    live, idle = order[:count], order[count:]
    if not len(live) or not len(idle):
        return False
    second.bias.add_(w[:, idle] @ h.mean(0)[idle])
    source = live[torch.arange(len(idle), device=live.device) % count]
    w /= 1 + source.bincount(minlength=len(order))
    w[:, idle] = w[:, source]
    for p in (first.weight, first.bias):
        size = p[live].square().mean().sqrt()
        p[idle] = p[source] + _NOISE * size * _normal(p[source], generator)
    return True


def _hidden(network: nn.Module) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    """The linear layers before and after every hidden layer whose parameters are solved for."""
    for chain in network.modules():
        if isinstance(chain, nn.Sequential):
            layers = [m for m in chain if isinstance(m, nn.Linear) and m.bias is not None]
            for first, second in pairwise(layers):
                if all(p.requires_grad for m in (first, second) for p in m.parameters()):
                    yield first, second


def shuffled(
    first: Mapping[str, Tensor], network: nn.Module, generator: torch.Generator
) -> dict[str, Tensor]:
    """The first parameters, shuffled within each tensor that is solved for."""
    return {
        n: first[n].flatten()[torch.randperm(p.numel(), generator=generator)].view_as(p).to(p)
        for n, p in network.named_parameters()
        if p.requires_grad
    }


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)
