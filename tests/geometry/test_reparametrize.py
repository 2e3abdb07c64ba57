"""ψ = φ∘f: the same function, gradients pulled back, Theorem 2 against dense pseudo-inverses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import pullback as pb
from pullback import PullbackError
from pullback.geometry.charts.diffeomorphism import EntryPermutation, cubic
from pullback.geometry.charts.reparametrize import Reparametrized, reparametrize
from tests.geometry.charts import mixing, shear
from tests.pairs import each_once


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


SIZE = sum(p.numel() for p in network().parameters())


def inputs(count: int = 9, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(1), dtype=dtype)


def matrix(size: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(size, dtype=torch.float64) + 0.3 * torch.randn(
        size, size, generator=generator, dtype=torch.float64
    )


PAIR = (torch.sinh, torch.asinh)


CASES: dict[str, Callable[[], Any]] = {
    "cubic": cubic,
    "a pair": lambda: PAIR,
    "falling": lambda: (lambda t: -torch.sinh(t), lambda w: -torch.asinh(w)),
    "mixing": lambda: mixing(matrix(SIZE), 1.0),
    "entries": lambda: EntryPermutation(4),
    "shear": shear,
    "functions of the dict": lambda: (shear().forward, shear().inverse),
}


def dense(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """J (n, p) by autograd, and the parameters, flat."""
    params = {n: p.detach() for n, p in model.named_parameters()}
    rows = jacrev(lambda p: functional_call(model, p, (x,)).flatten())(params)
    flat = torch.cat([p.flatten() for p in params.values()])
    return torch.cat([r.flatten(1) for r in rows.values()], 1), flat


def differential(twin: Reparametrized) -> Tensor:
    """F = df_θ, (p, p)."""
    theta = {n: p.detach() for n, p in zip(twin.names, twin.parameters(), strict=True)}
    rows = jacrev(
        lambda t: torch.cat([w.flatten() for w in twin.diffeomorphism.forward(t).values()])
    )
    return torch.cat([r.flatten(1) for r in rows(theta).values()], 1)


@pytest.mark.parametrize(("name", "dtype"), each_once(CASES, [torch.float64, torch.float32]))
def test_the_function_is_the_same_and_the_model_as_it_was(name: str, dtype: torch.dtype) -> None:
    model = network(dtype)
    x = inputs(dtype=dtype)
    before = copy.deepcopy(model.state_dict())
    twin = reparametrize(model, CASES[name]())
    limit = 1e-13 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(twin(x), model(x), rtol=limit, atol=limit)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint(
        p.data_ptr() for p in model.parameters()
    )
    assert [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]
    assert all(p.dtype == dtype and p.is_leaf and p.requires_grad for p in twin.parameters())


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_pulled_back(name: str) -> None:
    """∇_θL = Fᵀ∇_wL and J_θ = J_w F."""
    model = network()
    x = inputs()
    twin = reparametrize(model, CASES[name]())
    f = differential(twin)
    assert torch.linalg.matrix_rank(f) == SIZE
    torch.testing.assert_close(dense(twin, x)[0], dense(model, x)[0] @ f, rtol=1e-9, atol=1e-11)
    for m in (model, twin):
        m(x).square().sum().backward()
    one, two = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, twin))  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(two, f.T @ one, rtol=1e-9, atol=1e-11)
    v = {n: torch.randn_like(p) for n, p in twin.named_parameters()}
    theta = {n: p.detach() for n, p in twin.named_parameters()}
    pushed = torch.cat([t.flatten() for t in twin.push(theta, v).values()])
    want = f @ torch.cat([t.flatten() for t in v.values()])
    torch.testing.assert_close(pushed, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "count"),
    each_once(["a pair", "mixing", "shear"], [5, 40]),
)
def test_theorem_2_on_the_model_and_formula_31_on_the_parameters(name: str, count: int) -> None:
    """dψ G_θ⁺∇ = dφ G_w⁺∇, while df G_θ⁺∇ = F(FᵀGF)⁺Fᵀ∇, another vector if p > rank."""
    model = network()
    x = inputs(count)
    twin = reparametrize(model, CASES[name]())
    f = differential(twin)
    j, _ = dense(model, x)
    r = torch.randn(2 * count, dtype=torch.float64)
    direct = j @ torch.linalg.pinv(j) @ r

    def closure(m: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            m.zero_grad()
            loss = (m(x).flatten() * r).sum() / count
            loss.backward()
            return loss

        return run

    moves = []
    for m in (model, twin):
        opt = pb.NaturalGradient(m, solver=pb.solvers.PseudoInverse())
        moves.append(opt.direction(closure(m)).x)
    torch.testing.assert_close(dense(model, x)[0] @ moves[0], direct, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(dense(twin, x)[0] @ moves[1], direct, rtol=1e-7, atol=1e-8)
    want = f @ torch.linalg.pinv(j @ f) @ r
    torch.testing.assert_close(f @ moves[1], want, rtol=1e-6, atol=1e-7)
    distance = float((f @ moves[1] - moves[0]).norm() / moves[0].norm())
    assert distance > 1e-2 if count == 5 else distance < 1e-7


def test_frozen_tied_and_buffered_models() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False)
            self.two = nn.Linear(3, 3)
            self.two.weight = self.one.weight
            self.norm = nn.BatchNorm1d(3).eval()
            self.norm.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.two(torch.tanh(self.one(x))))

    model = Tied().double().eval()
    twin = reparametrize(model, PAIR)
    assert not twin.training
    torch.testing.assert_close(twin(inputs()), model(inputs()))
    assert sorted(twin.names) == ["norm.bias", "one.weight", "two.bias"]
    assert [n for n, p in twin.named_parameters() if not p.requires_grad] == ["inner.norm.weight"]
    repeated = copy.deepcopy(twin)
    repeated.load_state_dict(twin.state_dict())
    torch.testing.assert_close(repeated(inputs()), model(inputs()))


def test_recurrent_layers() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4, batch_first=True).double()
    twin = reparametrize(model, shear())
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    torch.testing.assert_close(twin(x)[0], model(x)[0])
    twin(x)[0].sum().backward()
    assert all(p.grad is not None for p in twin.parameters())


def cube_root(w: Tensor) -> Tensor:
    return w.sign() * w.abs() ** (1 / 3)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "square": (lambda: (lambda t: t**2, torch.sqrt), "not invertible"),
    "range": (lambda: (torch.exp, torch.log), "not invertible"),
    "wrong inverse": (lambda: (torch.sinh, torch.sinh), "not invertible"),
    "shapes": (lambda: (lambda t: t.flatten(), lambda w: w), "shapes"),
    "nan": (lambda: (lambda t: t * torch.nan, lambda t: t), "not invertible"),
    "another dtype": (lambda: (lambda t: 2 * t.float(), lambda w: w / 2), "shapes or dtypes"),
    "no inverse": (lambda: torch.sinh, "its inverse"),
    "no function": (lambda: 3, "diffeomorphism is not usable"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_diffeomorphism_is_refused(name: str) -> None:
    make, words = BAD[name]
    with pytest.raises(PullbackError, match=words):
        reparametrize(network(), make())


def test_a_derivative_that_vanishes_at_a_weight_is_refused() -> None:
    """θ³ is a bijection, but no diffeomorphism where a bias is zero."""
    model = network()
    reparametrize(model, (lambda t: t**3, cube_root))
    nn.init.zeros_(model[0].bias)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PullbackError, match="derivative is singular"):
        reparametrize(model, (lambda t: t**3, cube_root))


def test_nothing_to_reparametrize() -> None:
    with pytest.raises(PullbackError, match="nothing to reparametrize"):
        reparametrize(nn.Tanh(), PAIR)
    with pytest.raises(PullbackError, match="nothing to reparametrize"):
        reparametrize(network().requires_grad_(False), PAIR)


def test_parameters_without_values_are_refused() -> None:
    with pytest.raises(PullbackError, match="meta"):
        reparametrize(nn.Linear(2, 2, device="meta"), PAIR)
