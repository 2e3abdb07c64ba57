"""Real parameters among complex activations, as in Fourier layers: no layer's formula holds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.maps import Call, ModuleMap, identity_covectors
from pullback.testing import assert_close, jacobian


class Spectrum(nn.Module):
    """A real map on the Fourier modes of a signal (N, T, 4), and a head."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        shape = {"modes": (5, 4, 4), "complex modes": (5, 4, 4, 2), "gain": (5, 4)}
        self.w = nn.Parameter(torch.randn(shape.get(form, (4, 4))))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.rfft(x, dim=1)
        return self.head(torch.fft.irfft(self.multiply(z), n=x.shape[1], dim=1).mean(1))

    def multiply(self, z: Tensor) -> Tensor:
        if self.form == "modes":
            return torch.einsum("nki,kio->nko", z, self.w.to(z.dtype))
        if self.form == "complex modes":
            return torch.einsum("nki,kio->nko", z, torch.view_as_complex(self.w))
        if self.form == "gain":
            return z * self.w
        if self.form == "linear":
            return F.linear(z, self.w.to(z.dtype))
        return z @ self.w.to(z.dtype)


FORMS = ["modes", "complex modes", "gain", "linear", "product"]


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_real_weight_among_complex_numbers(form: str) -> None:
    torch.manual_seed(0)
    model = Spectrum(form).double()
    x = torch.randn(6, 8, 4).double()
    j = jacobian(model(x), list(model.parameters()))
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    pulled = linear.pullback(identity_covectors(linear.value))
    assert_close(pulled.rows(), j, 1e-12, "rows")
    assert_close(pulled.kernel(budget=2**30), j @ j.T, 1e-12, "kernel")
    assert {c.name: c.reason == "known layer" for c in pulled.coverage}["head.weight"]


@pytest.mark.filterwarnings("ignore:.*of the trained parameters", "error:Casting complex")
@pytest.mark.parametrize("rule", ["natural", "eigenbasis", "spectral"])
@pytest.mark.parametrize("form", FORMS)
def test_kfac_trains_a_fourier_layer(form: str, rule: str) -> None:
    torch.manual_seed(0)
    model = Spectrum(form)
    x = torch.randn(16, 8, 4)
    targets = torch.randint(0, 3, (16,))
    optimizer = pb.KFAC(model, rule=rule)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {row.name: row.block for row in optimizer.coverage()}["w"] in ("diagonal", "none")
