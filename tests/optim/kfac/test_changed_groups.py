"""Parameters that are frozen, thawed or given to another rule while they are trained."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Eigenbasis, Natural, Rule, Spectral

from ..common import refused
from .common import vector

RULES = [Eigenbasis, Spectral, Natural]


def build(rule: Rule | str, **options: Any) -> tuple[Any, pb.KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    groups = [{"params": list(model[i].parameters())} for i in (0, 2, 4)]
    return model.double(), pb.KFAC(model, 0.02, rule=rule, params=groups, **options)


def train(model: nn.Module, opt: pb.KFAC, steps: range) -> None:
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
        opt.zero_grad()
        F.mse_loss(model(x), x[:, :3].sin()).backward()
        opt.step()


def list_tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    tensors: list[Tensor] = []
    for branch in tree.values() if isinstance(tree, dict) else ():
        tensors += list_tensors(branch)
    return tensors


def count_saved_bytes(opt: pb.KFAC, *numbers: int) -> int:
    saved = opt.state_dict()["state"]
    tensors: list[Tensor] = []
    for number in numbers:
        tensors += list_tensors(saved[number])
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("make", RULES)
def test_what_is_held_for_weights_is_given_up_when_they_freeze(make: type[Rule]) -> None:
    model, opt = build(make())
    train(model, opt, range(3))
    before = opt.memory()
    model[2].requires_grad_(False)
    train(model, opt, range(3, 5))
    assert all(opt.memory()[name] < size for name, size in before.items())
    assert count_saved_bytes(opt, 2, 3) == 0
    model[2].requires_grad_(True)
    train(model, opt, range(5, 6))
    assert opt.info.took_statistics
    assert opt.memory() == before
    assert {row.rule for row in opt.coverage()[2:3]} == {make.name}
    train(model, opt, range(6, 8))
    assert opt.info.took_statistics == (make is Natural)  # which does at its first ten steps


@pytest.mark.parametrize("make", RULES)
def test_a_state_saved_while_weights_are_frozen_resumes_to_the_same_bits(
    make: type[Rule],
) -> None:
    model, opt = build(make())
    train(model, opt, range(3))
    model[2].requires_grad_(False)
    train(model, opt, range(3, 5))
    resumed, fresh = build(make())
    resumed.load_state_dict(model.state_dict())
    resumed[2].requires_grad_(False)
    fresh.load_state_dict(opt.state_dict())
    for network, optimizer in ((model, opt), (resumed, fresh)):
        train(network, optimizer, range(5, 7))
        network[2].requires_grad_(True)
        train(network, optimizer, range(7, 20))
    assert torch.equal(vector(model), vector(resumed))


@pytest.mark.parametrize("make", [Eigenbasis, Spectral])
def test_a_rule_that_a_group_asks_for_later_is_followed(make: type[Rule]) -> None:
    model, opt = build(make(), statistics_every=2)
    train(model, opt, range(3))
    size = opt.memory()["averages"]
    opt.param_groups[1]["rule"] = "adam"
    train(model, opt, range(3, 4))
    row = opt.coverage()[2]
    assert (row.rule, row.reason) == ("adam", "its param group asks for it")
    assert opt.memory()["averages"] < size
    train(model, opt, range(4, 7))
    opt.param_groups[1]["rule"] = None
    train(model, opt, range(7, 9))
    assert opt.coverage()[2].rule == make.name
    assert opt.memory()["averages"] == size


def test_a_rule_that_a_group_cannot_have_is_refused_later_too() -> None:
    model, opt = build(Natural())
    train(model, opt, range(1))
    opt.param_groups[0]["rule"] = "adam"
    with refused("cannot have its own rule=", "only lr", "leave it out"):
        train(model, opt, range(1, 2))


@pytest.mark.parametrize("rule", ["eigenbasis", "spectral"])
def test_two_optimizers_that_watch_one_model_do_not_see_each_others_covectors(rule: str) -> None:
    """Each has the blocks and averages that it has alone."""
    grams = []
    for is_alone in (True, False):
        model, opt = build(rule)
        neighbour = None
        if not is_alone:
            neighbour = pb.KFAC(model, likelihood=nn.MSELoss(), statistics_every=1)
        train(model, opt, range(12))
        grams.append(opt.gram().dense())
        if neighbour is not None:
            train(model, neighbour, range(12, 13))
            assert all(row.block.startswith("kronecker") for row in neighbour.coverage())
    assert torch.equal(*grams)


def test_a_natural_gradient_does_not_see_the_covectors_of_a_kfac_beside_it() -> None:
    directions = []
    for is_alone in (True, False):
        model, kfac = build("eigenbasis")
        if is_alone:
            kfac.close()
        opt = pb.NaturalGradient(model)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

        def closure(model: Any = model, opt: Any = opt, x: Tensor = x) -> Tensor:
            opt.zero_grad()
            loss = (model(x) - x[:, :3].sin()).square().sum(1).mean() / 2
            loss.backward()
            return loss

        directions.append(opt.direction(closure).x)
    assert torch.equal(*directions)
