"""What a loop may do with a model: use weights elsewhere, change them, differentiate outputs."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.testing import assert_close
from tests.kfac_options import kfac_of
from tests.optim.common import vector
from tests.optim.kfac import oracle as o
from tests.optim.kfac.common import Then, batch, kfac, net


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def take(opt: pb.KFAC, model: nn.Module, *args: Any) -> None:
    x = torch.linspace(-1, 1, 20).sin().view(5, 4)
    opt.zero_grad()
    (0.5 * model(x, *args).square().sum() / 5 + getattr(model, "extra", 0.0)).backward()
    opt.step()
    assert opt.info.took_statistics


def optimizer(model: nn.Module, **options: Any) -> pb.KFAC:
    return o.optimizer(model, "euclidean", statistics_every=1, ema=0.0, **options)


# --- weights used outside their layer -------------------------------------------------------


class Uses(nn.Module):
    """A layer that some passes do not train, or whose weight they use once more by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor, mode: str) -> Tensor:
        h = self.inner(x)
        if mode == "beside":
            self.extra = self.inner(10 * x + 1).mean()
        else:
            self.extra = 0.0
        if mode == "outside":
            h = h + F.linear(x.square(), 2 * self.inner.weight)
        return self.last(torch.tanh(h.detach() if mode == "detached" else h))


REASONS = {
    "kronecker": "Linear",
    "diagonal": "outside its layer",
    "gradient": "no output seen so far depended on it",
}


@pytest.mark.parametrize(
    "passes",
    [
        ["plain kronecker", "outside diagonal", "plain kronecker"],
        ["detached gradient", "plain kronecker", "detached kronecker"],
        ["outside diagonal", "detached diagonal"],
    ],
)
def test_the_last_pass_that_used_a_layer_says_what_is_held(passes: list[str]) -> None:
    model = Uses()
    opt = optimizer(model)
    twice = chain.from_iterable((p, p) for p in passes)
    for mode, block in map(str.split, twice):
        take(opt, model, mode)
        rows = {row.name: row for row in opt.coverage()}
        assert rows["inner.weight"].block.startswith(block)
        assert REASONS[block] in rows["inner.weight"].reason
        assert rows["last.weight"].block.startswith("kronecker")


def test_a_call_that_the_loss_feels_but_not_the_output_does_not_count() -> None:
    model = Uses()
    grams = []
    for mode in ("beside", "plain"):
        opt = optimizer(model)
        take(opt, model, mode)
        grams.append(opt.gram().dense())
    assert_close(*grams, 1e-12, "inputs of the call that matters")


class Outside(nn.Module):
    """The second output alone uses a weight outside of its layer."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.one = nn.Linear(3, 1)
        self.two = nn.Linear(3, 1)
        self.mixed = mixed

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        y = self.one(h)
        z = self.two(h)
        if self.mixed:
            y, z = y + z, z - y
        return torch.cat([y, z + F.linear(h.square(), 3 * self.one.weight)], -1)


@pytest.mark.parametrize("mixed", [False, True])
def test_one_output_that_uses_a_weight_outside_its_layer_is_noticed(mixed: bool) -> None:
    model = Outside(mixed)
    opt = optimizer(model)
    for _ in range(2):
        take(opt, model)
    others = {r.name: r.block for r in opt.coverage() if not r.block.startswith("kronecker")}
    assert others == {"one.weight": "diagonal"}


# --- outputs changed in place ---------------------------------------------------------------


IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "whole": (lambda h: h.relu_(), torch.relu),
    "twice": (lambda h: h.mul_(2).add_(h), lambda h: 4 * h),
    "a view": (lambda h: h.view(-1, 6).tanh_().view(h.shape), torch.tanh),
    "a part": (
        lambda h: (h[..., 2:].relu_(), h)[1],
        lambda h: torch.cat([h[..., :2], torch.relu(h[..., 2:])], -1),
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_layers_output_may_be_changed_in_place(name: str) -> None:
    """The cotangent is that of the layer's own output."""
    grams = []
    for call in IN_PLACE[name]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), Then(call), nn.Linear(6, 3), nn.Tanh())
        opt = optimizer(model)
        for _ in range(2):
            take(opt, model)
            grams.append(opt.gram().dense())
    for actual in grams:
        assert_close(actual, grams[-1], 1e-12, name)


# --- cells and slopes inside a model ---------------------------------------------------------


class Cell(nn.Module):
    """An LSTM cell, once or in a loop, whose c is read as well as its h."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.cell = nn.LSTMCell(4, 3)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for _ in range(self.times):
            state = self.cell(x, state)
        assert state is not None
        return self.head(torch.cat(state, 1))


@pytest.mark.parametrize("times", [1, 3])
def test_an_lstm_cell_has_kronecker_blocks(times: int) -> None:
    """Its c lies in the graph of its h: what h sends there is no cotangent from outside."""
    model = Cell(times)
    opt = optimizer(model)
    take(opt, model)
    assert all(row.block.startswith("kronecker") for row in opt.coverage())


class Turned(nn.Module):
    """A slope that sees samples first, or (places, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.slope = nn.PReLU()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor, is_transposed: bool) -> Tensor:
        h = self.first(x)
        if is_transposed:
            h = self.slope(h.transpose(0, 1)).transpose(0, 1)
        else:
            h = self.slope(h)
        return self.last(h).mean(1)


@pytest.mark.parametrize("positions", [2, 3])
def test_a_slope_finds_its_samples_on_another_axis(positions: int) -> None:
    model = Turned()
    x = torch.randn(2, positions, 3)
    want, actual = (
        o.stepped(model, x, is_transposed, kind="euclidean") for is_transposed in (False, True)
    )
    assert_close(actual.gram().dense(), want.gram().dense(), 1e-12, "the same samples")


# --- models that change ---------------------------------------------------------------------


class Wandering(nn.Sequential):
    """As many operations after the layers as it is told."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for _ in range(self.count):
            x = x * 1.0
        return x


def frozen_every_other_time(model: Any, step: int) -> None:
    model[0].requires_grad_(step % 2 == 0)


def untie(model: Any, step: int) -> None:
    if step == 3:  # the new weight is in no param group
        model[3].weight = nn.Parameter(model[0].weight.detach().clone())


def exchange_norm(model: Any, step: int) -> None:
    """Another normalization with the same parameters."""
    if step == 3:
        old = model[1]
        model[1] = nn.GroupNorm(2, 4)
        model[1].weight = old.weight
        model[1].bias = old.bias


def change_count(model: Any, step: int) -> None:
    model.count = (3, 1, 2, 5, 1)[step]


@pytest.mark.parametrize("change", [frozen_every_other_time, untie, exchange_norm, change_count])
def test_a_changed_model_is_taken_as_it_is_now(change: Callable[[Any, int], None]) -> None:
    model: Any = Wandering(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4))
    if change is untie:
        model[3].weight = model[0].weight
    params = list(model.parameters())
    opt = optimizer(model, params=params)
    for step in range(5):
        change(model, step)
        take(opt, model)
    fresh = optimizer(model, params=params)
    take(fresh, model)
    assert_close(opt.gram().dense(), fresh.gram().dense(), 1e-12, "as of a fresh optimizer")
    assert opt.coverage() == fresh.coverage()


# --- losses on derivatives of the output ----------------------------------------------------


def slope(model: nn.Module, x: Tensor, graph: bool = True) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=graph)[0]


def test_a_loss_of_derivatives_alone_is_refused_and_names_the_objective() -> None:
    model = net()
    x, _ = batch()
    opt = kfac(model, metric=pb.metrics.Euclidean())
    before = vector(model)
    slope(model, x).square().mean().backward()
    with pytest.raises(pb.PullbackError, match=r"step\(objective="):
        opt.step()
    assert torch.equal(vector(model), before)


@pytest.mark.parametrize("clears_late", [False, True])
def test_derivatives_in_a_call_of_their_own_warn(clears_late: bool) -> None:
    model = net()
    x, _ = batch()
    opt = kfac(model, metric=pb.metrics.Euclidean())
    loss = model(x).square().mean() + slope(model, x).square().mean()
    if clears_late:
        opt.zero_grad()
    loss.backward()
    with pytest.warns(RuntimeWarning, match=r"step\(objective="):
        opt.step()


def test_gradients_by_inputs_that_no_loss_uses_do_not_warn() -> None:
    model = net()
    x, _ = batch()
    opt = kfac(model, metric=pb.metrics.Euclidean(), statistics_every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            opt.zero_grad()
            attacked = x + 0.1 * slope(model, x, graph=False).sign()
            model(attacked).square().mean().backward()
            opt.step()
    assert opt.info.took_statistics


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives_of_the_same_output_warn_only_where_the_loss_uses_them(order: int) -> None:
    """A saliency map with a graph, which the loss does not go through; then one that it does."""
    model = net()
    x = batch()[0].requires_grad_()
    opt = kfac(model, metric=pb.metrics.Euclidean(), statistics_every=1)
    for used in (False, True):
        opt.zero_grad()
        z = shown = model(x)
        for _ in range(order):
            shown = torch.autograd.grad(shown.sum(), x, create_graph=True)[0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            (z.square().mean() + (shown.square().mean() if used else 0)).backward()
            opt.step()
        assert opt.info.took_statistics
        assert ["step(objective=" in str(w.message) for w in caught] == [True] * used


def test_a_graph_of_derivatives_is_freed_as_without_the_optimizer() -> None:
    left = []
    for watched in (False, True):
        refs: list[weakref.ref[Tensor]] = []

        def pack(value: Tensor, refs: list[weakref.ref[Tensor]] = refs) -> Tensor:
            refs.append(weakref.ref(detached := value.detach()))
            return detached

        model = net()
        x = batch()[0].requires_grad_()
        if watched:
            opt = kfac(model, metric=pb.metrics.Euclidean())
        else:
            opt = None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            shown = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        gc.disable()
        del shown
        left.append(sum(ref() is not None for ref in refs))
        gc.enable()
        del opt
    assert left[0] == left[1] < len(refs)


@pytest.mark.parametrize(
    ("rule", "betas"), [("eigenbasis", (0.5, 0.99)), ("spectral", (0.9, 0.95))], ids=str
)
def test_parameters_that_no_rule_is_for_follow_adamw(rule: str, betas: tuple[float, float]) -> None:
    """A model without a weight matrix for the rule has no statistics, and trains."""
    ends = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        groups = [{"params": list(model.parameters()), "rule": "adam"}]
        opt: Any = torch.optim.AdamW(model.parameters(), 0.01, betas=betas, weight_decay=0.1)
        if ours:
            opt = pb.KFAC(model, 0.01, rule=rule, params=groups, weight_decay=0.1)
        for _ in range(3):
            opt.zero_grad()
            model(torch.ones(5, 4)).square().mean().backward()
            opt.step()
        ends.append(vector(model))
    assert_close(*ends, 1e-12, "AdamW")


@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_statistics_step_knows_roles(compiled: bool) -> None:
    """What `pb.parameter_roles` finds by a pass of its own, K-FAC finds along the user's."""
    model = nn.Sequential(nn.Linear(6, 16), nn.GLU(), nn.Linear(8, 3))
    network = torch.compile(model, backend="eager") if compiled else model
    opt = kfac_of(network, lr=0.01, likelihood=pb.likelihoods.Categorical())
    assert opt._capture.table.roles == {}
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    nn.functional.cross_entropy(network(x), y).backward()
    opt.step()
    roles = {n: (r.role, r.split) for n, r in opt._capture.table.roles.items()}
    assert roles == {row.name: (row.role, row.split) for row in pb.parameter_roles(model, x)}
    assert roles["0.weight"] == ("matrix", (8, 8))


@pytest.mark.parametrize("rule", [None, pb.optim.kfac.Eigenbasis()])
def test_a_way_through_the_model_is_proven_once(rule) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    likelihood = None
    if rule is None:
        likelihood = pb.likelihoods.Categorical()
    opt = pb.KFAC(model, lr=0.01, rule=rule, likelihood=likelihood, statistics_every=1)
    x = torch.randn(16, 6)
    y = torch.randint(0, 3, (16,))
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    assert opt._capture.structure.proofs == 1
