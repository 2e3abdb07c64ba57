"""Lightning, Accelerate and Trainer on two processes are the same on one, on the joined batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .common import (
    NATURAL,
    SPECTRAL,
    accelerated,
    classifier,
    fit,
    gpt2,
    lightning_fit,
    vector,
)

for package in ("transformers", "accelerate", "lightning"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes wrote."""
    folder = tmp_path_factory.mktemp("two")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tests.integrations.processes", str(folder),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _alone(loop: str, folder: Path) -> Tensor:
    """The same loop in this process, with batches twice as large."""
    options = SPECTRAL if "spectral" in loop else NATURAL
    if loop.startswith("accelerate"):
        return accelerated(0, 1, options)
    if loop.startswith("trainer"):
        return vector(fit(gpt2(), folder, options, gradient_accumulation_steps=2).model)
    module = classifier(NATURAL, manual="manual" in loop)
    more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    lightning_fit(module, **({} if "manual" in loop else more))
    return vector(module.net)


LOOPS = [
    "accelerate", "accelerate, built after wrapping", "accelerate, spectral", "trainer, natural",
    "trainer, spectral", "lightning, automatic", "lightning, manual",
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_two_processes_are_one(found: list[dict[str, Any]], loop: str, tmp_path: Path) -> None:
    first, second = (own[loop] for own in found)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, _alone(loop, tmp_path), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rule", ["natural", "spectral"])
def test_a_trainer_resumes_to_the_same_bits(found: list[dict[str, Any]], rule: str) -> None:
    """The first process alone has saved, between two inversions."""
    for own in found:
        assert torch.equal(own[f"trainer, {rule}, resumed"], own[f"trainer, {rule}"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("built too early", ["2 processes", "built before they met", "group="]),
        ("not told", ["2 processes", "not wrapped", "Lightning, Accelerate or Trainer", "group="]),
        ("lightning, whole module", ["single number", "training_step calls"]),
    ],
)
def test_what_would_drift_is_refused(
    found: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    for own in found:
        assert all(word in own[case] for word in words), own[case]
