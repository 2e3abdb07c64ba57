"""Recurrent layers, and layers used twice: found is what J does not see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pullback.symmetry import Balanced, Scaling, Sliced, find
from tests.symmetry.networks import Of, dense, in_kernel, nullity, randomize


def normal(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def small_biases(model: nn.Module, seed: int) -> nn.Module:
    model = randomize(model, seed)
    for name, p in model.named_parameters():
        if "bias" in name:
            p.data *= 0.2
    return model


def read_out(cell: Callable[..., nn.Module], width: int = 4, **options: Any) -> nn.Module:
    """A recurrent layer whose outputs of all times a linear layer reads."""
    return Of(
        lambda s, x: s.out(s.cell(x)[0]),
        cell=cell(3, 4, batch_first=True, **options),
        out=nn.Linear(width, 2),
    )


def unrolled_network(act: Callable[[Tensor], Tensor], start: bool = False) -> nn.Module:
    """A recurrent network written by hand, from zeros or from a state that is given."""

    def forward(s: Any, x: Tensor, *arguments: Tensor) -> Tensor:
        if start:
            h = arguments[0]
        else:
            h = x.new_zeros(len(x), 4)
        for t in range(x.shape[1]):
            h = act(s.into(x[:, t]) + s.again(h))
        return s.out(h)

    return Of(forward, into=nn.Linear(3, 4), again=nn.Linear(4, 4), out=nn.Linear(4, 2))


def twice(bias: bool) -> nn.Module:
    """Two branches through one and the same layer."""

    def forward(s: Any, x: Tensor, z: Tensor) -> Tensor:
        a, b = (F.leaky_relu(f(y), 0.3) for f, y in ((s.u, x), (s.v, z)))
        return s.one(F.leaky_relu(s.w(a), 0.3)) + s.two(F.leaky_relu(s.w(b), 0.3))

    return Of(
        forward,
        u=nn.Linear(3, 2),
        v=nn.Linear(3, 2),
        w=nn.Linear(2, 3, bias=bias),
        one=nn.Linear(3, 2),
        two=nn.Linear(3, 2, bias=False),
    )


TWO = (normal(150, 3), normal(150, 3, seed=6))
LONG = (normal(90, 3, 3),)

#: name -> (model, example, generators)
FOUND: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], int]] = {
    "ReLU RNN": (lambda: read_out(nn.RNN, nonlinearity="relu"), LONG, 4 + 4),
    "two layers": (lambda: read_out(nn.RNN, nonlinearity="relu", num_layers=2), LONG, 8 + 8),
    "both ways": (
        lambda: read_out(nn.RNN, 8, nonlinearity="relu", bidirectional=True),
        LONG,
        8 + 8,
    ),
    "no biases": (lambda: read_out(nn.RNN, nonlinearity="relu", bias=False), LONG, 4),
    "tanh RNN: biases that add up": (lambda: read_out(nn.RNN), LONG, 4),
    "LSTM: biases of gates": (lambda: read_out(nn.LSTM), LONG, 16),
    "LSTM with projection": (lambda: read_out(nn.LSTM, 2, proj_size=2), LONG, 16 + 2),
    "GRU": (lambda: read_out(nn.GRU), LONG, 0),
    "by hand": (lambda: unrolled_network(F.leaky_relu), LONG, 4 + 4),
    "by hand, GELU": (lambda: unrolled_network(F.gelu), LONG, 4),
    "by hand, shifted": (lambda: unrolled_network(lambda x: F.leaky_relu(x - 0.5, 0.3)), LONG, 4),
    "from a given state": (
        lambda: unrolled_network(lambda x: F.leaky_relu(x, 0.3), start=True),
        (*LONG, normal(90, 4, seed=3)),
        4,
    ),
    "one layer for two branches": (lambda: twice(False), TWO, 2 + 3 + 1),
    "and its bias": (lambda: twice(True), TWO, 2 + 3),
}


#: variants of their neighbors
VARIANTS = {
    *("two layers", "no biases", "by hand, GELU", "by hand, shifted"),
    *("and its bias", "from a given state"),
}


def ordinary(name: str, seed: int) -> object:
    slow = name in VARIANTS or seed != 3
    return pytest.param(name, seed, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("name", "seed"), [ordinary(*case) for case in product(FOUND, (3, 11))])
def test_the_kernel_of_j_is_what_was_found(name: str, seed: int) -> None:
    make, x, count = FOUND[name]
    model = small_biases(make(), seed)
    symmetry = find(model, x)
    j = dense(model, *x)
    z = symmetry.generators()
    assert len(z) == count
    assert not symmetry.rejected
    assert not count or in_kernel(j, z) < 1e-14
    explained = symmetry.rank()
    assert explained.independent == count <= nullity(j)
    assert count == nullity(j) or explained.reasons
    element = 0.3 * normal(count, seed=seed)
    with torch.no_grad():
        if count:
            moved = functional_call(model, symmetry.orbit(element), x)
        else:
            moved = model(*x)
        torch.testing.assert_close(moved, model(*x), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "name",
    [
        *("LSTM: biases of gates", "tanh RNN: biases that add up"),
        *("by hand, GELU", "from a given state"),
        *("no biases", "by hand", "one layer for two branches", "and its bias"),
    ],
)
def test_nothing_is_missed(name: str) -> None:
    make, x, count = FOUND[name]
    assert nullity(dense(small_biases(make(), 3), *x)) == count


def test_the_recurrent_weight_is_conjugated() -> None:
    model = small_biases(unrolled_network(F.relu), 3)
    (scaling,) = [a for a in find(model, LONG).actions if isinstance(a, Scaling)]
    params = {n: p.detach() for n, p in model.named_parameters()}
    alpha = torch.tensor([2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    w = scaling.act(params, alpha.log())
    d = torch.diag(alpha)
    torch.testing.assert_close(w["again.weight"], d @ params["again.weight"] @ d.inverse())
    torch.testing.assert_close(w["into.weight"], d @ params["into.weight"])
    torch.testing.assert_close(w["again.bias"], d @ params["again.bias"])
    torch.testing.assert_close(w["out.weight"], params["out.weight"] @ d.inverse())


def test_a_recurrent_network_descends_on_its_slice() -> None:
    model = small_biases(unrolled_network(F.relu), 3)
    symmetry = find(model, LONG)
    before = model(*LONG).detach()
    start = symmetry.orbit(2 * normal(symmetry.dimension, seed=2))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(start[name])
    slice = Balanced(symmetry.scalings, model)
    slice.retract_()
    assert slice.contains(tolerance=1e-12)
    torch.testing.assert_close(model(*LONG), before, rtol=1e-10, atol=1e-11)
    opt = Sliced(torch.optim.Adam(model.parameters(), lr=1e-3), symmetry)
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = model(*LONG).square().mean()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_whole_layers_of_these_kinds() -> None:
    for name, count in (("ReLU RNN", 1 + 4), ("by hand", 1 + 4)):
        make, x, _ = FOUND[name]
        model = small_biases(make(), 3)
        z = find(model, x, group="layer").generators()
        assert len(z) == count
        assert in_kernel(dense(model, *x), z) < 1e-14


def test_normalized_weights_have_no_rule_and_hooks_leave_the_model_as_it_was() -> None:
    x = normal(20, 3)
    for make in (nn.utils.parametrizations.weight_norm, nn.utils.weight_norm):
        model = nn.Sequential(make(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2)).double()
        with torch.no_grad():
            model(x)
        weight = model[0].__dict__.get("weight")
        assert find(model, x).dimension == 0
        assert model[0].__dict__.get("weight") is weight
        copy.deepcopy(model)


def test_a_layer_that_is_used_twice_in_a_row() -> None:
    model = Of(
        lambda s, x: s.out(F.gelu(s.w(s.w(s.u(x))))),
        u=nn.Linear(3, 2, bias=False),
        w=nn.Linear(2, 2, bias=False),
        out=nn.Linear(2, 2),
    )
    model = small_biases(model, 3)
    x = normal(60, 3)
    # w²u stays under u ← α²u and w ← w/α, and under nothing else
    (scaling,) = find(model, x).actions
    weights = {n: p.detach() for n, p in model.named_parameters()}
    moved = scaling.act(weights, torch.ones(1).double())
    ratios = [float((moved[f"{n}.weight"] / weights[f"{n}.weight"]).log().mean()) for n in "uw"]
    assert ratios[0] == pytest.approx(-2 * ratios[1])


@pytest.mark.parametrize(("value", "scales"), [(0.0, 3), (1.0, 0)])
def test_padding_by_zeros_keeps_scales_and_by_ones_fixes_them(value: float, scales: int) -> None:
    model = Of(
        lambda s, x: s.two(F.pad(F.relu(s.one(x)), (1, 1), value=value)),
        one=nn.Conv1d(2, 3, 3),
        two=nn.Conv1d(3, 2, 3),
    )
    symmetries = find(randomize(model), normal(40, 2, 9))
    assert symmetries.dimension == scales
    assert symmetries.rank().nullity == scales


def test_a_kernel_that_is_computed_has_one_scale() -> None:
    """Its entries meet in every output, so they are scaled together."""

    def convolve(s: Any, x: Tensor, k: Tensor) -> Tensor:
        kernel = F.relu(s.kernel(k)).mean(0).expand(4, 1, 3)
        return s.head(F.conv1d(F.relu(s.maps(x)), kernel, groups=4).mean(2))

    model = Of(
        convolve,
        maps=nn.Conv1d(2, 4, 3),
        kernel=nn.Linear(5, 3),
        head=nn.Linear(4, 2),
    )
    symmetries = find(randomize(model), (normal(40, 2, 9), normal(6, 5)))
    assert symmetries.dimension == 5  # four maps, and the kernel
    assert symmetries.rank().independent == 5


def test_tables_that_are_added_share_scales_and_shift_the_reader() -> None:
    """Tokens and positions: four columns, and constants of either table for the reader's bias."""
    model = Of(
        lambda s, tokens: s.out(s.words(tokens) + s.positions.weight),
        words=nn.Embedding(7, 4),
        positions=nn.Embedding(5, 4),
        out=nn.Linear(4, 2),
    )
    tokens = torch.randint(0, 7, (60, 5), generator=torch.Generator().manual_seed(0))
    symmetries = find(randomize(model), tokens)
    assert symmetries.dimension == 12
    assert symmetries.rank().independent == 12


def test_the_rank_of_a_frozen_network_says_why_it_is_zero() -> None:
    model = randomize(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
    rank = find(model.requires_grad_(False), normal(5, 3)).rank()
    assert rank.nullity == rank.independent == 0
    assert "no parameter requires a gradient" in str(rank)
