"""The law of compound layers: taps give the gradients that autograd gives."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pullback.maps.layers import Compound, Tap, find_layer
from pullback.testing import assert_close


def check(module: nn.Module, *args: Any, **kwargs: Any) -> list[Tap]:
    """The replay has the layer's outputs, and Σ δ ⊗ a and Σ δ are its parameters' gradients."""
    with torch.no_grad():
        for p in module.parameters():  # attention's biases begin at zero
            p.add_(0.3 * torch.randn_like(p))
    compound = find_layer(module, Compound)
    assert compound is not None
    real = compound.select_outputs(module, module(*args, **kwargs))
    with torch.no_grad():  # the replay makes its own graph, as a hook may need
        outputs, taps = compound.replay(module, args, kwargs)
    assert len(real) == len(outputs)
    for computed_gradients, want in zip(outputs, real, strict=True):
        assert_close(computed_gradients, want, 1e-12, "a replayed output")

    cotangents = [torch.randn_like(y) for y in real]
    want = torch.autograd.grad(real, list(module.parameters()), cotangents)
    computed_gradients = gradients(outputs, cotangents, taps)
    assert computed_gradients.keys() == {id(p) for p in module.parameters()}
    for (name, p), g in zip(module.named_parameters(), want, strict=True):
        assert_close(computed_gradients[id(p)], g, 1e-11, f"the gradient of {name}")
    return taps


def gradients(
    outputs: list[Tensor], cotangents: list[Tensor], taps: list[Tap]
) -> dict[int, Tensor]:
    """Per parameter's id, what its one tap gives."""
    flat = list(chain.from_iterable(tap.outputs for tap in taps))
    deltas = iter(torch.autograd.grad(outputs, flat, cotangents))
    gradients_by_tensor: dict[int, Tensor] = {}
    for tap in taps:
        weight: Tensor | float = 0.0
        bias: Tensor | float = 0.0
        for a, z in zip(tap.inputs, tap.outputs, strict=True):
            delta = next(deltas)
            assert not a.requires_grad
            assert a.shape[:2] == z.shape[:2] == delta.shape[:2]
            weight = weight + torch.einsum("gpo,gpi->goi", delta, a)
            bias = bias + delta.sum(1)
        pairs = ((tap.weight, weight), (tap.bias, bias))
        for parameter, value in pairs:
            if parameter is not None:
                assert id(parameter) not in gradients_by_tensor, "two taps own one parameter"
                gradients_by_tensor[id(parameter)] = torch.as_tensor(value).reshape(parameter.shape)
        _check_places(tap)
    return gradients_by_tensor


def _check_places(tap: Tap) -> None:
    total = sum(a.shape[1] for a in tap.inputs)
    assert max(tap.positions) == total
    for g, count in enumerate(tap.positions):
        if count < total:  # padded in one step only, at its end
            (a,) = tap.inputs
            assert not a[g, count:].any()
