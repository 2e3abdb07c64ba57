"""Small models, closures, a dense oracle, and what a refusal or a rejection must leave alone."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

DOUBLE = torch.float64
#: of the optimizers and of the dense solutions that they are compared with
DAMPING = 1e-2


def mlp(
    inputs: int = 3,
    hidden: int = 5,
    outputs: int = 2,
    *,
    act: Callable[[], nn.Module] = nn.Tanh,
    dtype: torch.dtype = DOUBLE,
) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), act(), nn.Linear(hidden, outputs)).to(dtype)


def data(
    samples: int = 6, inputs: int = 3, outputs: int = 2, dtype: torch.dtype = DOUBLE
) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, inputs, dtype=dtype), torch.randn(samples, outputs, dtype=dtype)


def closure_of(
    opt: Any,
    model: Callable[..., Tensor],
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
    extra: Callable[[], Tensor] | None = None,
) -> Callable[[], Tensor]:
    """The closure everybody writes, with an optional regularizer."""

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(model(x), y)
        if extra is not None:
            value = value + extra()
        value.backward()
        return value

    return closure


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def vector(model: nn.Module) -> Tensor:
    """All parameters of the model in one new vector."""
    return flat(model.parameters()).clone()


def fill_missing(pieces: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    """Zeros where autograd found no dependence."""
    pairs = zip(pieces, params, strict=True)
    return [torch.zeros_like(p) if g is None else g for g, p in pairs]


def jacobian(z: Tensor, params: Sequence[Tensor]) -> Tensor:
    """dz/dparams, (z.numel(), p), by one reverse pass per entry."""
    rows = []
    for entry in z.flatten():
        pieces = torch.autograd.grad(entry, params, retain_graph=True, allow_unused=True)
        rows.append(flat(fill_missing(pieces, params)))
    return torch.stack(rows)


def gram(z: Tensor, params: Sequence[Tensor], metric: Tensor | float) -> Tensor:
    """JᵀMJ for a number, or one matrix (N, m, m) per sample; means are in `metric`."""
    j = jacobian(z, params)
    if isinstance(metric, float):
        return metric * j.T @ j
    return j.T @ torch.block_diag(*metric) @ j


def gradient(loss: Tensor, params: Sequence[Tensor]) -> Tensor:
    pieces = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    return flat(fill_missing(pieces, params))


def solve_damped(g: Tensor, rhs: Tensor, damping: float) -> Tensor:
    """(G + λ)⁻¹ rhs."""
    return torch.linalg.solve(g + damping * torch.eye(len(g), dtype=g.dtype), rhs)


def mse_gram(z: Tensor, params: Sequence[Tensor]) -> Tensor:
    """The Gram of `F.mse_loss`, 2/(N·m) JᵀJ."""
    return gram(z, params, 2.0 / z.numel())


def assert_close(actual: Tensor, want: Tensor, rtol: float = 1e-9) -> None:
    """Relative error in norm."""
    error = float((actual - want).norm() / want.norm())
    assert error <= rtol, f"relative error {error:.2e} > {rtol:.0e}"


def hooks(model: nn.Module) -> int:
    """How many hooks stand on all modules."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, name)) for m, name in product(model.modules(), names))


def same(a: Any, b: Any) -> bool:
    """Equality of nested states, to the bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return set(a) == set(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def snapshot(model: nn.Module, opt: Any = None) -> dict[str, Any]:
    """All that a rejected step must put back."""
    state = {"model": model.state_dict(), "random": torch.get_rng_state(), "hooks": hooks(model)}
    if opt is not None:
        state["optimizer"] = opt.state_dict()
    return copy.deepcopy(state)


@contextmanager
def expect_unchanged(model: nn.Module, opt: Any = None) -> Iterator[None]:
    """Parameters, buffers, random state, optimizer state and hooks are the same afterwards."""
    before = snapshot(model, opt)
    yield
    after = snapshot(model, opt)
    for key in before:
        assert same(before[key], after[key]), f"{key} changed"


@contextmanager
def refused(what: str, why: str, remedy: str) -> Iterator[None]:
    """A PullbackError that says what broke, why, and what to do."""
    with pytest.raises(pb.PullbackError) as caught:
        yield
    error = caught.value
    assert what in error.what
    assert why in error.why
    assert remedy in error.remedy
    assert str(error) == f"{error.what}: {error.why}. {error.remedy}"
