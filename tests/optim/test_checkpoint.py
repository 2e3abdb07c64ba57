"""State for checkpoints: by parameter, there from the start, and through torch's own functions."""

import copy
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adam, Optimizer, RMSprop

import pullback as pb
from pullback.symmetry import Sliced, SliceSGD
from tests.kfac_options import kfac_of
from tests.pairs import each_once

from .common import closure_of, data, mlp, refused, same, vector

S = pb.solvers
T = pb.steps


def natural(make: Callable[[], tuple[S.Solver, T.Step]]) -> Callable[[nn.Module], Optimizer]:
    def build(model: nn.Module) -> Optimizer:
        solver, step = make()
        return pb.NaturalGradient(model, solver=solver, step=step)

    return build


RULES: dict[str, Callable[[], T.Step]] = {
    "Constant": lambda: T.Constant(0.5),
    "GridLineSearch": lambda: T.GridLineSearch(6),
    "Backtracking": T.Backtracking,
    "LevenbergMarquardt": lambda: T.LevenbergMarquardt(1.0),
    "TargetRatio": lambda: T.TargetRatio(radii=8),
    "QuadraticModel": T.QuadraticModel,
    "Spring": lambda: T.Spring(0.9, T.Constant(0.5)),
    "TrustNorm of Spring": lambda: T.TrustNorm(0.1, T.Spring(0.9)),
    "Spring of QuadraticModel": lambda: T.Spring(0.5, T.QuadraticModel()),
}
#: K-FAC, with each kind of state that its options ask for
KFAC: dict[str, dict[str, Any]] = {
    "KFAC": {},
    "KFAC, bias apart": {"joint": False, "momentum": 0.0},
    "KFAC, eigenbases": {"ekfac": True},
    "KFAC, exact damping": {"damping": pb.optim.kfac.Exact(0.1)},
    "KFAC, references": {"damping": pb.optim.kfac.Invariant(0.1)},
    "KFAC, adaptive": {"damping": pb.optim.kfac.Adaptive(0.1)},
    "KFAC, quadratic model": {"step": T.QuadraticModel()},
    "KFAC, every step": {"statistics_every": 1, "invert_every": 1},
    "KFAC, clipped": {"kl_clip": 1e-3},
    "KFAC, rule eigenbasis": {"rule": "eigenbasis", "damping": None},
    "KFAC, rule spectral": {"rule": "spectral"},
    "KFAC, rule two-sided": {"rule": "two-sided"},
}


def kfac(options: dict[str, Any]) -> Callable[[nn.Module], Optimizer]:
    settings = {"damping": 0.1, "statistics_every": 2, "invert_every": 4} | options
    return lambda model: kfac_of(model, 0.05, **settings)


#: whose state is there from construction
OWN: dict[str, Callable[[nn.Module], Optimizer]] = {
    **{name: natural(lambda r=r: (S.PseudoInverse(1e-2), r())) for name, r in RULES.items()},
    "Sketched": natural(lambda: (S.Sketched(rows=8, columns=16, damping=1e-2), T.Constant(0.5))),
    **{name: kfac(options) for name, options in KFAC.items()},
    "SliceSGD": lambda m: SliceSGD(m, 0.05, every=2),
    "SliceSGD, momentum": lambda m: SliceSGD(m, 0.05, momentum=0.9),
    "SliceSGD, layers": lambda m: SliceSGD(m, 0.05, group="layer", momentum=0.9),
    "Sliced NaturalGradient": lambda m: Sliced(pb.NaturalGradient(m, step=T.Constant(0.1))),
}
#: whose inner optimizer makes its state in the first step
LATE: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Sliced Adam": lambda m: Sliced(Adam(m.parameters(), 0.01), m),
    "Sliced SGD": lambda m: Sliced(SGD(m.parameters(), 0.05), m, every=2),
    "Sliced SGD, momentum": lambda m: Sliced(SGD(m.parameters(), 0.05, momentum=0.9), m),
    "Sliced RMSprop": lambda m: Sliced(RMSprop(m.parameters(), 0.01, momentum=0.9), m),
}
ALL = {**OWN, **LATE}
OPTIONS = {
    "nested": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


def start(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(1)
    model = mlp(act=nn.ReLU, dtype=dtype)
    return model, ALL[name](model)


def train(model: nn.Module, opt: Optimizer, steps: int = 3) -> Tensor:
    torch.manual_seed(2)
    x, y = data(12, dtype=next(model.parameters()).dtype)
    closure = closure_of(opt, model, x, y)
    for _ in range(steps):
        opt.step(closure)
    return vector(model)


def outline(tree: Any) -> Any:
    """The keys, with the types of what stands there."""
    if isinstance(tree, dict):
        assert all(type(key) is str for key in tree)
        return {key: outline(value) for key, value in tree.items()}
    assert type(tree) in (Tensor, int, float)
    if isinstance(tree, Tensor):
        return (tree.shape, tree.dtype)
    return "number"


def outlines(opt: Optimizer) -> list[Any]:
    params = list(chain.from_iterable(group["params"] for group in opt.param_groups))
    assert set(opt.state) == set(params)
    return [outline(opt.state[p]) for p in params]


@pytest.mark.parametrize("name", OWN)
def test_state_stands_by_parameter_from_construction_on(name: str) -> None:
    """K-FAC's averages and states are there with the first statistics, which show its table."""
    model, opt = start(name)
    before = outlines(opt)
    if name.startswith("KFAC"):
        train(model, opt, 1)
        for fresh, later in zip(before, outlines(opt), strict=True):
            known = fresh.keys() - {"state", "average", "mean"}
            assert all(later[key] == fresh[key] for key in known)
            assert fresh["state"] == {"ready": "number", "born": "number"}
        before = outlines(opt)
    train(model, opt)
    assert outlines(opt) == before
    assert [outline(s) for s in opt.state_dict()["state"].values()] == before


@pytest.mark.parametrize(("name", "options"), each_once(ALL, OPTIONS))
def test_torchs_checkpoints_resume_to_the_same_bits(name: str, options: str) -> None:
    model, opt = start(name)
    train(model, opt)
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=OPTIONS[options]))
    weights = copy.deepcopy(model.state_dict())
    want = train(model, opt)
    resumed, fresh = start(name)
    resumed.load_state_dict(weights)
    set_optimizer_state_dict(resumed, fresh, saved, options=OPTIONS[options])
    assert torch.equal(train(resumed, fresh), want)


@pytest.mark.parametrize(
    "name",
    [
        "KFAC",
        "KFAC, eigenbases",
        "KFAC, rule eigenbasis",
        "KFAC, rule spectral",
        "Spring of QuadraticModel",
        "SliceSGD",
        "Sliced Adam",
    ],
)
def test_a_checkpoint_in_files_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    model, opt = start(name)
    train(model, opt)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, opt)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    want = train(model, opt)
    resumed, fresh = start(name)
    for _ in range(2 if name.startswith("KFAC") else 1):  # the first load reads K-FAC's table
        state = {
            "model": resumed.state_dict(),
            "optimizer": get_optimizer_state_dict(resumed, fresh),
        }
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        resumed.load_state_dict(state["model"])
        set_optimizer_state_dict(resumed, fresh, state["optimizer"])
    assert torch.equal(train(resumed, fresh), want)


@pytest.mark.parametrize("name", ["Constant", "KFAC", "SliceSGD", "Sliced Adam"])
def test_loading_by_keyword(name: str) -> None:
    model, opt = start(name)
    train(model, opt)
    _, fresh = start(name)
    fresh.load_state_dict(state_dict=opt.state_dict())
    assert same(fresh.state_dict(), opt.state_dict())


@pytest.mark.parametrize("other", [{}, {"state": {}}])
def test_what_is_no_state_is_refused(other: dict[str, Any]) -> None:
    model, opt = start("TrustNorm of Spring")
    train(model, opt)
    before = copy.deepcopy(opt.state_dict())
    with refused("not an optimizer's", "by parameter", "NaturalGradient.state_dict()"):
        opt.load_state_dict(other)
    assert same(opt.state_dict(), before)


@pytest.mark.parametrize("name", [n for n in ALL if n.startswith("Slice") and "Nat" not in n])
def test_a_step_without_gradients_and_rate_changes_nothing(name: str) -> None:
    model, opt = start(name)
    for steps in (0, 3):
        train(model, opt, steps)
        if name in LATE and not steps:  # this makes the state, as torch wants it
            continue
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        rate = opt.param_groups[0]["lr"]
        opt.param_groups[0]["lr"] = 0.0
        before = copy.deepcopy((model.state_dict(), opt.state_dict()))
        opt.step(closure=None)
        assert same((model.state_dict(), opt.state_dict()), before)
        opt.param_groups[0]["lr"] = rate


def test_the_step_that_makes_torch_create_state_moves_and_counts_nothing() -> None:
    model, opt = start("Sliced Adam")
    before = vector(model)
    assert not opt.state
    state = get_optimizer_state_dict(model, opt)["state"]["0.weight"]
    assert torch.equal(vector(model), before)
    assert state["slice"] == {"steps": 0}
    assert not state["optimizer"]["exp_avg"].any()


@pytest.mark.parametrize("flat", [False, True])
def test_frozen_parameters_need_no_saved_state(flat: bool) -> None:
    """torch leaves them out; the numbers of the step come from the others."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, opt = start("TrustNorm of Spring")
    model[0].requires_grad_(False)  # pyright: ignore
    train(model, opt)
    saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
    resumed, fresh = start("TrustNorm of Spring")
    resumed.load_state_dict(model.state_dict())
    resumed[0].requires_grad_(False)  # pyright: ignore
    set_optimizer_state_dict(resumed, fresh, saved, options=options)
    assert fresh.state[resumed[0].weight]["schedule"]["steps"] == 3  # pyright: ignore
    assert same(fresh.state_dict(), opt.state_dict())


@pytest.mark.parametrize("name", ["Spring", "QuadraticModel"])
def test_vectors_of_half_parameters_are_saved_as_they_are_kept(name: str) -> None:
    model, opt = start(name, torch.bfloat16)
    train(model, opt)
    resumed, fresh = start(name, torch.bfloat16)
    resumed.load_state_dict(model.state_dict())
    fresh.load_state_dict(opt.state_dict())
    want = train(model, opt)
    assert torch.equal(train(resumed, fresh), want)


def test_the_state_of_the_inner_optimizer_begins_on_the_slice() -> None:
    model = mlp(act=nn.ReLU)
    adam = Adam(model.parameters(), 0.01)
    train(model, adam)
    opt = Sliced(Adam(model.parameters()), model)
    opt.load_state_dict(adam.state_dict())
    weight = next(model.parameters())
    assert torch.equal(opt.state[weight]["optimizer"]["exp_avg"], adam.state[weight]["exp_avg"])
    older = copy.deepcopy(adam.state_dict())
    older["param_groups"][0]["slice_steps"] = 3
    with refused("older version", "param group", "Sliced.state_dict()"):
        opt.load_state_dict(older)


@pytest.mark.parametrize("older", [False, True])
def test_a_natural_gradient_takes_its_own_state_alone(older: bool) -> None:
    model, opt = start("TrustNorm of Spring")
    train(model, opt)
    adam = Adam(model.parameters(), 0.01)
    train(model, adam)
    other = adam.state_dict()
    if older:  # everything stood under one key
        other["state"] = {"pullback": {"steps": 3}}
    before = copy.deepcopy(opt.state_dict())
    with refused("not NaturalGradient's", "no schedule", "of this version"):
        opt.load_state_dict(other)
    assert same(opt.state_dict(), before)


class Hoarder(T.Constant):
    """Keeps what it has not declared, or no number."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.name = name
        self.value = value

    @property
    def numbers(self) -> dict[str, float]:
        return {"count": 0}

    def take(self, local: T.Local) -> T.Move:
        local.state[self.name] = self.value
        return super().take(local)


@pytest.mark.parametrize(("name", "value"), [("other", 1.0), ("count", "one")])
def test_a_step_that_keeps_what_it_has_not_declared_is_refused(name: str, value: Any) -> None:
    model = mlp()
    x, y = data()
    opt = pb.NaturalGradient(model, step=Hoarder(name, value))
    with refused("Hoarder keeps", "", "`numbers`"):
        opt.step(closure_of(opt, model, x, y))


class LateLayer(nn.Module):
    """A layer that is not used from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.last = nn.Linear(6, 3)
        self.unused_at_first = nn.Linear(5, 3)
        self.used = False

    def forward(self, x: Tensor) -> Tensor:
        z = self.last(torch.tanh(self.first(x)))
        if self.used:
            return z + self.unused_at_first(x)
        return z


@pytest.mark.parametrize("rule", ["natural", "eigenbasis"])
def test_a_layer_that_was_not_used_yet_asks_for_no_statistics_after_loading(rule: str) -> None:
    def run(resumed: bool) -> Tensor:
        torch.manual_seed(0)
        model = LateLayer()
        opt = pb.KFAC(model, 0.05, rule=rule, statistics_every=2, invert_every=4)
        for number in range(8):
            model.used = number >= 5
            if resumed and number == 3:
                state = opt.state_dict()
                opt = pb.KFAC(model, 0.05, rule=rule, statistics_every=2, invert_every=4)
                opt.load_state_dict(state)
            x = torch.randn(7, 5, generator=torch.Generator().manual_seed(number))
            opt.zero_grad()
            F.cross_entropy(model(x), torch.arange(7) % 3).backward()
            opt.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run(True), run(False))
