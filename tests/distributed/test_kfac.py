"""K-FAC on N processes is K-FAC of one process on the joined batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pullback as pb

from .training import MODELS, STEPS, train
from .world import World

CATEGORICAL = pb.likelihoods.Categorical()
NATURAL: dict[str, Any] = {"likelihood": CATEGORICAL, "fisher": "exact"}
UNEVEN = (15, 8, 13)


def equal(
    world: World, kind: str, options: dict[str, Any], counts: tuple[int, ...] = UNEVEN, **how: Any
) -> None:
    """The processes' parameters are the same bits, and those of one process to round-off."""
    found = world.run(_train, kind, counts, options, how, size=len(counts))
    want = train(0, 1, kind, counts, options, **how)
    for name, p in want.items():
        for other in found[1:]:
            assert torch.equal(found[0][name], other[name]), name
        torch.testing.assert_close(found[0][name], p, rtol=1e-10, atol=1e-10)


def _train(
    rank: int, size: int, kind: str, counts: Any, options: Any, how: dict[str, Any]
) -> dict[str, torch.Tensor]:
    return train(rank, size, kind, counts, options, **how)


@pytest.mark.parametrize("kind", MODELS)
def test_layers(world: World, kind: str) -> None:
    equal(world, kind, NATURAL)


OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {**NATURAL, "kl_clip": 1e-3},
    "no clip": {**NATURAL, "kl_clip": None},
    "every step": {**NATURAL, "kl_clip": None, "statistics_every": 1, "invert_every": 1},
    "exact damping": {**NATURAL, "damping": pb.optim.kfac.Exact(1e-2)},
    "invariant damping": {**NATURAL, "damping": pb.optim.kfac.Invariant(1e-2)},
    "no damping": {**NATURAL, "damping": 0.0, "kl_clip": 1e-3},
    "adaptive damping": {**NATURAL, "damping": pb.optim.kfac.Adaptive(1e-2), "lr": 0.5},
    "quadratic model": {**NATURAL, "step": pb.steps.QuadraticModel(), "lr": 1.0},
    "empirical": {"likelihood": CATEGORICAL, "fisher": "empirical"},
    "ekfac": {**NATURAL, "ekfac": True},
    "apart": {**NATURAL, "joint": False, "kl_clip": None},
    "diagonals": {**NATURAL, "max_factor": 10, "kl_clip": None},
    "reduce": {**NATURAL, "sharing": "reduce"},
    "eigenbasis": {"rule": "eigenbasis", "lr": 3e-3},
    "spectral": {"rule": "spectral", "lr": 6e-3, "ema": 0.8},
    "decay": {**NATURAL, "weight_decay": 0.1, "momentum": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(world: World, name: str) -> None:
    singular = name in ("no damping", "invariant damping")  # which magnify round-off
    equal(world, "small" if singular else "dense", OPTIONS[name], steps=4 if singular else STEPS)


@pytest.mark.parametrize("name", ["clip", "no clip", "eigenbasis", "spectral"])
def test_workers(world: World, name: str) -> None:
    """One process for each inverse; the others receive directions."""
    equal(world, "convolutions", {**OPTIONS[name], "workers": 1})


def test_empty_batches(world: World) -> None:
    equal(world, "dense", OPTIONS["no clip"], (20, 0, 15))
    equal(world, "convolutions", OPTIONS["clip"], (0, 20, 15))


def test_accumulation(world: World) -> None:
    equal(world, "dense", OPTIONS["clip"], (14, 16, 6), micro=2)


def test_clipped_gradients(world: World) -> None:
    equal(world, "dense", OPTIONS["clip"], clip=0.1)


def test_plain_module(world: World) -> None:
    """With `group=` the optimizer averages the gradients itself."""
    equal(world, "dense", OPTIONS["clip"], plain=True)
    equal(world, "experts", OPTIONS["clip"], plain=True)


@pytest.mark.parametrize("name", ["clip", "no clip", "one worker", "eigenbasis", "spectral"])
def test_checkpoints(world: World, tmp_path: Path, name: str) -> None:
    """Saved by two processes, a run goes on with three or with one as if nothing had happened."""
    options = {**OPTIONS.get(name, OPTIONS["eigenbasis"])}
    if name == "one worker":
        options["workers"] = 1
    how = {"save": str(tmp_path / "two"), "steps": 5}
    world.run(_train, "convolutions", (20, 16), options, how, size=2)
    want = train(0, 1, "convolutions", (36,), {**options, "workers": None})
    how = {"load": str(tmp_path / "two"), "start": 5}
    found = world.run(_train, "convolutions", UNEVEN, options, how)
    found.append(train(0, 1, "convolutions", (36,), {**options, "workers": None}, **how))
    for parameter, p in want.items():
        for other in found:
            torch.testing.assert_close(other[parameter], p, rtol=1e-10, atol=1e-10)
