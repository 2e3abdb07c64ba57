"""Statistics that are gathered before the device has said what the output is like.

On a CPU the waiting route is forced; whatever is found later, averages are as if one had asked.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.likelihoods.categorical import chosen
from pullback.maps.layers import linear, moments
from pullback.optim.kfac.statistics import sweep
from pullback.optim.kfac.statistics.measure import Measure
from pullback.optim.kfac.statistics.sums import _stack


class Shifted(nn.Module):
    """Tokens, a normalization, and logits to which something is added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.hidden, self.head = nn.Linear(6, 6), nn.Linear(6, 7)
        self.double()
        self.shift = torch.zeros(5, 4, 7, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.norm(self.tokens(x))))) + self.shift


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls, plain = [], Measure.pull

    def pull(self: Measure, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Measure, "pull", pull)
    return calls


def run(
    ignored: tuple[int, ...] = (), infinite: tuple[int, ...] = (), micro: int = 1, **options: Any
) -> tuple[pb.KFAC, list[Any]]:
    net = Shifted()
    opt = pb.KFAC(
        net, lr=0.05, likelihood=pb.likelihoods.Categorical(), damping=0.1, statistics_every=1,
        invert_every=3, **options,
    )  # fmt: skip
    infos = []
    for i in range(7):
        opt.zero_grad()
        for j in range(micro):
            g = torch.Generator().manual_seed(10 * i + j)
            x, y = torch.randint(0, 7, (2, 5, 4), generator=g)
            if i in ignored and j == micro - 1:
                y[:, 2:] = -100
            if i in infinite:
                y[0], net.shift[0, 0, 0] = -100, torch.inf
            z = net(x)
            net.shift.zero_()
            F.cross_entropy(z.flatten(0, 1), y.flatten()).backward()
        opt.step()
        infos.append(opt.info)
    return opt, infos


def same(one: pb.KFAC, two: pb.KFAC) -> None:
    for key, average in one.curvature.averages.items():
        other = two.curvature.averages[key]
        assert (average.mass, average.count) == (other.mass, other.count)
        for name, value in average.value.items():
            torch.testing.assert_close(value, other.value[name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("ignored", [(), (3,), (2, 3, 4), (0, 1, 6)])
def test_places_that_do_not_count_are_found_in_time(
    ignored: tuple[int, ...], micro: int, pulls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, infos = run(ignored, micro=micro, fisher="exact")
    asked = len(pulls)
    pulls.clear()
    monkeypatch.setattr(sweep, "waits", lambda x: True)
    two, wanted = run(ignored, micro=micro, fisher="exact")
    same(one, two)
    assert infos == wanted
    # one asks at first, after a pass with such places, and where there were passes before
    surprises = [i for i in ignored if micro == 1 and i > 0 and i - 1 not in ignored]
    assert len(pulls) == asked + 4 * 7 * len(surprises)


def test_draws_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = run()
    monkeypatch.setattr(sweep, "waits", lambda x: True)
    same(one, run()[0])


@pytest.mark.parametrize("infinite", [(0,), (2,), (3, 4)])
def test_an_output_that_is_not_finite_gives_nothing(
    infinite: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, infos = run(infinite=infinite, fisher="exact")
    monkeypatch.setattr(sweep, "waits", lambda x: True)
    two, wanted = run(infinite=infinite, fisher="exact")
    same(one, two)
    assert infos == wanted
    assert [i for i, info in enumerate(infos) if not info.taken] == list(infinite)


@pytest.mark.parametrize("classes", [5, 600, 1000, 1024])
def test_classes_are_drawn_even_from_no_probabilities(classes: int) -> None:
    p = torch.full((20, classes), torch.nan)
    p[::2] = torch.softmax(torch.randn(10, classes), -1)
    y = chosen(p, torch.Generator().manual_seed(0))
    assert ((y >= 0) & (y < classes)).all()


@pytest.mark.parametrize("ignored", [0, 3])
def test_moments_side_by_side_are_the_same(ignored: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def averages() -> pb.KFAC:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        net.append(nn.Linear(5, 3, bias=False))
        opt = pb.KFAC(net, lr=0.1, likelihood=pb.likelihoods.Categorical(), damping=0.1)
        y = torch.arange(8) % 3
        y[:ignored] = -100
        F.cross_entropy(net(torch.randn(8, 5)), y).backward()
        opt.step()
        return opt

    stacks, find = [], _stack
    monkeypatch.setattr(sweep, "waits", lambda x: True)
    one = averages()
    monkeypatch.setattr(linear, "stackable", lambda x: True)
    monkeypatch.setattr(moments, "product_into", lambda out, x: torch.mm(x.T, x, out=out))
    name = "pullback.optim.kfac.statistics.sums._stack"
    monkeypatch.setattr(name, lambda some: stacks.append(find(some)) or stacks[-1])
    two = averages()
    assert [s is not None for s in stacks] == [True]
    for key, average in one.curvature.averages.items():
        for tag, value in average.value.items():
            torch.testing.assert_close(two.curvature.averages[key].value[tag], value)


def test_moments_in_another_order_are_no_stack() -> None:
    rows = [torch.randn(4, 3) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "product_into", lambda out, x: torch.mm(x.T, x, out=out))
        one, two, three = moments.stacked(rows)
    assert _stack([one, two, three]) is one.stack
    assert _stack([two, one, three]) is None
    assert _stack([one, two]) is None
    assert _stack([one, two, three + three]) is None


def test_a_layer_that_was_exchanged_is_noticed() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    opt = pb.KFAC(net, lr=0.1, likelihood=pb.likelihoods.Categorical(), statistics_every=1)
    x, y = torch.randn(4, 3), torch.arange(4) % 2
    F.cross_entropy(net(x), y).backward()
    opt.step()
    net[1] = nn.Sequential(nn.Tanh(), nn.Identity())
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    opt.step()
    assert opt.info.taken
    net[0] = nn.Linear(3, 3)
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    with pytest.raises(pb.PullbackError, match="other parameters"):
        opt.step()
