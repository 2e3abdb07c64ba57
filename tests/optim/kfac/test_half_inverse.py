"""Inverse factors in float16 lose no more than TF32 does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pullback as pb
from pullback.optim.kfac.rules import natural
from pullback.optim.kfac.rules.half_inverse import apply_in_half, round_to_half, widen

DOUBLE = torch.float64


def make_factor(n: int, seed: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(2, n, 2 * n, generator=generator, dtype=dtype)
    return samples @ samples.mT / n + 0.1 * torch.eye(n, dtype=dtype)


@pytest.mark.parametrize("columns", [24, 21])
@pytest.mark.parametrize("power", [0, 8, -8])
def test_factors_and_gradients_of_any_range(columns: int, power: int) -> None:
    """`columns` may be fewer than the inverse has, which is then filled up with zeros."""
    scale = torch.logspace(-2, 2, 16, dtype=DOUBLE)
    left = torch.linalg.inv(make_factor(16, 0) * scale[:, None] * scale * 10.0**power)
    right = torch.linalg.inv(make_factor(columns, 1))
    padded = F.pad(right, (0, 24 - columns, 0, 24 - columns))
    half = round_to_half(left.float(), padded.float())
    gradient = torch.randn(2, 16, columns, generator=torch.Generator().manual_seed(2)) * 1e-9
    exact = left @ gradient.double() @ right
    assert (apply_in_half(half, gradient) - exact).norm() < 5e-3 * exact.norm()
    wide_left, wide_right = widen(half)
    corner = wide_right[:, :columns, :columns]
    assert (wide_left @ gradient @ corner - exact).norm() < 5e-3 * exact.norm()


def test_units_of_unlike_size_keep_their_bits() -> None:
    """In the length of the metric, where all units count alike: √⟨x, R X C⟩ of the error."""
    roots: list[Tensor] = []
    for n, seed in ((64, 0), (96, 1)):
        scale = torch.logspace(0, 4, n, dtype=DOUBLE)
        roots.append(torch.linalg.cholesky(make_factor(n, seed) * scale[:, None] * scale))
    left, right = roots
    half = round_to_half(*(torch.cholesky_inverse(root).float() for root in roots))
    white = torch.randn(2, 64, 96, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    direction = apply_in_half(half, (left @ white @ right.mT).float()).double()
    assert (left.mT @ direction @ right - white).norm() < 5e-3 * white.norm()


def test_zeros_stay_zeros() -> None:
    half = round_to_half(torch.zeros(1, 8, 8), torch.zeros(1, 8, 8))
    assert not apply_in_half(half, torch.zeros(1, 8, 8)).any()


def train(model: nn.Module, optimizer: pb.KFAC, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=generator)
    y = torch.randint(0, 3, (64,), generator=generator)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def make_optimizer() -> tuple[nn.Module, pb.KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    model.append(nn.Linear(16, 3))
    likelihood = pb.likelihoods.Categorical()
    return model, pb.KFAC(model, likelihood=likelihood, statistics_every=2, invert_every=2)


def test_training_saving_and_converting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: training goes as in float32; states are loaded and converted."""
    model, optimizer = make_optimizer()
    exact_losses = train(model, optimizer, 12)
    monkeypatch.setattr(natural, "pays_in_half", lambda left, right: left.dtype == torch.float32)
    model, optimizer = make_optimizer()
    losses = train(model, optimizer, 12)
    states = [block.state for block in optimizer.blocks.states.blocks.values()]
    assert all(state.tensors()["left"].dtype == torch.float16 for state in states)
    assert losses == pytest.approx(exact_losses, rel=1e-2)

    other_model, other = make_optimizer()
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert train(other_model, other, 3) == train(model, optimizer, 3)

    key = next(iter(optimizer.blocks.averages))
    block = optimizer.blocks.states.blocks[key]
    wide_left, _ = widen(block.state.in_half)
    memory = block.state.left
    rows = torch.linspace(0.5, 2, 16)[None]
    block.rule.rescale(block.state, rows, torch.ones(1, 7))
    assert block.state.left is memory
    rescaled, _ = widen(block.state.in_half)
    expected = wide_left * rows[..., None] * rows[:, None]
    torch.testing.assert_close(rescaled, expected, rtol=5e-3, atol=5e-3 * float(expected.max()))

    for key in optimizer.blocks.averages:
        before = optimizer.blocks.states.blocks[key].state.in_half
        left, right = widen(before)
        optimizer.blocks.move_block(key, torch.zeros(0, dtype=DOUBLE))
        state = optimizer.blocks.states.blocks[key].state
        assert state.left.dtype == DOUBLE
        torch.testing.assert_close(state.left, left.double())
        torch.testing.assert_close(state.right, right.double())
