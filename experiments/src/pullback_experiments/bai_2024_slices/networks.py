"""The networks that are trained, and the digits as they see them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.symmetry import Symmetry, find

from ..learning import data, networks
from ..learning.data import DataSet

#: seven layers whose widths fall by the same number each, as in the paper
PAPER_WIDTHS = (3072, 2634, 2196, 1758, 1320, 882, 444, 10)
DIGITS_WIDTHS = (64, 112, 96, 80, 64, 48, 32, 10)


mlp = partial(networks.mlp, bias=False)
convnet = partial(networks.convnet, 8)


@lru_cache(maxsize=2)
def load(name: str, device: str = "cpu") -> DataSet:
    """Return CIFAR-10 or the digits, of mean 0 and variance 1; cached: decoding takes seconds."""
    if name == "cifar10":
        return data.cifar10().to(device)
    return digits().to(device)


def digits(dtype: torch.dtype = torch.float32) -> DataSet:
    """Return 1347 and 450 digits, (N, 1, 8, 8), of mean 0 and variance 1 over all pixels."""
    raw = data.digits()
    mean = raw.x.mean()
    std = raw.x.std()
    x, test = ((t - mean) / std for t in (raw.x, raw.test_x))
    return replace(raw, x=x.to(dtype), test_x=test.to(dtype))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": partial(mlp, 64, 64, 32, 10, bias=True),
    "conv net": convnet,
}


@lru_cache(maxsize=8)
def _weights(network: str, trained: bool, seed: int) -> dict[str, Tensor]:
    """Return the parameters of a start, by name."""
    torch.manual_seed(seed)
    model = NETWORKS[network]().double()
    if trained:
        images = digits(torch.float64)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        # after 40 steps on batches of 64 a net knows something and has more to learn
        for index in torch.randint(len(images.x), (40, 64)):
            optimizer.zero_grad()
            F.cross_entropy(model(images.x[index]), images.y[index]).backward()
            optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def start(
    network: str, trained: bool, size: float, seed: int, device: torch.device
) -> tuple[nn.Module, Symmetry, float]:
    """Return a float64 network whose units are scaled by 10^±size, with a random sign each.

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
