"""Layers with an elementwise gain and shift: normalizations, and PReLU's slope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._core.space import compute_dtype
from .base import Block, RowsBlock
from .moments import Sharing
from .registry import Layer, Use, register


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
        self, module: Any, x: Tensor, delta: Tensor, roles: Sequence[str], sharing: Sharing
    ) -> Tensor:
        """Σ_n rows rowsᵀ of one covector, unit by unit: (U, k, k) for these of gain and shift."""
        rows = self.unit_rows(module, x, delta, roles, sharing)
        return rows.permute(1, 2, 0) @ rows.transpose(0, 1)

    def unit_rows(
        self, module: Any, x: Tensor, delta: Tensor, roles: Sequence[str], sharing: Sharing
    ) -> Tensor:
        """The rows of one covector, sample by sample and unit by unit: (N, U, k)."""
        features = self.features(module, x.ndim)
        dtype = compute_dtype(delta.dtype)
        x, delta = x.to(dtype), delta.to(dtype)
        shape = x.shape
        flat = x.flatten(0, x.ndim - features - 1) if x.ndim > features else x[None]
        x = self.normalized(module, flat).view(shape)
        by = {"weight": delta * x, "bias": delta}
        return torch.stack([self._rows(module, by[r], features, sharing) for r in roles], -1)

    def _rows(self, module: Any, value: Tensor, features: int, sharing: Sharing) -> Tensor:
        """(N, U): added up over the places of a sample, and over the axes that share a gain."""
        value = sharing.by_sample(value, features).sum(1)
        if shared := self.places(module, features):
            value = value.sum(shared)
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

    def unit_rows(
        self, module: Any, x: Tensor, delta: Tensor, roles: Sequence[str], sharing: Sharing
    ) -> Tensor:
        """From Σδ and Σδx by sample and channel: Σδx̂ = (Σδx − μΣδ)/σ, without forming x̂."""
        dtype = compute_dtype(delta.dtype)
        x, delta = (t.to(dtype).reshape(*t.shape[:2], -1) for t in (x, delta))
        if module.training or module.running_mean is None:
            variance, mean = torch.var_mean(x, (0, 2), correction=0)
        else:
            variance, mean = module.running_var.to(dtype), module.running_mean.to(dtype)
        shift = delta.sum(2)
        gain = torch.linalg.vecdot(delta, x) - mean * shift
        by = {"weight": gain * (variance + module.eps).rsqrt(), "bias": shift}
        return torch.stack([by[r] for r in roles], -1)


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
    """The slope multiplies min(x, 0)."""

    def parameters(self, module: Any) -> dict[str, Tensor | None]:
        return {"weight": module._parameters.get("weight")}

    def places(self, module: Any, ndim: int) -> list[int]:
        return [-k for k in range(1, ndim + (module.num_parameters == 1))]

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return x.clamp(max=0)
