"""Rules of a user's own, and states that no longer fit: nothing is lost silently."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.grams.kronecker import Pair
from pullback.optim.kfac import (
    Damping,
    Eigenbasis,
    Estimation,
    Natural,
    Rule,
    Spectral,
    Statistics,
)
from pullback.optim.kfac.rules import REFRESHED, RefreshReport, RuleState

from ..common import refused, vector
from .common import batch, net


class Descent(Rule):
    """The gradient itself: no moment and no statistics."""

    name: ClassVar = "descent"
    reads: ClassVar = Statistics.NONE
    is_elementwise: ClassVar = True
    squares_gradients: ClassVar = False

    def init(self, shape: Any) -> RuleState:
        return RuleState()

    def refresh(self, averages: Any, state: Any) -> RefreshReport:
        raise AssertionError("there are no statistics to refresh from")

    def direction(self, gradient: Tensor, state: Any, step: Any) -> Tensor:
        return gradient


@dataclass
class OneMoment(RuleState):
    momentum: Tensor
    left: Tensor = field(metadata=REFRESHED)


class Whitened(Rule):
    """One moment, and both factors: R^(-½) of the outputs applied to momentum."""

    name: ClassVar = "whitened"
    reads: ClassVar = Statistics.INPUTS_AND_OUTPUTS

    def init(self, shape: Any) -> RuleState:
        blocks, rows, _ = shape.size
        return OneMoment(shape.zeros(*shape.size), shape.zeros(blocks, rows, rows))

    def refresh(self, averages: Any, state: Any) -> RefreshReport:
        pair = averages.normalize()
        assert isinstance(pair, Pair)
        values, basis = torch.linalg.eigh(pair.output_factor)
        roots = (values.clamp(min=0) + 1e-2).rsqrt()
        state.left = (basis * roots[:, None]) @ basis.mT
        return RefreshReport()

    def direction(self, gradient: Tensor, state: Any, step: Any) -> Tensor:
        step.average(state.momentum, gradient, 0.1)
        return state.left @ state.momentum


@dataclass
class InputScale(RuleState):
    scale: Tensor = field(metadata=REFRESHED)


class Scaled(Rule):
    """Statistics of inputs only, and no moment."""

    name: ClassVar = "scaled"
    reads: ClassVar = Statistics.INPUTS

    def init(self, shape: Any) -> RuleState:
        return InputScale(shape.zeros(shape.size[0], shape.size[2]))

    def refresh(self, averages: Any, state: Any) -> RefreshReport:
        factor = averages.normalize().input_factor
        state.scale = (factor.diagonal(dim1=1, dim2=2) + 1e-3).rsqrt()
        return RefreshReport()

    def direction(self, gradient: Tensor, state: Any, step: Any) -> Tensor:
        return gradient * state.scale[:, None]


def train(opt: pb.KFAC, model: nn.Module, steps: int, start: int = 0) -> None:
    for i in range(start, start + steps):
        x, y = batch(seed=i)
        opt.zero_grad()
        parameter = next(model.parameters())
        F.cross_entropy(model(x.to(parameter.dtype)), y).backward()
        opt.step()


@pytest.mark.parametrize("make", [Descent, Whitened, Scaled])
def test_rules_with_one_moment_none_or_inputs_only(make: type[Rule]) -> None:
    torch.manual_seed(0)
    model = net()
    opt = pb.KFAC(model, 0.01, rule=make(), statistics_every=2, invert_every=2)
    train(opt, model, 3)
    assert opt.coverage()[0].rule == make.name
    twin = copy.deepcopy(model)
    other = pb.KFAC(twin, 0.01, rule=make(), statistics_every=2, invert_every=2)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(opt, model, 4, 3)
    train(other, twin, 4, 3)
    assert torch.equal(vector(model), vector(twin))


def test_a_rule_without_statistics_is_gradient_descent() -> None:
    torch.manual_seed(0)
    model, twin = net(), net()
    twin.load_state_dict(model.state_dict())
    opt = pb.KFAC(model, 0.05, rule=Descent())
    sgd = torch.optim.SGD(twin.parameters(), 0.05)
    train(opt, model, 3)
    for i in range(3):
        x, y = batch(seed=i)
        sgd.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        sgd.step()
    torch.testing.assert_close(vector(model), vector(twin))
    assert {row.rule for row in opt.coverage()} == {"descent"}
    assert not opt.coverage().is_preliminary
    with_others = pb.KFAC(net(), 0.05, rule=Spectral(others=Descent()))
    train(with_others, with_others.model, 1)
    assert "descent" in {row.rule for row in with_others.coverage()}


def test_a_refresh_without_a_report_is_refused() -> None:
    class Silent(Scaled):
        def refresh(self, averages: Any, state: Any) -> Any:
            super().refresh(averages, state)

    model = nn.Linear(4, 3)
    optimizer = pb.KFAC(model, rule=Silent())
    model(torch.randn(8, 4)).square().mean().backward()
    with pytest.raises(pb.PullbackError, match="refresh returned NoneType"):
        optimizer.step()


def test_impossible_declarations_are_refused_at_construction() -> None:
    class Unread(Scaled):
        reads: ClassVar[Any] = "basis"

    class Entries(Scaled):
        is_elementwise: ClassVar = True

    class Matrices(Scaled):
        reads: ClassVar = Statistics.NONE

    class Nameless(Scaled):
        name: ClassVar = ""

    wrongs = {Unread: "reads is", Entries: "single entries", Matrices: "matrices", Nameless: "name"}
    for wrong, why in wrongs.items():
        with refused("is not usable", why, "Declare"):
            wrong()
    for others in (Scaled(), Natural()):
        with refused("cannot be the rule for others", "all parameters", "Use AdamW()"):
            pb.KFAC(net(), rule=Spectral(others=others))


@pytest.mark.parametrize(
    ("attribute", "value", "remedy"),
    [
        ("others", "adam", "Use Rule or None"),
        ("damping", 0.1, "Use Damping or None"),
        ("estimation", {}, "Use Estimation"),
        ("defaults", 0.1, "Use Defaults"),
        ("kl_clip", 1e-3, "INPUTS_AND_OUTPUTS"),
    ],
)
def test_attributes_that_a_rule_cannot_have(attribute: str, value: Any, remedy: str) -> None:
    rule = type("Wrong", (Scaled,), {attribute: value})()
    with refused(attribute, "", remedy):
        pb.KFAC(net(), rule=rule)


# --- states that no longer fit ------------------------------------------------------------------


def moments_of(opt: pb.KFAC, p: Tensor) -> dict[str, Tensor]:
    state = opt.state[p]["state"]
    return {n: state[n].double().clone() for n in ("first", "momentum", "second") if n in state}


@pytest.mark.parametrize("make", [Eigenbasis, Spectral])
@pytest.mark.parametrize("how", ["loaded", "converted"])
def test_moments_follow_to_another_dtype(make: type[Rule], how: str) -> None:
    """A state in float32 goes on in float64, with all that is in it."""
    torch.manual_seed(0)
    model = net(torch.float32)
    opt = pb.KFAC(model, 0.01, rule=make(), statistics_every=2, invert_every=2)
    train(opt, model, 4)
    reference = copy.deepcopy(opt)
    model.double()
    if how == "loaded":
        saved = copy.deepcopy(opt.state_dict())
        opt = pb.KFAC(model, 0.01, rule=make(), statistics_every=2, invert_every=2)
        opt.load_state_dict(saved)
    train(opt, model, 1, 4)
    train(reference, reference.model, 1, 4)
    for p, q in zip(model.parameters(), reference.model.parameters(), strict=True):
        moments, want = moments_of(opt, p), moments_of(reference, q)
        assert moments.keys() == want.keys()
        for name, moment in moments.items():
            assert opt.state[p]["state"][name].dtype == torch.float64
            torch.testing.assert_close(moment, want[name], rtol=1e-2, atol=1e-4)


@dataclass
class Listed(RuleState):
    moments: Any


class KeepsList(Scaled):
    def init(self, shape: Any) -> RuleState:
        return Listed([shape.zeros(*shape.size)])


class KeepsTupleOfLists(Scaled):
    def init(self, shape: Any) -> RuleState:
        return Listed(([1],))


class KeepsWithoutBlocks(Scaled):
    def init(self, shape: Any) -> RuleState:
        return Listed(shape.zeros(17, 2))


class KeepsNoState(Scaled):
    def init(self, shape: Any) -> Any:
        return None


class Undecorated(RuleState):
    def __init__(self, moment: Tensor) -> None:
        self.moment = moment


class KeepsNoFields(Scaled):
    def init(self, shape: Any) -> RuleState:
        return Undecorated(shape.zeros(*shape.size))


class RefreshesMomentum(Scaled):
    """What is not declared as refreshed would be lost where blocks are stacked."""

    def init(self, shape: Any) -> RuleState:
        return OneMoment(shape.zeros(*shape.size), shape.zeros(shape.size[0]))

    def refresh(self, averages: Any, state: Any) -> RefreshReport:
        state.momentum += averages.normalize().input_factor.mean()
        return RefreshReport()


class RefreshesOneBlock(Scaled):
    def refresh(self, averages: Any, state: Any) -> RefreshReport:
        state.scale = averages.normalize().input_factor[:, 0, 0].expand(3, -1)
        return RefreshReport()


class ReplacesMoment(Descent):
    """A moment in another tensor would be lost at the next change of the stacks."""

    def init(self, shape: Any) -> RuleState:
        return Listed(shape.zeros(*shape.size))

    def direction(self, gradient: Tensor, state: Any, step: Any) -> Tensor:
        state.moments = state.moments + gradient
        return state.moments


class ReadsOutputs(Scaled):
    def refresh(self, averages: Any, state: Any) -> RefreshReport:
        assert averages.pair.output_factor is not None
        return super().refresh(averages, state)


class SumsBlocks(Scaled):
    def direction(self, gradient: Tensor, state: Any, step: Any) -> Tensor:
        return gradient.sum(0)


REFUSED = {
    KeepsList: ("moments of its state is a list", "a field for each tensor"),
    KeepsTupleOfLists: ("moments of its state is a tuple", "a field for each tensor"),
    KeepsWithoutBlocks: ("has shape (17, 2) for 1 blocks", "first axis"),
    KeepsNoState: ("init returned NoneType", "extends RuleState"),
    KeepsNoFields: ("moment of its state is no field", "Decorate Undecorated with @dataclass"),
    RefreshesMomentum: ("refresh changed momentum", "field(metadata=REFRESHED)"),
    RefreshesOneBlock: ("refresh left scale with shape (3, 1) for 1 blocks", "first axis"),
    ReplacesMoment: ("direction replaced moments of the state", "Write into the tensor"),
    ReadsOutputs: ("reads the output factor", "INPUTS_AND_OUTPUTS"),
    SumsBlocks: ("direction returned shape", "gradient's shape"),
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_a_rule_must_not_do_is_refused_in_words(make: type[Rule]) -> None:
    model = net()
    opt = pb.KFAC(model, 0.01, rule=make())
    with refused("The rule", *REFUSED[make]):
        train(opt, model, 1)


@pytest.mark.parametrize("make", [Eigenbasis, Spectral, Natural])
def test_frozen_weights_have_no_buffers_until_they_thaw(make: type[Rule]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 4)).double()
    model[2].requires_grad_(False)
    opt = pb.KFAC(model, 0.01, rule=make(), statistics_every=1, invert_every=1)
    train(opt, model, 2)

    def held() -> int:
        saved = opt.state_dict()["state"]
        tensors = [t for number in (2, 3) for t in _tensors(saved[number])]
        return sum(t.nbytes for t in tensors if t.ndim)

    assert held() == 0
    model[2].requires_grad_(True)
    train(opt, model, 2, 2)
    assert held() > 64 * 64 * 8


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for value in tree.values() for t in _tensors(value)]
    return []


def test_states_of_older_versions_are_refused() -> None:
    opt = pb.KFAC(net(), likelihood=nn.CrossEntropyLoss())
    saved = opt.state_dict()
    for entry in saved["state"].values():
        entry["inverse"] = entry.pop("state")
    with refused("an older version", "no table", "Start the optimizer anew"):
        opt.load_state_dict(saved)


class NoValue(Damping):
    def __init__(self) -> None:
        self.size = 0.1

    def find_shifts(self, means: Any, reference: Any, value: float) -> Any:
        return means


class OneNumber(Damping):
    def find_shifts(self, means: Any, reference: Any, value: float) -> Any:
        return value


class OneNumberASide(Damping):
    def find_shifts(self, means: Any, reference: Any, value: float) -> Any:
        return value, value


class OtherBlocks(Damping):
    def find_shifts(self, means: Any, reference: Any, value: float) -> Any:
        return torch.ones(7), torch.ones(7)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (NoValue, "no value"),
        (OneNumber, "returned float"),
        (OneNumberASide, "returned float for a side"),
        (OtherBlocks, "returned shape \\(7,\\) for 1 blocks"),
    ],
)
def test_what_a_damping_must_not_do_is_refused_in_words(make: type[Damping], why: str) -> None:
    model = net()
    with pytest.raises(pb.PullbackError, match=f"damping {make.__name__} is not usable.*{why}"):
        train(pb.KFAC(model, 0.01, rule=Natural(damping=make())), model, 1)


def test_a_state_with_another_rule_for_others_is_refused() -> None:
    """It was taken up for the table of a checkpoint alone, or its moments were dropped."""
    rules = {"adam": Whitened(), "descent": Whitened(others=Descent())}
    saved = {}
    for name, rule in rules.items():
        model = net()
        opt = pb.KFAC(model, 0.01, rule=rule)
        train(opt, model, 2)
        saved[name] = opt.state_dict()
    opt = pb.KFAC(net(), 0.01, rule=Whitened())
    with refused("another rule", "is nothing, and this rule keeps first, second", "same rule="):
        opt.load_state_dict(saved["descent"])
    opt = pb.KFAC(net(), 0.01, rule=Whitened(others=Descent()))
    with refused("another rule", "is first, second, and this rule keeps nothing", "same rule="):
        opt.load_state_dict(saved["adam"])


def test_a_renamed_layer_keeps_its_averages() -> None:
    """Blocks are saved by what they are, not by the classes of layers."""

    class Renamed(nn.Linear):
        pass

    def build(layer_type: type[nn.Linear]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(layer_type(3, 5), nn.Tanh(), layer_type(5, 4)).double()

    options: Any = {"lr": 0.01, "rule": "eigenbasis", "statistics_every": 2, "invert_every": 2}
    model = build(nn.Linear)
    opt = pb.KFAC(model, **options)
    train(opt, model, 3)
    other = build(Renamed)
    other.load_state_dict(model.state_dict())
    resumed = pb.KFAC(other, **options)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(opt, model, 4, 3)
    train(resumed, other, 4, 3)
    assert torch.equal(vector(model), vector(other))


def test_others_and_estimation_reach_a_rule_without_a_constructor() -> None:
    """They were ignored without a word, as any argument was."""
    rule = Scaled(others=Descent(), estimation=Estimation(ema=0.5))
    assert rule.find_ema() == 0.5
    assert Scaled(estimation=Estimation(seed=1)).find_ema() == 0.95  # that of every rule
    model = net()
    x, y = batch()
    optimizer = pb.KFAC(model, rule=rule)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert {row.rule for row in optimizer.coverage()} == {"scaled", "descent"}
    with pytest.raises(TypeError, match="lr"):
        Scaled(lr=0.1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="positional"):
        Scaled(0.1)  # pyright: ignore[reportCallIssue]
