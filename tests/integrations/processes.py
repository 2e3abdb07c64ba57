"""What every process does: `torchrun --nproc-per-node 2 -m tests.integrations.processes FOLDER`.

Each loop's parameters, and errors as texts, are written to FOLDER/RANK.pt.
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

from .common import (
    NATURAL,
    SPECTRAL,
    accelerated,
    batches,
    classifier,
    fit,
    gpt2,
    lightning_fit,
    vector,
)


def error_of(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except pb.PullbackError as error:
        return str(error)
    return ""


def built_too_early(early: Any) -> None:
    """A step of an optimizer that was built before the processes had met."""
    x, y = batches(4)
    cross_entropy(early.model(input_ids=x).logits.flatten(0, 1), y.flatten()).backward()
    early.step()


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    early, found = pb.KFAC(gpt2(), **NATURAL), {}
    found["accelerate"] = accelerated(rank, size, NATURAL)
    found["accelerate, built after wrapping"] = accelerated(rank, size, NATURAL, after=True)
    found["accelerate, spectral"] = accelerated(rank, size, SPECTRAL)
    found["built too early"] = error_of(built_too_early, early)
    found["not told"] = error_of(pb.KFAC, gpt2())
    share = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    for name, options in (("natural", NATURAL), ("spectral", SPECTRAL)):
        own = folder / name
        saved = {**share, "save_strategy": "steps", "save_steps": 3}
        found[f"trainer, {name}"] = vector(fit(gpt2(), own, options, **saved).model)
        resumed = fit(gpt2(), own, options, resume=str(own / "checkpoint-3"), **share)
        found[f"trainer, {name}, resumed"] = vector(resumed.model)
    for name, manual, more in (
        ("automatic", False, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("manual", True, {}),
    ):
        module = classifier(NATURAL, manual)
        lightning_fit(module, rank, size, **more)
        found[f"lightning, {name}"] = vector(module.net)
    found["lightning, whole module"] = error_of(
        lightning_fit, classifier(NATURAL, inner=False), rank, size
    )
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
