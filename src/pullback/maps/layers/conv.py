"""Convolutions of one to three dimensions, with groups, stride, dilation and any padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from .affine import AffineBlock
from .moments import (
    Moments,
    Sharing,
    compute_shared_moments,
    compute_shared_second_moment,
    find_kept_or_reached_positions,
)
from .patch_correlation import can_correlate, correlate_patches, count_correlation_bytes
from .patches import (
    apply_to_images,
    compute_channel_moment,
    compute_channel_moments,
    compute_first_moment,
    compute_patch_moment,
    count_channel_bytes,
    is_pointwise,
    list_channels,
    unfold_patches,
)
from .registry import Block, Layer, LayerInput, Use, join_uses, register


@dataclass(frozen=True)
class _Memory:
    #: bytes of moments, or of patches, that are formed at once: 128 MiB, little beside activations
    moments: int = 2**27


_MEMORY = _Memory()


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Layer):
    """An affine layer on patches; the output's positions are the sharing axis."""

    use = "convolution"
    curvature = "kronecker"

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        return 1 + len(module.kernel_size)

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        cotangents = []
        for use in uses:
            form = partial(list_channels, use.module)
            cotangents.append(apply_to_images(form, use.delta, 2, use.features))
        delta = join_uses(cotangents, 3)
        module = uses[0].module
        width = module.in_channels // module.groups * prod(module.kernel_size)
        inputs = partial(_unfold_samples, [_ImageUse(u.module, u.input, u.features) for u in uses])
        return AffineBlock(names["weight"], names["bias"], inputs, delta, width=width)

    def counted_positions(self, module: Any, x: Tensor, delta: Tensor, keep: Tensor) -> Tensor:
        """Return a mask (B, *positions), or (B,) if the loss ignores whole samples."""
        if delta.ndim != 2 + len(module.kernel_size):
            delta = delta[None]
        if keep.ndim == 1:
            return find_kept_or_reached_positions(delta.flatten(1), keep)
        return find_kept_or_reached_positions(delta, keep, 1)

    def input_moments(
        self, module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None
    ) -> Moments:
        if x.ndim != 2 + len(module.kernel_size):
            x = x[None]
        width = module.in_channels // module.groups * prod(module.kernel_size)
        if sharing.reduce:
            return compute_shared_moments(unfold_patches(module, x), sharing, keep)
        is_blocked = module.groups > 1 or width > sharing.longest
        if is_blocked or (keep is not None and keep.ndim > 1):
            return _gather_moments(module, x, sharing, keep)
        positions = prod(compute_output_sizes(module, x))
        if keep is None:
            return Moments(*compute_patch_moment(module, x), len(x) * positions)
        x = x * keep.view(-1, *[1] * (x.ndim - 1))
        return Moments(*compute_patch_moment(module, x), keep.sum() * positions)

    def input_moments_of_uses(self, uses: Sequence[LayerInput], sharing: Sharing) -> list[Moments]:
        """The moments of several uses; some kinds of one shape are formed together."""
        by_use: dict[int, Moments] = {}
        stacks: dict[Any, list[int]] = {}
        for i, (module, x, keep) in enumerate(uses):
            method = None
            if keep is None:
                method = _find_stacked_method(module, x, sharing)
            if method is not None:
                stacks.setdefault((method, x.shape, x.dtype, x.device), []).append(i)
            else:  # these need the most memory, and come while few moments are there
                by_use[i] = self.input_moments(module, x, sharing, keep)
        for (method, *_), indices in stacks.items():
            _add_stacked(by_use, uses, indices, method)
        return [by_use[i] for i in range(len(uses))]

    def output_moment(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if delta.ndim != 2 + len(module.kernel_size):
            delta = delta[None]
        if module.groups == 1 and not sharing.reduce and delta.shape[1] <= sharing.longest:
            return compute_channel_moment(delta)
        return compute_shared_second_moment(list_channels(module, delta), sharing)


@dataclass(frozen=True)
class _StackedMethod:
    """How moments of several inputs of one shape are formed together."""

    #: Σ a aᵀ (K, I, I) of K inputs
    compute: Callable[[Sequence[Tensor]], Tensor]
    #: bytes that it takes for one input
    count_bytes: Callable[[Tensor], int]


_CHANNELS = _StackedMethod(compute_channel_moments, count_channel_bytes)
_CORRELATION = _StackedMethod(correlate_patches, count_correlation_bytes)


def _find_stacked_method(module: Any, x: Tensor, sharing: Sharing) -> _StackedMethod | None:
    """Return how the moments of several such inputs are formed at once; None if one by one."""
    if sharing.reduce or module.groups > 1:
        return None
    # on a CPU a correlation is no faster, and its sums are less exact
    if x.is_cuda and 9 * x.shape[1] <= sharing.longest and can_correlate(module, x):
        return _CORRELATION
    if x.shape[1] <= sharing.longest and is_pointwise(module, x):
        return _CHANNELS
    return None


def _add_stacked(
    by_use: dict[int, Moments],
    uses: Sequence[LayerInput],
    indices: list[int],
    method: _StackedMethod,
) -> None:
    """Add the moments of convolutions whose inputs have one shape, some at a time."""
    first_input = uses[indices[0]].input
    step = max(1, _MEMORY.moments // method.count_bytes(first_input))
    positions = first_input.shape[0] * prod(first_input.shape[2:])
    for start in range(0, len(indices), step):
        batch = indices[start : start + step]
        second = method.compute([uses[i].input for i in batch])
        for i, moment in zip(batch, second.split(1), strict=True):
            module, x, _ = uses[i]
            by_use[i] = Moments(moment, compute_first_moment(module, x, moment), positions)


def _gather_moments(module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
    """Return the moments of all patches at counted positions, formed for some samples at a time."""
    patch_entries = x.shape[1] * prod(module.kernel_size)
    sample_bytes = prod(compute_output_sizes(module, x)) * patch_entries * x.element_size()
    step = max(1, _MEMORY.moments // max(1, sample_bytes))
    total = None
    for start in range(0, len(x), step):
        mask = None
        if keep is not None:
            mask = keep[start : start + step]
        share = compute_shared_moments(
            unfold_patches(module, x[start : start + step]), sharing, mask
        )
        if total is None:
            total = share
        else:
            total = total + share
    assert total is not None
    return total


def compute_output_sizes(module: Any, x: Tensor) -> list[int]:
    """Return the output's number of positions along each axis."""
    pad = module._reversed_padding_repeated_twice
    sizes = []
    for axis, size in enumerate(x.shape[2:]):
        last = len(module.kernel_size) - 1 - axis  # the padding of the last axis comes first
        padded = size + pad[2 * last] + pad[2 * last + 1]
        reach = module.dilation[axis] * (module.kernel_size[axis] - 1) + 1
        sizes.append((padded - reach) // module.stride[axis] + 1)
    return sizes


class _ImageUse(NamedTuple):
    """A module, its input images, and how many trailing axes are channels and space."""

    module: Any
    images: Tensor
    features: int


def _unfold_samples(uses: Sequence[_ImageUse], samples: slice) -> Tensor:
    """Return the patches (N, G, T, I) that all uses see in a slice of samples."""
    patches = []
    for use in uses:
        form = partial(unfold_patches, use.module)
        patches.append(apply_to_images(form, use.images[samples], 1, use.features))
    return join_uses(patches, 2)
