"""Kicks: idle neurons become copies of live ones, and where none is idle there is noise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pullback import pde
from pullback.pde.runs.perturbation import kick


def with_idle(count: int) -> nn.Sequential:
    """A network whose second layer does not use so many neurons, but for their constants."""
    network = pde.mlp(2, 8, 8, 1, seed=0)
    first = network[2]
    last = network[4]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight[:, : count // 2] = 0.0
        first.weight[count // 2 : count] = 0.0  # constants
    return network


def parts(network: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """How much each neuron of the last hidden layer does."""
    last = network[4]
    assert isinstance(last, nn.Linear)
    return network[:4](x).std(0) * last.weight[0].abs()


def test_idle_neurons_become_copies_and_the_function_stays() -> None:
    network = with_idle(4)
    x = torch.rand(200, 2, dtype=torch.float64)
    before = network(x).detach()
    sizes = parts(network, x)
    assert int((sizes > 1e-3 * sizes.max()).sum()) == 4
    front = [p.detach().clone() for p in network[0].parameters()]
    kick(network, x, torch.Generator().manual_seed(0))
    sizes = parts(network, x)
    assert int((sizes > 1e-3 * sizes.max()).sum()) == 8
    change = (network(x) - before).std() / before.std()
    assert 1e-5 < change < 0.05
    for p, q in zip(network[0].parameters(), front, strict=True):  # none of these is idle
        assert torch.equal(p, q)


@pytest.mark.parametrize("frozen", [False, True])
def test_there_is_noise_where_none_is_idle(frozen: bool) -> None:
    """Neurons whose parameters are not solved for are left alone."""
    network = with_idle(4 if frozen else 0)
    x = torch.rand(200, 2, dtype=torch.float64)
    network[2].requires_grad_(not frozen)
    before = [p.detach().clone() for p in network.parameters()]
    kick(network, x, torch.Generator().manual_seed(0))
    for p, q in zip(network.parameters(), before, strict=True):
        off = float((p.detach() - q).norm() / q.norm())
        assert (off < 0.1 and off > 1e-4) == p.requires_grad
