"""Layers with an elementwise gain and shift: normalizations, and PReLU's slope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._core.space import compute_dtype
from .base import Block, RowsBlock
from .moments import Sharing
from .registry import Layer, Use, register
from .units import UnitSums, finished, second_moments


class Scale(Layer):
    """output = gain ∘ x̂ + shift, so a row is Σ_t δ_t ∘ x̂_t and Σ_t δ_t over the places t."""

    curvature = "units"

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """x̂, what the gain multiplies."""
        raise NotImplementedError(type(self).__name__)

    def places(self, module: Any, ndim: int) -> list[int]:
        """The feature axes (counted from the end) that share one gain."""
        return []

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        rows: dict[str, Tensor] = {}
        for use in uses:
            module, delta, features = use.module, use.delta, use.features
            lead = use.input.shape[: use.input.ndim - features]
            x = self.normalized(module, use.input.flatten(0, len(lead) - 1)).unflatten(0, lead)
            shared = [*range(2, delta.ndim - features), *self.places(module, features)]
            for role, value in (("weight", delta * x[:, None]), ("bias", delta)):
                if (name := names.get(role)) is not None:
                    row = value.sum(shared) if shared else value
                    row = row.reshape(*delta.shape[:2], -1)
                    rows[name] = rows[name] + row if name in rows else row
        return RowsBlock(rows)

    def units(
        self,
        module: Any,
        x: Tensor,
        delta: Tensor,
        roles: Sequence[str],
        sharing: Sharing,
    ) -> Tensor:
        """Σ_n rows rowsᵀ of one covector, unit by unit: (U, k, k) for these of gain and shift."""
        return second_moments([self.unit_sums(module, x, delta, roles, sharing)])[0]

    def unit_rows(
        self,
        module: Any,
        x: Tensor,
        delta: Tensor,
        roles: Sequence[str],
        sharing: Sharing,
    ) -> Tensor:
        """The rows of one covector, sample by sample and unit by unit: (N, U, k)."""
        return finished([self.unit_sums(module, x, delta, roles, sharing)])

    def unit_sums(
        self,
        module: Any,
        x: Tensor,
        delta: Tensor,
        roles: Sequence[str],
        sharing: Sharing,
    ) -> UnitSums:
        """What these rows are made of."""
        features = self.features(module, x.ndim)
        dtype = compute_dtype(delta.dtype)
        x, delta = x.to(dtype), delta.to(dtype)
        shape = x.shape
        flat = x.flatten(0, x.ndim - features - 1) if x.ndim > features else x[None]
        x = self.normalized(module, flat).view(shape)
        by = {"weight": delta * x, "bias": delta}
        found = {r: self._rows(module, by[r], features, sharing) for r in roles}
        return UnitSums(found, tuple(roles))

    def _rows(self, module: Any, value: Tensor, features: int, sharing: Sharing) -> Tensor:
        """(N, U): added up over the places of a sample, and over the axes that share a gain."""
        value = sharing.by_sample(value, features).sum([1, *self.places(module, features)])
        return value.reshape(len(value), -1)


@register(nn.LayerNorm, nn.RMSNorm)
class TrailingNorm(Scale):
    """The gain has the shape of the trailing, normalized axes."""

    def features(self, module: Any, ndim: int) -> int:
        return len(module.normalized_shape)

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, module.normalized_shape, None, module.eps)
        return F.layer_norm(x, module.normalized_shape, None, None, module.eps)

    def unit_sums(
        self,
        module: Any,
        x: Tensor,
        delta: Tensor,
        roles: Sequence[str],
        sharing: Sharing,
    ) -> UnitSums:
        """The same in fewer steps for (N, T, n), which is what transformers have."""
        elsewhere = sharing.batch_dim or sharing.layout is not None
        if x.ndim != 3 or len(module.normalized_shape) > 1 or elsewhere:
            return super().unit_sums(module, x, delta, roles, sharing)
        dtype, by = compute_dtype(delta.dtype), {}
        for role in roles:
            value = delta
            if role == "weight":
                value = self.normalized(module, x if x.dtype == dtype else x.to(dtype)) * delta
            by[role] = value.sum(1, dtype=dtype)
        return UnitSums(by, tuple(roles))


class ChannelScale(Scale):
    """The gain has one entry per channel, axis 1 of the layer's own input."""

    def features(self, module: Any, ndim: int) -> int:
        return ndim - 1

    def places(self, module: Any, ndim: int) -> list[int]:
        return [-k for k in range(1, ndim)]


@register(nn.GroupNorm)
class GroupNorm(ChannelScale):
    """Normalized within groups of channels of one sample."""

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return F.group_norm(x, module.num_groups, None, None, module.eps)


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNorm(ChannelScale):
    """Normalized by the running averages, or over the batch, which couples what comes before."""

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        if module.training or module.running_mean is None:
            return F.batch_norm(x, None, None, training=True, eps=module.eps)
        return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)

    def unit_sums(
        self,
        module: Any,
        x: Tensor,
        delta: Tensor,
        roles: Sequence[str],
        sharing: Sharing,
    ) -> UnitSums:
        """Σδ and Σδx by sample and channel, without forming x̂."""
        if not module.training and module.running_mean is not None:
            kept = module.running_mean, (module.running_var + module.eps).rsqrt()
        else:
            channels = x.to(compute_dtype(delta.dtype)).reshape(*x.shape[:2], -1)
            variance, mean = torch.var_mean(channels, (0, 2), correction=0)
            kept = mean, (variance + module.eps).rsqrt()
        gain, shift = _channel_sums(x, delta)
        if sharing.layout is not None:
            gain, shift = (sharing.by_sample(t).sum(1) for t in (gain, shift))
        if kept[0].dtype != gain.dtype:
            kept = kept[0].to(gain.dtype), kept[1].to(gain.dtype)
        return UnitSums({"weight": gain, "bias": shift}, tuple(roles), kept)


def _channel_sums(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Σδx and Σδ over the places of each sample and channel, (N, C).

    They are the gradients of N·C gains and shifts of what is not normalized any further, which one
    pass over x and δ gives where no precision is lost on the way.
    """
    (n, c, *space), dtype = x.shape, compute_dtype(delta.dtype)
    places = prod(space)
    if x.dtype == delta.dtype == dtype and x.is_contiguous() and delta.is_contiguous():
        lines = (1, n * c, places)
        _, gain, shift = torch.ops.aten.native_group_norm_backward.default(
            delta.view(lines), x.view(lines), *_standard(n * c, dtype, x.device), *lines, n * c,
            [False, True, True],
        )  # fmt: skip
        return gain.view(n, c), shift.view(n, c)
    delta = delta.reshape(n, c, places)
    product = x.reshape(n, c, places).to(dtype) * delta
    return product.sum(2), delta.sum(2, dtype=dtype)


@lru_cache(32)
def _standard(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Mean 0 and 1/σ = 1 of n channels of one sample, (1, n), and their gains 1."""
    zeros = torch.zeros(1, n, dtype=dtype, device=device)
    return zeros, torch.ones_like(zeros), zeros.new_ones(n)


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNorm(ChannelScale):
    """Normalized within one channel of one sample, which may come without an axis of samples."""

    def features(self, module: Any, ndim: int) -> int:
        return module._get_no_batch_dim()

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        if module.training or not module.track_running_stats:
            return F.instance_norm(x, eps=module.eps)  # without the buffers: it would write them
        return F.instance_norm(
            x, module.running_mean, module.running_var, use_input_stats=False, eps=module.eps
        )


@register(nn.PReLU)
class PReLU(ChannelScale):
    """The slope multiplies min(x, 0); a single one does so anywhere, wherever the samples stand."""

    def features(self, module: Any, ndim: int) -> int:
        return 0 if module.num_parameters == 1 else ndim - 1

    def parameters(self, module: Any) -> dict[str, Tensor | None]:
        return {"weight": module._parameters.get("weight")}

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return x.clamp(max=0)
