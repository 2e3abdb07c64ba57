"""The deep autoencoder."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

MNIST = (784, 1000, 500, 250, 30)
DIGITS = (64, 100, 50, 25, 10)


def autoencoder(widths: tuple[int, ...] = MNIST) -> nn.Sequential:
    """The mirrored autoencoder of Hinton and Salakhutdinov: tanh units, a linear code, logits.

    Weights are Glorot's: from torch's own start gradients vanish, and Adam and SGD stay for long
    at the mean image.
    """
    layers: list[nn.Module] = []
    for a, b in pairwise([*widths, *widths[-2::-1]]):
        layers += [nn.Linear(a, b), nn.Tanh()]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    code = 2 * (len(widths) - 1) - 1
    return nn.Sequential(*(x for i, x in enumerate(layers[:-1]) if i != code))
