"""Tangent kernels of models with named inputs, structured outputs, and arithmetic of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback.kernels import ntk
from pullback.testing import assert_close


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class Named(nn.Module):
    """Two named inputs, and an object of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.two = nn.Linear(2, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, *, left: Tensor, right: Tensor, scale: float = 1.0) -> Any:
        hidden = torch.tanh(self.one(left) + scale * self.two(right))
        return Output(self.last(hidden), hidden)


def dense(model: nn.Module, inputs: dict[str, Any], output: str) -> Tensor:
    """The Jacobian of the outputs, (N, m, p), by torch.func."""
    params = {n: p.detach() for n, p in model.named_parameters()}

    def value(params: dict[str, Tensor]) -> Tensor:
        return getattr(torch.func.functional_call(model, params, (), inputs), output)

    jacobian = torch.func.jacrev(value)(params)
    return torch.cat([j.flatten(2) for j in jacobian.values()], 2)


@pytest.mark.parametrize("output", ["logits", "hidden"])
def test_inputs_may_be_named_and_the_output_chosen(output: str) -> None:
    model = Named()
    x, x2 = ({"left": torch.randn(n, 3), "right": torch.randn(n, 2)} for n in (5, 4))
    j = dense(model, x, output)
    j2 = dense(model, x2, output)
    # a parameter that the output does not feel has no column
    kernel = ntk(model, x, x2, output=output)
    assert_close(kernel, torch.einsum("nap,kbp->nkab", j, j2), 1e-12, output)
    if output == "logits":
        assert_close(ntk(model, x, x2), kernel, 1e-14, "logits are found")


class Drawing(nn.Sequential):
    """In evaluation it draws a number that decides nothing, as layer drop does."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            if torch.rand([]) < 0.5 and self.training:
                continue
            x = layer(x)
        return x


def test_a_model_in_evaluation_may_draw_numbers() -> None:
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
    x = torch.randn(6, 3)
    assert_close(ntk(Drawing(*layers).eval(), x), ntk(nn.Sequential(*layers), x), 1e-14, "kernel")


class Halved(nn.Module):
    """x·rsqrt(mean x²)·g with the inner part in single precision, as Llama's norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


def test_single_precision_inside_keeps_the_structured_route() -> None:
    model = nn.Sequential(nn.Linear(3, 6), Halved(6), nn.Linear(6, 2))
    x = torch.randn(5, 3)
    params = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(params)
    j = torch.cat([t.flatten(2) for t in jacobian.values()], 2)
    assert_close(ntk(model, x), torch.einsum("nap,kbp->nkab", j, j), 1e-6, "kernel")
