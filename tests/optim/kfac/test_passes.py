"""Statistics by few passes: nothing is copied, drawn or held more than once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pullback as pb
from pullback.likelihoods.categorical import chosen
from pullback.optim.kfac.statistics import descent, pending
from pullback.optim.kfac.statistics.measure import Measure

Averages = dict[str, Tensor]


class Tower(nn.Module):
    """Two layers on sequences, with what is done to the first one's output, and a head."""

    def __init__(self, after: Any, *, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 5)
        self.head, self.after, self.detached = nn.Linear(5, 4, bias=bias), after, False

    def forward(self, x: Tensor) -> Tensor:
        h = self.after(self.a(x))
        h = h.detach() if self.detached else h
        return self.head(torch.tanh(self.b(h)))


def learned(model: nn.Module, steps: int = 1, change: Any = None) -> Averages:
    """All averages after some statistics steps, by name."""
    opt = pb.KFAC(model, 0.0, likelihood=pb.likelihoods.Categorical(), statistics_every=1)
    made = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 3, generator=made, dtype=next(model.parameters()).dtype)
    y = torch.randint(0, 4, (12,), generator=made)
    for i in range(steps):
        if change is not None:
            change(model, i)
        opt.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y).backward()
        opt.step()
        assert opt.info.taken
    held = opt.curvature.averages.items()
    return {f"{k.names}{n}": t for k, a in held for n, t in a.value.items()}


def tower(after: Any, **options: Any) -> Tower:
    torch.manual_seed(0)
    return Tower(after, **options).double()


def agree(one: Averages, two: Averages, rtol: float = 1e-12) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=rtol, atol=1e-15)


def _sliced_in_place(h: Tensor) -> Tensor:
    h[..., 2:].relu_()
    return h


def _sliced(h: Tensor) -> Tensor:
    return torch.cat([h[..., :2], torch.relu(h[..., 2:])], -1)


@pytest.mark.parametrize(
    ("inplace", "apart"),
    [
        (lambda h: h.relu_(), torch.relu),
        (lambda h: h.mul_(2).add_(h), lambda h: 4 * h),
        (_sliced_in_place, _sliced),
        (lambda h: h.view(-1, 6).tanh_().view(h.shape), torch.tanh),
    ],
)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_layers_output_may_be_changed_in_place(inplace: Any, apart: Any, steps: int) -> None:
    """The cotangent is that of the layer's own output, which is not copied for it."""
    agree(learned(tower(apart), steps), learned(tower(inplace), steps))


class Copies(TorchDispatchMode):
    """Counts copies of activations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.clone.default
        return func(*args, **(kwargs or {}))


def test_outputs_of_linear_layers_are_not_copied() -> None:
    model = tower(torch.relu)
    opt = pb.KFAC(model, 0.0, likelihood=pb.likelihoods.Categorical())
    assert opt.statistics_due
    with Copies() as copies:
        model(torch.randn(4, 3, 3, dtype=torch.float64))
    assert copies.count == 0


@pytest.mark.parametrize("bias", [False, True])
def test_a_large_covector_is_let_go_below_the_head(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    """From the second time on it is gone while the layers below are passed; the same factors."""
    want = learned(tower(torch.relu, bias=bias), 3)
    monkeypatch.setattr(pending, "_LARGE", 1)
    covectors: list[Any] = []
    alive: list[bool] = []
    pull, pulled = Measure.pull, descent.pulled

    def spy(self: Measure, way: descent.Descent, sums: Any) -> Any:
        covectors[:] = [weakref.ref(way.covector[0].untyped_storage())]
        return pull(self, way, sums)

    def below(root: Any, covector: Tensor, targets: Any) -> Any:
        alive.append(covectors[0]() is not None)
        return pulled(root, covector, targets)

    monkeypatch.setattr(Measure, "pull", spy)
    monkeypatch.setattr(descent, "pulled", below)
    agree(want, learned(tower(torch.relu, bias=bias), 3))
    assert alive == [True, False, False]


def test_another_way_is_met_by_another_covector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The covector is gone when it turns out that a layer is no longer on the way."""

    def change(model: Any, i: int) -> None:
        model.detached = i == 2

    monkeypatch.setattr(pending, "_LARGE", 1)
    raised: list[int] = []
    take = pending.Pending.value
    monkeypatch.setattr(pending.Pending, "value", lambda self: raised.append(1) or take(self))
    held = learned(tower(torch.relu), 4, change)
    assert all(bool(t.isfinite().all()) for t in held.values())
    assert len(raised) == 4


def test_a_head_by_itself_has_nothing_below(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    want = learned(nn.Linear(3, 4).double(), 3)
    monkeypatch.setattr(pending, "_LARGE", 1)
    torch.manual_seed(0)
    agree(want, learned(nn.Linear(3, 4).double(), 3))


@pytest.mark.parametrize("classes", [3, 500, 3000, 3072])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_classes_are_chosen_by_their_probabilities(classes: int, dtype: torch.dtype) -> None:
    """χ² of many draws, whose mean is the number of classes less one; none has probability 0."""
    made = torch.Generator().manual_seed(classes)
    z = torch.randn(classes, generator=made)
    z[[1, -1]] = -torch.inf
    p = torch.softmax(z, 0).to(dtype)
    n = 16000
    y = torch.cat([chosen(p.expand(n // 4, -1), made) for _ in range(4)])
    share = p.double() / p.double().sum()
    counts = torch.bincount(y, minlength=classes).double()
    assert counts[p == 0].sum() == 0
    live = p > 0
    chi = ((counts - n * share).square()[live] / (n * share[live])).sum()
    degrees = int(live.sum()) - 1
    assert abs(float(chi) - degrees) < 6 * (2 * degrees) ** 0.5 + 6


def test_rows_that_are_not_numbers_choose_some_class() -> None:
    p = torch.full((2, 2000), torch.nan)
    assert bool((chosen(p) < 2000).all())


def test_scores_in_half_precision_are_those_of_the_rounded_probabilities() -> None:
    z = torch.randn(5, 1500)
    for dtype in (torch.bfloat16, torch.float16):
        score = pb.likelihoods.Categorical().score(z.to(dtype), torch.Generator().manual_seed(0))
        p = torch.softmax(z.to(dtype).float(), 1)
        y = score.float().argmin(1)
        want = p - F.one_hot(y, 1500)
        assert score.dtype == dtype
        torch.testing.assert_close(score.float(), want, rtol=1e-2, atol=5e-3)
