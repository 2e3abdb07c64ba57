"""K-FAC as one would write it down first: the peer that the library's is measured against.

Hooks keep each layer's input and the loss's own cotangent (the empirical Fisher); factors are full
matrix products of unfolded inputs with a column of ones, inverses come from Cholesky factors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LONGEST = 8192  # a longer side of a layer has a diagonal factor, or the layer takes SGD steps


class NaiveKFAC(torch.optim.SGD):
    """SGD with momentum on gradients of `Linear` and `Conv2d` layers multiplied by A⁻¹ and G⁻¹."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        damping: float = 1e-3,
        momentum: float = 0.9,
        ema: float = 0.95,
        statistics_every: int = 10,
        invert_every: int = 100,
    ) -> None:
        super().__init__(model.parameters(), lr=lr, momentum=momentum)
        self.damping = damping
        self.ema = ema
        self.statistics_every = statistics_every
        self.invert_every = invert_every
        self.steps = 0
        layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        self.layers = [m for m in layers if max(len(m.weight), m.weight[0].numel()) <= LONGEST]
        self.factors: dict[nn.Module, list[Tensor]] = {}
        self.inverses: dict[nn.Module, list[Tensor]] = {}
        self._inputs: dict[nn.Module, Tensor] = {}
        self._new: dict[nn.Module, list[Tensor]] = {}
        for m in self.layers:
            m.register_forward_hook(self._forward)
            m.register_full_backward_hook(self._backward)

    @property
    def _due(self) -> bool:
        return self.steps % self.statistics_every == 0

    def _forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._due and torch.is_grad_enabled():
            self._inputs[module] = args[0].detach()

    @torch.no_grad()
    def _backward(self, module: Any, grad_input: Any, grad_output: Any) -> None:
        if not self._due:
            return
        dtype = module.weight.dtype
        a = self._inputs.pop(module).to(dtype)
        d = grad_output[0].to(dtype)
        n = len(a)
        if isinstance(module, nn.Conv2d):
            a = F.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride)  # pyright: ignore[reportArgumentType]
            a = a.mT
            d = d.flatten(2).mT
        a = a.reshape(-1, a.shape[-1])
        d = d.reshape(-1, d.shape[-1])
        if module.bias is not None:
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        self._new[module] = [a.T @ a / len(a), d.T @ d * n]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for module, new in self._new.items():
            old = self.factors.get(module)
            if old is None:
                self.factors[module] = new
                continue
            pairs = zip(old, new, strict=True)
            self.factors[module] = [self.ema * x + (1 - self.ema) * y for x, y in pairs]
        self._new.clear()
        if self.steps % self.invert_every == 0:
            self.inverses = {m: self._invert(*self.factors[m]) for m in self.factors}
        for m, (left, right) in self.inverses.items():
            self._precondition(m, left, right)
        self.steps += 1
        return super().step(closure)

    def _invert(self, a: Tensor, g: Tensor) -> list[Tensor]:
        pi = ((a.trace() / len(a)) / (g.trace() / len(g)).clamp(min=1e-30)).sqrt()
        root = self.damping**0.5
        eyes = [torch.eye(len(x), device=x.device, dtype=x.dtype) for x in (g, a)]
        shifted = [g + root / pi * eyes[0], a + root * pi * eyes[1]]
        return [torch.cholesky_inverse(torch.linalg.cholesky(x)) for x in shifted]

    def _precondition(self, module: Any, left: Tensor, right: Tensor) -> None:
        weight = module.weight
        bias = module.bias
        v = weight.grad.flatten(1)
        if bias is not None:
            v = torch.cat([v, bias.grad[:, None]], 1)
        v = left @ v @ right
        if bias is not None:
            bias.grad.copy_(v[:, -1])
            v = v[:, :-1]
        weight.grad.copy_(v.reshape(weight.shape))
