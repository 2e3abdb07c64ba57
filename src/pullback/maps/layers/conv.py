"""Convolutions of one to three dimensions, with groups, stride, dilation and any padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from math import prod
from typing import Any

from torch import Tensor, nn

from .affine import AffineBlock
from .correlated import correlated_moments, correlates
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

_TOGETHER = 2**27  # bytes of moments that are formed at once


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(Layer):
    """An affine layer on patches; the output's places are the sharing axis."""

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
        """(B, *places), or (B,) where the loss ignores samples as a whole."""
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
        apart = module.groups > 1 or width > sharing.longest
        if apart or (keep is not None and keep.ndim > 1):
            return _gathered(module, x, sharing, keep)
        places = prod(_places(module, x))
        if keep is None:
            return Moments(*patch_moment(module, x), len(x) * places)
        x = x * keep.view(-1, *[1] * (x.ndim - 1))
        return Moments(*patch_moment(module, x), keep.sum() * places)

    def inputs_of(self, uses: Sequence[Seen], sharing: Sharing) -> list[Moments]:
        """Pointwise ones, and those whose patches have their correlation taken, by shape."""
        found: dict[int, Moments] = {}
        alike: dict[Any, list[int]] = {}
        for i, (module, x, keep) in enumerate(uses):
            if keep is None and (way := _way(module, x, sharing)) is not None:
                alike.setdefault((way, x.shape, x.dtype, x.device), []).append(i)
            else:  # these need the most memory, and come while few moments are there
                found[i] = self.inputs(module, x, sharing, keep)
        for (way, shape, *_), own in alike.items():
            step = max(1, _TOGETHER // _BYTES[way](uses[own[0]][1]))
            for some in (own[a : a + step] for a in range(0, len(own), step)):
                second = way([uses[i][1] for i in some])
                for i, one in zip(some, second.split(1), strict=True):
                    first = patch_sum(*uses[i][:2], one)
                    found[i] = Moments(one, first, shape[0] * prod(shape[2:]))
        return [found[i] for i in range(len(uses))]

    def outputs(self, module: Any, x: Tensor, delta: Tensor, sharing: Sharing) -> Tensor:
        if delta.ndim == 2 + len(module.kernel_size):
            d = delta
        else:
            d = delta[None]
        if module.groups == 1 and not sharing.reduce and d.shape[1] <= sharing.longest:
            return channel_moment(d)
        return shared_second_moment(d.unflatten(1, (module.groups, -1)).flatten(3).mT, sharing)


def _gathered(module: Any, x: Tensor, sharing: Sharing, keep: Tensor | None) -> Moments:
    """All patches of some samples at a time, of which those count that `keep` says."""
    places = prod(_places(module, x))
    each = places * x.shape[1] * prod(module.kernel_size) * x.element_size()
    step = max(1, _TOGETHER // max(1, each))
    found = None
    if keep is None:
        masks = repeat(None)
    else:
        masks = keep.split(step)
    for some, mask in zip(x.split(step), masks, strict=False):
        more = shared_moments(patches(module, some), sharing, mask)
        if found is None:
            found = more
        else:
            found = found + more
    assert found is not None
    return found


def _way(module: Any, x: Tensor, sharing: Sharing) -> Any:
    """Return the function that forms the moments of several such inputs at once, or None."""
    if sharing.reduce or module.groups > 1:
        return None
    # on a CPU a correlation is no faster, and its sums are less exact
    if x.is_cuda and 9 * x.shape[1] <= sharing.longest and correlates(module, x):
        return correlated_moments
    if x.shape[1] <= sharing.longest and pointwise(module, x):
        return channel_moments
    return None


#: bytes that each of these takes per input
_BYTES = {
    correlated_moments: lambda x: (9 * x.shape[1]) ** 2 * x.element_size(),
    channel_moments: channel_bytes,
}


def _places(module: Any, x: Tensor) -> list[int]:
    """The output's places along each axis."""
    pad = module._reversed_padding_repeated_twice
    axes = zip(x.shape[2:], module.kernel_size, module.stride, module.dilation, strict=True)
    padded = [before + after for before, after in zip(pad[::2], pad[1::2], strict=True)][::-1]
    return [
        (n + p - d * (k - 1) - 1) // s + 1 for (n, k, s, d), p in zip(axes, padded, strict=True)
    ]


def _inputs(seen: Sequence[tuple[Any, int, Tensor]], some: slice) -> Tensor:
    """The patches (N, G, T, I) of a slice of samples, from modules, feature axes and inputs."""
    found = [of_samples(partial(patches, module), x[some], 1, dims) for module, dims, x in seen]
    return joined(found, 2)
