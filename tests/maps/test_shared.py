"""Plans kept between calls serve the same graph and no other."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError
from pullback.kernels import Tangent, ntk
from pullback.maps.module import _PLANS
from pullback.maps.structure import LayerStructure
from pullback.testing import assert_close


class Gated(nn.Module):
    """A network whose behavior depends on attributes, and whose weight has a gated second use."""

    def __init__(self, gate: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 2)
        self.gate = nn.Parameter(torch.tensor(gate), requires_grad=False)
        self.outside = self.is_transposed = self.mixed = False

    def forward(self, x: Tensor) -> Tensor:  # (N, 5, 5)
        h = torch.tanh(self.first(x.transpose(0, 1) if self.is_transposed else x))
        if self.outside:
            h = h + self.gate * self.first.weight.sum()
        z = self.second(h.transpose(0, 1) if self.is_transposed else h).sum(1)
        if self.mixed:
            return z + z.mean(0)
        return z


def dense(model: nn.Module, x: Tensor) -> Tensor:
    params = [p for p in model.parameters() if p.requires_grad]
    z = model(x)
    rows = torch.stack(
        [
            torch.cat([g.flatten() for g in torch.autograd.grad(v, params, retain_graph=True)])
            for v in z.flatten()
        ]
    )
    return (rows @ rows.T).view(*z.shape, *z.shape).transpose(1, 2)


@pytest.fixture
def model() -> Gated:
    torch.manual_seed(0)
    return Gated().double()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    proofs: list[Any] = []
    establish = LayerStructure.establish

    def count(*args: Any) -> LayerStructure:
        proofs.append(args)
        return establish(*args)

    monkeypatch.setattr(LayerStructure, "establish", count)
    return proofs


def test_a_second_call_proves_nothing_again(model: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = counted(monkeypatch)
    x = torch.randn(5, 5, 5, dtype=torch.float64)
    for _ in range(3):
        assert_close(ntk(model, x), dense(model, x), 1e-12, "kernel")
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1 * torch.randn_like(p)
    assert len(proofs) == 1
    ntk(model, x[:3])
    assert len(proofs) == 2


def test_a_gate_that_opens_is_seen(model: Gated) -> None:
    model.outside = True
    x = torch.randn(5, 5, 5, dtype=torch.float64)
    for gate in (0.0, 1.0, 0.0):
        with torch.no_grad():
            model.gate.fill_(gate)
        assert_close(ntk(model, x), dense(model, x), 1e-12, f"gate {gate}")


@pytest.mark.parametrize("attribute", ["outside", "turned"])
def test_another_forward_pass_is_another_graph(model: Gated, attribute: str) -> None:
    x = torch.randn(5, 5, 5, dtype=torch.float64)  # as many samples as places
    with torch.no_grad():
        model.gate.fill_(2.0)
    for value in (False, True, False):
        setattr(model, attribute, value)
        assert_close(ntk(model, x), dense(model, x), 1e-12, f"{attribute} {value}")


@pytest.mark.parametrize("chunk", [None, 1, 4, 5])
def test_samples_that_begin_to_interact_are_refused(model: Gated, chunk: int | None) -> None:
    x = torch.randn(12, 5, 5, dtype=torch.float64)
    ntk(model, x, chunk=chunk)
    model.mixed = True
    with pytest.raises(PullbackError, match="couples the samples"):
        ntk(model, x, chunk=chunk)


def test_plans_do_not_keep_a_model_alive() -> None:
    model = nn.Linear(2, 2)
    ntk(model, torch.randn(3, 2))
    assert model in _PLANS
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_tangent_space_stays_where_it_was(model: Gated) -> None:
    x = torch.randn(3, 5, 5, dtype=torch.float64)
    tangent = Tangent(model)
    want = dense(model, x)
    with torch.no_grad():
        model.first.weight += 1
    assert_close(ntk(tangent, x), want, 1e-12, "before the step")
    assert_close(ntk(model, x), dense(model, x), 1e-12, "after it")


class Routed(nn.Module):
    """Samples are sorted on the way, as experts' are, and put back by index or by writing."""

    def __init__(self, permutation: str) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 2)
        self.permutation = permutation

    def forward(self, x: Tensor) -> Tensor:  # (N, 4)
        order = x[:, 0].argsort()
        h = torch.tanh(self.first(x[order]))
        if self.permutation == "read":
            return self.second(h[order.argsort()])
        return x.new_zeros(len(x), 2).index_copy(0, order, self.second(h))


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("variant", ["read", "written"])
def test_samples_that_stood_in_order_may_stand_in_another(variant: str, chunk: int | None) -> None:
    torch.manual_seed(0)
    model = Routed(variant).double()
    x = torch.randn(6, 4, dtype=torch.float64).sort(0)[0]
    for inputs in (x, x.flip(0), torch.cat([x[:3], x[3:].flip(0)])):
        assert_close(ntk(model, inputs, chunk=chunk), dense(model, inputs), 1e-10, "K = J Jᵀ")


class Experts(nn.Module):
    """Each sample goes to one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 2)
        self.two = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # (N, 4)
        mask = x[:, 0] > 0
        z = x.new_zeros(len(x), 2)
        z[mask] = self.one(x[mask])
        z[~mask] = self.two(x[~mask])
        return z


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_an_expert_without_samples_has_no_share(chunk: int | None) -> None:
    torch.manual_seed(0)
    model = Experts().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    for inputs in (x, x.abs(), -x.abs()):
        assert_close(ntk(model, inputs, chunk=chunk), dense(model, inputs), 1e-10, "K = J Jᵀ")
