"""Is a parameter's gradient what its layers say? The structure is proven, not believed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...._core.space import compute_dtype, tolerance
from ....maps.layers.moments import Sharing
from ....maps.record import Entry
from .alone import gradients
from .graph import Roots
from .sweep import block_of
from .taps import Replays

_ENTRIES = 2**25  # of cotangents that are looked at together
_ELSEWHERE = (
    "it is also used outside its layer, whose dropout lets nobody tell the gradients of both apart"
)


class Proof:
    """Adds up Σ δ ⊗ ā over the layers, to be compared with autograd's gradients.

    Where the terms cancel, as for a bias before a normalization, both are round-off: they may
    differ by that of their terms, ε‖δ‖‖ā‖. In two cases autograd's are not what they ought to be:
    those of a layer with dropout, which nobody can repeat, and sums that torch's normalizations
    add up in half precision, of which little may be left. There the layer's gradient by itself is
    compared, without dropout and in full precision, and it is shown that nothing else adds to it.
    """

    def __init__(self) -> None:
        self._got: dict[str, Tensor] = {}
        self._noise: dict[str, Tensor] = {}
        self._half = False
        #: the gradients of layers by themselves, to be compared with instead of the loss's
        self._own: dict[str, Tensor] = {}
        #: the same in half precision, by which the loss's must be made of them
        self._rounded: dict[str, Tensor] = {}
        #: what these layers share with others
        self._elsewhere: Collection[str] = ()

    def __call__(self, entry: Entry, delta: Tensor) -> None:
        """One use of a layer."""
        if not delta.numel():  # no places, no share in the gradient
            for name, p in zip(entry.names.values(), entry.site.held, strict=True):
                if p is not None:
                    self._add(name, p.new_zeros(p.numel()), delta, delta)
            return
        half = delta.dtype in (torch.float16, torch.bfloat16)
        self._half = self._half or half
        if half and entry.layer.curvature == "units":
            _accumulate(self._own, gradients(entry, delta, torch.float32))
            _accumulate(self._rounded, gradients(entry, delta))
        for x, d in _pieces(entry, delta):
            block, samples = block_of(replace(entry, input=x), d, Sharing(), self._all(entry))
            ones = d.new_ones(samples, 1, dtype=compute_dtype(d.dtype))
            for name, value in block.lift(ones).items():
                self._add(name, value, d, x)

    @staticmethod
    def _all(entry: Entry) -> set[str | None]:
        return set(entry.names.values())

    def replays(self, found: Replays, root: Roots, leaves: Mapping[str, Tensor]) -> None:
        """The maps of compound layers, of which those with dropout are proven by themselves."""
        own, self._elsewhere = found.alone(root, leaves)
        _accumulate(self._own, own)
        for maps in found.layers:
            # what cancels inside a layer, before q and k where there is one key, leaves round-off
            largest = torch.stack([_norm(d) for _, deltas in maps for d in deltas]).amax()
            for tap, deltas in maps:
                d, a = torch.cat(list(deltas), 1), torch.cat(list(tap.inputs), 1)
                names = found.roles(tap)
                self._add(names["weight"], d.mT @ a, d, a, largest)
                self._add(names["bias"], d.sum(1), d, a, largest)

    def _add(
        self,
        name: str | None,
        value: Tensor,
        delta: Tensor,
        x: Tensor,
        largest: Tensor | None = None,
    ) -> None:
        """One term, from cotangents that were made of others with the `largest` norm."""
        if name is None:
            return
        value, eps = value.flatten(), torch.finfo(value.dtype).eps
        size = _norm(x) if x.is_floating_point() else 0.0
        scale = _norm(delta) if largest is None else largest
        terms = 10 * eps * scale * (size + delta.numel() ** 0.5)
        got, noise = self._got, self._noise
        got[name] = got[name] + value if name in got else value
        noise[name] = noise[name] + terms if name in noise else terms

    def unexplained(self, truth: Mapping[str, Tensor | None]) -> dict[str, str]:
        """The parameters whose gradient is another one, and why."""
        reasons = {}
        for name, gradient in truth.items():
            if name not in self._got:  # of what this pass did not use there is nothing to say
                reasons[name] = "" if gradient is None else "no layer with known structure uses it"
                continue
            if gradient is None:
                continue
            if name in self._elsewhere:
                reasons[name] = _ELSEWHERE
                continue
            if not self._made(name, gradient):
                reasons[name] = "it is also used outside its layer"
                continue
            gradient, got = self._own.get(name, gradient), self._got[name]
            want = gradient.flatten().to(got.dtype)
            limit = 10 * tolerance(gradient.dtype) + (0.05 if self._half else 0.0)
            if not bool((got - want).norm() <= limit * want.norm() + self._noise[name]):
                reasons[name] = "it is also used outside its layer, or the layer was changed"
        return reasons

    def _made(self, name: str, gradient: Tensor) -> bool:
        """Whether the loss's gradient is that of these layers, in the same arithmetic."""
        own = self._rounded.get(name)
        if own is None:
            return True
        return bool((gradient - own).norm() <= tolerance(own.dtype) * own.norm())


def _accumulate(sums: dict[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, value in found.items():
        sums[name] = sums[name] + value if name in sums else value


def _pieces(entry: Entry, delta: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The use, some samples at a time where it is large; batch norms need all of them."""
    whole = entry.layer.curvature == "units" or delta.ndim == entry.features
    if whole or delta.numel() <= _ENTRIES or len(entry.input) != len(delta):
        yield entry.input, delta
        return
    step = max(1, _ENTRIES * len(delta) // delta.numel())
    yield from zip(entry.input.split(step), delta.split(step), strict=True)


def _norm(x: Tensor) -> Tensor:
    x = x.to_dense() if x.layout != torch.strided else x
    return torch.linalg.vector_norm(x, dtype=compute_dtype(x.dtype))
