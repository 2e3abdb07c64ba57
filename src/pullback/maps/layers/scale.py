"""Layers with an elementwise gain and shift: norms, PReLU's slope, gains written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._core.space import compute_dtype
from .moments import Sharing
from .registry import Block, Layer, RowsBlock, Use, join_uses, register


class Normalization(NamedTuple):
    """Mean and 1/σ of each unit, (U,)."""

    mean: Tensor
    inverse_deviation: Tensor


@dataclass(frozen=True, slots=True)
class UnitSums:
    """Sums Σδx̂ ("weight") and Σδ ("bias") over the positions of each sample and unit: (N, U).

    With a `normalization` (μ, 1/σ), "weight" is Σδx, and `form_unit_rows` computes
    Σδx̂ = (Σδx − μΣδ)/σ from it.
    """

    by_role: dict[str, Tensor]
    roles: tuple[str, ...]
    normalization: Normalization | None = None

    @property
    def shape(self) -> torch.Size:
        """(N, U)."""
        return next(iter(self.by_role.values())).shape

    @property
    def join_key(self) -> tuple[object, ...]:
        """What sums must have in common for `form_unit_rows` to join them."""
        sums = next(iter(self.by_role.values()))
        return sums.shape[0], sums.dtype, sums.device, self.roles, self.normalization is None


def form_unit_rows(layers: Sequence[UnitSums]) -> Tensor:
    """Return the rows (N, ΣU, k) of layers with one `join_key`, side by side."""
    first = layers[0]
    sums = []  # one concatenation of all roles takes fewer launches than one for each
    for role in first.by_role:
        sums.extend([layer.by_role[role] for layer in layers])
    chunks = join_uses(sums, 1).chunk(len(first.by_role), 1)
    by_role = dict(zip(first.by_role, chunks, strict=True))
    normalizations = [layer.normalization for layer in layers if layer.normalization]
    if normalizations:
        means = [normalization.mean for normalization in normalizations]
        scales = [normalization.inverse_deviation for normalization in normalizations]
        mean, scale = join_uses([*means, *scales], 0).chunk(2)
        weight = torch.addcmul(by_role["weight"], mean, by_role["bias"], value=-1)
        by_role["weight"] = weight.mul_(scale)
    return torch.stack([by_role[role] for role in first.roles], -1)


def compute_unit_moments(layers: Sequence[UnitSums]) -> list[Tensor]:
    """Return Σ_n rows rowsᵀ, (U, k, k), of each of these layers with one `join_key`."""
    rows = form_unit_rows(layers)
    units = torch.bmm(rows.permute(1, 2, 0), rows.transpose(0, 1))
    return list(units.split([layer.shape[1] for layer in layers]))


class Scale(Layer):
    """output = gain ∘ x̂ + shift, so a row is Σ_t δ_t ∘ x̂_t and Σ_t δ_t over the positions t."""

    use = "scale"
    curvature = "units"

    def normalize(self, module: Any, x: Tensor) -> Tensor:
        """Return x̂, which the gain multiplies."""
        raise NotImplementedError(type(self).__name__)

    def shared_axes(self, module: Any, ndim: int) -> list[int]:
        """Return the feature axes, as negative numbers, along which one gain is shared."""
        return []

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        rows: dict[str, Tensor] = {}
        for use in uses:
            module = use.module
            delta = use.delta
            features = use.features
            lead = use.input.shape[: use.input.ndim - features]
            x = self.normalize(module, use.input.flatten(0, len(lead) - 1)).unflatten(0, lead)
            shared = [*range(2, delta.ndim - features), *self.shared_axes(module, features)]
            for role, value in (("weight", delta * x[:, None]), ("bias", delta)):
                name = names.get(role)
                if name is None:
                    continue
                if shared:
                    value = value.sum(shared)
                row = value.reshape(*delta.shape[:2], -1)
                if name in rows:
                    rows[name] = rows[name] + row
                else:
                    rows[name] = row
        return RowsBlock(rows)

    def compute_unit_sums(
        self,
        module: Any,
        x: Tensor,
        delta: Tensor,
        roles: Sequence[str],
        sharing: Sharing,
        normalization: Normalization | None = None,
    ) -> UnitSums:
        """Return the sums of which `form_unit_rows` makes one covector's rows.

        A batch norm reuses the `normalization` of the forward pass where it is known.
        """
        features = self.count_feature_axes(module, x.ndim)
        dtype = compute_dtype(delta.dtype)
        by_role = {}
        for role in roles:
            value = delta
            if role == "weight":
                samples = x[None]
                if x.ndim > features:
                    samples = x.flatten(0, x.ndim - features - 1)
                value = self.normalize(module, samples.to(dtype)).view(x.shape) * delta
            value = sharing.by_sample(value, features)
            value = value.sum([1, *self.shared_axes(module, features)], dtype=dtype)
            by_role[role] = value.reshape(len(value), -1)
        return UnitSums(by_role, tuple(roles))


@register(nn.LayerNorm, nn.RMSNorm)
class TrailingNorm(Scale):
    """The gain has the shape of the trailing, normalized axes."""

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        return len(module.normalized_shape)

    def normalize(self, module: Any, x: Tensor) -> Tensor:
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, module.normalized_shape, None, module.eps)
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)


class ChannelScale(Scale):
    """The gain has one entry per channel, axis 1 of the layer's own input."""

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        return ndim - 1

    def shared_axes(self, module: Any, ndim: int) -> list[int]:
        return [-k for k in range(1, ndim)]


@register(nn.GroupNorm)
class GroupNorm(ChannelScale):
    """Normalized within groups of channels of one sample."""

    def normalize(self, module: Any, x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, None, None, module.eps)


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNorm(ChannelScale):
    """Normalized by the running averages, or over the batch, which couples what comes before."""

    def normalize(self, module: Any, x: Tensor) -> Tensor:
        if module.training or module.running_mean is None:
            return F.batch_norm(x, None, None, training=True, eps=module.eps)
        return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)

    def compute_unit_sums(
        self,
        module: Any,
        x: Tensor,
        delta: Tensor,
        roles: Sequence[str],
        sharing: Sharing,
        normalization: Normalization | None = None,
    ) -> UnitSums:
        """Return Σδ and Σδx by sample and channel, without forming x̂."""
        if not module.training and module.running_mean is not None:
            scale = (module.running_var + module.eps).rsqrt()
            normalization = Normalization(module.running_mean, scale)
        elif normalization is None:
            channels = x.to(compute_dtype(delta.dtype)).reshape(*x.shape[:2], -1)
            variance, mean = torch.var_mean(channels, (0, 2), correction=0)
            normalization = Normalization(mean, (variance + module.eps).rsqrt())
        gain, shift = _sum_channels(x, delta)
        if sharing.layout is not None:
            gain = sharing.by_sample(gain).sum(1)
            shift = sharing.by_sample(shift).sum(1)
        mean, scale = (statistic.to(gain.dtype) for statistic in normalization)
        sums = {"weight": gain, "bias": shift}
        return UnitSums(sums, tuple(roles), Normalization(mean, scale))


def _sum_channels(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σδx and Σδ over the positions of each sample and channel, (N, C).

    They are the gradients of N·C gains and shifts with mean 0 and σ = 1. The backward kernel of
    group norm gives them in one pass over x and δ; it is used where it loses no precision.
    """
    n, c, *space = x.shape
    dtype = compute_dtype(delta.dtype)
    positions = prod(space)
    if x.dtype == delta.dtype == dtype and x.is_contiguous() and delta.is_contiguous():
        shape = (1, n * c, positions)
        _, gain, shift = torch.ops.aten.native_group_norm_backward.default(
            delta.view(shape),
            x.view(shape),
            *_identity_normalization(n * c, dtype, x.device),
            *shape,
            n * c,
            [False, True, True],
        )
        return gain.view(n, c), shift.view(n, c)
    delta = delta.reshape(n, c, positions)
    product = x.reshape(n, c, positions).to(dtype) * delta
    return product.sum(2), delta.sum(2, dtype=dtype)


@lru_cache(32)
def _identity_normalization(
    n: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean 0 and 1/σ = 1 of n channels of one sample, (1, n), and their gains 1."""
    zeros = torch.zeros(1, n, dtype=dtype, device=device)
    return zeros, torch.ones_like(zeros), zeros.new_ones(n)


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNorm(ChannelScale):
    """Normalized within one channel of one sample, which may come without an axis of samples."""

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        return module._get_no_batch_dim()

    def normalize(self, module: Any, x: Tensor) -> Tensor:
        if module.training or not module.track_running_stats:
            return F.instance_norm(x, eps=module.eps)  # without the buffers: it would write them
        return F.instance_norm(
            x, module.running_mean, module.running_var, use_input_stats=False, eps=module.eps
        )


@register(nn.PReLU)
class PReLU(ChannelScale):
    """The slope multiplies min(x, 0); a single one does so anywhere, wherever the samples stand."""

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        if module.num_parameters == 1:
            return 0
        return ndim - 1

    def normalize(self, module: Any, x: Tensor) -> Tensor:
        return x.clamp(max=0)


class Gain(nn.Module):
    """A use z = g ∘ x, or z = x + g, written as a module.

    `shape` is that with which g meets x, without leading ones.
    """

    description = "an elementwise product or sum"

    def __init__(self, role: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.__dict__["_parameters"] = {"weight": None, "bias": None, role: parameter}
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Return g ∘ x, or x + g."""
        parameters: Any = self._parameters
        gain = parameters["weight"]
        if gain is None:
            return x + parameters["bias"].reshape(self.shape)
        return x * gain.reshape(self.shape)


@register(Gain)
class ElementwiseGain(Scale):
    """x̂ is x; axes on which the gain has one entry share it."""

    def count_feature_axes(self, module: Any, ndim: int) -> int:
        return len(module.shape)

    def shared_axes(self, module: Any, ndim: int) -> list[int]:
        return [i - ndim for i, n in enumerate(module.shape) if n == 1]

    def normalize(self, module: Any, x: Tensor) -> Tensor:
        return x
