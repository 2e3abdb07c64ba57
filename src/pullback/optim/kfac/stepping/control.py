"""From directions to a move: clipping, decay, momentum, and whether the move is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....steps.quadratic import best_factors
from ..blocks.damping import Adaptive
from ..source import Source

if TYPE_CHECKING:
    from ..optimizer import KFAC


class Control:
    """One move of the parameters along the given directions."""

    def __init__(
        self,
        optimizer: KFAC,
        params: Mapping[str, nn.Parameter],
        directions: dict[str, Tensor],
        source: Source,
    ) -> None:
        self._opt, self._params, self._source = optimizer, params, source
        self._directions = directions
        #: actual over predicted reduction
        self.ratio: float | None = None
        #: learning rate and momentum that the quadratic model found best
        self.factors: tuple[float | None, float | None] = (None, None)

    def move(self) -> tuple[bool, str]:
        """Move; where the damping is adaptive, look at the loss and perhaps take it back."""
        damping = self._opt.damping
        if not isinstance(damping, Adaptive):
            self._apply()
            return True, ""
        before = {n: p.detach().clone() for n, p in self._params.items()}
        self._apply(decay=False)  # which the loss knows nothing of
        moved = {n: before[n] - p for n, p in self._params.items()}
        loss = self._source.again()
        assert self._source.loss is not None
        actual = self._source.loss - loss
        for name, p in self._params.items():  # the model is that of where we came from
            p.copy_(before[name])
        slope = sum(float(torch.sum(m * self._gradient(n))) for n, m in moved.items())
        predicted = slope - 0.5 * float(self._source.products([moved])[0][0])
        self.ratio = actual / predicted if predicted else float("nan")
        memory, rejected = self._opt._memory, not actual >= 0
        memory["damping"] = damping.next(memory["damping"], -1.0 if rejected else self.ratio)
        if rejected:
            for p in self._params.values():
                self._buffer(p).zero_()  # which no damping makes shorter
            memory["again"] = True
            return False, "the loss rose"
        self._decay()
        for name, p in self._params.items():
            p.sub_(moved[name])
        return True, ""

    def _decay(self) -> None:
        """w ← (1 − η·weight_decay)w."""
        for group in self._opt.param_groups:
            if group["weight_decay"]:
                chosen = [p for p in group["params"] if p.grad is not None and p.requires_grad]
                shrunk = 1 - float(group["lr"]) * float(group["weight_decay"])
                torch._foreach_mul_(chosen, shrunk)

    def _gradient(self, name: str) -> Tensor:
        gradient = self._params[name].grad
        assert gradient is not None
        return gradient

    def _buffer(self, p: Tensor) -> Tensor:
        return momentum_of(self._opt.state, p)

    def _apply(self, *, decay: bool = True) -> None:
        shrink = self._shrink()
        if decay:
            self._decay()
        if self._opt.rule is not None:
            self._combine()
        for group in self._opt.param_groups:
            names = [self._opt._names[id(p)] for p in group["params"]]
            chosen: list[Tensor] = [self._params[n] for n in names if n in self._directions]
            if not chosen:
                continue
            lr, momentum = float(group["lr"]), float(group["momentum"])
            deltas: Any = [
                self._directions[n].to(self._params[n].dtype)
                for n in names
                if n in self._directions
            ]
            if shrink is not None:
                deltas = torch._foreach_mul(deltas, shrink)
            if not momentum or self._opt.rule is not None:
                torch._foreach_add_(chosen, deltas, alpha=-lr)
            else:
                advance(chosen, deltas, [self._buffer(p) for p in chosen], lr, momentum)

    def _combine(self) -> None:
        """The best αΔ + βm in the plane of direction and last move, by the exact model."""
        rule, names = self._opt.rule, list(self._params)
        assert rule is not None
        span = [self._directions]
        if rule.momentum and all("momentum" in self._opt.state[p] for p in self._params.values()):
            span.append({n: self._buffer(p) for n, p in self._params.items()})
        products = self._source.products(span)
        lengths = [[sum_of(x, y, names) for y in span] for x in span]
        gradients = {n: self._gradient(n) for n in names}
        slopes = [sum_of(gradients, x, names) for x in span]
        # a multiple of references is no multiple of the identity
        damping = 0.0 if self._opt.damping.referenced else self._opt._memory["damping"]
        c = best_factors(slopes, products, lengths, damping)
        self._directions = {
            n: sum((f * x[n] for f, x in zip(c[1:], span[1:], strict=True)), c[0] * span[0][n])
            for n in names
        }
        self.factors = (float(c[0]), float(c[1]) if len(c) > 1 else None)
        for n, p in self._params.items():
            self._buffer(p).copy_(self._directions[n])

    def _shrink(self) -> Tensor | None:
        """The factor that keeps η²·ΔᵀF̂Δ ≤ δ; ΔᵀF̂Δ ≤ Δᵀg, with equality without damping."""
        limit = self._opt.kl_clip
        if limit is None:
            return None
        dots = []
        for group in self._opt.param_groups:
            for p in group["params"]:
                name = self._opt._names[id(p)]
                if name in self._directions and p.grad is not None:
                    d = self._directions[name]
                    dots.append(float(group["lr"]) ** 2 * torch.sum(d * p.grad.to(d.dtype)))
        total = torch.stack([d.to(dots[0]) for d in dots]).sum()
        tiny = torch.finfo(total.dtype).tiny
        return (limit / total.clamp(min=tiny)).sqrt().clamp(max=1.0)


def advance(
    params: list[Tensor], deltas: list[Tensor], buffers: list[Tensor], lr: float, momentum: float
) -> None:
    """m ← μm + Δ, w ← w − ηm: in one pass over the memory where the kernel knows it."""
    first, every = params[0], [*params, *deltas, *buffers]
    plain = first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64)
    if plain and all(t.is_contiguous() and _alike(t, first) for t in every):
        torch._fused_sgd_(
            params, deltas, buffers, weight_decay=0.0, momentum=momentum, lr=lr, dampening=0.0,
            nesterov=False, maximize=False, is_first_step=False, grad_scale=None, found_inf=None,
        )  # fmt: skip
        return
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, deltas)
    torch._foreach_add_(params, buffers, alpha=-lr)


def _alike(one: Tensor, two: Tensor) -> bool:
    return one.device == two.device and one.dtype == two.dtype


def momentum_of(state: Mapping[Tensor, Any], p: Tensor) -> Tensor:
    """The parameter's momentum, on its device."""
    own = state[p]
    if "momentum" not in own:
        own["momentum"] = torch.zeros_like(p)
    elif own["momentum"].device != p.device or own["momentum"].dtype != p.dtype:
        own["momentum"] = own["momentum"].to(p)
    return own["momentum"]


def sum_of(x: Mapping[str, Tensor], y: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """⟨x, y⟩ over all parameters."""
    return torch.stack([torch.sum(x[n].double() * y[n].double()) for n in names]).sum()
