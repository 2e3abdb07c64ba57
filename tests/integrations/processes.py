"""What every process does: `torchrun -m tests.integrations.processes trainer FOLDER`.

Parameters after each loop, and errors as texts, are written to FOLDER/RANK.pt.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import pullback as pb
from tests.kfac_options import kfac_of

from .common import (
    NATURAL,
    SPECTRAL,
    batches,
    classifier,
    fit,
    gpt2,
    lightning_fit,
    train_accelerated,
    vector,
)


def error_of(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except pb.PullbackError as error:
        return str(error)
    return ""


def built_too_early(optimizer: Any) -> None:
    """A step of an optimizer that was built before the processes had met."""
    x, y = batches(4)
    cross_entropy(optimizer.model(input_ids=x).logits.flatten(0, 1), y.flatten()).backward()
    optimizer.step()


def with_accelerate(rank: int, size: int, folder: Path) -> dict[str, Any]:
    return {
        "built before wrapping": train_accelerated(rank, size, NATURAL),
        "built after wrapping": train_accelerated(rank, size, NATURAL, after=True),
        "spectral": train_accelerated(rank, size, SPECTRAL),
    }


def with_trainer(
    rank: int, size: int, folder: Path, options: dict[str, Any] = SPECTRAL
) -> dict[str, Any]:
    premature = kfac_of(gpt2(), **NATURAL)
    actual = {}
    share = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    saved = {**share, "save_strategy": "steps", "save_steps": 3}
    actual["whole"] = vector(fit(gpt2(), folder, options, **saved).model)
    resumed = fit(gpt2(), folder, options, resume=str(folder / "checkpoint-3"), **share)
    actual["resumed"] = vector(resumed.model)
    actual["built too early"] = error_of(built_too_early, premature)
    actual["not told"] = error_of(pb.KFAC, gpt2())
    return actual


def with_natural_trainer(rank: int, size: int, folder: Path) -> dict[str, Any]:
    return with_trainer(rank, size, folder, NATURAL)


def with_lightning(rank: int, size: int, folder: Path) -> dict[str, Any]:
    actual: dict[str, Any] = {}
    for name, manual, more in (
        ("automatic", False, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("manual", True, {}),
    ):
        module = classifier(NATURAL, manual)
        lightning_fit(module, rank, size, **more)
        actual[name] = vector(module.net)
    whole = classifier(NATURAL, inner=False)
    actual["the whole module"] = error_of(lightning_fit, whole, rank, size)
    return actual


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    loop = globals()[f"with_{sys.argv[1]}"]
    folder = Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    torch.save(loop(rank, size, folder), folder / f"{rank}.pt")
