"""Layers with an elementwise gain and shift: norms, PReLU's slope, gains written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._core.space import compute_dtype
from .moments import Sharing
from .registry import Block, Layer, RowsBlock, Use, joined, register

#: mean and 1/σ of a normalization
Kept = tuple[Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class UnitSums:
    """By role, "weight" and "bias", Σδx̂ and Σδ over the positions of each sample and unit: (N, U).

    Where `kept` has μ and 1/σ, (U,), "weight" is Σδx, and Σδx̂ = (Σδx − μΣδ)/σ is yet to come.
    """

    by: dict[str, Tensor]
    roles: tuple[str, ...]
    kept: Kept = None

    @property
    def shape(self) -> torch.Size:
        """(N, U)."""
        return next(iter(self.by.values())).shape

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what sums must have in common for `unit_rows` to join them."""
        some = next(iter(self.by.values()))
        return some.shape[0], some.dtype, some.device, self.roles, self.kept is None


def unit_rows(some: Sequence[UnitSums]) -> Tensor:
    """The rows (N, ΣU, k) of layers of one kind, side by side."""
    first = some[0]
    beside = joined([x.by[role] for role in first.by for x in some], 1).chunk(len(first.by), 1)
    by = dict(zip(first.by, beside, strict=True))
    kept = [x.kept for x in some if x.kept]
    if kept:
        mean, scale = joined([t for pair in zip(*kept, strict=True) for t in pair], 0).chunk(2)
        by["weight"] = torch.addcmul(by["weight"], mean, by["bias"], value=-1).mul_(scale)
    return torch.stack([by[role] for role in first.roles], -1)


def second_moments(some: Sequence[UnitSums]) -> list[Tensor]:
    """Σ_n rows rowsᵀ, (U, k, k), of each of these layers of one kind."""
    rows = unit_rows(some)
    units = torch.bmm(rows.permute(1, 2, 0), rows.transpose(0, 1))
    return list(units.split([x.shape[1] for x in some]))


class Scale(Layer):
    """output = gain ∘ x̂ + shift, so a row is Σ_t δ_t ∘ x̂_t and Σ_t δ_t over the positions t."""

    use = "scale"
    curvature = "units"

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        """x̂, what the gain multiplies."""
        raise NotImplementedError(type(self).__name__)

    def positions(self, module: Any, ndim: int) -> list[int]:
        """The feature axes (counted from the end) that share one gain."""
        return []

    def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
        rows: dict[str, Tensor] = {}
        for use in uses:
            module = use.module
            delta = use.delta
            features = use.features
            lead = use.input.shape[: use.input.ndim - features]
            x = self.normalized(module, use.input.flatten(0, len(lead) - 1)).unflatten(0, lead)
            shared = [*range(2, delta.ndim - features), *self.positions(module, features)]
            for role, value in (("weight", delta * x[:, None]), ("bias", delta)):
                if (name := names.get(role)) is not None:
                    if shared:
                        row = value.sum(shared)
                    else:
                        row = value
                    row = row.reshape(*delta.shape[:2], -1)
                    rows[name] = rows[name] + row if name in rows else row
        return RowsBlock(rows)

    def unit_sums(
        self,
        module: Any,
        x: Tensor,
        delta: Tensor,
        roles: Sequence[str],
        sharing: Sharing,
        kept: Kept = None,
    ) -> UnitSums:
        """What the rows of one covector are made of; `kept` has mean and 1/σ, if they are known."""
        features = self.features(module, x.ndim)
        dtype = compute_dtype(delta.dtype)
        by = {}
        for role in roles:
            value = delta
            if role == "weight":
                if x.ndim > features:
                    flat = x.flatten(0, x.ndim - features - 1)
                else:
                    flat = x[None]
                value = self.normalized(module, flat.to(dtype)).view(x.shape) * delta
            value = sharing.by_sample(value, features)
            value = value.sum([1, *self.positions(module, features)], dtype=dtype)
            by[role] = value.reshape(len(value), -1)
        return UnitSums(by, tuple(roles))


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

    def positions(self, module: Any, ndim: int) -> list[int]:
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
        kept: Kept = None,
    ) -> UnitSums:
        """Σδ and Σδx by sample and channel, without forming x̂."""
        if not module.training and module.running_mean is not None:
            kept = module.running_mean, (module.running_var + module.eps).rsqrt()
        elif kept is None:
            channels = x.to(compute_dtype(delta.dtype)).reshape(*x.shape[:2], -1)
            variance, mean = torch.var_mean(channels, (0, 2), correction=0)
            kept = mean, (variance + module.eps).rsqrt()
        gain, shift = _channel_sums(x, delta)
        if sharing.layout is not None:
            gain, shift = (sharing.by_sample(t).sum(1) for t in (gain, shift))
        kept = kept[0].to(gain.dtype), kept[1].to(gain.dtype)
        return UnitSums({"weight": gain, "bias": shift}, tuple(roles), kept)


def _channel_sums(x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Σδx and Σδ over the positions of each sample and channel, (N, C).

    They are the gradients of N·C gains and shifts of what is not normalized any further, which one
    pass over x and δ gives where no precision is lost on the way.
    """
    n, c, *space = x.shape
    dtype = compute_dtype(delta.dtype)
    positions = prod(space)
    if x.dtype == delta.dtype == dtype and x.is_contiguous() and delta.is_contiguous():
        lines = (1, n * c, positions)
        _, gain, shift = torch.ops.aten.native_group_norm_backward.default(
            delta.view(lines), x.view(lines), *_standard(n * c, dtype, x.device), *lines, n * c,
            [False, True, True],
        )  # fmt: skip
        return gain.view(n, c), shift.view(n, c)
    delta = delta.reshape(n, c, positions)
    product = x.reshape(n, c, positions).to(dtype) * delta
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
        if module.num_parameters == 1:
            return 0
        return ndim - 1

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return x.clamp(max=0)


class Gain(nn.Module):
    """A use z = g ∘ x, or z = x + g, in the place of a module.

    `shape` is that with which g meets x, without leading ones.
    """

    def __init__(self, role: str, parameter: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.__dict__["_parameters"] = {"weight": None, "bias": None, role: parameter}
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, or add."""
        held: Any = self._parameters
        gain = held["weight"]
        shift = held["bias"]
        if gain is None:
            return x + shift.reshape(self.shape)
        return x * gain.reshape(self.shape)


@register(Gain)
class ElementwiseGain(Scale):
    """x̂ is x; axes on which the gain has one entry share it."""

    def features(self, module: Any, ndim: int) -> int:
        return len(module.shape)

    def positions(self, module: Any, ndim: int) -> list[int]:
        return [i - ndim for i, n in enumerate(module.shape) if n == 1]

    def normalized(self, module: Any, x: Tensor) -> Tensor:
        return x
