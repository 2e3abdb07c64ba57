"""Any `nn.Module` as a map, through functional calls.

What was established about a model's structure is kept for later calls while its graph is the same.
Which axis counts the samples and whether layers explain a parameter follow from the operations of
a forward pass and from how they are joined, not from the numbers that pass through. So the plan of
one call serves another whose autograd graph has the same nodes, joined alike, over the same
parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.autograd.forward_ad as fwad
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .._core.capture import Call, Selector, move_samples_first, select_output, unwrap_model
from .._core.errors import PullbackError, reraise_fatal
from .._core.factor import Factor
from .._core.graph import disable_fused_attention
from .._core.space import ParameterSpace, relative_tolerance
from .base import Linearization, Map, Pulled
from .record import Recorder
from .structure import LayerStructure


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
        coupled: accept modules that mix the samples of a batch, which have no rows per sample.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        *,
        output: Selector = None,
        batch_dim: int = 0,
        plans: dict[Any, Any] | None = None,
        coupled: bool = False,
    ) -> None:
        self.model = unwrap_model(model)
        self.call = call
        self.output = output
        self.batch_dim = batch_dim
        if plans is None:
            self.plans = {}
        else:
            self.plans = plans
        if not coupled:
            refuse_coupled(self.model)

    def value(self, output: Any) -> Tensor:
        """z from the model's output: samples first, at least one event axis."""
        return self.arranged(select_output(output, self.output))

    def arranged(self, z: Tensor) -> Tensor:
        """The selected tensor, or its cotangent: samples first, at least one event axis."""
        return move_samples_first(z, self.batch_dim)

    def call_with(self, params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """z at other parameters; buffers are read as the call found them, never written."""
        recorded = self.call.buffers
        if recorded is None:
            buffers = dict(self.model.named_buffers())
        else:
            buffers = recorded
        buffers = {n: b.clone() for n, b in buffers.items()}
        tensors = in_every_slot(self.model, {**buffers, **params})
        return self.value(
            functional_call(self.model, tensors, args, kwargs, tie_weights=False, strict=False)
        )

    def linearize(self, params: Mapping[str, Tensor]) -> ModuleLinearization:
        """φ(w) with a graph that is kept for many pullbacks."""
        return ModuleLinearization(self, params)


class ModuleLinearization(Linearization):
    """A replayed forward pass with its layers' inputs and the positions where cotangents appear."""

    def __init__(self, source: ModuleMap, params: Mapping[str, Tensor]) -> None:
        self.map = source
        self.space = ParameterSpace(params)
        #: the parameters the graph is built on
        self.leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        self._recorder = Recorder(source.model, self.leaves)
        call = source.call
        listened = ("listening", *((tuple(t.shape), t.dtype) for t in call.tensors))
        self._recorder.sites.listening = source.plans.get(listened, True)
        with torch.enable_grad(), call.replay_context(), self._recorder:
            self.graph = source.call_with(self.leaves, *call.args, **call.kwargs)
        source.plans[listened] = self._recorder.sites.listening
        #: the uses of known layers in the pass
        self.entries = self._recorder.entries
        self.value = self.graph.detach().to(self.space.dtype)
        self._refuse_another_output()

    def _refuse_another_output(self) -> None:
        """Raise where the replayed pass is not the one that was recorded."""
        recorded = self.map.call.recorded_output()
        if recorded is None:
            return
        before = self.map.arranged(recorded).to(self.value.dtype)
        now = self.value
        limit = relative_tolerance(self.graph.dtype, 10)
        same = before.shape == now.shape and (now - before).norm() <= limit * before.norm()
        if bool(same) or not bool(torch.isfinite(before).all()):
            return
        raise PullbackError(
            "The forward pass cannot be repeated",
            "run again on the same inputs it gave another output: the model keeps a state or a "
            "random generator of its own, or the closure changed its mode (train, eval) after it",
            "Keep state in buffers, use torch's global random generator, and set the mode "
            "outside the closure",
        )

    def jvp(self, v: Tensor) -> Tensor:
        """J v by forward-mode differentiation; by two reverse passes where that fails.

        Which way serves is proved once per model and shape: an embedding's padding row has a
        forward mode that its reverse mode does not share.
        """
        key = ("jvp", self._recorder.signature(self.map.call))
        ways = (self._forward_mode, self._double_vjp)
        if key not in self.map.plans:
            found = next((i for i, way in enumerate(ways) if self._adjoint(way)), None)
            if found is None:
                raise PullbackError(
                    "J v cannot be computed for this model",
                    "an operation in it has neither a forward-mode nor a second derivative",
                    'Give the operation a jvp, or use gram="rows" or "kernel" with a solver that '
                    "factorizes; in KFAC leave out Adaptive damping and step=",
                )
            self.map.plans[key] = found
        return ways[self.map.plans[key]](v)

    def _adjoint(self, push: Callable[[Tensor], Tensor]) -> bool:
        """Whether ⟨J v, u⟩ = ⟨v, Jᵀu⟩ for random u and v."""
        generator = torch.Generator().manual_seed(2)
        v, u = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.value)
            for shape in (self.space.size, self.value.shape)
        )
        try:
            pushed = push(v)
            pulled = self.vjp(u)
        except (RuntimeError, NotImplementedError) as error:
            reraise_fatal(error)
            return False
        scale = pushed.norm() * u.norm() + v.norm() * pulled.norm()
        gap = ((pushed * u).sum() - v @ pulled).abs()
        return bool(gap <= torch.finfo(self.graph.dtype).eps ** 0.5 * scale)

    def _forward_mode(self, v: Tensor) -> Tensor:
        call = self.map.call
        source = self.map
        pieces = self.space.split(v)
        # fused attention has no forward mode, plain matrix products have
        with torch.no_grad(), fwad.dual_level(), call.replay_context(), disable_fused_attention():
            dual = {
                n: fwad.make_dual(p.detach(), pieces[n].to(p.dtype)) for n, p in self.leaves.items()
            }
            z = source.call_with(dual, *call.args, **call.kwargs)
            tangent = fwad.unpack_dual(z).tangent
        if tangent is None:
            return torch.zeros_like(self.value)
        return tangent.to(self.value.dtype)

    def _double_vjp(self, v: Tensor) -> Tensor:
        """J v as the derivative of u ↦ ⟨Jᵀu, v⟩."""
        z = self.graph
        pieces = self.space.split(v)
        u = torch.zeros_like(z, requires_grad=True)
        leaves = list(self.leaves.values())
        with torch.enable_grad():
            pulled = torch.autograd.grad(z, leaves, u, create_graph=True, allow_unused=True)
            pairs = zip(pulled, pieces.values(), strict=True)
            total = sum((p * one.to(p.dtype)).sum() for p, one in pairs if p is not None)
        if not isinstance(total, Tensor) or not total.requires_grad:
            return torch.zeros_like(self.value)
        return torch.autograd.grad(total, u, retain_graph=True)[0].to(self.value.dtype)

    def vjp(self, u: Tensor) -> Tensor:
        return self.space.flatten(self.gradients(u, list(self.leaves.values())))

    def closed_form(self, factor: Factor) -> Any:
        """The answer of the model's own `pullback_gram(linearization, factor)`, if it has one."""
        offer = getattr(self.map.model, "pullback_gram", None)
        if offer is None:
            return None
        return offer(self, factor)

    def gradients(
        self, u: Tensor, inputs: list[Any], *, batched: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Autograd's answer for parameters or for the layers' outputs; the graph is kept.

        `batched` covectors u (R, N, *event) are pulled back side by side, by torch.func's rules:
        those of `is_grads_batched` take many operations covector by covector.
        """
        used: list[bool] = []

        def pull(one: Tensor) -> tuple[Tensor, ...]:
            found = torch.autograd.grad(
                self.graph, inputs, one, retain_graph=True, allow_unused=True
            )
            used[:] = [g is not None for g in found]
            return tuple(g for g in found if g is not None)

        u = u.to(self.graph.dtype)
        pulled = iter(vmap(pull)(u) if batched else pull(u))
        return tuple(next(pulled) if some else None for some in used)

    def pullback(self, covectors: Tensor) -> Pulled:
        """The rows in factored form where the layers have structure, materialized elsewhere."""
        key = self._recorder.signature(self.map.call)
        plan = self.map.plans.get(key)
        if plan is None:
            plan = LayerStructure.establish(self)
            if plan.settled:
                self.map.plans[key] = plan
        return plan.pullback(self, covectors)

    @property
    def footprint(self) -> int:
        """Entries that pulling one covector a sample back holds, roughly: at layers, or as rows."""
        entries = self.entries
        known = {name for e in entries for name in e.names.values()}
        rest = sum(p.numel() for n, p in self.leaves.items() if n not in known)
        return sum(prod(e.shape) for e in entries) + self.value.shape[0] * rest

    @property
    def widest(self) -> int:
        """Multiply-adds that pulling one covector a sample back takes at one layer, at most."""
        found = [0]
        for e in self.entries:
            weights = [w for w in e.layer.parameters(e.module).values() if w is not None]
            found += [prod(e.shape) * prod(w.shape[1:]) for w in weights]
        return max(found)


def in_every_slot(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the name of each module that holds them, each module named once.

    torch's own `tie_weights` names a module twice that is used twice, and then puts the
    replacement back in the place of the parameter.
    """
    slots = {
        f"{path}.{key}" if path else key: id(held)
        for path, module in model.named_modules()
        for key, held in (*module._parameters.items(), *module._buffers.items())
        if held is not None
    }
    by_id = {slots[name]: tensor for name, tensor in tensors.items()}
    return {name: by_id[held] for name, held in slots.items() if held in by_id}


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


_AXES = ("_saved_dim", "_saved_dim0", "_saved_dim1", "_saved_dims")
_KEPT = 64  # graphs remembered per model
_PLANS: WeakKeyDictionary[nn.Module, dict[Any, dict[Any, Any]]] = WeakKeyDictionary()


def shared_plans(linear: ModuleLinearization) -> dict[Any, Any] | None:
    """The plans that fit this graph; None where a parameter is used outside its layers.

    Such a use may vanish for the parameters of one call (a gate that begins at zero) and count for
    those of the next, so that what was seen of it holds for one call alone.
    """
    graph, joints = topology(linear.graph, linear.leaves)
    uses = Counter(n for entry in linear.entries for n in entry.names.values() if n is not None)
    if any(joints[name] != count for name, count in uses.items()):
        return None
    kinds = tuple((p.dtype, p.device) for p in linear.leaves.values())
    kept = _PLANS.setdefault(linear.map.model, {})
    if len(kept) >= _KEPT:
        kept.clear()
    return kept.setdefault((graph, kinds), {})


@lru_cache(maxsize=1024)
def _axes(kind: type) -> tuple[str, ...]:
    """Under which names a kind of node keeps its axes."""
    return tuple(axis for axis in _AXES if hasattr(kind, axis))


def topology(root: Tensor, leaves: dict[str, Tensor]) -> tuple[Any, Counter[str]]:
    """The graph's nodes in the order they are met, each with its kind, axes, parameter and what
    it leads to; and how often each parameter is led to.
    """
    names = {id(leaf): name for name, leaf in leaves.items()}
    order = [root.grad_fn]
    index = {root.grad_fn: 0}
    out = []
    joints: Counter[str] = Counter()
    for node in order:  # which grows
        if node is None:
            continue
        edges = []
        for following, place in node.next_functions:
            if following not in index:
                index[following] = len(order)
                order.append(following)
            edges.append((index[following], place))
            if (name := names.get(id(getattr(following, "variable", None)))) is not None:
                joints[name] += 1
        axes = tuple([str(getattr(node, axis)) for axis in _axes(type(node))])
        name = names.get(id(getattr(node, "variable", None)))
        out.append((node.name(), axes, name, tuple(edges)))
    return tuple(out), joints
