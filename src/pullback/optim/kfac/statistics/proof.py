"""Is a parameter's gradient what its layers say? The structure is proven, not believed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...._core.space import compute_dtype, tolerance
from ....maps.layers import Tap
from ....maps.layers.moments import Sharing
from ....maps.record import Entry
from .sweep import block_of
from .taps import Named

_ENTRIES = 2**25  # of cotangents that are looked at together


class Proof:
    """Adds up Σ δ ⊗ ā over the layers, to be compared with autograd's gradients.

    Where the terms cancel, as for a bias before a normalization, both are round-off: they may
    differ by that of their terms, ε‖δ‖‖ā‖.
    """

    def __init__(self) -> None:
        self._got: dict[str, Tensor] = {}
        self._noise: dict[str, Tensor] = {}
        self._half = False

    def __call__(self, entry: Entry, delta: Tensor) -> None:
        """One use of a layer."""
        self._half = self._half or delta.dtype in (torch.float16, torch.bfloat16)
        for x, d in _pieces(entry, delta):
            block, samples = block_of(replace(entry, input=x), d, Sharing(), self._all(entry))
            ones = d.new_ones(samples, 1, dtype=compute_dtype(d.dtype))
            for name, value in block.lift(ones).items():
                self._add(name, value, d, x)

    @staticmethod
    def _all(entry: Entry) -> set[str | None]:
        return set(entry.names.values())

    def taps(self, found: Sequence[tuple[Tap, list[Tensor]]], name: Named) -> None:
        """The maps of a compound layer."""
        for tap, deltas in found:
            d, a = torch.cat(list(deltas), 1), torch.cat(list(tap.inputs), 1)
            if tap.weight is not None:
                self._add(name(tap.weight), d.mT @ a, d, a)
            if tap.bias is not None:
                self._add(name(tap.bias), d.sum(1), d, a)

    def _add(self, name: str | None, value: Tensor, delta: Tensor, x: Tensor) -> None:
        if name is None:
            return
        value, eps = value.flatten(), torch.finfo(value.dtype).eps
        size = _norm(x) if x.is_floating_point() else 0.0
        terms = 10 * eps * _norm(delta) * (size + delta.numel() ** 0.5)
        got, noise = self._got, self._noise
        got[name] = got[name] + value if name in got else value
        noise[name] = noise[name] + terms if name in noise else terms

    def unexplained(self, truth: Mapping[str, Tensor | None]) -> dict[str, str]:
        """The parameters whose gradient is another one, and why."""
        reasons = {}
        for name, gradient in truth.items():
            if name not in self._got:
                reasons[name] = "no layer with known structure uses it"
                continue
            if gradient is None:
                continue
            got = self._got[name]
            want = gradient.flatten().to(got.dtype)
            limit = 10 * tolerance(gradient.dtype) + (0.05 if self._half else 0.0)
            if not bool((got - want).norm() <= limit * want.norm() + self._noise[name]):
                reasons[name] = "it is also used outside its layer, or the layer was changed"
        return reasons


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
