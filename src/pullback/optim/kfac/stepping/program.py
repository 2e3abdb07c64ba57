r"""The step between statistics written down once: gradients in, the same kernels, parameters moved.

    Δ = F̂⁻¹g,  Δ ← Δ/√max(1, Σ η²⟨Δ, g⟩/δ),  w ← (1 − η·decay)w,  m ← μm + Δ,  w ← w − ηm,

and nothing moves where a direction is not finite, which the device decides by itself (a gradient
that is not finite makes its block's direction so). Rates are numbers on the device, so that
schedules leave what was recorded valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...._core.space import compute_dtype
from ..blocks.curvature import Curvature
from ..blocks.group import Group
from .control import momentum_of
from .rooms import Plan, Rooms, Stack


class Share:
    """The parameters of one param group that have a gradient."""

    def __init__(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        directions: list[Tensor],
        kl_clip: float | None,
    ) -> None:
        self.group, self.params, self._limit = group, params, kl_clip
        self._directions = directions
        self.buffers: list[Tensor] = []
        some = params[0]
        self._double = some.dtype == torch.float64
        self._cast = any(d.dtype != some.dtype for d in directions)
        #: η, 1 − η·decay, η²/δ and 1
        self.rates = torch.ones(
            4, device=some.device, dtype=torch.float64 if self._double else torch.float32
        )
        self._now: list[Any] = [None] * 3

    @property
    def options(self) -> tuple[Any, ...]:
        """What is part of the kernels."""
        decays, momentum = bool(self.group["weight_decay"]), float(self.group["momentum"])
        # the fused kernel reads η in single precision only
        return decays, momentum, float(self.group["lr"]) if self._double else None

    def fits(self, group: dict[str, Any], state: Mapping[Tensor, Any]) -> bool:
        """Whether group and momentum are those that were written down."""
        if self.group is not group:
            return False
        pairs = zip(self.params, self.buffers, strict=False)
        return all([state[p].get("momentum") is m for p, m in pairs])

    def set(self, state: Mapping[Tensor, Any]) -> None:
        """Bring the rates to the device, where they changed."""
        if self.group["momentum"] and not self.buffers:
            self.buffers = [momentum_of(state, p) for p in self.params]
        lr, decay = self.group["lr"], self.group["weight_decay"]
        if isinstance(lr, Tensor) and not lr.is_cuda:
            lr = float(lr)
        square = 1.0 if self._limit is None else lr * lr / self._limit
        for i, value in enumerate((lr, 1 - lr * decay, square)):
            if isinstance(value, Tensor):
                self.rates[i].copy_(value.reshape(()), non_blocking=True)
            elif value != self._now[i]:
                self.rates[i].fill_(value)
                self._now[i] = value

    def move(self, longer: Tensor | None, good: Tensor, broken: Tensor) -> None:
        """Decay, momentum and the move itself by directions over `longer`, if they are good."""
        decays, momentum, exact = self.options
        if decays:
            torch._foreach_mul_(self.params, torch.where(good, self.rates[1], self.rates[3]))
        deltas = self._directions
        if self._cast:
            deltas = [torch.empty_like(p) for p in self.params]
            torch._foreach_copy_(deltas, self._directions)
        if longer is not None and self._double:  # which the fused kernel knows in single precision
            torch._foreach_div_(deltas, longer)
            longer = None
        torch._fused_sgd_(
            self.params, deltas, self.buffers if momentum else [], weight_decay=0.0,
            momentum=momentum, lr=self.rates[0] if exact is None else exact, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False, grad_scale=longer,
            found_inf=broken,
        )  # fmt: skip


class Program:
    """The step for one set of parameters with a gradient and one set of inverses in memory.

    Without a limit directions are written over the gradients' copies.

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
        self._curvature, self._like, self._state = curvature, parameters, state
        self.names, self._own = [n for own in names for n in own], [list(own) for own in names]
        self.params = [parameters[n] for n in self.names]
        self.entries = sum(p.numel() for p in self.params)
        self._inverses, wanted = curvature.groups, set(self.names)
        self._turned = [k for k in curvature.turned_keys if wanted.intersection(k.names)]
        blocks = [x for x in self._inverses if wanted.intersection(x.names)]
        some, plan = self.params[0], Plan(blocks, parameters, [own for own in names if own])
        self._given = self._found = Rooms(plan, some.device)
        if kl_clip is not None:
            self._found = Rooms(plan, some.device)
        self._tasks: list[tuple[Group, list[tuple[str, Stack, Stack]]]] = []
        #: parameters that are multiplied by themselves: what their gradients are read as
        self._alone: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        #: gradients that are read where they lie
        self._there: dict[str, Tensor] = {}
        for block in blocks:
            block.check(parameters)
            own = [(n[0], self._given.stack(n, s), self._found.stack(n, s)) for n, s in block.slabs]
            self._tasks.append((block, own))
            self._alone |= {n[0]: (block.dtype, s) for n, s in block.slabs if len(n) == 1}
        held = {n for x in blocks for n in x.names}
        self._loose = [n for n in self.names if n not in held]
        self._shares = [
            Share(g, [parameters[n] for n in own], [self._found.views[n] for n in own], kl_clip)
            for g, own in zip(groups, names, strict=True)
            if own
        ]
        self._limit, self._spans = kl_clip, plan.spans()
        self.good = torch.ones((), dtype=torch.bool, device=some.device)
        self._broken = torch.zeros((), dtype=torch.float32, device=some.device)

    def fits(self, names: Sequence[list[str]], groups: Sequence[dict[str, Any]]) -> bool:
        """Whether inverses, momentum and param groups are where they were."""
        if self._curvature.groups is not self._inverses or names != self._own:
            return False
        own = [g for g, n in zip(groups, names, strict=True) if n]
        return all(x.fits(g, self._state) for x, g in zip(self._shares, own, strict=True))

    @property
    def options(self) -> tuple[Any, ...]:
        """What a recording depends on beside memory."""
        return (self._limit, *(share.options for share in self._shares))

    def fill(self, *, once: bool = False) -> None:
        """Bring rates and gradients to where the kernels read them.

        Where these run once, and nobody compares the directions with the gradients, a gradient
        that is not stacked with others may stay where it is.
        """
        for share in self._shares:
            share.set(self._state)
        self._given.hold()
        if self._found is not self._given:
            self._found.hold()
        given: Any = {n: p.grad for n, p in zip(self.names, self.params, strict=True)}
        if once and self._found is self._given:
            for name, (dtype, shape) in self._alone.items():
                g = given.get(name)
                if g is not None and g.dtype == dtype and g.is_contiguous():
                    self._there[name] = given.pop(name).view(shape)
        torch._foreach_copy_([self._given.views[n] for n in given], list(given.values()))

    def release(self) -> None:
        """Give back the memory that gradients were brought to."""
        self._given.release()
        self._found.release()
        self._there = {}

    def run(self) -> None:
        """The step from gradients that were filled in."""
        for block, slabs in self._tasks:
            given = [self._there[n] if n in self._there else g.read() for n, g, _ in slabs]
            found = block.directions(given, [d.direct for *_, d in slabs])
            for (*_, stack), whole in zip(slabs, found, strict=True):
                stack.write(whole)
        self._run_loose()
        total = self._total()
        nothing = total * 0  # or NaN
        torch.eq(nothing, nothing, out=self.good)
        torch.ne(nothing, nothing, out=self._broken)
        longer = None if self._limit is None else total.clamp(min=1.0).sqrt()
        for share in self._shares:
            share.move(longer, self.good, self._broken)

    def _run_loose(self) -> None:
        """Blocks held by their eigenbases, and parameters that have no block."""
        if not self._loose:
            return
        given, views = {n: self._given.views[n] for n in self.names}, self._found.views
        found: dict[str, Tensor] = {}
        for key in self._turned:
            found |= self._curvature.turn(key, given, self._like)
        new = given if self._found is not self._given else {}
        pairs = [(views[n], found.get(n, new.get(n))) for n in self._loose]
        pairs = [(room, t) for room, t in pairs if t is not None]
        if pairs:
            torch._foreach_copy_([room for room, _ in pairs], [t for _, t in pairs])

    def _total(self) -> Tensor:
        """Σ η²⟨Δ, g⟩/δ, or some number that is finite where all directions are."""
        given, found = self._given.flat, self._found.flat
        if self._limit is None:
            norms = [torch.linalg.vector_norm(t, dtype=compute_dtype(d)) for d, t in found.items()]
            return norms[0] if len(norms) == 1 else sum(norms[1:], norms[0])
        total = None
        for dtype, share, a, b in self._spans:
            rate = self._shares[share].rates[2]
            dot = torch.dot(given[dtype][a:b], found[dtype][a:b]).to(rate.dtype)
            total = dot * rate if total is None else torch.addcmul(total, dot, rate)
        assert total is not None
        return total
