"""Steps of normalized filters, and of weights that begin large."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

import pullback as pb
from pullback.maps.roles import Role
from pullback.optim.kfac import (
    AdamW,
    Estimation,
    Filters,
    KFACLoadPlanner,
    Spectral,
    TwoSided,
)
from pullback.optim.kfac.factors.block import BlockKind
from pullback.optim.kfac.rules.base import BlockShape

from ..common import assert_close, refused
from .common import vector

DAMPING = 0.05


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


def make_net() -> Any:
    """Two convolutions, of which the first is normalized, and a head that begins large."""
    model: Any = nn.Sequential(
        nn.Conv2d(2, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip
    nn.init.normal_(model[6].weight)
    return model


def make_batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 2, 4, 4, generator=generator), torch.arange(6) % 3


def train(model: nn.Module, opt: Any, steps: range) -> Tensor:
    for number in steps:
        x, y = make_batch(number)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return vector(model)


def find_state(opt: pb.KFAC, name: str) -> Any:
    """The rule's state of a weight."""
    blocks = opt.blocks.states.blocks
    (state,) = (block.state for key, block in blocks.items() if key.names[0] == name)
    return state


# --- by definition ------------------------------------------------------------------------------


def find_polar_factor(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def find_root(factor: Tensor) -> Tensor:
    """(C + λ tr(C)/n)^(-½), up to a number."""
    values, basis = torch.linalg.eigh(factor)
    return basis @ torch.diag((values + DAMPING * values.mean()).rsqrt()) @ basis.T


@pytest.mark.parametrize("options", [{}, {"whitening": False}, {"agreement": False}], ids=str)
@pytest.mark.parametrize("filters", [Filters(), Filters(momentum=0.3, size=0.5)])
def test_five_steps_of_filters(filters: Filters, options: dict[str, Any]) -> None:
    """Whitened Nesterov momentum, its polar factor, and rows of one length: entries of 2 lr."""
    model = make_net()
    twin = copy.deepcopy(model)
    rule = Spectral(damping=DAMPING, filters=filters, estimation=Estimation(ema=0.8), **options)
    opt = pb.KFAC(model, 0.05, rule=rule, statistics_every=1, invert_every=1)
    factor = torch.zeros(8, 8)
    momentum = torch.zeros(4, 8)
    weight: Any = twin[0].weight
    for number in range(5):
        x, y = make_batch(number)
        twin.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        patches = F.unfold(x, 2).mT.flatten(0, 1)
        factor = 0.8 * factor + 0.2 * patches.T @ patches / len(patches)
        gradient = weight.grad.flatten(1)
        momentum = filters.momentum * momentum + (1 - filters.momentum) * gradient
        direction = filters.momentum * momentum + (1 - filters.momentum) * gradient
        if rule.whitening:
            direction = direction @ find_root(factor)
        polar = find_polar_factor(direction)
        rows = polar / polar.square().mean(1, keepdim=True).sqrt()
        expected = weight.detach() - 0.05 * filters.size * rows.view_as(weight)
        train(model, opt, range(number, number + 1))
        assert_close(model[0].weight.detach(), expected, 1e-8)
        twin.load_state_dict(model.state_dict())


@pytest.mark.parametrize("kind", [Spectral, TwoSided])
def test_matrices_of_grouped_filters_have_directions_of_their_own(kind: Any) -> None:
    grouped = nn.Conv2d(4, 4, 2, bias=False, groups=2)
    model = nn.Sequential(nn.Conv2d(2, 4, 1), grouped, *make_net()[1:])
    before = grouped.weight.detach().clone()
    train(model, pb.KFAC(model, 0.5, rule=kind()), range(1))
    step = (before - grouped.weight.detach()).flatten(1)
    assert_close(step.square().mean(1), torch.ones(4), 1e-6)
    for matrix in step.chunk(2):
        assert_close(matrix @ matrix.T, 8 * torch.eye(2), 1e-6)


def test_which_weights_have_steps_of_filters() -> None:
    """Those before a norm in training mode, not frozen ones; none with filters=None."""
    for rule, is_training, expected in (
        (Spectral(), True, Filters()),
        (Spectral(), False, None),
        (Spectral(filters=None), True, None),
    ):
        model = make_net()
        model[1].train(is_training)
        opt = pb.KFAC(model, 1e-3, rule=rule)
        train(model, opt, range(1))
        assert find_state(opt, "0.weight").filters == expected
        assert find_state(opt, "3.weight").filters is None
        model[1].train(not is_training)
        assert train(model, opt, range(1, 12)).isfinite().all()
        assert find_state(opt, "0.weight").filters == expected


# --- weights that begin large -------------------------------------------------------------------


def find_first_size(initialize: Callable[[Tensor], Any], **options: Any) -> float:
    """How long the first step of a head with 48 inputs is, over that of torch's initial weight."""
    sizes = []
    for change in (lambda weight: None, initialize):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 3))
        change(model[2].weight)
        before = model[2].weight.detach().clone()
        opt = pb.KFAC(model, 1e-3, rule=Spectral(head=True, **options))
        F.mse_loss(model(torch.randn(9, 2)), torch.randn(9, 3)).backward()
        opt.step()
        sizes.append(float((model[2].weight - before).norm()))
    return sizes[1] / sizes[0]


@pytest.mark.parametrize("scale", [1.0, 5.0, 1e20])
def test_steps_of_large_weights_are_in_proportion(scale: float) -> None:
    size = torch.empty(0)

    def initialize(weight: Tensor) -> None:
        nonlocal size
        nn.init.normal_(weight, std=scale)
        size = weight.detach().square().mean().sqrt()

    ratio = find_first_size(initialize)
    assert ratio == pytest.approx(float(size) * sqrt(3 * 48), rel=1e-6)


@pytest.mark.parametrize(
    "initialize",
    [
        nn.init.kaiming_normal_,
        nn.init.xavier_uniform_,
        nn.init.orthogonal_,
        lambda weight: nn.init.normal_(weight, std=0.02),
        nn.init.zeros_,
        lambda weight: nn.init.normal_(weight, std=3.5 / sqrt(3 * 48)),
    ],
)
def test_usual_initial_values_change_no_step(initialize: Any) -> None:
    assert find_first_size(initialize) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(
    ("layer_type", "mode"), [(nn.Conv2d, "fan_out"), (nn.ConvTranspose2d, "fan_in")]
)
def test_kaiming_by_outputs_changes_no_step(layer_type: Any, mode: Any) -> None:
    """Eight times as many inputs as outputs: entries are 6.9 times as large as torch's.

    What torch calls the inputs of transposed convolutions are their outputs.
    """
    growths = []
    layer = layer_type(32, 4, 3)
    for _ in range(2):
        model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2))
        x = torch.randn(3, 32, 3, 3)
        model(x).sum().backward()
        opt = pb.KFAC(model, rule=Spectral())
        model(x).sum().backward()
        opt.step()
        growths.append(find_state(opt, "0.weight").growth)
        nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
    assert torch.equal(*growths)


def test_wide_layers_of_transformers_have_the_usual_steps() -> None:
    """Entries of 0.02 are 4.9 times as large as torch's where there are 20,000 inputs."""
    rule = Spectral(whitening=False)
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    for role in (Role.MATRIX, Role.HEAD):
        shape = BlockShape(
            BlockKind.KRONECKER, (1, 4, 20_000), False, False, **options, role=role,
            initial_size=0.02,
        )  # fmt: skip
        assert rule.init(shape).growth.max() == 1


def test_without_agreement_the_schedule_alone_sets_the_length() -> None:
    assert find_first_size(nn.init.normal_, agreement=False) == pytest.approx(1, rel=1e-6)


class ScaledInputs(nn.Module):
    """W x/√n, the parametrization of neural tangent kernels."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach() * sqrt(layer.in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x / sqrt(x.shape[-1]), self.weight)


def test_both_parametrizations_of_a_large_weight_give_the_same_functions() -> None:
    standard: Any = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3))
    nn.init.normal_(standard[0].weight, std=3.0)
    tangent = copy.deepcopy(standard)
    tangent[0] = ScaledInputs(standard[0])
    rules = {"rule": Spectral(damping=DAMPING), "statistics_every": 1, "invert_every": 1}
    x = torch.randn(9, 6)
    y = torch.randn(9, 3)
    outputs: list[Tensor] = []
    for model in (standard, tangent):
        opt = pb.KFAC(model, 0.01, **rules)
        for _ in range(5):
            opt.zero_grad()
            F.mse_loss(model(x), y).backward()
            opt.step()
        outputs.append(model(x))
    assert_close(outputs[0].detach(), outputs[1].detach(), 1e-7)


def test_values_count_that_a_weight_has_at_its_first_step() -> None:
    """Not those at the time when the optimizer was made, which may be anything."""
    model = make_net()
    opts = []
    for value in (1.0, torch.nan, torch.inf, 1e30):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[6].weight.mul_(value)
        opts.append((other, pb.KFAC(other, 0.1, rule=Spectral(head=True))))
        other.load_state_dict(model.state_dict())
    first, *others = [train(other, opt, range(3)) for other, opt in opts]
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


def test_groups_that_come_later_are_measured_then() -> None:
    model = make_net()
    opt = pb.KFAC(model, 0.01, rule=Spectral(head=True), params=model[:4].parameters())
    train(model, opt, range(2))
    nn.init.normal_(model[6].weight, std=2.0)
    size = float(model[6].weight.detach().square().mean().sqrt())
    opt.add_param_group({"params": model[6].parameters()})
    train(model, opt, range(2, 13))
    expected = 3 * size * sqrt(3 * 12)
    assert_close(find_state(opt, "6.weight").growth.mean(), torch.tensor(expected), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_sizes_of_other_dtypes(dtype: torch.dtype) -> None:
    """Squares of entries that float16 cannot hold."""
    model = make_net().to(dtype)
    with torch.no_grad():
        model[6].weight.mul_(300)
    opt = pb.KFAC(model, 1e-4, rule=Spectral(head=True))
    x, y = make_batch(0)
    F.cross_entropy(model(x.to(dtype)).float(), y).backward()
    size = model[6].weight.detach().double().square().mean().sqrt()
    opt.step()
    assert_close(find_state(opt, "6.weight").growth.mean(), 3 * size * sqrt(3 * 12), 1e-2)


# --- state --------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module) -> pb.KFAC:
    return pb.KFAC(
        model, 0.01, rule=Spectral(head=True, others=AdamW()), statistics_every=2, invert_every=4
    )


def make_resumed() -> tuple[Any, pb.KFAC]:
    """A network of other weights, with a fresh optimizer."""
    torch.manual_seed(1)
    resumed = make_net()
    with torch.no_grad():
        for p in resumed.parameters():
            p.mul_(7)
    return resumed, make_optimizer(resumed)


def test_resumed_to_the_same_bits_after_weights_have_changed_their_size() -> None:
    model = make_net()
    opt = make_optimizer(model)
    train(model, opt, range(5))
    with torch.no_grad():
        model[6].weight.div_(100)
    growth = find_state(opt, "6.weight").growth.clone()
    assert growth.min() > 3
    resumed, fresh = make_resumed()
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert torch.equal(find_state(fresh, "6.weight").growth, growth)
    assert find_state(fresh, "0.weight").filters == Filters()
    assert torch.equal(train(resumed, fresh, range(5, 9)), train(model, opt, range(5, 9)))


def test_resumed_to_the_same_bits_while_a_weight_is_frozen() -> None:
    """Its state is given up. Its size when it thaws is the same in both runs."""
    model = make_net()
    opt = make_optimizer(model)
    train(model, opt, range(3))
    growth = find_state(opt, "6.weight").growth.max()
    with torch.no_grad():
        model[6].weight.mul_(2)
    model[6].weight.requires_grad_(False)
    train(model, opt, range(3, 5))
    resumed, fresh = make_resumed()
    resumed[6].weight.requires_grad_(False)
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    runs = []
    for net, optimizer in ((model, opt), (resumed, fresh)):
        train(net, optimizer, range(5, 6))
        net[6].weight.requires_grad_(True)
        runs.append(train(net, optimizer, range(6, 12)))
    assert torch.equal(*runs)
    assert find_state(opt, "6.weight").growth.min() > 1.5 * growth


def test_distributed_checkpoints_hold_it_before_the_first_step(tmp_path: Path) -> None:
    model = make_net()
    opt = make_optimizer(model)
    train(model, opt, range(3))
    dcp.save({"model": model, "opt": opt}, checkpoint_id=tmp_path, no_dist=True)
    resumed, fresh = make_resumed()
    dcp.load(
        {"model": resumed, "opt": fresh},
        checkpoint_id=tmp_path,
        no_dist=True,
        planner=KFACLoadPlanner(),
    )
    assert torch.equal(train(resumed, fresh, range(3, 6)), train(model, opt, range(3, 6)))


def test_tables_of_an_older_version_are_refused() -> None:
    model = make_net()
    opt = make_optimizer(model)
    train(model, opt, range(1))
    saved = opt.state_dict()
    for state in saved["state"].values():
        state["table"].pop("normalized")
    with refused("older version", "length", "Start the optimizer anew"):
        make_optimizer(model).load_state_dict(saved)


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [1, -0.1, float("nan"), "a", None, torch.tensor(0.5), True])
def test_momenta_that_are_refused(momentum: Any) -> None:
    with refused("momentum= is not usable", "got", "in [0, 1)"):
        Filters(momentum=momentum)


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf"), "a", None, True])
def test_sizes_that_are_refused(size: Any) -> None:
    with refused("size= is not usable", "got", "≥ 0"):
        Filters(size=size)


@pytest.mark.parametrize("kind", [Spectral, TwoSided])
@pytest.mark.parametrize("filters", [0.6, "filters", {"momentum": 0.6}, Filters, True])
def test_filters_that_are_refused(kind: Any, filters: Any) -> None:
    with refused("filters= is not usable", "got", "Filters(momentum=..., size=...), or None"):
        kind(filters=filters)


class OwnRule(Spectral):
    """A subclass, whose direction may do what a graph cannot hold."""


@pytest.mark.parametrize(
    ("rule", "has_graph"),
    [
        (Spectral(), True),
        (TwoSided(), True),
        (OwnRule(), False),
        (Spectral(cuda_graph=False), False),
        (TwoSided(cuda_graph=False), False),
        (OwnRule(cuda_graph=True), True),
    ],
)
def test_whether_directions_come_from_a_graph(rule: Spectral, has_graph: bool) -> None:
    assert rule.cuda_graph is has_graph
