r"""Is a parameter's gradient what its layers say? Structure is proven, not believed.

A layer explains a parameter if its own formula Σ δ ⊗ ā, added up over the uses of the layer, gives
autograd's gradient. Exact natural gradients, tangent kernels and K-FAC all rest on this one proof.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from .._core.space import compute_dtype, tolerance
from .record import Entry

NO_LAYER = "no layer with known structure uses it"
ELSEWHERE = "it is also used outside its layer"
_OWN = __package__ or ""
_HIDDEN = f"{ELSEWHERE}, whose dropout hides which part of the gradient is whose"


class Proof:
    """Adds up what the layers say, to be compared with autograd's gradients.

    Where the terms cancel, as for a bias before a normalization, both are round-off: they may
    differ by that of their terms, ε‖δ‖‖ā‖. In two cases autograd's gradients are not what they
    ought to be: those of a layer with dropout, which nobody can repeat, and sums that torch's
    normalizations add up in half precision, of which little may be left. There the layer's gradient
    by itself is compared, without dropout and in full precision, and it is shown that nothing else
    adds to it.

    Args:
        limit: the relative difference that is allowed; by default that of the gradient's dtype, and
            more where cotangents have half precision.
    """

    def __init__(self, limit: float | None = None) -> None:
        self._limit, self._half = limit, False
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
        """One term each, from `count` cotangents of norm `scale` and inputs of norm `size`."""
        for name, value in values.items():
            value = value.flatten()
            noise = 10 * torch.finfo(value.dtype).eps * scale * (size + count**0.5)
            noise = torch.as_tensor(noise, device=value.device)
            held = self._got.get(name)
            self._got[name] = value if held is None else held + value
            self._noise[name] = noise if held is None else self._noise[name] + noise

    def add_use(self, entry: Entry, delta: Tensor, values: Mapping[str, Tensor]) -> None:
        """One use of a layer: its cotangents, and what its formula gives for them."""
        x, half = entry.input, delta.dtype in (torch.float16, torch.bfloat16)
        self._half = self._half or half
        size = norm(x) if x.is_floating_point() and x.numel() else 0.0
        self.add(values, norm(delta), size, delta.numel())
        if half and entry.layer.curvature == "units":
            accumulate(self._own, own_gradients(entry, delta, torch.float32))
            accumulate(self._rounded, own_gradients(entry, delta))
        if not type(entry.layer).__module__.startswith(_OWN):  # cotangents take much memory
            for name in values:
                self._uses.setdefault(name, []).append((entry, delta))

    def add_alone(self, own: Mapping[str, Tensor], elsewhere: Collection[str]) -> None:
        """Gradients of layers with dropout by themselves, and what others use of theirs."""
        accumulate(self._own, own)
        self._elsewhere = elsewhere

    def unexplained(self, truth: Mapping[str, Tensor | None]) -> dict[str, str]:
        """The parameters whose gradient is another one, and why; empty where none was seen."""
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
        if rounded is not None and not _close(gradient, rounded, tolerance(rounded.dtype)):
            return ELSEWHERE
        want, got = self._own.get(name, gradient), self._got[name]
        limit = self._limit
        if limit is None:
            limit = 10 * tolerance(want.dtype) + (0.05 if self._half else 0.0)
        if _close(got, want.flatten().to(got.dtype), limit, self._noise[name]):
            return ""
        return self._blame(name, gradient, limit)

    def _blame(self, name: str, gradient: Tensor, limit: float) -> str:
        """Tell a wrong formula from a use outside: by what the modules themselves would give."""
        uses, own = self._uses.get(name, []), {}
        try:
            for entry, delta in uses:
                accumulate(own, own_gradients(entry, delta))
        except Exception:  # a module that cannot be run by itself
            own = {}
        if name in own and _close(gradient, own[name].to(gradient), limit, self._noise[name]):
            kind, layer = type(uses[0][0].module).__name__, type(uses[0][0].layer).__name__
            return f"the formula of its layer, {layer}, gives another gradient than {kind} itself"
        return ELSEWHERE


def own_gradients(
    entry: Entry, delta: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """A layer's gradients by itself: its own forward from what it saw, and its own backward.

    By name, for the cotangent δ at its output; in `dtype`, or in the arithmetic of its pass.
    """
    held = {n: p for n, p in entry.module._parameters.items() if p is not None}
    own = {n: p.detach().to(dtype or p.dtype).requires_grad_() for n, p in held.items()}
    buffers = {n: _copy(b, dtype) for n, b in entry.module._buffers.items()}
    x = entry.input if dtype is None else entry.input.to(dtype)
    mixed = dtype is None and any(p.dtype != delta.dtype for p in held.values())
    with (
        torch.enable_grad(),
        torch.autocast(x.device.type, delta.dtype if mixed else None, enabled=mixed),
        _holding(entry.module, own, buffers),
    ):
        y = entry.module.forward(x)
    cotangent = delta.reshape(y.shape).to(y.dtype)
    found = torch.autograd.grad(y, list(own.values()), cotangent, allow_unused=True)
    by_role = dict(zip(own, found, strict=True))
    pairs = [(name, by_role.get(role)) for role, name in entry.names.items()]
    return {name: g for name, g in pairs if name is not None and g is not None}


@contextlib.contextmanager
def _holding(
    module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor | None]
) -> Iterator[None]:
    """A layer with other tensors than its own."""
    held = module._parameters, module._buffers
    module._parameters = {**held[0], **parameters}  # pyright: ignore[reportAttributeAccessIssue]
    module._buffers = {**buffers}
    try:
        yield
    finally:
        module._parameters, module._buffers = held


def _copy(buffer: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if buffer is None:
        return None
    return buffer.to(dtype, copy=True) if dtype and buffer.is_floating_point() else buffer.clone()


def accumulate(sums: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Add by name."""
    for name, value in found.items():
        sums[name] = sums[name] + value if name in sums else value


def norm(x: Tensor) -> Tensor:
    """‖x‖ in the precision of linear algebra."""
    x = x.to_dense() if x.layout != torch.strided else x
    return torch.linalg.vector_norm(x, dtype=compute_dtype(x.dtype))


def _close(got: Tensor, want: Tensor, limit: float, noise: Tensor | float = 0.0) -> bool:
    return bool((got.flatten() - want.flatten()).norm() <= limit * want.norm() + noise)
