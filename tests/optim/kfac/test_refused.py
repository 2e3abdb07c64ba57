"""Options, param groups and saved states that K-FAC refuses; half precision and empty tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac.stepping.look import finite

from ..common import hooks, refused
from .common import DOUBLE, batch, gram, kfac, net, train, vector


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(DOUBLE)
    yield
    torch.set_default_dtype(old)


# --- options and param groups ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "quadratic"), ("step", pb.steps.QuadraticModel), ("step", pb.steps.Constant(1.0)),
        ("grad_scaler", 3), ("params", 3), ("damping", True),
    ],
)  # fmt: skip
def test_options_of_a_wrong_type(name: str, value: Any) -> None:
    model = net()
    before = hooks(model)
    with refused("not usable" if name == "damping" else f"{name}= is not usable", "got", "Use"):
        kfac(model, **{name: value})
    assert hooks(model) == before


@pytest.mark.parametrize("params", [[1], ["0.weight"], [None]])
def test_parameters_that_are_none(params: Any) -> None:
    with refused("does not belong to the model", repr(params[0]), "Pass parameters"):
        kfac(net(), params=params)


@pytest.mark.parametrize("name", ["damping", "kl_clip", "ema", "betas", "weight-decay"])
def test_options_that_a_group_cannot_have(name: str) -> None:
    """A group's own damping would be read by nothing."""
    model = net()
    with refused(f"its own {name}=", "only lr, momentum, weight_decay", "Give it to KFAC"):
        kfac(model, params=[{"params": model.parameters(), name: 10.0}])
    opt = kfac(model, params=model[0].parameters())
    with refused(f"its own {name}=", "only lr, momentum, weight_decay", "Give it to KFAC"):
        opt.add_param_group({"params": model[2].parameters(), name: 10.0})
    assert len(opt.param_groups) == 1


def test_a_groups_labels_and_schedulers_notes_are_welcome() -> None:
    model = net()
    groups = [
        {"params": list(model[0].named_parameters()), "name": "first", "lr": 0.2},
        {"params": list(model[2].named_parameters()), "initial_lr": 0.1, "weight_decay": 0.1},
    ]
    opt = kfac(model, params=groups)
    torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=5)
    again = kfac(net(), momentum=0.5)
    again.load_state_dict(kfac(net()).state_dict())
    train(opt, model, 2)
    assert opt.param_groups[0]["name"] == "first"


RATES: list[tuple[str, Any]] = [
    ("lr", "0.1"), ("lr", [0.1]), ("lr", None), ("lr", True), ("lr", float("nan")), ("lr", -0.1),
    ("lr", torch.inf), ("lr", torch.ones(2)), ("lr", torch.tensor(-1.0)), ("lr", torch.tensor(1j)),
    ("momentum", 1.0), ("momentum", "0.9"), ("weight_decay", -1), ("weight_decay", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), RATES)
def test_rates_put_into_groups_by_hand(name: str, value: Any) -> None:
    model = net()
    opt = kfac(model)
    train(opt, model, 2)
    before, good = vector(model), opt.param_groups[0][name]
    opt.param_groups[0][name] = value
    with refused(f"{name}= is not usable", "got", "Use a number"):
        train(opt, model)
    assert torch.equal(vector(model), before)
    opt.param_groups[0][name] = good
    train(opt, model)


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, int])
def test_rates_of_other_types(kind: Any) -> None:
    values = []
    for value in (kind(0.25) if kind is not int else 0, 0.25 if kind is not int else 0.0):
        torch.manual_seed(0)
        model = net()
        opt = kfac(model)
        for name in ("lr", "momentum", "weight_decay"):
            opt.param_groups[0][name] = value
        train(opt, model, 3)
        values.append(vector(model))
    assert torch.equal(*values)


def test_groups_that_are_none() -> None:
    model = net()
    opt = kfac(model)
    for group in ({}, 3, {"params": 3}, {"lr": 0.1}):
        with refused("A param group is not usable", "got", '"params"'):
            opt.add_param_group(group)  # pyright: ignore[reportArgumentType]
    with refused("'0.weight' is in two param groups", "before", "once"):
        opt.add_param_group({"params": [model[0].weight]})
    train(opt, model, 2)
    assert len(opt.param_groups) == 1


def test_closures_and_objectives_that_cannot_be_called() -> None:
    model = net()
    opt = kfac(model)
    before = vector(model)
    with refused("The closure cannot be called", "got int", "function"):
        opt.step(3)  # pyright: ignore[reportArgumentType]
    with refused("The objective is not usable", "got int", "optim.Objective"):
        opt.step(objective=3)  # pyright: ignore[reportArgumentType]
    assert torch.equal(vector(model), before)
    train(opt, model, 2)
    exact = pb.NaturalGradient(model)
    with refused("The closure cannot be called", "got int", "function"):
        exact.step(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, batch()[0])])
def test_script_modules(make: Callable[[Any], Any]) -> None:
    with refused("The model is a ScriptModule", "watched", "torch.compile"):
        kfac(make(net()))


# --- saved states ---------------------------------------------------------------------------------


def cut(*path: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        inner = state
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return state

    return change


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def wider() -> Any:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))


def longer() -> Any:
    return nn.Sequential(*net(), nn.Linear(4, 4))


MEMORY = ("state", "pullback")
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "none": (net, lambda state: None, "is not KFAC's"),
    "empty": (net, lambda state: {}, "is not KFAC's"),
    "memory": (net, lambda state: state | {"state": {"pullback": None}}, "is not KFAC's"),
    "steps": (net, cut(*MEMORY, "steps"), "is not whole"),
    "taken": (net, cut(*MEMORY, "taken"), "is not whole"),
    "damping": (net, cut(*MEMORY, "damping"), "is not whole"),
    "curvature": (net, cut(*MEMORY, "curvature"), "is not whole"),
    "gathered": (net, cut(*MEMORY, "gathered"), "is not whole"),
    "generator": (net, cut(*MEMORY, "gathered", "generator"), "is not whole"),
    "average": (net, cut(*MEMORY, "curvature", "blocks", 0, "average"), "is not whole"),
    "groups": (net, cut("param_groups"), "another network"),
    "renamed": (Renamed, lambda state: state, "another network"),
    "wider": (wider, lambda state: state, "another network"),
    "longer": (longer, lambda state: state, "another network"),
}


@pytest.mark.parametrize("name", STATES)
def test_states_that_cannot_be_used_change_nothing(name: str) -> None:
    make, change, what = STATES[name]
    source = net()
    saved = kfac(source)
    train(saved, source, 3)
    one, two = make(), make()
    two.load_state_dict(one.state_dict())
    first, second = kfac(one), kfac(two)
    for opt, model in ((first, one), (second, two)):
        train(opt, model, 2)
    with refused(what, "", "Load"):
        first.load_state_dict(change(copy.deepcopy(saved.state_dict())))
    for opt, model in ((first, one), (second, two)):
        train(opt, model, 4, start=2)
    assert torch.equal(vector(one), vector(two))


# --- half precision, and tensors without entries --------------------------------------------------


def test_large_gradients_in_half_precision_are_finite() -> None:
    """The norm of 2¹⁸ entries of 1950 overflows there."""
    large = torch.full((512, 512), 1950.0, dtype=torch.float16)
    others = [torch.ones(3, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16)]
    for some in ([large], [large, others[0]], [others[1], large], [others[2], large], [*others]):
        assert finite(some)
        for value in (float("inf"), float("nan")):
            spoiled = [t.clone() for t in some]
            spoiled[0].view(-1)[1] = value
            assert not finite(spoiled)
    model = nn.Linear(256, 256).half()
    opt = pb.KFAC(model, lr=1e-6, damping=1e-2)
    before = vector(model)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    (model(x.half()).float() * 1000).sum().backward()
    norm = model.weight.grad.double().norm()  # pyright: ignore[reportOptionalMemberAccess]
    assert torch.finfo(torch.float16).max < norm < torch.inf
    opt.step()
    assert opt.info.accepted
    assert not torch.equal(vector(model), before)


class Empty(nn.Module):
    """Layers and parameters without entries beside a network."""

    def __init__(self, there: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 4)
        if there:
            self.nothing, self.none = nn.Linear(5, 0), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(torch.tanh(self.one(x)))
        if not hasattr(self, "nothing"):
            return self.two(z)
        return self.two(z + self.nothing(z).sum(-1, keepdim=True)) + self.none.sum(0)


EMPTY: list[dict[str, Any]] = [
    {}, {"damping": 0.0}, {"ekfac": True}, {"joint": False}, {"kl_clip": 1e-3},
    {"damping": pb.optim.kfac.Invariant(0.1)}, {"damping": pb.optim.kfac.Exact(0.1)},
]  # fmt: skip


@pytest.mark.parametrize("options", EMPTY)
def test_parameters_without_entries_are_left_aside(options: dict[str, Any]) -> None:
    values = []
    for there in (True, False):
        model = Empty(there)
        opt = kfac(model, fisher="exact", **options)
        train(opt, model, 4)
        values.append(vector(model))
        rows = {r.name: r for r in opt.coverage() if not r.block.startswith(("kron", "unit"))}
        assert rows.keys() == ({"none", "nothing.weight", "nothing.bias"} if there else set())
        assert all((r.block, r.reason) == ("none", "it has no entries") for r in rows.values())
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=1e-14)
    x, y = batch()
    one, two = (gram(Empty(there), x, y, F.cross_entropy, **options) for there in (True, False))
    torch.testing.assert_close(one, two)


class Odd(nn.Module):
    """Gives what no metric is of."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 2), kind

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        if self.kind == "complex":
            return torch.complex(z, z)
        if self.kind == "nested":
            return torch.nested.as_nested_tensor([z[:2], z[2:]], layout=torch.jagged)
        return z.to_sparse()


@pytest.mark.parametrize("kind", ["complex", "nested", "sparse_coo"])
def test_outputs_that_no_metric_is_of(kind: str) -> None:
    model = Odd(kind)
    opt = pb.KFAC(model, 0.1)
    with pytest.raises(pb.PullbackError, match=f"output is a {kind} tensor"):
        model(torch.randn(5, 3))
    opt.close()
