"""Any module as a map: value, jvp, vjp and rows are those of autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback._core.state import RandomState
from pullback.maps import Call, ModuleMap, identity_covectors
from pullback.testing import assert_close, jacobian
from tests.laws.cases import Built, ModelCase
from tests.laws.table import MODELS


def linearize(built: Built):
    """The map of the recorded call, with the random state that the call had."""
    call = Call.of(*built.args, **built.kwargs)
    torch.manual_seed(built.seed)
    call.random = RandomState(torch.device("cpu"))
    source = ModuleMap(built.model, call, batch_dim=built.batch_dim)
    free = {n: p for n, p in built.model.named_parameters() if p.requires_grad}
    return source.linearize(free)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", MODELS, ids=lambda c: c.name)
def test_a_linearization_is_autograds(case: ModelCase) -> None:
    built = case.make()
    z = built.value()
    j = jacobian(z, [p for p in built.model.parameters() if p.requires_grad])
    linear = linearize(built)
    assert_close(linear.value, z, 1e-14, "value")
    v = torch.randn(j.shape[1]).double()
    u = torch.randn_like(z)
    with torch.no_grad():
        assert_close(linear.jvp(v).flatten(), j @ v, 1e-12, "jvp = J v")
        assert_close(linear.vjp(u), j.T @ u.flatten(), 1e-12, "vjp = Jᵀu")
        assert_close(linear.rows(), j, 1e-12, "rows = J")
        if case.name != "MultiheadAttention":  # fused attention has no second derivative
            twice = linear._push_by_double_vjp(v)
            assert_close(twice.flatten(), j @ v, 1e-12, "J v by two reverse passes")


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", MODELS, ids=lambda c: c.name)
def test_linearizing_leaves_the_model_alone(case: ModelCase) -> None:
    built = case.make()
    before = {n: t.clone() for n, t in built.model.state_dict().items()}
    hooks = [len(m._forward_hooks) for m in built.model.modules()]
    random = torch.get_rng_state()
    linear = linearize(built)
    torch.set_rng_state(random)
    with torch.no_grad():
        linear.rows()
        linear.jvp(torch.ones(linear.space.size).double())
    for name, value in built.model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} was changed"
    assert torch.equal(torch.get_rng_state(), random), "the random state was changed"
    assert [len(m._forward_hooks) for m in built.model.modules()] == hooks, "hooks were left"
    assert all(p.grad is None for p in built.model.parameters())


class Recurrent(nn.Module):
    def __init__(self, layer_type: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = layer_type(2, 3, batch_first=True)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Scaled(nn.Module):
    """Attention by the fused kernel, as transformers call it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, 4)).movedim(-3, 0).transpose(2, 3)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).mean((1, 2))


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 3)
        for step in x.unbind(1):
            h = self.cell(step, h)
        return h


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Bilinear(2, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x[:, 0], x[:, 1])


UNKNOWN = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "GRUCell": Cells,
    "Bilinear": Pair,
    "ConvTranspose1d": lambda: nn.Sequential(nn.ConvTranspose1d(3, 2, 2), nn.Flatten()),
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)), nn.Tanh(), nn.Flatten()
    ),
    "TransformerEncoderLayer": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True), nn.Flatten()
    ),
}


@pytest.mark.filterwarnings("ignore:.*performance drop")
@pytest.mark.parametrize("name", UNKNOWN)
def test_layers_nobody_registered_are_still_exact(name: str) -> None:
    """Fallbacks are slower, not different: kernel, rows and matrix-free products."""
    torch.manual_seed(0)
    model = UNKNOWN[name]().double()
    x = torch.randn(3, 3, 2).double()
    j = jacobian(model(x), list(model.parameters()))
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    pulled = linear.pullback(identity_covectors(linear.value))
    with torch.no_grad():
        assert_close(pulled.rows(), j, 1e-11, "rows")
        assert_close(pulled.kernel(budget=2**30), j @ j.T, 1e-11, "kernel")
        v = torch.randn(j.shape[1]).double()
        assert_close(linear.jvp(v).flatten(), j @ v, 1e-11, "jvp")
    named = {c.name for c in pulled.coverage}
    assert named == dict(model.named_parameters()).keys()


def test_fused_attention() -> None:
    """No forward mode, no second derivative, no vmap rule: served by plain products."""
    torch.manual_seed(0)
    model = Scaled().double()
    x = torch.randn(2, 3, 4).double()
    j = jacobian(model(x), list(model.parameters()))
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    v = torch.randn(j.shape[1]).double()
    with torch.no_grad():
        assert_close(linear.jvp(v).flatten(), j @ v, 1e-11, "jvp")
        assert_close(linear.rows(), j, 1e-11, "rows")


class Counting(nn.Module):
    """The output depends on a buffer that every call moves on."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x) * (1 + self.calls)


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_a_replay_sees_the_buffers_that_the_call_saw(form: str) -> None:
    """Spectral norm in training mode is such a module: its forward pass moves its own buffers."""
    torch.manual_seed(0)
    model = Counting().double()
    x = torch.randn(4, 3).double()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(0.1), gram=form)

    def closure() -> Tensor:
        opt.zero_grad()
        # scaled by 2 and by 3
        one = model(x[:2])
        two = model(x[2:])
        loss = 0.5 * (one.square().sum() + two.square().sum()) / 4
        loss.backward()
        return loss

    info = opt.step(closure)
    scale = torch.tensor([2.0, 2.0, 3.0, 3.0]).double()
    design = torch.cat([x, torch.ones(4, 1).double()], 1) * scale[:, None]
    w = torch.cat([before[:6].view(2, 3), before[6:, None]], 1)
    gram = design.T @ design / 4 + 0.1 * torch.eye(4).double()
    want = torch.linalg.solve(gram, design.T @ (design @ w.T) / 4).T
    moved = before - torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_close(moved[:6].view(2, 3), want[:, :3], 1e-10, "the weight's step")
    assert_close(moved[6:], want[:, 3], 1e-10, "the bias's step")
    assert float(model.calls) == 2
    assert info.whitened == (form != "dense")


def test_forward_mode_is_not_trusted_with_a_padding_row() -> None:
    """Reverse mode leaves the padding row out, forward mode does not: G must stay symmetric."""
    torch.manual_seed(0)
    model = nn.Embedding(3, 2, padding_idx=0).double()
    with torch.no_grad():
        model.weight.normal_()
    x = torch.tensor([0, 1, 2, 1])
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    with torch.no_grad():
        v = torch.randn(6).double()
        u = torch.randn(4, 2).double()
        pushed = linear.jvp(v)
        assert_close((pushed * u).sum(), v @ linear.vjp(u), 1e-13, "⟨J v, u⟩ = ⟨v, Jᵀu⟩")
        assert torch.equal(pushed[0], torch.zeros(2).double())


def test_parameter_subsets_and_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3).double()
    named = dict(model.named_parameters())
    chosen = {n: named[n] for n in ("2.bias", "0.weight")}
    j = jacobian(model(x), list(chosen.values()))
    linear = ModuleMap(model, Call.of(x)).linearize(chosen)
    assert linear.space.names == ("2.bias", "0.weight")
    assert_close(linear.rows(), j, 1e-13, "rows in the order asked for")


def test_batch_norm_in_training_mode_is_refused_with_the_remedy() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(pb.PullbackError, match=r"\.eval\(\)") as error:
        ModuleMap(model, Call.of(torch.randn(4, 3)))
    assert "'1'" in str(error.value)
    stateless = nn.BatchNorm1d(3, track_running_stats=False).eval()
    with pytest.raises(pb.PullbackError, match="couples"):
        ModuleMap(stateless, Call.of(torch.randn(4, 3)))


def test_an_input_changed_in_place_is_refused() -> None:
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3).double()
    opt = pb.NaturalGradient(model)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        x.add_(1)
        return loss

    with pytest.raises(pb.PullbackError, match="in place"):
        opt.step(closure)
