"""Any `nn.Module` as a map, through functional calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn
from torch.func import functional_call

from .._core.capture import Call, Selector, plain, select
from .._core.errors import PullbackError
from .._core.space import ParameterSpace, compute_dtype
from .base import Linearization, Map, Pulled
from .record import Recorder
from .structure import Structure


class ModuleMap(Map):
    """w ↦ model(*args, **kwargs) for a recorded call, over a subset of the parameters.

    Args:
        model: any module; behind `torch.compile` the module itself is differentiated.
        call: the arguments (`Call.of(x)` for plain inputs), with random state and autocast
            mode where they were recorded.
        output: which tensor of a structured output is z.
        batch_dim: the axis of z that counts samples.
        plans: a dict that keeps what was established about the model's structure
            between linearizations.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        *,
        output: Selector = None,
        batch_dim: int = 0,
        plans: dict[Any, Structure] | None = None,
    ) -> None:
        self.model, self.call = plain(model), call
        self.output, self.batch_dim = output, batch_dim
        self.plans = {} if plans is None else plans
        refuse_coupled(self.model)

    def value(self, output: Any) -> Tensor:
        """z from the model's output: samples first, at least one event axis."""
        z = select(output, self.output)
        if z.ndim == 0:
            raise PullbackError(
                "The model's output is a single number",
                "it has no batch axis, so there are no samples to average over",
                "Return one value per sample",
            )
        z = z.movedim(self.batch_dim, 0)
        if z.shape[0] == 0:
            raise PullbackError(
                "The batch is empty", f"the output has shape {tuple(z.shape)}", "Skip empty batches"
            )
        return z.unsqueeze(-1) if z.ndim == 1 else z

    def call_with(self, params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """z at other parameters; buffers are read, never written."""
        buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        return self.value(functional_call(self.model, {**buffers, **params}, args, kwargs))

    def linearize(self, params: Mapping[str, Tensor]) -> ModuleLinearization:
        """φ(w) with a graph that is kept for many pullbacks."""
        return ModuleLinearization(self, params)


class ModuleLinearization(Linearization):
    """A replayed forward pass with its layers' inputs and the places where cotangents appear."""

    def __init__(self, source: ModuleMap, params: Mapping[str, Tensor]) -> None:
        self.map = source
        self.space = ParameterSpace(params)
        self._leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        self._recorder = Recorder(source.model, self._leaves)
        call = source.call
        with torch.enable_grad(), call.replaying(), self._recorder:
            self.graph = source.call_with(self._leaves, *call.args, **call.kwargs)
        self.value = self.graph.detach().to(compute_dtype(self.graph.dtype))

    def jvp(self, v: Tensor) -> Tensor:
        """J v by forward-mode differentiation; by two reverse passes where that is missing."""
        call, source = self.map.call, self.map
        try:
            with torch.no_grad(), fwad.dual_level(), call.replaying():
                dual = {
                    n: fwad.make_dual(p.detach(), t.to(p.dtype))
                    for (n, p), t in zip(
                        self._leaves.items(), self.space.split(v).values(), strict=True
                    )
                }
                z = source.call_with(dual, *call.args, **call.kwargs)
                tangent = fwad.unpack_dual(z).tangent
        except (RuntimeError, NotImplementedError):
            return self._double_vjp(v)
        return torch.zeros_like(self.value) if tangent is None else tangent.to(self.value.dtype)

    def _double_vjp(self, v: Tensor) -> Tensor:
        """J v as the derivative of u ↦ ⟨Jᵀu, v⟩."""
        u = torch.zeros_like(self.graph, requires_grad=True)
        with torch.enable_grad():
            pulled = torch.autograd.grad(
                self.graph, list(self._leaves.values()), u, create_graph=True, allow_unused=True
            )
            total = sum(
                (p * t.to(p.dtype)).sum()
                for p, t in zip(pulled, self.space.split(v).values(), strict=True)
                if p is not None
            )
        if not isinstance(total, Tensor) or not total.requires_grad:
            return torch.zeros_like(self.value)
        return torch.autograd.grad(total, u, retain_graph=True)[0].to(self.value.dtype)

    def vjp(self, u: Tensor) -> Tensor:
        return self.space.flatten(self.gradients(u, list(self._leaves.values())))

    def gradients(self, u: Tensor, inputs: list[Any]) -> tuple[Tensor | None, ...]:
        """Autograd's answer for parameters or for the layers' outputs; the graph is kept."""
        return torch.autograd.grad(
            self.graph, inputs, u.to(self.graph.dtype), retain_graph=True, allow_unused=True
        )

    def pullback(self, covectors: Tensor) -> Pulled:
        """The rows in factored form where the layers have structure, materialized elsewhere."""
        key = self._recorder.signature(self.map.call)
        plan = self.map.plans.get(key)
        if plan is None:
            plan = self.map.plans[key] = Structure.establish(self, self._recorder)
        return plan.pullback(self, self._recorder, covectors)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The parameters the graph was built on."""
        return self._leaves


def refuse_coupled(model: nn.Module) -> None:
    """Raise where a module mixes the samples of a batch."""
    for name, module in model.named_modules():
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if norm and (module.training or module.running_mean is None):
            raise PullbackError(
                f"{type(module).__name__} {name!r} couples the samples of a batch",
                "in training mode each output depends on all inputs, so there is no tangent "
                "vector per sample",
                "Call .eval() on it, freeze its statistics, or use GroupNorm or LayerNorm",
            )
