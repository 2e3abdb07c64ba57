"""The plan of a model is proved once, remembered while it holds, and never by luck."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.maps import Call, ModuleMap, identity_covectors
from pullback.maps.structure import LayerStructure
from pullback.testing import assert_close, jacobian


class Folded(nn.Module):
    """(T, N, d) folded to (T·N, d), with an output layer that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.two = nn.Linear(4, 2)
        nn.init.zeros_(self.two.weight)

    def forward(self, x: Tensor) -> Tensor:
        t, n, _ = x.shape
        return self.two(torch.tanh(self.one(x.reshape(t * n, 3)))).reshape(t, n, 2)


class SquareSequence(nn.Module):
    """Sequence first with T = N: only a probe can tell the axes apart, and zero tells nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.two = nn.Linear(4, 2)
        nn.init.zeros_(self.two.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize("module_class", [Folded, SquareSequence])
@pytest.mark.parametrize("form", ["rows", "kernel", "dense"])
def test_a_layer_that_does_not_answer_the_probe_is_asked_again(module_class, form: str) -> None:
    """At zero-initialized outputs every layout fits; it must not be kept for later steps."""
    torch.manual_seed(0)
    model = module_class().double()
    x = torch.randn(4, 4, 3).double()
    t = torch.randn(4, 4, 2).double()
    opt = pb.NaturalGradient(
        model, solver=pb.solvers.Cholesky(0.1), gram=form, output=pb.optim.Outputs(batch_dim=1)
    )

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * (model(x) - t).square().sum() / 4
        loss.backward()
        return loss

    for _ in range(2):
        w = torch.cat([p.detach().flatten() for p in model.parameters()])
        z = model(x).movedim(1, 0)
        j = jacobian(z, list(model.parameters()))
        g = j.T @ (z - t.movedim(1, 0)).detach().flatten() / 4
        gram = j.T @ j / 4 + 0.1 * torch.eye(len(w)).double()
        opt.step(closure)
        moved = w - torch.cat([p.detach().flatten() for p in model.parameters()])
        assert_close(moved, torch.linalg.solve(gram, g), 1e-9, "the step")


def test_the_plan_is_made_once_per_shape_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []
    original = LayerStructure.establish.__func__  # pyright: ignore[reportFunctionMemberAccess]

    def count_and_plan(cls, linear):
        plans.append(linear.value.shape[0])
        return original(cls, linear)

    monkeypatch.setattr(LayerStructure, "establish", classmethod(count_and_plan))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2)).double()
    opt = pb.NaturalGradient(model, gram="kernel")

    def step(n: int) -> None:
        x = torch.randn(n, 3).double()

        def closure() -> Tensor:
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        opt.step(closure)

    for n in (4, 4, 4, 5, 4, 5):
        step(n)
    assert plans == [4, 5]
    model.eval()
    step(4)
    assert plans == [4, 5, 4]
    model[0].requires_grad_(False)
    step(4)
    assert plans == [4, 5, 4, 4], "other parameters, another plan"


class Positions(nn.Module):
    """A table looked up by place, not by sample, and as many places as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.body = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.tanh(x + self.table(torch.arange(4))))


def test_places_are_not_mistaken_for_samples() -> None:
    torch.manual_seed(0)
    model = Positions().double()
    x = torch.randn(4, 4, 3).double()
    j = jacobian(model(x), list(model.parameters()))
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    pulled = linear.pullback(identity_covectors(linear.value))
    assert_close(pulled.kernel(budget=2**30), j @ j.T, 1e-12, "kernel")
    reasons = {c.name: c.reason for c in pulled.coverage}
    assert "no axis" in reasons["table.weight"]
    assert reasons["body.weight"] == "known layer"


class Axes(nn.Module):
    """Linear layers that see the samples first, second, folded and folded last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.folded = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x.transpose(0, 1))).transpose(0, 1)
        x = torch.tanh(self.folded(x.reshape(n * t, 3))).view(n, t, 3)
        x = self.last(x.transpose(0, 1).reshape(t * n, 3)).view(t, n, 2)
        return x.transpose(0, 1)


@pytest.mark.parametrize("shape", [(3, 3, 3), (2, 4, 3), (4, 2, 3), (1, 3, 3), (3, 1, 3)], ids=str)
def test_samples_are_found_on_every_axis(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Axes().double()
    x = torch.randn(*shape).double()
    j = jacobian(model(x), list(model.parameters()))
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    pulled = linear.pullback(identity_covectors(linear.value))
    assert {c.reason for c in pulled.coverage} == {"known layer"}
    assert_close(pulled.rows(), j, 1e-12, "rows")
    assert_close(pulled.kernel(budget=2**30), j @ j.T, 1e-12, "kernel")


def test_a_dead_layer_is_exact_and_stays_so() -> None:
    """Every unit of a ReLU layer is off: its rows vanish, and no plan is built on that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100)
    x = torch.randn(4, 3).double()
    plans: dict = {}
    for bias in (-100.0, 0.1):
        with torch.no_grad():
            model[0].bias.fill_(bias)
        j = jacobian(model(x), list(model.parameters()))
        linear = ModuleMap(model, Call.of(x), plans=plans).linearize(dict(model.named_parameters()))
        assert_close(linear.rows(), j, 1e-13, f"rows at bias {bias}")


class Gated(nn.Module):
    """A layer's weight that is used outside the layer too, behind a gate that starts shut."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.one(x)) + self.gate * (x @ self.one.weight))


def test_a_use_that_opens_later_is_noticed() -> None:
    """The plan made while the gate is shut is dropped once it no longer explains the gradient."""
    torch.manual_seed(0)
    model = Gated().double()
    x = torch.randn(4, 3).double()
    params = list(model.parameters())
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(0.1), gram="kernel", lr=0.0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * model(x).square().sum(-1).mean()
        loss.backward()
        return loss

    for gate in (0.0, 1.0):
        with torch.no_grad():
            model.gate.fill_(gate)
        z = model(x)
        j = jacobian(z, params)
        g = j.T @ z.detach().flatten() / 4
        want = torch.linalg.solve(j.T @ j / 4 + 0.1 * torch.eye(len(g)).double(), g)
        opt.param_groups[0]["lr"] = 1.0
        before = torch.cat([p.detach().flatten() for p in params])
        opt.step(closure)
        moved = before - torch.cat([p.detach().flatten() for p in params])
        assert_close(moved, want, 1e-8, f"step with the gate at {gate}")


def test_spectral_norm_in_training_mode_is_replayed_from_its_own_buffers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)
    ).double()
    x = torch.randn(5, 3).double()
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(0.1), gram="kernel")
    saved = {n: b.clone() for n, b in model.named_buffers()}
    w = torch.cat([p.detach().flatten() for p in model.parameters()])
    z = model(x)
    j = jacobian(z, list(model.parameters()))
    with torch.no_grad():
        for n, b in model.named_buffers():
            b.copy_(saved[n])
    g = j.T @ z.detach().flatten() / 5
    want = torch.linalg.solve(j.T @ j / 5 + 0.1 * torch.eye(len(w)).double(), g)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * model(x).square().sum(1).mean()
        loss.backward()
        return loss

    assert opt.step(closure).whitened
    moved = w - torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_close(moved, want, 1e-9, "the step")
