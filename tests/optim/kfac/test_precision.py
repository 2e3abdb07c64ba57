"""Half precision: autocast, models in 16 bits, and normalizations whose gradients torch rounds."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pullback._core.flags import are_finite
from tests.kfac_options import kfac_of

from ..common import assert_close
from .common import batch, gram, kfac, net, train, vector


class Normed(nn.Module):
    """A normalization between layers on sequences, whose shift may be used once more."""

    def __init__(self, norm: nn.Module, more: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = norm
        self.head = nn.Linear(8, 3)
        self.more = more
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        channels_first = isinstance(self.norm, nn.BatchNorm1d | nn.GroupNorm)
        if channels_first:
            return self.norm(h.mT).mT
        return self.norm(h)

    def forward(self, x: Tensor) -> Tensor:
        h: Any = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else None
        if h is None:
            h = self.inner(x)
        return self.head((h + self.norm.bias if self.more else h).mean(1))


NORMS = [nn.LayerNorm(8), nn.RMSNorm(8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8)]


def step(model: nn.Module, opt: Any = None, dtype: torch.dtype | None = torch.bfloat16) -> None:
    """By autocast to `dtype`, or in the model's own."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(48, 32, 5, generator=g)
    y = torch.randint(0, 3, (48,), generator=g)
    x = x.to(next(model.parameters()).dtype)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        z = model(x)
    F.cross_entropy(z.float(), y).backward()
    if opt is not None:
        opt.step()


@pytest.mark.parametrize("everything", [False, True])
def test_autocast(everything: bool) -> None:
    """Around the forward pass, or around backward pass and step as well."""
    model = net(torch.float32)
    x, y = batch(dtype=torch.float32)
    want = gram(model, x, y)
    opt = kfac(model, fisher="exact", lr=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        z = model(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=everything):
        F.cross_entropy(z.float(), y).backward()
        opt.step()
    assert opt.gram().dense().dtype == torch.float32
    assert all("kronecker" in row.block for row in opt.coverage())
    assert_close(opt.gram().dense(), want, 0.03)


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("whole", [False, True], ids=["autocast", "model"])
def test_norms_have_blocks_of_units(norm: nn.Module, dtype: torch.dtype, whole: bool) -> None:
    plain = Normed(copy.deepcopy(norm)).to(dtype if whole else torch.float32)
    model = copy.deepcopy(plain)
    opt = kfac(model, fisher="exact", lr=0.0)
    step(model, opt, None if whole else dtype)
    blocks = [r.block for r in opt.coverage() if r.name.startswith("norm.")]
    assert [b.split(",")[0] for b in blocks] == ["units"] * len(list(norm.parameters()))
    # buffers are what the training alone makes of them
    step(plain, None, None if whole else dtype)
    for actual, want in zip(model.buffers(), plain.buffers(), strict=True):
        assert actual.dtype == want.dtype
        assert torch.equal(actual, want)


def test_blocks_are_those_of_float32_also_from_checkpoints() -> None:
    """To what half precision gives."""
    grams = []
    for dtype, checkpointed in ((None, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        torch.manual_seed(0)
        model = Normed(nn.LayerNorm(8), checkpointed=checkpointed)
        opt = kfac(model, fisher="exact", lr=0.0)
        step(model, opt, dtype)
        grams.append(opt.gram().dense())
    assert_close(grams[1], grams[0], 0.05)
    assert_close(grams[2], grams[1], 1e-5)


def test_a_shift_that_is_used_elsewhere_and_a_layer_that_was_changed_are_noticed() -> None:
    more = Normed(nn.LayerNorm(8), more=True)
    changed = Normed(nn.LayerNorm(8))
    forward = changed.norm.forward
    changed.norm.forward = lambda input: 2 * forward(input)
    for model, blocks in ((more, ["units", "diagonal"]), (changed, ["diagonal", "diagonal"])):
        opt = kfac(model)
        step(model, opt)
        rows = [r for r in opt.coverage() if r.name.startswith("norm.")]
        assert [r.block for r in rows] == blocks
        assert model is changed or "outside its layer" in rows[1].reason


@pytest.mark.parametrize("options", [{}, {"kl_clip": 1e-3}, {"ekfac": True}], ids=str)
def test_training_in_bfloat16(options: dict[str, Any]) -> None:
    model = net(torch.bfloat16)
    opt = kfac(model, **options)
    start = vector(model)
    train(opt, model, 6, dtype=torch.bfloat16)
    assert opt.info.accepted
    assert all("kronecker" in row.block for row in opt.coverage())
    assert 0 < (vector(model) - start).norm() < torch.inf


def test_large_gradients_in_float32_are_finite() -> None:
    """Squares overflow from 1e19 on."""
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    opt = kfac_of(model, lr=1e-26, rule="natural")
    before = vector(model)
    (1e25 * model(x).square().mean()).backward()
    opt.step()
    assert opt.info.accepted
    assert not torch.equal(vector(model), before)
    assert model.weight.grad is not None
    model.weight.grad[0, 1] = torch.inf
    opt.step()
    assert not opt.info.accepted


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_the_largest_number_is_finite(dtype: torch.dtype) -> None:
    largest = torch.full((70,), torch.finfo(dtype).max, dtype=dtype)
    empty = torch.zeros(0)
    other = torch.ones(3, dtype=torch.float64)
    assert bool(are_finite([empty, largest, other]))
    assert bool(are_finite([empty]))
    for value in (torch.inf, -torch.inf, torch.nan):
        broken = largest.clone()
        broken[65] = value
        assert not bool(are_finite([other, broken]))


def test_large_gradients_in_float16_are_finite() -> None:
    """Their norm overflows there."""
    model = nn.Linear(256, 256).half()
    opt = kfac_of(model, lr=1e-6, damping=1e-2)
    before = vector(model)
    x = torch.randn(4, 256)
    (model(x.half()).float() * 1000).sum().backward()
    assert model.weight.grad is not None
    assert torch.finfo(torch.float16).max < model.weight.grad.double().norm() < torch.inf
    opt.step()
    assert opt.info.accepted
    assert not torch.equal(vector(model), before)
    model.weight.grad[3, 4] = torch.inf
    opt.step()
    assert not opt.info.accepted
