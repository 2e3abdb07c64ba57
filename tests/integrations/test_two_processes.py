"""Lightning, Accelerate and Trainer on two processes are the same on one, on the joined batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .common import (
    NATURAL,
    SPECTRAL,
    classifier,
    fit,
    gpt2,
    lightning_fit,
    train_accelerated,
    vector,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
#: by package, what each of two processes wrote
ResultsOf = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> ResultsOf:
    @cache
    def run(package: str) -> list[dict[str, Any]]:
        pytest.importorskip("lightning" if package == "lightning" else "accelerate")
        pytest.importorskip("transformers")
        folder = tmp_path_factory.mktemp(package)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "tests.integrations.processes", package, str(folder),
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        outcome = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
        )
        assert outcome.returncode == 0, outcome.stderr[-5000:]
        return [torch.load(folder / f"{rank}.pt") for rank in range(2)]

    return run


def _alone(package: str, loop: str, folder: Path) -> Tensor:
    """The same loop in this process, with batches twice as large."""
    options = SPECTRAL if "spectral" in loop or package == "trainer" else NATURAL
    if package == "accelerate":
        return train_accelerated(0, 1, options)
    if "trainer" in package:
        return vector(fit(gpt2(), folder, options, gradient_accumulation_steps=2).model)
    module = classifier(NATURAL, manual=loop == "manual")
    more = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    lightning_fit(module, **({} if loop == "manual" else more))
    return vector(module.net)


LOOPS = [
    ("trainer", "whole"),
    ("natural_trainer", "whole"),
    *(
        ("accelerate", loop)
        for loop in ("built before wrapping", "built after wrapping", "spectral")
    ),
    *(("lightning", loop) for loop in ("automatic", "manual")),
]


@pytest.mark.parametrize(("package", "loop"), LOOPS)
@pytest.mark.filterwarnings("ignore")
def test_two_processes_are_one(
    results_of: ResultsOf, package: str, loop: str, tmp_path: Path
) -> None:
    first, second = (results[loop] for results in results_of(package))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, _alone(package, loop, tmp_path), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("package", ["trainer", "natural_trainer"])
def test_a_trainer_resumes_to_the_same_bits(results_of: ResultsOf, package: str) -> None:
    """The first process alone has saved, between two inversions."""
    for results in results_of(package):
        assert torch.equal(results["resumed"], results["whole"])


@pytest.mark.parametrize(
    ("package", "case", "words"),
    [
        ("trainer", "built too early", ["2 processes", "built before they met", "group="]),
        ("trainer", "not told", ["2 processes", "not wrapped", "Accelerate or Trainer", "group="]),
        ("lightning", "the whole module", ["single number", "training_step calls"]),
    ],
)
def test_what_would_drift_is_refused(
    results_of: ResultsOf, package: str, case: str, words: list[str]
) -> None:
    for results in results_of(package):
        assert all(word in results[case] for word in words), results[case]
