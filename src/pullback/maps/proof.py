r"""Proof that a parameter's gradient is what its layers' formulas give.

A layer explains a parameter if its formula Σ δ ⊗ ā, added up over the uses of the layer, gives
autograd's gradient. Exact natural gradients, tangent kernels and K-FAC rest on this proof.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module

from .._core.space import compute_dtype, relative_tolerance
from .record import Entry

NO_LAYER = "no layer with known structure uses it"
ELSEWHERE = "it is also used outside its layer"
HOOKED = "a gradient hook on it changes its gradient"
UNUSED = "no forward pass so far gave it any rows"
_FOLDED = 2**16  # entries of a gradient that are compared one by one
_OWN = __package__ or ""
_HIDDEN = f"{ELSEWHERE}, whose dropout hides which part of the gradient is whose"


class Proof:
    """Gradients by the layers' formulas, to be compared with autograd's.

    Where the terms cancel, as for a bias before a normalization, both are round-off: they may
    differ by that of their terms, ε‖δ‖‖ā‖. Two gradients of autograd are not compared: those of a
    layer with dropout, which cannot be repeated, and sums that torch's normalizations form in half
    precision. There the layer is differentiated by itself, without dropout and in full precision,
    and it is shown that nothing else adds to its gradient. `limit` is the relative difference that
    is allowed; by default that of the gradient's dtype, more where cotangents have half precision.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._limit = limit
        self._half = False
        self._got: dict[str, Tensor] = {}
        self._noise: dict[str, Tensor] = {}
        #: the gradients of layers by themselves, to be compared with instead of the loss's
        self._own: dict[str, Tensor] = {}
        #: the same in half precision, of which the loss's must be made
        self._rounded: dict[str, Tensor] = {}
        #: what layers with dropout share with others
        self._elsewhere: Collection[str] = ()
        #: the uses of layers that others have registered, whose formula may be wrong
        self._uses: dict[str, list[tuple[Entry, Tensor]]] = {}

    def add(
        self, values: Mapping[str, Tensor], scale: Tensor | float, size: Tensor | float, count: int
    ) -> None:
        """Add one term each, from `count` cotangents of norm `scale` and inputs of norm `size`."""
        for name, value in values.items():
            noise = 10 * torch.finfo(value.dtype).eps * scale * (size + count**0.5)
            accumulate(self._got, {name: _folded(value)})
            accumulate(self._noise, {name: torch.as_tensor(noise, device=value.device)})

    def add_use(self, entry: Entry, delta: Tensor, values: Mapping[str, Tensor]) -> None:
        """Add one use of a layer: its cotangents, and what its formula gives for them."""
        x = entry.input
        half = delta.dtype in (torch.float16, torch.bfloat16)
        self._half = self._half or half
        if x.is_floating_point() and x.numel():
            size = norm(x)
        else:
            size = 0.0
        self.add(values, norm(delta), size, delta.numel())
        if half and entry.layer.curvature == "units":
            accumulate(self._own, own_gradients(entry, delta, torch.float32))
            accumulate(self._rounded, own_gradients(entry, delta))
        if not type(entry.layer).__module__.startswith(_OWN):  # cotangents take much memory
            for name in values:
                self._uses.setdefault(name, []).append((entry, delta))

    def add_alone(self, own: Mapping[str, Tensor], elsewhere: Collection[str]) -> None:
        """Add gradients of layers with dropout by themselves, and which of these others use."""
        accumulate(self._own, own)
        self._elsewhere = elsewhere

    def unexplained(self, truth: Mapping[str, Tensor | None]) -> dict[str, str]:
        """Return the parameters whose gradient is another one, and why; "" where none was seen."""
        reasons = {}
        for name, gradient in truth.items():
            if name not in self._got:  # of what this pass did not use there is nothing to say
                reasons[name] = "" if gradient is None else NO_LAYER
            elif gradient is not None and (reason := self._reason(name, gradient)):
                reasons[name] = reason
        return reasons

    def _reason(self, name: str, gradient: Tensor) -> str:
        if name in self._elsewhere:
            return _HIDDEN
        rounded = self._rounded.get(name)
        if rounded is not None and not _close(gradient, rounded, relative_tolerance(rounded.dtype)):
            return ELSEWHERE
        want = self._own.get(name, gradient)
        got = self._got[name]
        limit = 10 * relative_tolerance(want.dtype) + (0.05 if self._half else 0.0)
        if self._limit is not None:
            limit = self._limit
        if _close(got, _folded(want.to(got.dtype)), limit, self._noise[name]):
            return ""
        return self._blame(name, gradient, limit)

    def _blame(self, name: str, gradient: Tensor, limit: float) -> str:
        """Return whether the formula is wrong or the parameter is used outside its layer."""
        uses = self._uses.get(name, [])
        own = {}
        try:
            for entry, delta in uses:
                accumulate(own, own_gradients(entry, delta))
        except Exception:  # a module that cannot be run by itself
            own = {}
        if name in own and _close(gradient, own[name].to(gradient), limit, self._noise[name]):
            kind = type(uses[0][0].module).__name__
            layer = type(uses[0][0].layer).__name__
            return f"the formula of its layer, {layer}, gives another gradient than {kind} itself"
        return ELSEWHERE


def own_gradients(
    entry: Entry, delta: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return a layer's gradients by name for the cotangent δ, from its own forward and backward.

    In `dtype`, or in the arithmetic of its pass.
    """
    module = entry.module
    held = {n: p for n, p in module._parameters.items() if p is not None}
    own = {n: p.detach().to(dtype or p.dtype).requires_grad_() for n, p in held.items()}
    buffers = {n: b.clone() for n, b in module._buffers.items() if b is not None}
    if dtype is None:
        x = entry.input
    else:
        x = entry.input.to(dtype)
    if dtype is not None:
        buffers = {n: b.to(dtype) if b.is_floating_point() else b for n, b in buffers.items()}
    mixed = dtype is None and any(p.dtype != delta.dtype for p in held.values())
    with (
        torch.enable_grad(),
        torch.autocast(x.device.type, delta.dtype if mixed else None, enabled=mixed),
        _reparametrize_module(module, {**own, **buffers}),
    ):
        y = module.forward(x)
    cotangent = delta.reshape(y.shape).to(y.dtype)
    found = torch.autograd.grad(y, list(own.values()), cotangent, allow_unused=True)
    by_role = dict(zip(own, found, strict=True))
    pairs = [(name, by_role.get(role)) for role, name in entry.names.items()]
    return {name: g for name, g in pairs if name is not None and g is not None}


def accumulate(sums: dict[Any, Any], found: Mapping[Any, Any]) -> None:
    """Add to the sums, key by key."""
    for key, value in found.items():
        sums[key] = sums[key] + value if key in sums else value


def norm(x: Tensor) -> Tensor:
    """‖x‖ in the precision of linear algebra."""
    if x.layout != torch.strided:
        x = x.to_dense()
    return torch.linalg.vector_norm(x, dtype=compute_dtype(x.dtype))


def _folded(value: Tensor) -> Tensor:
    """Add up a large tensor by random signs to 2¹⁶ numbers, whose norm is the same on average.

    Beside all gradients there would not be room for as many of the formulas'.
    """
    flat = value.flatten()
    if flat.numel() <= _FOLDED:
        return flat
    random = torch.Generator(flat.device).manual_seed(0)
    coins = torch.randint(0, 2, flat.shape, generator=random, device=flat.device, dtype=torch.int8)
    return F.pad(flat * (2 * coins - 1), (0, -flat.numel() % _FOLDED)).view(-1, _FOLDED).sum(0)


def _close(got: Tensor, want: Tensor, limit: float, noise: Tensor | float = 0.0) -> bool:
    return bool((got.flatten() - want.flatten()).norm() <= limit * want.norm() + noise)
