"""Recurrent layers, layers used twice, normalized weights: found is what J does not see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from pullback.symmetry import Balanced, Mixing, Scaling, Sliced, find
from tests.symmetry.networks import Of, dense, in_kernel, nullity, randomized


def normal(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def small_biases(model: nn.Module, seed: int) -> nn.Module:
    model = randomized(model, seed)
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


def unrolled(act: Callable[[Tensor], Tensor], start: bool = False) -> nn.Module:
    """A recurrent network written by hand, from zeros or from a state that is given."""

    def forward(s: Any, x: Tensor, *given: Tensor) -> Tensor:
        h = given[0] if start else x.new_zeros(len(x), 4)
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


def normed(make: Callable[..., nn.Module], act: Callable[[], nn.Module], dim: int = 0) -> nn.Module:
    return nn.Sequential(make(nn.Linear(3, 4), dim=dim), act(), make(nn.Linear(4, 2), dim=dim))


def normed_convs(make: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(
        make(nn.Conv1d(2, 3, 2)), nn.LeakyReLU(), make(nn.Conv1d(3, 2, 2, bias=False))
    )


def recurrent_norm() -> nn.Module:
    model = unrolled(F.leaky_relu)
    parametrizations.weight_norm(model.again)  # pyright: ignore[reportArgumentType]
    return model


def leaky() -> nn.Module:
    return nn.LeakyReLU(0.3)


new, old = parametrizations.weight_norm, nn.utils.weight_norm
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
    "LSTM with projection": (lambda: read_out(nn.LSTM, 2, proj_size=2), LONG, 16 + 4),
    "GRU: biases of two gates": (lambda: read_out(nn.GRU), LONG, 8),
    "GRU without biases": (lambda: read_out(nn.GRU, bias=False), LONG, 0),
    "by hand": (lambda: unrolled(F.leaky_relu), LONG, 4 + 4),
    "by hand, GELU": (lambda: unrolled(F.gelu), LONG, 4),
    "by hand, shifted": (lambda: unrolled(lambda x: F.leaky_relu(x - 0.5, 0.3)), LONG, 4),
    "from a given state": (
        lambda: unrolled(lambda x: F.leaky_relu(x, 0.3), start=True),
        (*LONG, normal(90, 4, seed=3)),
        4,
    ),
    "one layer for two branches": (lambda: twice(False), TWO, 2 + 3 + 1),
    "and its bias": (lambda: twice(True), TWO, 2 + 3),
    "weight norm": (lambda: normed(new, leaky), (normal(150, 3),), 4 + 4 + 2),
    "by hooks": (lambda: normed(old, leaky), (normal(150, 3),), 4 + 4 + 2),
    "of columns": (lambda: normed(new, leaky, 1), (normal(150, 3),), 4 + 3 + 4),
    "before GELU": (lambda: normed(new, nn.GELU), (normal(150, 3),), 4 + 2),
    "with nothing between": (
        lambda: nn.Sequential(new(nn.Linear(3, 2)), new(nn.Linear(2, 4))),
        (normal(150, 3),),
        4 + 2 + 2 + 4,
    ),
    "convolutions": (lambda: normed_convs(new), (normal(80, 2, 5),), 3 + 3 + 2),
    "convolutions, by hooks": (lambda: normed_convs(old), (normal(80, 2, 5),), 3 + 3 + 2),
    "recurrent": (recurrent_norm, LONG, 4 + 4 + 4),
}


#: variants of their neighbors
VARIANTS = {
    *("two layers", "no biases", "GRU without biases", "by hand, GELU", "by hand, shifted"),
    *("and its bias", "by hooks", "before GELU", "convolutions, by hooks", "from a given state"),
}


def ordinary(name: str, seed: int) -> object:
    slow = name in VARIANTS or seed != 3
    return pytest.param(name, seed, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("name", "seed"), [ordinary(n, s) for n in FOUND for s in (3, 11)])
def test_the_kernel_of_j_is_what_was_found(name: str, seed: int) -> None:
    make, x, count = FOUND[name]
    model = small_biases(make(), seed)
    found = find(model, x)
    j, z = dense(model, *x), found.generators()
    assert len(z) == count
    assert not found.rejected
    assert not count or in_kernel(j, z) < 1e-14
    explained = found.rank()
    assert explained.independent == count <= nullity(j)
    assert count == nullity(j) or explained.reasons
    element = 0.3 * normal(count, seed=seed)
    with torch.no_grad():
        moved = functional_call(model, found.orbit(element), x) if count else model(*x)
        torch.testing.assert_close(moved, model(*x), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "name",
    [
        *("LSTM: biases of gates", "GRU: biases of two gates", "tanh RNN: biases that add up"),
        *("LSTM with projection", "by hand, GELU", "from a given state", "before GELU"),
        *("with nothing between", "of columns", "convolutions", "no biases", "by hand"),
        *("one layer for two branches", "and its bias", "recurrent"),
    ],
)
def test_nothing_is_missed(name: str) -> None:
    make, x, count = FOUND[name]
    assert nullity(dense(small_biases(make(), 3), *x)) == count


def test_the_recurrent_weight_is_conjugated() -> None:
    model = small_biases(unrolled(F.relu), 3)
    (scaling,) = [a for a in find(model, LONG).actions if isinstance(a, Scaling)]
    params = {n: p.detach() for n, p in model.named_parameters()}
    alpha = torch.tensor([2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    w, d = scaling.scale(params, alpha), torch.diag(alpha)
    torch.testing.assert_close(w["again.weight"], d @ params["again.weight"] @ d.inverse())
    torch.testing.assert_close(w["into.weight"], d @ params["into.weight"])
    torch.testing.assert_close(w["again.bias"], d @ params["again.bias"])
    torch.testing.assert_close(w["out.weight"], params["out.weight"] @ d.inverse())


def test_a_recurrent_network_descends_on_its_slice() -> None:
    model = small_biases(unrolled(F.relu), 3)
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


def test_lengths_of_directions_are_scalings_that_do_nothing() -> None:
    model, x = small_biases(normed(new, nn.GELU), 3), normal(50, 3)
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(-1)  # pyright: ignore  # signs stay
    found = find(model, x)
    params = dict(model.named_parameters())
    for action in found.actions:
        assert isinstance(action, Scaling)
        (name,) = action.names
        assert name.endswith("original1")
        assert params[name].shape[0] == action.dimension
    relu = small_biases(normed(new, leaky), 3)
    with torch.no_grad():
        relu[0].parametrizations.weight.original0[1] = 0.0  # pyright: ignore  # a unit without weights
    assert in_kernel(dense(relu, x), find(relu, x).generators()) < 1e-14


def test_a_plain_reader_of_a_normalized_layer_has_a_slice() -> None:
    model = small_biases(nn.Sequential(new(nn.Linear(3, 4)), nn.ReLU(), nn.Linear(4, 2)), 3)
    x = normal(50, 3)
    (scaling, *_) = find(model, x).scalings
    assert "0.parametrizations.weight.original0" in scaling.names
    slice = Balanced([scaling], model)
    before = model(x).detach()
    slice.retract_()
    assert slice.contains()
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)


def test_whole_layers_of_these_kinds() -> None:
    for name, count in (("ReLU RNN", 1 + 4), ("weight norm", 1 + 1 + 1)):
        make, x, _ = FOUND[name]
        model = small_biases(make(), 3)
        z = find(model, x, group="layer").generators()
        assert len(z) == count
        assert in_kernel(dense(model, *x), z) < 1e-14


def test_frozen_parts_of_a_normalized_weight_stay() -> None:
    x = normal(80, 3)
    for part in ("original0", "original1"):
        model = small_biases(normed(new, leaky), 3)
        for name, p in model.named_parameters():
            if name.endswith(part):
                p.requires_grad_(False)
        found = find(model, x)
        assert not any(n.endswith(part) for a in found.actions for n in a.names)
        if found.dimension:
            assert in_kernel(dense(model, x), found.generators()) < 1e-14


def test_hooks_leave_the_model_as_it_was() -> None:
    model, x = normed(old, leaky).double(), normal(20, 3)
    with torch.no_grad():
        model(x)
    held = model[0].weight
    find(model, x)
    assert model[0].weight is held
    copy.deepcopy(model)


def test_a_layer_that_is_used_twice_in_a_row() -> None:
    model = Of(
        lambda s, x: s.out(F.gelu(s.w(s.w(s.u(x))))),
        u=nn.Linear(3, 2, bias=False),
        w=nn.Linear(2, 2, bias=False),
        out=nn.Linear(2, 2),
    )
    model, x = small_biases(model, 3), normal(60, 3)
    # w²u stays under u ← α²u and w ← w/α, and under nothing else
    (scaling,) = find(model, x).actions
    held = {n: p.detach() for n, p in model.named_parameters()}
    moved = scaling.act(held, torch.ones(1).double())
    ratios = [float((moved[f"{n}.weight"] / held[f"{n}.weight"]).log().mean()) for n in "uw"]
    assert ratios[0] == pytest.approx(-2 * ratios[1])
    model.function = lambda s, x: s.out(s.w(s.w(s.u(x))))
    (mixing,) = [a for a in find(model, x).actions if isinstance(a, Mixing)]
    params = {n: p.detach() for n, p in model.named_parameters()}
    m = torch.linalg.matrix_exp(normal(2, 2))
    w = mixing.act(params, normal(2, 2).flatten())
    torch.testing.assert_close(w["w.weight"], m @ params["w.weight"] @ m.inverse())
