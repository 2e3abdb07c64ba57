r"""Proof that a parameter's gradient is what its layers' formulas give.

A layer explains a parameter if its formula Σ δ ⊗ ā, added up over the uses of the layer, gives
autograd's gradient. Exact natural gradients, tangent kernels and K-FAC rest on this proof.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module

from .._core.space import compute_dtype, relative_tolerance
from .layers import Use, describe_layer
from .layers.moments import Sharing
from .record import Entry

NO_LAYER = "no layer with known structure uses it"
ELSEWHERE = "it is also used outside its layer"
HOOKED = "a gradient hook on it changes its gradient"
UNUSED = "no forward pass so far gave it any rows"
_PACKAGE = __package__ or ""


@dataclass(frozen=True)
class ProofLimits:
    """Bounds on memory, in entries of tensors."""

    #: of a gradient that are compared one by one; larger ones are folded by random signs, and a
    #: difference in one entry stays unseen only if others of the same sum undo it
    compared: int = 2**16
    #: of cotangents for which a layer's formula is evaluated by one call: 128 MiB in float32
    formula: int = 2**25


_LIMITS = ProofLimits()
_HIDDEN_BY_DROPOUT = f"{ELSEWHERE}, whose dropout hides which part of the gradient is whose"


class Proof:
    """Gradients by the layers' formulas, to be compared with autograd's.

    Where the terms cancel, as for a bias before a normalization, both are round-off: they may
    differ by that of their terms, ε‖δ‖‖ā‖. Two gradients of autograd are not compared: those of a
    layer with dropout, which cannot be repeated, and sums that torch's normalizations form in half
    precision. There the layer is differentiated by itself, without dropout and in full precision,
    and the proof shows that nothing else adds to its gradient. `limit` is the relative difference
    that is allowed; the default depends on the gradient's dtype and on half precision.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._limit = limit
        self._has_half_precision = False
        #: the gradients that the formulas give, folded
        self._formula: dict[str, Tensor] = {}
        self._noise: dict[str, Tensor] = {}
        #: gradients of layers run by themselves, compared with instead of the loss's
        self._isolated: dict[str, Tensor] = {}
        #: the same in the half precision of the pass, which must agree with the loss's gradients
        self._isolated_half: dict[str, Tensor] = {}
        #: parameters of layers with dropout that are used elsewhere too
        self._elsewhere: Collection[str] = ()
        #: the uses of layers that users registered, whose formula may be wrong
        self._uses: dict[str, list[tuple[Entry, Tensor]]] = {}

    def add(
        self, values: Mapping[str, Tensor], scale: Tensor | float, size: Tensor | float, count: int
    ) -> None:
        """Add a term to the gradient of each parameter, with the round-off that it may have.

        The term comes from `count` cotangents of norm `scale` and from inputs of norm `size`.
        """
        for name, value in values.items():
            noise = 10 * torch.finfo(value.dtype).eps * scale * (size + count**0.5)
            accumulate(self._formula, {name: _fold(value)})
            accumulate(self._noise, {name: torch.as_tensor(noise, device=value.device)})

    def add_use(self, entry: Entry, delta: Tensor, sharing: Sharing | None = None) -> None:
        """Add one use of a layer: its formula is evaluated for these cotangents.

        `sharing` says where the samples stand, for layers whose use depends on it.
        """
        values = evaluate_formula(entry, delta, sharing or Sharing())
        x = entry.input
        has_half_precision = delta.dtype in (torch.float16, torch.bfloat16)
        self._has_half_precision = self._has_half_precision or has_half_precision
        size: Tensor | float = 0.0
        if x.is_floating_point() and x.numel():
            size = norm(x)
        self.add(values, norm(delta), size, delta.numel())
        if has_half_precision and entry.layer.curvature == "units":
            accumulate(self._isolated, differentiate_layer(entry, delta, torch.float32))
            accumulate(self._isolated_half, differentiate_layer(entry, delta))
        if not type(entry.layer).__module__.startswith(_PACKAGE):  # others' cotangents take memory
            for name in values:
                self._uses.setdefault(name, []).append((entry, delta))

    def add_isolated(self, gradients: Mapping[str, Tensor], elsewhere: Collection[str]) -> None:
        """Add gradients of layers with dropout, each run without it and by itself.

        `elsewhere` are those of their parameters that are used outside of these layers too.
        """
        accumulate(self._isolated, gradients)
        self._elsewhere = elsewhere

    def find_unexplained(self, truth: Mapping[str, Tensor | None]) -> dict[str, str]:
        """Return the reason for each parameter whose gradient is not what the formulas give.

        The reason is empty for a parameter that neither the layers nor the graph used.
        """
        reasons = {}
        for name, gradient in truth.items():
            if name not in self._formula:
                reasons[name] = ""
                if gradient is not None:
                    reasons[name] = NO_LAYER
            elif gradient is not None:
                reason = self._find_reason(name, gradient)
                if reason:
                    reasons[name] = reason
        return reasons

    def _find_reason(self, name: str, gradient: Tensor) -> str:
        """Return why the formula does not explain the gradient; empty if it does."""
        if name in self._elsewhere:
            return _HIDDEN_BY_DROPOUT
        isolated_half = self._isolated_half.get(name)
        if isolated_half is not None:
            tolerance = relative_tolerance(isolated_half.dtype)
            if not _is_close(gradient, isolated_half, tolerance):
                return ELSEWHERE
        reference = self._isolated.get(name, gradient)
        formula = self._formula[name]
        limit = self._choose_limit(reference.dtype)
        if _is_close(formula, _fold(reference.to(formula.dtype)), limit, self._noise[name]):
            return ""
        return self._explain_difference(name, gradient, limit)

    def _choose_limit(self, dtype: torch.dtype) -> float:
        """Return the relative difference that is allowed for gradients of this dtype."""
        if self._limit is not None:
            return self._limit
        limit = 10 * relative_tolerance(dtype)
        if self._has_half_precision:
            return limit + 0.05
        return limit

    def _explain_difference(self, name: str, gradient: Tensor, limit: float) -> str:
        """Return the reason: a wrong formula, or a use of the parameter outside its layer."""
        uses = self._uses.get(name, [])
        isolated: dict[str, Tensor] = {}
        try:
            for entry, delta in uses:
                accumulate(isolated, differentiate_layer(entry, delta))
        except Exception:  # a module that cannot be run by itself
            return ELSEWHERE
        if name not in isolated:
            return ELSEWHERE
        if not _is_close(gradient, isolated[name].to(gradient), limit, self._noise[name]):
            return ELSEWHERE
        module = describe_layer(uses[0][0].module)
        layer = type(uses[0][0].layer).__name__
        return f"the formula of its layer, {layer}, gives another gradient than {module} itself"


def arrange_use(entry: Entry, delta: Tensor, sharing: Sharing) -> Use:
    """Return a use with the cotangents of one covector, samples first: (N, ...) and (N, 1, ...)."""
    dtype = compute_dtype(delta.dtype)
    x = entry.input
    if x.is_floating_point():
        x = x.to(dtype)
    features = entry.layer.count_feature_axes(entry.module, delta.ndim)
    leading_axes = delta.ndim - features
    if leading_axes == 0:
        x = x[None]
        delta = delta[None]
    elif sharing.layout is not None:
        x = sharing.layout(x)
        delta = sharing.layout(delta)
    elif leading_axes > 1:
        x = x.movedim(sharing.batch_dim, 0)
        delta = delta.movedim(sharing.batch_dim, 0)
    return Use(entry.module, x, delta.to(dtype)[:, None], features)


def evaluate_formula(entry: Entry, delta: Tensor, sharing: Sharing) -> dict[str, Tensor]:
    """Return the gradients that the layer's own formula gives for its cotangents, by name."""
    gradients: dict[str, Tensor] = {}
    if not delta.numel():  # no positions, no share in the gradient
        for name, parameter in zip(entry.names.values(), entry.site.parameters, strict=True):
            if name is not None and parameter is not None:
                gradients[name] = parameter.new_zeros(parameter.numel())
        return gradients
    for x, delta_piece in _split_samples(entry, delta, sharing):
        use = arrange_use(replace(entry, input=x), delta_piece, sharing)
        ones = use.delta.new_ones(len(use.delta), 1)
        accumulate(gradients, entry.layer.block(entry.names, [use]).lift(ones))
    return gradients


def _split_samples(
    entry: Entry, delta: Tensor, sharing: Sharing
) -> Iterable[tuple[Tensor, Tensor]]:
    """Return inputs and cotangents, of some samples each where there are many positions.

    Batch norms need all samples at once.
    """
    needs_all = entry.layer.curvature == "units" or delta.ndim == entry.features
    is_large = delta.numel() > _LIMITS.formula
    is_folded = sharing.layout is not None or len(entry.input) != len(delta)
    if needs_all or not is_large or is_folded:
        return [(entry.input, delta)]
    size = max(1, _LIMITS.formula * len(delta) // delta.numel())
    return zip(entry.input.split(size), delta.split(size), strict=True)


def differentiate_layer(
    entry: Entry, delta: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return a layer's gradients by name for the cotangent δ, from its own forward and backward.

    The layer runs by itself, in `dtype`, or by default in the arithmetic of the recorded pass.
    """
    module = entry.module
    parameters = {}
    for own_name, parameter in module._parameters.items():
        if parameter is not None:
            parameters[own_name] = parameter.detach().to(dtype or parameter.dtype).requires_grad_()
    names = _find_names_of_parameters(entry)
    x = entry.input
    autocast_dtype: torch.dtype | None = None
    if dtype is not None:
        x = x.to(dtype)
    elif any(p.dtype != delta.dtype for p in parameters.values()):
        autocast_dtype = delta.dtype
    buffers = _copy_buffers(module, dtype)
    with (
        torch.enable_grad(),
        torch.autocast(x.device.type, autocast_dtype, enabled=autocast_dtype is not None),
        _reparametrize_module(module, {**parameters, **buffers}),
    ):
        y = module.forward(x)
    cotangent = delta.reshape(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, list(parameters.values()), cotangent, allow_unused=True)
    by_name = {}
    for own_name, gradient in zip(parameters, gradients, strict=True):
        name = names[own_name]
        if name is not None and gradient is not None:
            by_name[name] = gradient
    return by_name


def _find_names_of_parameters(entry: Entry) -> dict[str, str | None]:
    """Return the names in the model by those in the module, which need not be the layer's keys."""
    layer_keys = {id(p): key for key, p in entry.layer.parameters(entry.module).items()}
    return {
        own_name: entry.names.get(layer_keys.get(id(parameter), own_name))
        for own_name, parameter in entry.module._parameters.items()
    }


def _copy_buffers(module: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return copies of a module's buffers, floating point ones in `dtype`."""
    buffers = {}
    for name, buffer in module._buffers.items():
        if buffer is None:
            continue
        copied = buffer.clone()
        if dtype is not None and copied.is_floating_point():
            copied = copied.to(dtype)
        buffers[name] = copied
    return buffers


def accumulate(sums: dict[Any, Any], terms: Mapping[Any, Any]) -> None:
    """Add terms to sums, key by key; a key without a sum starts with its term."""
    for key, value in terms.items():
        if key in sums:
            sums[key] = sums[key] + value
        else:
            sums[key] = value


def norm(x: Tensor) -> Tensor:
    """Return ‖x‖, in float32 at least."""
    if x.layout != torch.strided:
        x = x.to_dense()
    return torch.linalg.vector_norm(x, dtype=compute_dtype(x.dtype))


def _fold(value: Tensor) -> Tensor:
    """Return 2¹⁶ sums of entries with random signs, whose norm is that of the tensor on average.

    Memory for a second copy of all gradients may not be there. Small tensors stay as they are.
    """
    flat = value.flatten()
    length = _LIMITS.compared
    if flat.numel() <= length:
        return flat
    generator = torch.Generator(flat.device).manual_seed(0)
    bits = torch.randint(
        0, 2, flat.shape, generator=generator, device=flat.device, dtype=torch.int8
    )
    return F.pad(flat * (2 * bits - 1), (0, -flat.numel() % length)).view(-1, length).sum(0)


def _is_close(value: Tensor, reference: Tensor, limit: float, noise: Tensor | float = 0.0) -> bool:
    """Return True if ‖value − reference‖ is at most limit·‖reference‖ + noise."""
    difference = (value.flatten() - reference.flatten()).norm()
    return bool(difference <= limit * reference.norm() + noise)
