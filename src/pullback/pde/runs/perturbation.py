"""Other parameters from which a stuck run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..networks.state import InUnits


@dataclass(frozen=True)
class PerturbationThresholds:
    """How parameters are perturbed."""

    #: a neuron is idle if it moves the next layer by less than this share of the most active one;
    #: on Poisson 5D (seed 1) 40 of 64 neurons of a stuck run were below it
    idle_share: float = 1e-3
    #: noise, as a share of the parameters' root mean square: the function changes by about as much
    noise_share: float = 0.01


THRESHOLDS = PerturbationThresholds()


@torch.no_grad()
def kick(network: nn.Module, x: Tensor, generator: torch.Generator) -> None:
    """Turn idle neurons into copies of live ones; if none is idle, add noise to all parameters.

    Args:
        network: whose parameters change in place.
        x: points (N, d) at which the activity of neurons is measured.
        generator: of the noise.
    """
    has_idle_neurons = False
    for layers in _find_hidden_layers(network):
        has_idle_neurons |= _replace_idle_neurons(network, layers, x, generator)
    if has_idle_neurons:
        return
    for parameter in network.parameters():
        if parameter.requires_grad:
            size = parameter.square().mean().sqrt()
            parameter += THRESHOLDS.noise_share * size * _draw_normal(parameter, generator)


@dataclass(frozen=True)
class HiddenLayer:
    """The linear layers before and after the neurons of a hidden layer."""

    incoming: nn.Linear
    outgoing: nn.Linear


def _find_hidden_layers(network: nn.Module) -> Iterator[HiddenLayer]:
    """Yield the hidden layers of sequential networks whose parameters are all solved for."""
    for chain in network.modules():
        if not isinstance(chain, nn.Sequential):
            continue
        linears = [m for m in chain if isinstance(m, nn.Linear) and m.bias is not None]
        for incoming, outgoing in pairwise(linears):
            if _is_trained(incoming) and _is_trained(outgoing):
                yield HiddenLayer(incoming, outgoing)


def _is_trained(module: nn.Module) -> bool:
    return all(parameter.requires_grad for parameter in module.parameters())


def _replace_idle_neurons(
    network: nn.Module, layer: HiddenLayer, x: Tensor, generator: torch.Generator
) -> bool:
    """Replace idle neurons of a hidden layer by copies of active ones; return True if any.

    The activity of neuron i is std(hᵢ)‖wᵢ‖, where h are the outputs of the layer at the points and
    wᵢ its weights in the next layer. An idle neuron becomes a copy of a live one, and they share
    that one's w, so that the function hardly changes (Net2Net, arXiv:1511.05641). Noise on the
    copies' incoming weights makes them differ.
    """
    hidden = _record_inputs(network, layer.outgoing, x)
    weight = layer.outgoing.weight
    activity, order = (hidden.std(0) * weight.norm(dim=0)).sort(descending=True)
    live_count = int((activity > THRESHOLDS.idle_share * activity[0]).sum())
    live = order[:live_count]
    idle = order[live_count:]
    if not len(live) or not len(idle):
        return False
    layer.outgoing.bias.add_(weight[:, idle] @ hidden.mean(0)[idle])
    source = live[torch.arange(len(idle), device=live.device) % live_count]
    weight /= 1 + source.bincount(minlength=len(order))
    weight[:, idle] = weight[:, source]
    for parameter in (layer.incoming.weight, layer.incoming.bias):
        size = parameter[live].square().mean().sqrt()
        noise = _draw_normal(parameter[source], generator)
        parameter[idle] = parameter[source] + THRESHOLDS.noise_share * size * noise
    return True


def _record_inputs(network: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of a layer while the network is evaluated at points."""
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    network(x)
    hook.remove()
    return torch.cat(inputs)


def shuffle_parameters(
    parameters: Mapping[str, Tensor], network: nn.Module, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return parameters with the entries of each trained tensor in random order.

    The distribution of every layer's initial values stays what it was.
    """
    shuffled: dict[str, Tensor] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            order = torch.randperm(parameter.numel(), generator=generator)
            values = parameters[name].flatten()[order]
            shuffled[name] = values.view_as(parameter).to(parameter)
    return shuffled


@torch.no_grad()
def reinitialize(network: nn.Module, generator: torch.Generator, gain: float) -> None:
    """Give a network other initial values of the same distribution.

    Args:
        network: whose parameters are still initial values; they change in place.
        generator: of their order.
        gain: factor of the weights of the first linear layer.
    """
    parameters = dict(network.named_parameters())
    for name, value in shuffle_parameters(parameters, network, generator).items():
        parameters[name].copy_(value)
    first = next((m for m in network.modules() if isinstance(m, nn.Linear)), None)
    if first is not None and first.weight.requires_grad:
        first.weight.mul_(gain)


@torch.no_grad()
def enlarge_outputs(network: nn.Module, units: Tensor) -> None:
    """Multiply the last layer's weights by the units of the fields, (m,), if it gives the fields.

    A network whose outputs have units already stays as it is.
    """
    if any(isinstance(module, InUnits) for module in network.modules()):
        return
    linears = [module for module in network.modules() if isinstance(module, nn.Linear)]
    if linears and linears[-1].out_features == len(units) and _is_trained(linears[-1]):
        linears[-1].weight.mul_(units.to(linears[-1].weight)[:, None])


def _draw_normal(template: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers in the shape, dtype and device of a tensor."""
    return torch.randn(template.shape, generator=generator, dtype=torch.float64).to(template)
