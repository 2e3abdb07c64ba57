"""Inverses applied together: weight and bias by one factor, and whose memory is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from pullback.optim.kfac.blocks import group
from pullback.optim.kfac.blocks.group import Group, _apart
from pullback.optim.kfac.blocks.inverse import Inverse
from pullback.optim.kfac.statistics.sums import Key
from pullback.optim.kfac.stepping import steady

from .test_steady import OPTIONS, built, near, net, recorder, reference, train

__all__ = ["recorder"]


@pytest.fixture
def tall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The border below the right side, as on a GPU."""

    def bordered(inverse: Inverse) -> bool:
        right = inverse.right
        dense = inverse.border is not None and right is not None and right.ndim == 3
        return dense and not inverse.factors

    monkeypatch.setattr(group, "bordered", bordered)


def spd(groups: int, n: int) -> Tensor:
    x = torch.randn(groups, n, 2 * n, dtype=torch.float64)
    return x @ x.mT / n + torch.eye(n, dtype=torch.float64)


def inverse_of(key: Key, left: Tensor, right: Tensor) -> Inverse:
    back = 1 / left if left.ndim == 2 else torch.linalg.inv(left)
    return Inverse.of_sides(key, back, torch.linalg.inv(right))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_weight_and_bias_by_one_factor(tall, count, groups, diagonal, inside) -> None:
    torch.manual_seed(0)
    high, wide = 3, 5
    keys = [Key("kronecker", (f"w{i}", f"b{i}")) for i in range(count)]
    lefts = [spd(groups, high) for _ in keys]
    lefts = [x.diagonal(dim1=1, dim2=2).clone() for x in lefts] if diagonal else lefts
    rights = [spd(groups, wide + 1) for _ in keys]
    members = {k: inverse_of(k, a, c) for k, a, c in zip(keys, lefts, rights, strict=True)}
    both = Group(members, {k: (groups, high, wide + 1) for k in keys})
    assert both._tall is not None
    v = torch.randn(count * groups, high, wide, dtype=torch.float64)
    b = torch.randn(count * groups, high, dtype=torch.float64)
    left = torch.cat([torch.diag_embed(x) if diagonal else x for x in lefts])
    joined = torch.linalg.solve(left, torch.cat([v, b[..., None]], 2))
    want = torch.linalg.solve(torch.cat(rights), joined, left=False)
    out = (v, b) if inside else (None, None)  # over the gradients themselves
    weight, bias = both.directions([v, b], out)
    torch.testing.assert_close(weight, want[..., :-1])
    torch.testing.assert_close(bias, want[..., -1])
    # members are parts of what is applied: what is renewed there counts
    members[keys[-1]].border.zero_()  # pyright: ignore[reportOptionalMemberAccess]
    assert not both._tall[-groups:, wide].any()
    assert torch.equal(both._tall[:, wide + 1 :], torch.zeros_like(both._tall[:, wide + 1 :]))


@pytest.mark.parametrize("largest", [0, 2**26])
@pytest.mark.parametrize("options", [*OPTIONS, {"damping": 0.0, "lr": 0.01}], ids=str)
def test_the_same_training(recorder, tall, monkeypatch, options, largest) -> None:
    monkeypatch.setattr(steady, "_LARGEST", largest)
    model = net()
    opt = built(model, **options)
    found = train(model, opt, 30)
    copied = copy.deepcopy(opt)
    more = train(model, opt, 8, start=30)
    assert near(train(copied.model, copied, 8, start=30), more)
    monkeypatch.setattr(group, "bordered", lambda inverse: False)
    assert near(found, reference(30, **options))


def test_a_gradient_that_is_alone_is_read_where_it_lies(recorder, monkeypatch) -> None:
    monkeypatch.setattr(steady, "_LARGEST", 0)
    read: list[Any] = []
    inner = Group.directions

    def directions(self: Group, stacks: Any, out: Any = None) -> Any:
        read.extend(s.data_ptr() for s in stacks)
        return inner(self, stacks, out)

    monkeypatch.setattr(Group, "directions", directions)
    model = net()
    opt = built(model)
    train(model, opt, 5)
    assert model.last.weight.grad.data_ptr() in read
    assert model.conv.weight.grad.data_ptr() in read
    assert model.first.weight.grad.data_ptr() not in read  # stacked with the second's
    program = opt._steady._program
    assert program is not None
    assert not program._there


def test_what_is_left_of_a_stack_does_not_keep_it() -> None:
    stack = torch.randn(4, 3, 3)
    assert _apart(stack) is stack
    part = _apart(stack[1:2])
    assert torch.equal(part, stack[1:2])
    assert part.untyped_storage().nbytes() == part.nbytes
