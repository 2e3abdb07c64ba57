"""Networks to start from, and the same function elsewhere on its orbit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.symmetry import Symmetry, find

from .networks import convnet, digits, mlp

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": partial(mlp, 64, 64, 32, 10, bias=True),
    "conv net": convnet,
}
_TRAINED = 40  # steps of Adam, after which a net knows something and has more to learn
_BATCH = 64


@lru_cache(maxsize=8)
def _weights(network: str, trained: bool, seed: int) -> dict[str, Tensor]:
    """The parameters of a start, by name."""
    torch.manual_seed(seed)
    model = NETWORKS[network]().double()
    if trained:
        some = digits(torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for index in torch.randint(len(some.x), (_TRAINED, _BATCH)):
            optimizer.zero_grad()
            F.cross_entropy(model(some.x[index]), some.y[index]).backward()
            optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def start(
    network: str, trained: bool, size: float, seed: int, device: torch.device
) -> tuple[nn.Module, Symmetry, float]:
    """A network in float64 whose units are scaled by 10^±size, each with a random sign.

    Returns:
        the network, its symmetry, and how far its outputs moved, relative: round-off.
    """
    model = NETWORKS[network]().double()
    model.load_state_dict(_weights(network, trained, seed))
    model = model.to(device)
    x = digits(torch.float64).x[:64].to(device)
    symmetry = find(model, x[:8])
    with torch.no_grad():
        before = model(x)
        draw = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (symmetry.dimension,), generator=draw) * 2 - 1
        symmetry.move_(size * math.log(10) * signs.to(x))
        moved = float((model(x) - before).norm() / before.norm())
    return model, symmetry, moved
