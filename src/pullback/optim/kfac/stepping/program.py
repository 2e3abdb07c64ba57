r"""The step between statistics written down once: gradients in, the same kernels, parameters moved.

    Δ = F̂⁻¹g,  Δ ← min(1, √δ/√(Σ η²⟨Δ, g⟩)) Δ,  w ← (1 − η·decay)w,  m ← μm + Δ,  w ← w − ηm,

and nothing moves where a gradient is not finite, which the device decides by itself. Rates are
numbers on the device, so that schedules leave what was recorded valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..blocks.curvature import Curvature
from ..statistics.sums import Key
from .control import momentum_of
from .look import finite


class Share:
    """The parameters of one param group that have a gradient."""

    def __init__(self, group: dict[str, Any], names: list[str], like: Mapping[str, Tensor]) -> None:
        self.group, self.names = group, names
        self.params = [like[n] for n in names]
        self.buffers: list[Tensor] = []
        some = self.params[0]
        #: η and η·decay
        self.rates = torch.zeros(2, device=some.device, dtype=_rate_dtype(some.dtype))
        self._now: list[Any] = [None, None]

    @property
    def options(self) -> tuple[Any, ...]:
        """What is part of the kernels."""
        decays, momentum = bool(self.group["weight_decay"]), float(self.group["momentum"])
        # the fused kernel reads η in single precision only
        exact = float(self.group["lr"]) if self.params[0].dtype == torch.float64 else None
        return decays, momentum, exact

    def fits(self, group: dict[str, Any], state: Mapping[Tensor, Any]) -> bool:
        """Whether group and momentum are those that were written down."""
        return self.group is group and all(
            state[p].get("momentum") is m for p, m in zip(self.params, self.buffers, strict=False)
        )

    def set(self, state: Mapping[Tensor, Any]) -> None:
        """Bring the rates to the device, where they changed."""
        if self.group["momentum"] and not self.buffers:
            self.buffers = [momentum_of(state, p) for p in self.params]
        lr, decay = self.group["lr"], self.group["weight_decay"]
        if isinstance(lr, Tensor) and not lr.is_cuda:
            lr = float(lr)
        for i, value in enumerate((lr, lr * decay)):
            if isinstance(value, Tensor):
                self.rates[i].copy_(value, non_blocking=True)
            elif value != self._now[i]:
                self.rates[i].fill_(value)
                self._now[i] = value

    def move(self, deltas: list[Tensor], broken: Tensor) -> None:
        """Decay, momentum and the move itself, unless broken."""
        decays, momentum, exact = self.options
        if decays:
            keep = 1 - self.rates[1] * (1 - broken.to(self.rates.dtype))
            torch._foreach_mul_(self.params, keep)
        torch._fused_sgd_(
            self.params, deltas, self.buffers if momentum else [], weight_decay=0.0,
            momentum=momentum, lr=self.rates[0] if exact is None else exact, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False, grad_scale=None, found_inf=broken,
        )  # fmt: skip


def _rate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class Program:
    """The step for one set of parameters with a gradient and one set of inverses in memory.

    Args:
        curvature: whose inverses are applied.
        parameters: all of the model's, by name.
        names: those with a gradient, per param group.
        groups: the param groups.
        state: where momentum is kept.
        kl_clip: δ, or None.
    """

    def __init__(
        self,
        curvature: Curvature,
        parameters: Mapping[str, Tensor],
        names: Sequence[list[str]],
        groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, Any],
        kl_clip: float | None,
    ) -> None:
        self._curvature, self._like, self._limit = curvature, parameters, kl_clip
        self._shares = [
            Share(g, own, parameters) for g, own in zip(groups, names, strict=True) if own
        ]
        self.names = [n for own in names for n in own]
        self._inverses = curvature.groups
        wanted = set(self.names)
        self._blocks = [x for x in self._inverses if wanted.intersection(x.names)]
        self._turned = [k for k in curvature.turned_keys if wanted.intersection(k.names)]
        self._state = state
        self.params = [parameters[n] for n in self.names]
        self.entries = sum(p.numel() for p in self.params)
        self.good = torch.ones((), dtype=torch.bool, device=self.params[0].device)
        #: stacks that gradients are written to, by group, and all gradients by name
        self._rooms: list[list[Tensor]] | None = None
        self._views: dict[str, Tensor] = {}

    def fits(self, names: Sequence[list[str]], groups: Sequence[dict[str, Any]]) -> bool:
        """Whether inverses, momentum and param groups are where they were."""
        if self._curvature.groups is not self._inverses:
            return False
        own = [(g, n) for g, n in zip(groups, names, strict=True) if n]
        return len(own) == len(self._shares) and all(
            share.names == n and share.fits(g, self._state)
            for share, (g, n) in zip(self._shares, own, strict=True)
        )

    @property
    def options(self) -> tuple[Any, ...]:
        """What a recording depends on beside memory."""
        return (self._limit, *(share.options for share in self._shares))

    def set(self) -> None:
        """Bring the rates to the device."""
        for share in self._shares:
            share.set(self._state)

    def fill(self) -> None:
        """Copy the gradients to where recorded kernels read them."""
        if self._rooms is None:
            self._rooms = []
            for block in self._blocks:
                stacks, views = block.room(self._like)
                self._rooms.append(stacks)
                self._views |= views
            for name, p in zip(self.names, self.params, strict=True):
                if name not in self._views:
                    self._views[name] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        torch._foreach_copy_([self._views[n] for n in self.names], [p.grad for p in self.params])  # pyright: ignore[reportArgumentType]

    def run_filled(self) -> None:
        """The step from gradients that were filled in."""
        assert self._rooms is not None
        given = {n: self._views[n] for n in self.names}
        found: dict[str, Tensor] = {}
        for block, stacks in zip(self._blocks, self._rooms, strict=True):
            found |= block.apply(stacks, self._like)
        self._finish(given, found)

    def run(self) -> None:
        """The step from the gradients as they are."""
        given: Any = {n: p.grad for n, p in zip(self.names, self.params, strict=True)}
        found: dict[str, Tensor] = {}
        for block in self._blocks:
            found |= block(given, self._like)
        self._finish(given, found)

    def _finish(self, gradients: Mapping[str, Tensor], found: dict[str, Tensor]) -> None:
        self.good.copy_(finite(list(gradients.values())))
        broken = 1 - self.good.float()
        for key in self._turned:
            found |= self._turn(key, gradients)
        directions = {n: _laid(found.get(n, g), self._like[n]) for n, g in gradients.items()}
        shrink = self._shrink(gradients, directions)
        for share in self._shares:
            deltas = [directions[n] for n in share.names]
            if shrink is not None:
                deltas = list(torch._foreach_mul(deltas, shrink.to(deltas[0].dtype)))
            share.move(deltas, broken)

    def _turn(self, key: Key, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._curvature.turn(key, gradients, self._like)

    def _shrink(
        self, gradients: Mapping[str, Tensor], directions: Mapping[str, Tensor]
    ) -> Tensor | None:
        """The factor that keeps η²·ΔᵀF̂Δ ≤ δ."""
        if self._limit is None:
            return None
        total = torch.zeros_like(self._shares[0].rates[0])
        for share in self._shares:
            dots = [torch.sum(directions[n] * gradients[n]) for n in share.names]
            total = total + share.rates[0].square() * torch.stack(dots).to(total.dtype).sum()
        tiny = torch.finfo(total.dtype).tiny
        return (self._limit / total.clamp(min=tiny)).sqrt().clamp(max=1.0)


def _laid(delta: Tensor, p: Tensor) -> Tensor:
    """A direction in its parameter's dtype and memory layout."""
    if delta.dtype == p.dtype and delta.stride() == p.stride():
        return delta
    return torch.empty_like(p).copy_(delta)
