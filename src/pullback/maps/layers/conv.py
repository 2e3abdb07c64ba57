"""Convolutions of one to three dimensions, with groups, stride, dilation and any padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn

from .affine import AffineBlock
from .moments import Moments, Sharing, counted, shared_moments, shared_second_moment
from .patches import (
    channel_bytes,
    channel_moment,
    channel_moments,
    lines,
    of_samples,
    patch_moment,
    patch_sum,
    patches,
    pointwise,
)
from .registry import Block, Layer, Seen, Use, joined, register


@dataclass(frozen=True)
class _Memory:
    #: bytes of moments, or of patches, that are formed at once
    moments: int = 2**27


_MEMORY = _Memory()


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Layer):
    """An affine layer on patches; the output's positions are the sharing axis."""

    use = "convolution"
    curvature = "kronecker"

    def features(self, module: Any, ndim: int) -> int:
        return 1 + len(module.kernel_size)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        delta = joined(
            [of_samples(partial(lines, u.module), u.delta, 2, u.features) for u in uses], 3
        )
        module = uses[0].module
        width = module.in_channels // module.groups * prod(module.kernel_size)
        inputs = partial(_inputs, [(u.module, u.features, u.input) for u in uses])
        return AffineBlock(names["weight"], names["bias"], inputs, delta, width=width)

    def counted(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        """(B, *positions), or (B,) where the loss ignores samples as a whole."""
        if delta.ndim != 2 + len(module.kernel_size):
            delta = delta[None]
        if keep.ndim == 1:
            return counted(delta.flatten(1), keep)
        return counted(delta, keep, 1)

    def inputs(self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
        if x.ndim != 2 + len(module.kernel_size):
            x = x[None]
        width = module.in_channels // module.groups * prod(module.kernel_size)
        if sharing.reduce:
            return shared_moments(patches(module, x), sharing, keep)
        is_blocked = module.groups > 1 or width > sharing.longest
        if is_blocked or (keep is not None and keep.ndim > 1):
            return _gather_moments(module, x, sharing, keep)
        positions = prod(output_sizes(module, x))
        if keep is None:
            return Moments(*patch_moment(module, x), len(x) * positions)
        x = x * keep.view(-1, *[1] * (x.ndim - 1))
        return Moments(*patch_moment(module, x), keep.sum() * positions)

    def inputs_of(self, uses: Sequence[Seen], sharing: Sharing) -> list[Moments]:
        """The moments of several uses; pointwise ones of one shape are formed together."""
        by_use: dict[int, Moments] = {}
        pointwise_uses: dict[Any, list[int]] = {}
        for i, (module, x, keep) in enumerate(uses):
            if keep is None and _is_pointwise(module, x, sharing):
                pointwise_uses.setdefault((x.shape, x.dtype, x.device), []).append(i)
            else:  # these need the most memory, and come while few moments are there
                by_use[i] = self.inputs(module, x, sharing, keep)
        for indices in pointwise_uses.values():
            _add_pointwise(by_use, uses, indices)
        return [by_use[i] for i in range(len(uses))]

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if delta.ndim == 2 + len(module.kernel_size):
            d = delta
        else:
            d = delta[None]
        if module.groups == 1 and not sharing.reduce and d.shape[1] <= sharing.longest:
            return channel_moment(d)
        return shared_second_moment(d.unflatten(1, (module.groups, -1)).flatten(3).mT, sharing)


def _add_pointwise(by_use: dict[int, Moments], uses: Sequence[Seen], indices: list[int]) -> None:
    """Add the moments of pointwise convolutions whose inputs have one shape, some at a time."""
    first_input = uses[indices[0]][1]
    step = max(1, _MEMORY.moments // channel_bytes(first_input))
    positions = first_input.shape[0] * prod(first_input.shape[2:])
    for start in range(0, len(indices), step):
        batch = indices[start : start + step]
        second = channel_moments([uses[i][1] for i in batch])
        for i, moment in zip(batch, second.split(1), strict=True):
            module, x, _ = uses[i]
            by_use[i] = Moments(moment, patch_sum(module, x, moment), positions)


def _gather_moments(module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
    """Moments from all patches, of some samples at a time; those count that `keep` says."""
    patch_entries = x.shape[1] * prod(module.kernel_size)
    sample_bytes = prod(output_sizes(module, x)) * patch_entries * x.element_size()
    step = max(1, _MEMORY.moments // max(1, sample_bytes))
    total = None
    for start in range(0, len(x), step):
        mask = None
        if keep is not None:
            mask = keep[start : start + step]
        share = shared_moments(patches(module, x[start : start + step]), sharing, mask)
        if total is None:
            total = share
        else:
            total = total + share
    assert total is not None
    return total


def _is_pointwise(module: Any, x: Tensor, sharing: Sharing) -> bool:
    """Whether patches are single pixels, and their second moment a full matrix."""
    if sharing.reduce or module.groups > 1 or x.shape[1] > sharing.longest:
        return False
    return pointwise(module, x)


def output_sizes(module: Any, x: Tensor) -> list[int]:
    """The output's positions along each axis."""
    pad = module._reversed_padding_repeated_twice
    sizes = []
    for axis, size in enumerate(x.shape[2:]):
        last = len(module.kernel_size) - 1 - axis  # the padding of the last axis comes first
        padded = size + pad[2 * last] + pad[2 * last + 1]
        reach = module.dilation[axis] * (module.kernel_size[axis] - 1) + 1
        sizes.append((padded - reach) // module.stride[axis] + 1)
    return sizes


def _inputs(seen: Sequence[tuple[Any, int, Tensor]], some: slice) -> Tensor:
    """The patches (N, G, T, I) of a slice of samples, from modules, feature axes and inputs."""
    found = [of_samples(partial(patches, module), x[some], 1, dims) for module, dims, x in seen]
    return joined(found, 2)
