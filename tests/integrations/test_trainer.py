"""Hugging Face's Trainer takes the steps of a loop by hand."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from tests.kfac_options import kfac_of

from .common import (
    NATURAL,
    SPECTRAL,
    LazyPackage,
    arguments,
    fit,
    gpt2,
    needs,
    next_word_loss,
    sentences,
    vector,
)

pytestmark = needs("transformers", "accelerate")
hf: Any = LazyPackage("transformers")
accelerate: Any = LazyPackage("accelerate")


@pytest.fixture(autouse=True)
def _no_mixed_precision_left() -> Any:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def by_hand(batches: list[Any], micro: int, kfac: dict[str, Any]) -> Tensor:
    """The same batches, joined where gradients were accumulated."""
    model = gpt2().train()
    opt = kfac_of(model, **kfac)
    rate = opt.param_groups[0]["lr"]
    epoch = len(sentences()) // 8
    remaining = iter(batches)
    steps: list[list[Any]] = []
    while sum(map(len, steps)) < len(batches):  # the last step of an epoch may have fewer
        left = epoch - sum(map(len, steps)) % epoch
        steps.append(list(islice(remaining, min(micro, left))))
    for i, microbatches in enumerate(steps):
        opt.param_groups[0]["lr"] = rate * (1 - i / len(steps))
        x, y, positions = (
            torch.cat([batch[name] for batch, _ in microbatches])
            for name in ("input_ids", "labels", "position_ids")
        )
        opt.zero_grad()
        z = model(input_ids=x, position_ids=positions).logits
        next_word_loss(z, y, 0, microbatches[0][1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    return vector(model)


@pytest.mark.parametrize(
    ("kfac", "micro"),
    [
        pytest.param(NATURAL, 3, id="natural"),
        pytest.param(SPECTRAL, 2, id="spectral"),
        pytest.param({**NATURAL, "fisher": "empirical"}, 2, id="empirical", marks=pytest.mark.slow),
        pytest.param(
            {"rule": "eigenbasis", "statistics_every": 2},
            1,
            id="eigenbasis",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fit_is_the_loop_by_hand(tmp_path: Path, kfac: dict[str, Any], micro: int) -> None:
    """Tokens are counted over all batches of a step, whatever is ignored in each of them."""
    trainer = fit(gpt2(), tmp_path, kfac, gradient_accumulation_steps=micro)
    want = by_hand(trainer.trained_batches, micro, kfac)
    torch.testing.assert_close(vector(trainer.model), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "kfac", [{**NATURAL, "fisher": "mc"}, SPECTRAL], ids=["natural", "spectral"]
)
def test_a_resumed_fit_has_the_same_bits(tmp_path: Path, kfac: dict[str, Any]) -> None:
    """Blocks that functions show are known to a checkpoint, and not to a fresh optimizer."""
    saved = {"save_strategy": "steps", "save_steps": 3}
    want = vector(fit(gpt2(0.1), tmp_path, kfac, **saved).model)
    resumed = fit(gpt2(0.1), tmp_path, kfac, resume=str(tmp_path / "checkpoint-3"))
    assert len(resumed.trained_batches) == 3
    assert torch.equal(vector(resumed.model), want)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": False},
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.slow
        ),
    ],
    ids=["checkpointing", "compiled"],
)
def test_ways_to_compute_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    want, actual = (
        fit(gpt2(), tmp_path, NATURAL, max_steps=3, **arguments) for arguments in ({}, options)
    )
    rows = {row.name: row.block for row in want.kfac.coverage()}
    assert rows == {row.name: row.block for row in actual.kfac.coverage()}
    torch.testing.assert_close(vector(actual.model), vector(want.model), rtol=1e-10, atol=1e-10)


def test_reentrant_checkpointing_is_refused(tmp_path: Path) -> None:
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(pb.PullbackError, match="gradient_checkpointing_kwargs"):
        fit(gpt2(), tmp_path, NATURAL, gradient_checkpointing=True, **options)


def test_bfloat16(tmp_path: Path) -> None:
    """Outputs are converted to float32 after the forward pass; the bits are those of autocast."""
    options = {**NATURAL, "fisher": "empirical"}
    trainer = fit(gpt2(dtype=torch.float32), tmp_path, options, bf16=True, max_steps=3)
    model = gpt2(dtype=torch.float32).train()
    opt = kfac_of(model, **options)
    rate = opt.param_groups[0]["lr"]
    for i, (batch, count) in enumerate(trainer.trained_batches):
        opt.param_groups[0]["lr"] = rate * (1 - i / 3)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    assert torch.equal(vector(trainer.model), vector(model))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_the_class_and_its_arguments(tmp_path: Path) -> None:
    """Trainer hands over `model` as the first argument."""
    model = gpt2()
    want = fit(gpt2(), tmp_path, SPECTRAL)
    optimizer_and_options = pb.KFAC, {"model": model, **SPECTRAL}
    trainer = hf.Trainer(
        model,
        arguments(tmp_path),
        train_dataset=sentences(),
        optimizer_cls_and_kwargs=optimizer_and_options,
    )
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, pb.KFAC)
    assert torch.equal(vector(model), vector(want.model))


def test_accelerates_scaler() -> None:
    """A step that overflows is left out; the others are those without a scaler."""
    accelerate.Accelerator(cpu=True)
    x, y = (t.clone() for t in _words())
    ends = []
    for scaled in (True, False):
        model = gpt2().train()
        if scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        else:
            scaler = None
        options = {**NATURAL, "fisher": "empirical", "grad_scaler": scaler}
        opt = accelerate.optimizer.AcceleratedOptimizer(kfac_of(model, **options), scaler=scaler)
        for step in range(5):
            if step == 2 and not scaled:
                continue
            opt.zero_grad()
            loss = next_word_loss(model(input_ids=x, position_ids=_places(x)).logits, y, 0)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if step == 2:
                model.transformer.ln_f.weight.grad.fill_(torch.inf)
            opt.step()
            assert opt.step_was_skipped == (step == 2)
        ends.append(vector(model))
    torch.testing.assert_close(*ends, rtol=1e-10, atol=1e-10)


def _words() -> tuple[Tensor, Tensor]:
    rows = sentences(8)
    return torch.stack([r["input_ids"] for r in rows]), torch.stack([r["labels"] for r in rows])


def _places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1]).expand(x.shape)
