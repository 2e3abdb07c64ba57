r"""The first-order model f₀(x) + J(x)(w − w₀), trainable as any module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from .._core.attention import unfused_attention
from .._core.capture import Selector, plain, select
from .._core.errors import reraise_fatal
from ..maps.module import refuse_coupled
from .tangent import Tangent


class Linearized(nn.Module):
    """x ↦ φ(w₀)(x) + dφ_{w₀}(w − w₀)(x), linear in its parameters w.

    w starts at w₀ and is what an optimizer moves (`weights.parameters()`); w₀ is kept in buffers.
    Gradients in w flow through, so the model can be trained: its training is exactly the kernel
    regression with the NTK at w₀ that `predict` computes. `train()` and `eval()` leave the network
    in the mode that it was linearized in: f₀ is one function.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor] | None, output: Selector):
        super().__init__()
        tangent = Tangent(model, params)
        refuse_coupled(plain(model))
        self.weights = copy.deepcopy(plain(model))
        own = dict(self.weights.named_parameters())
        self._names = tuple(tangent.params)
        self._output = output
        self._forward_mode = True
        for name, parameter in own.items():
            parameter.requires_grad_(name in self._names)
        for i, name in enumerate(self._names):
            origin = tangent.params[name]
            own[name].data.copy_(origin)
            self.register_buffer(f"origin_{i}", origin)

    def train(self, mode: bool = True) -> Linearized:
        """Set this module's flag alone."""
        self.training = mode
        return self

    def origin(self) -> dict[str, Tensor]:
        """w₀ by name."""
        return {name: getattr(self, f"origin_{i}") for i, name in enumerate(self._names)}

    def forward(self, *args: Any, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """The value at w, or at `params`; those not given stay at w₀."""
        own = dict(self.weights.named_parameters())
        w = {n: own[n] for n in self._names} if params is None else {**self.origin(), **params}
        fixed = {n: p.detach() for n, p in own.items() if n not in self._names}
        move = {n: w[n] - o for n, o in self.origin().items()}

        def function(p: dict[str, Tensor]) -> Tensor:
            out = functional_call(self.weights, {**fixed, **p}, args)
            return select(out, self._output)

        if self._forward_mode:
            try:
                with unfused_attention():  # the fused one has no forward mode
                    value, change, *_ = jvp(function, (self.origin(),), (move,))
                return value + change
            except (RuntimeError, NotImplementedError) as error:
                reraise_fatal(error)
                self._forward_mode = False  # nor has a recurrent cell
        value, pull, *_ = vjp(function, self.origin())
        push = vjp(lambda u: pull(u)[0], torch.zeros_like(value))[1]  # u ↦ Jᵀu is linear
        return value + push(move)[0]


def linearize(
    model: nn.Module, params: Mapping[str, Tensor] | None = None, *, output: Selector = None
) -> Linearized:
    """The first-order model of a network at its present parameters, or at `params`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> first = linearize(model)
    >>> x = torch.randn(4, 2)
    >>> torch.equal(first(x), model(x))
    True
    """
    return Linearized(model, params, output)
