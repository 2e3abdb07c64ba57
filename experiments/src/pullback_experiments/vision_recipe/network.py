"""The network of the CIFAR-10 speed recipe: whitened patches, then six convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Patches:
    """Squares of an image that the first layer reads."""

    colors: int = 3
    #: pixels along a side
    side: int = 2

    @property
    def filters(self) -> int:
        """One per principal component of a patch, each with its negative."""
        return 2 * self.colors * self.side**2


PATCHES = Patches()


@dataclass(frozen=True)
class NormOptions:
    """Options of the batch normalizations, which have no trained gains."""

    #: the weight of the newest batch in the running moments: training has few steps
    momentum: float = 0.4
    #: almost none, so that the length of a filter has no effect
    eps: float = 1e-12


class ConvolutionGroup(nn.Module):
    """Two 3×3 convolutions, each with a normalization and a GELU; the first one is pooled."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = _make_convolution(channels, width)
        self.norm1 = _make_norm(width)
        self.conv2 = _make_convolution(width, width)
        self.norm2 = _make_norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) ↦ (N, width, H/2, W/2)."""
        y = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(y)))


class RecipeNetwork(nn.Module):
    """Fixed filters that whiten patches of 2×2 pixels, three groups of convolutions, and a head.

    Args:
        widths: channels of the three groups.
        classes: of the images.
    """

    def __init__(self, widths: tuple[int, int, int] = (64, 256, 256), classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(PATCHES.colors, PATCHES.filters, PATCHES.side)
        self.patches.weight.requires_grad_(False)
        first, second, third = widths
        self.groups = nn.Sequential(
            ConvolutionGroup(PATCHES.filters, first),
            ConvolutionGroup(first, second),
            ConvolutionGroup(second, third),
        )
        self.head = nn.Linear(third, classes, bias=False)
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.std())

    def forward(self, x: Tensor) -> Tensor:
        """Images (N, 3, 32, 32) ↦ logits (N, 10)."""
        y = self.groups(F.gelu(self.patches(x)))
        features = F.max_pool2d(y, y.shape[-1]).flatten(1)
        return self.head(features) / features.shape[1]

    @property
    def filters(self) -> list[nn.Parameter]:
        """The weights of the trained convolutions."""
        return [p for p in self.groups.parameters() if p.ndim == 4]

    @property
    def norm_biases(self) -> list[nn.Parameter]:
        """What the normalizations add."""
        return [p for p in self.groups.parameters() if p.ndim == 1 and p.requires_grad]

    @torch.no_grad()
    def whiten_patches(self, images: Tensor, eps: float = 5e-4) -> None:
        """Let the first filters give principal components of patches with variance 1.

        With the eigenvectors v and eigenvalues s of the patches' second moment, filters are
        ±v/√(s + eps).
        """
        unfolded = F.unfold(images.float(), PATCHES.side)
        patches = unfolded.transpose(1, 2).flatten(0, 1)
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        patch_shape = (PATCHES.colors, PATCHES.side, PATCHES.side)
        filters = (vectors / (values + eps).sqrt()).T.unflatten(1, patch_shape)
        self.patches.weight.copy_(torch.cat([filters, -filters]))


def _make_convolution(channels: int, width: int) -> nn.Conv2d:
    """Return a 3×3 convolution whose first outputs are its inputs."""
    convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    with torch.no_grad():
        nn.init.dirac_(convolution.weight[:channels])
    return convolution


def _make_norm(width: int) -> nn.BatchNorm2d:
    options = NormOptions()
    norm = nn.BatchNorm2d(width, options.eps, options.momentum)
    norm.weight.requires_grad_(False)
    return norm
