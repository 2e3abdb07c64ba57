"""Jets against nested reverse-mode differentiation, which knows nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain, combinations_with_replacement, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pullback.maps.jets import Index, Jet, Scheme, Unsupported, differentiate_nested
from pullback.maps.jets.jet import RULES
from pullback.maps.jets.towers import TOWERS

Function = Callable[[Any], Any]
DIM = 3


def all_indices(order: int, dim: int = DIM) -> list[Index]:
    """Every derivative up to the order, the mixed ones too."""
    by_order = (combinations_with_replacement(range(dim), k) for k in range(order + 1))
    return list(chain.from_iterable(by_order))


def oracle(function: Function, x: Tensor, scheme: Scheme) -> Tensor:
    """The channels by torch.autograd.grad of torch.autograd.grad."""
    x = x.clone().requires_grad_()
    u = function(x)
    columns = []
    for column in u.flatten(1).unbind(1):

        @cache
        def along(index: Index, u: Tensor = column) -> Tensor:
            if not index:
                return u
            u = along(index[:-1])
            if not u.requires_grad:
                return torch.zeros_like(u)
            (g,) = torch.autograd.grad(u.sum(), x, create_graph=True, allow_unused=True)
            if g is None:
                return torch.zeros_like(u)
            return g[:, index[-1]]

        channels = [along(index) for index in scheme.indices]
        if scheme.laplacian:
            channels.append(torch.stack([along((i, i)) for i in scheme.laplacian]).sum(0))
        columns.append(torch.stack(channels))
    return torch.stack(columns, -1).view(len(scheme), *u.shape).detach()


def agree(function: Function, x: Tensor, scheme: Scheme, tol: float = 1e-10) -> None:
    """Channel by channel, relative to the channel's own size (or that of the value)."""
    jet = function(Jet.input(x, scheme))
    assert isinstance(jet, Jet)
    actual = jet.stack_channels().detach()
    want = oracle(function, x, scheme)
    assert actual.shape == want.shape
    assert bool(torch.isfinite(want).all())
    for i, (g, w) in enumerate(zip(actual, want, strict=True)):
        if w.norm() > 0:
            scale = w.norm()
        else:
            scale = 1.0
        off = float((g - w).norm() / scale)
        assert off <= tol, f"channel {i} of {scheme}: {off:.1e}"


def points(n: int = 5, dim: int = DIM, seed: int = 0) -> Tensor:
    return torch.rand(n, dim, generator=torch.Generator().manual_seed(seed)).double() + 0.3


FULL = Scheme.of(all_indices(4))
MIXED = Scheme.of([(0, 1, 2), (0, 0, 1, 2), (2, 2)])
COLLAPSED = Scheme.of([(0, 0, 2)], laplacian=(0, 2))
ONLY = Scheme.of([], laplacian=(0, 1, 2))
PLAIN = Scheme.of([()])
SCHEMES = {"full": FULL, "collapsed": COLLAPSED, "only": ONLY, "plain": PLAIN}


def layer(a: int, b: int, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(a, b).double()


# --- elementwise -----------------------------------------------------------------------------

FUNCTIONS = sorted(
    {f for f in TOWERS if f not in (torch.pow, Tensor.pow, Tensor.__pow__)}, key=repr
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: getattr(f, "__name__", str(f)))
def test_every_tower(function: Any) -> None:
    mix = layer(DIM, 4)
    name = function.__name__
    method = function is getattr(Tensor, name, None)

    def u(x: Any) -> Any:
        h = mix(x)
        a = h * h + 0.2  # positive: logarithms and roots take part
        if method:
            return getattr(a, name)()
        return function(a)

    for scheme in (COLLAPSED,) if method else (MIXED, COLLAPSED, PLAIN):
        agree(u, points(2), scheme, 1e-9 if function is torch.sinc else 1e-10)
    if method:
        return
    with torch.no_grad():  # where torch takes other formulas
        plain = u(Jet.input(points(2), MIXED)).stack_channels()
    want = u(Jet.input(points(2), MIXED)).stack_channels()
    torch.testing.assert_close(plain, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "module",
    [
        *(nn.Tanh(), nn.Sigmoid(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Softplus()),
        *(nn.Softplus(2.0, 15.0), nn.Softsign(), nn.LogSigmoid(), nn.Mish(), nn.ReLU()),
        *(nn.Identity(), nn.Dropout().eval(), nn.Flatten()),
    ],
    ids=repr,
)
def test_modules_take_jets(module: nn.Module) -> None:
    """Signs of both kinds, and options as the modules pass them."""
    mix = layer(DIM, 6)
    for scheme in (MIXED, COLLAPSED, ONLY, PLAIN):
        agree(lambda x: module(3 * mix(x) - 1), points(), scheme)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 5, -1, -2, 0.5, 2.5, -1.5])
def test_powers(exponent: float) -> None:
    agree(lambda x: x**exponent, points(), FULL)
    agree(lambda x: torch.pow(x, exponent), points(), COLLAPSED)
    agree(lambda x: x.pow(exponent), points(), MIXED)


@pytest.mark.parametrize("exponent", [1, 2, 3, 4])
def test_powers_at_zero_and_below(exponent: int) -> None:
    x = points() - 1
    x[0] = 0
    agree(lambda x: x**exponent, x, FULL)


# --- operations ------------------------------------------------------------------------------

C = torch.linspace(0.5, 2, DIM).double()
COLUMN = torch.linspace(-1, 1, 5).double()[:, None]  # one constant per point
W = torch.linspace(-1, 1, 4 * DIM).double().view(DIM, 4)
L = layer(DIM, 4, 1)
M = layer(DIM, 4, 2)
MASK = torch.tensor([True, False, True, True, False])
OPERATIONS: dict[str, Function] = {
    "input": lambda x: x,
    "input column": lambda x: x[:, 0:1],
    "add inputs": lambda x: x + x,
    "add columns": lambda x: x[:, 0:1] + x[:, 1:2],
    "add and broadcast": lambda x: x[:, 0:1] + x,
    "add to layer": lambda x: L(x) + x[:, 1:2],
    "add number": lambda x: (x + 2) * (3 + x),
    "add constant": lambda x: (x + C) * (C + x),
    "add per point": lambda x: (x[:, :1] + COLUMN * C) * (COLUMN + x),
    "add alpha": lambda x: torch.add(x, torch.sin(x), alpha=3),
    "constant add alpha": lambda x: torch.add(C, torch.sin(x), alpha=3),
    "sub": lambda x: (x - torch.sin(x)) * (1 - x) * (C - x) * (x - C),
    "sub alpha": lambda x: torch.sub(x, torch.sin(x), alpha=3),
    "constant sub alpha": lambda x: torch.sub(C, torch.sin(x), alpha=3),
    "neg": lambda x: -torch.sin(-x),
    "mul": lambda x: torch.sin(x) * L(x)[:, :DIM] * x,
    "mul constant": lambda x: 2 * x * C * COLUMN,
    "constant mul": lambda x: (C * x) * (COLUMN * torch.exp(x)),
    "mul broadcast": lambda x: L(x) * x[:, :1],
    "outer": lambda x: (L(x)[:, :, None] * x[:, None]).flatten(1),
    "gate": lambda x: torch.sigmoid(L(x)) * torch.tanh(M(x)) + (1 - torch.sigmoid(L(x))) * M(x),
    "div": lambda x: torch.sin(x) / (1 + x * x),
    "div constant": lambda x: x * x / C / 3,
    "constant div": lambda x: C / x + 1 / (1 + x) + torch.div(COLUMN, 2 + x),
    "reciprocal": lambda x: torch.reciprocal(x) * x.reciprocal(),
    "fractions": lambda x: (x[:, :1] / x[:, 1:2]) / (x[:, 2:] / x[:, :1] + 1),
    "matmul constant": lambda x: torch.tanh(x @ W),
    "constant vector": lambda x: (torch.sin(x) @ C)[:, None],
    "matmul batch constant": lambda x: (torch.sin(x)[:, None] @ W.expand(5, DIM, 4)).flatten(1),
    "constant from the left": lambda x: (W.T @ torch.sin(x)[:, :, None]).flatten(1),
    "matmul jets": lambda x: (torch.sin(x)[:, None] @ torch.exp(x)[:, :, None]).flatten(1),
    "matmul inputs": lambda x: (x[:, None] @ x[:, :, None]).flatten(1),
    "linear": lambda x: F.linear(torch.sin(x), W.T, W[0]),
    "linear without bias": lambda x: F.linear(x, W.T),
    "linear of places": lambda x: layer(1, 2)(torch.sin(x)[:, :, None]).flatten(1),
    "cat": lambda x: torch.cat([torch.sin(x), x, x[:, :1]], -1),
    "cat with constants": lambda x: torch.cat([x, COLUMN, torch.sin(x)], 1),
    "stack": lambda x: torch.stack([torch.sin(x), x, COLUMN.expand(5, DIM)], 1).flatten(1),
    "stack last": lambda x: torch.stack([torch.sin(x), x * x], -1).flatten(1),
    "reshape": lambda x: torch.sin(x).reshape(5, 1, DIM).reshape((-1, DIM)),
    "view": lambda x: (x * x).view(-1, DIM, 1).view(5, -1),
    "input reshape": lambda x: x.reshape(5 * DIM, 1).reshape(5, DIM),
    "transpose": lambda x: (torch.sin(x)[:, :, None] * x[:, None]).transpose(1, 2).flatten(1),
    "transpose keywords": lambda x: (
        (torch.sin(x)[:, :, None] * L(x)[:, None]).transpose(dim0=-1, dim1=-2).flatten(1)
    ),
    "transpose points": lambda x: torch.exp(x.transpose(0, 1)).transpose(0, 1),
    "squeeze": lambda x: torch.sin(x)[:, :1].squeeze(-1)[:, None],
    "squeeze all": lambda x: torch.sin(x)[:, :1].squeeze().unsqueeze(-1),
    "unsqueeze": lambda x: torch.sin(x).unsqueeze(1).squeeze(dim=1),
    "unsqueeze in front": lambda x: torch.sin(x.unsqueeze(0))[0],
    "index column": lambda x: (torch.sin(x)[:, 1] * x[:, 2])[:, None],
    "index ellipsis": lambda x: torch.sin(x[..., 1:]) * x[..., 0, None],
    "index nothing": lambda x: x[()],
    "index list": lambda x: torch.sin(x)[:, [2, 0]] * x[:, torch.tensor([1, 1])],
    "index reversed": lambda x: x[:, [2, 1, 0]] * x,
    "index pairs": lambda x: (torch.sin(x)[:, :, None] * x[:, None])[
        torch.arange(5), :, torch.tensor([0, 1, 2, 0, 1])
    ],
    "index far pairs": lambda x: (torch.sin(x)[:, :, None] * x[:, None])[:, [0, 1], [1, 2]],
    "split": lambda x: torch.split(torch.sin(x), 2, -1)[0] * x.split([1, 2], dim=1)[1],
    "chunk": lambda x: torch.chunk(L(x), 2, -1)[1] * L(x).chunk(2, 1)[0],
    "unbind": lambda x: torch.stack([a * a for a in torch.unbind(x, -1)], -1),
    "sum": lambda x: (torch.sin(x) * x).sum(-1, keepdim=True),
    "sum axes": lambda x: (x[:, None] * x[:, :, None]).sum((1, 2))[:, None],
    "mean": lambda x: torch.mean(torch.sin(x), dim=1)[:, None],
    "input sum": lambda x: x.sum(1)[:, None] * x.sum(-1, keepdim=True),
    "one axis fewer": lambda x: L(x) * L(x).sum(0 - 1)[:, None] + L(x)[:, 0].reshape(5, 1),
    "like": lambda x: x * torch.ones_like(x) + torch.zeros_like(x[:, :1]),
    "clone": lambda x: torch.sin(x).clone().contiguous() * x,
    "norm": lambda x: torch.sqrt(torch.square(x).sum(-1, keepdim=True)),
    "fourier": lambda x: torch.cat([torch.sin(x @ W), torch.cos(x @ W)], -1),
    "hard": lambda x: x[:, :1] * (1 - x[:, :1]) * torch.tanh(L(x)) + torch.sin(x[:, 1:2]),
    "skip": lambda x: torch.tanh(M(torch.tanh(L(x))[:, :DIM] + x)) + L(x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    for scheme in (MIXED, COLLAPSED, ONLY, PLAIN):
        agree(OPERATIONS[name], points(), scheme)


@pytest.mark.parametrize("mask", [MASK, MASK.nonzero()[:, 0], slice(1, 4), [4, 0, 0]])
def test_some_of_the_points(mask: Any) -> None:
    """What is held once for all points must be told apart first."""
    for scheme in SCHEMES.values():
        whole = oracle(lambda x: torch.sin(x) * x, points(), scheme)
        jet: Any = Jet.input(points(), scheme)
        for actual in (torch.sin(jet[mask]) * jet[mask, :], (torch.sin(jet) * jet)[mask]):
            torch.testing.assert_close(
                actual.stack_channels(), whole[:, mask], rtol=1e-12, atol=1e-14
            )
        assert jet[mask].stack_channels().shape == whole[:, mask].shape


def shifted_together(function: Function, x: Tensor, scheme: Scheme) -> Tensor:
    """d/ds of function(x + Σ_i s_i e_i), the shift s one for all points."""

    def along(index: Index) -> Tensor:
        f: Function = lambda s: function(x + s)  # noqa: E731
        for axis in index:
            f = partial_in(f, axis)
        return f(torch.zeros(DIM).double())

    channels = [along(index) for index in scheme.indices]
    if scheme.laplacian:
        channels.append(torch.stack([along((i, i)) for i in scheme.laplacian]).sum(0))
    return torch.stack(channels)


def partial_in(f: Function, axis: int) -> Function:
    return lambda s: torch.func.jacrev(f)(s)[..., axis]


@pytest.mark.parametrize("scheme", [COLLAPSED, Scheme.of(all_indices(2)), PLAIN])
def test_points_that_see_each_other_move_together(scheme: Scheme) -> None:
    """Then ∂ᵢ is along the shift of all points."""
    functions: list[Function] = [
        lambda x: torch.sin(x)[..., 3, :] + x,
        lambda x: torch.sin(x) * x[:1],
        lambda x: torch.cat([x[1:], torch.sin(x[:1])]) * x,
        lambda x: (torch.sin(x).transpose(0, 1).sum(-1, keepdim=True) * torch.ones(5).double())
        .transpose(0, 1),
        lambda x: torch.ones(5, 5).double() @ torch.sin(x) + torch.ones(5, 5).double() @ x,
        lambda x: x @ (x.transpose(0, 1) @ torch.sin(x)),
    ]  # fmt: skip
    for function in functions:
        actual = function(Jet.input(points(), scheme)).stack_channels()
        want = shifted_together(function, points(), scheme)
        torch.testing.assert_close(actual, want, rtol=1e-10, atol=1e-12)


@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    dim=st.integers(1, 3),
    order=st.integers(1, 3),
    activation=st.sampled_from([torch.tanh, torch.sin, F.gelu, F.silu, F.softplus]),
    seed=st.integers(0, 10_000),
    skip=st.booleans(),
    n=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_random_networks(
    widths: list[int], dim: int, order: int, activation: Function, seed: int, skip: bool, n: int
) -> None:
    torch.manual_seed(seed)
    sizes = [dim, *widths, 2]
    layers = [nn.Linear(a, b).double() for a, b in pairwise(sizes)]

    def u(x: Any) -> Any:
        h = x
        for one in layers[:-1]:
            out = activation(one(h))
            if skip and out.shape == h.shape:
                h = out + h
            else:
                h = out
        return layers[-1](h)

    x = points(n, dim, seed)
    agree(u, x, Scheme.of(all_indices(order, dim)), 1e-9)
    agree(u, x, Scheme.of([(0,) * order], laplacian=range(dim)), 1e-9)


ANY: dict[str, Function] = {
    **{name: OPERATIONS[name] for name in ("gate", "skip", "fractions", "hard")},
    "layer norm": lambda x: F.layer_norm(L(x), (4,)),  # torch's second forward derivative is wrong
    "cumprod": lambda x: torch.cumprod(torch.sin(x), -1),  # and here
    "glu": lambda x: F.glu(L(x), -1),  # and here it has none
    "where": lambda x: torch.where(x > 1, torch.sin(L(x)[:, :DIM]), x**3),
    "abs": lambda x: torch.abs(L(x)) * x[:, :1],
    "softmax": lambda x: torch.softmax(L(x), -1),
    "power": lambda x: 2**x + x**x,
    "batch norm in evaluation": lambda x: F.batch_norm(L(x), W[0] * 0, W[0] * 0 + 2) ** 3,
    "in place": lambda x: torch.sin(x).mul_(x),
    "constant": lambda x: torch.ones(5, 2).double(),
}


@pytest.mark.parametrize("name", ANY)
def test_nested_is_the_same(name: str) -> None:
    for scheme in (MIXED, COLLAPSED, PLAIN):
        want = oracle(ANY[name], points(), scheme)
        actual = differentiate_nested(ANY[name], points(), scheme)
        torch.testing.assert_close(actual, want, rtol=1e-10, atol=1e-12)


# --- what has no rule --------------------------------------------------------------------------


def written(x: Any) -> Any:
    h = torch.sin(x)
    h[:, 0] = 0.0
    return h


def add_to_alias(x: Any) -> Any:
    h = torch.sin(x)
    alias = h
    h += 1
    return h * alias


UNSUPPORTED: dict[str, Function] = {
    "where": lambda x: torch.where(x > 1, x, x * x),
    "where with a constant mask": lambda x: torch.where(MASK[:, None], x, x * x),
    "clamp": lambda x: torch.clamp(x, 0, 1),
    "abs": lambda x: torch.abs(x),
    "abs operator": lambda x: abs(x),
    "maximum": lambda x: torch.maximum(x, x * x),
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, (DIM,)),
    "einsum": lambda x: torch.einsum("ni,ij->nj", x, W),
    "bmm": lambda x: torch.bmm(x[:, None], x[:, :, None]),
    "cumsum": lambda x: torch.cumsum(x, -1),
    "elu": lambda x: F.elu(x),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "sum over points": lambda x: x - x.sum(0),
    "sum of all": lambda x: x - x.sum(),
    "mean over points": lambda x: x - x.mean(0, keepdim=True),
    "negative axis of points": lambda x: x - x.mean(-2, keepdim=True),
    "write": written,
    "add in place": add_to_alias,
    "activation in place": lambda x: F.relu(x, inplace=True),
    "method in place": lambda x: torch.sin(x).mul_(2),
    "out": lambda x: torch.sin(x, out=torch.empty(5, DIM).double()),
    "dtype": lambda x: x.sum(-1, dtype=torch.float32),
    "to": lambda x: x.to(torch.float32),
    "float": lambda x: x.float(),
    "power of a jet": lambda x: 2**x,
    "tensor to the power of a jet": lambda x: C**x,
    "jet to the power of a jet": lambda x: x**x,
    "equal": lambda x: x == 0,
    "compare": lambda x: x > 0,
    "truth": lambda x: not x,
    "rounding": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "permute": lambda x: x.permute(1, 0),
    "detach": lambda x: x.detach(),
    "constant of more axes": lambda x: x * torch.ones(2, 5, DIM).double(),
    "add constant of more axes": lambda x: x + torch.ones(2, 5, DIM).double(),
    "matmul of different axes": lambda x: x[:, None, :] @ x.transpose(0, 1),
    "matmul with more axes": lambda x: x @ torch.ones(2, DIM, 4).double(),
    "matmul from the left with more axes": lambda x: torch.ones(2, 4, 5).double() @ x,
    "weight that is a jet": lambda x: F.linear(x, x),
    "numpy": lambda x: x.numpy(),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_refused_rather_than_wrong(name: str) -> None:
    with pytest.raises(Unsupported):
        UNSUPPORTED[name](Jet.input(points(), MIXED))


def test_a_jet_looks_like_its_value() -> None:
    jet = Jet.input(points(), FULL)
    assert jet.shape == (5, DIM)
    assert jet.size(0) == len(jet) == 5
    assert jet.dim() == jet.ndim == 2
    assert jet.dtype == torch.float64
    assert len({jet, jet}) == 1
    assert len(RULES) > 50


def test_schemes() -> None:
    scheme = Scheme.of([(1, 0, 0)], laplacian=(2, 0))
    assert scheme.indices == ((), (0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 1))
    assert scheme.laplacian == (0, 2)
    assert len(scheme) == 8
    assert scheme.order == 3
    assert PLAIN.order == 0
    assert len(PLAIN) == 1
    assert ONLY.order == 2
    assert Scheme.of([(0,)]).order == 1
