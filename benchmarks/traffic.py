"""Bytes that K-FAC sends per step, beside those of DistributedDataParallel's gradients.

The library's own code packs, places and counts; tensors have shapes alone, and nothing is sent.

    python -m benchmarks.traffic --processes 8
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pullback as pb
from pullback._core.processes import Processes, Traffic
from pullback.grams.kronecker.packed import map_memory
from pullback.optim.kfac.factors.placement import Placement
from pullback.optim.kfac.replicas import shared_sides, sum_sides

from .kfac_models import GPT, resnet50
from .timing import environment

RESULTS = Path(__file__).parent / "results"
MODELS: dict[str, Callable[[], nn.Module]] = {"ResNet-50": resnet50, "GPT-2": lambda: GPT(depth=12)}
CATEGORICAL = pb.likelihoods.Categorical()
RULES: dict[str, dict[str, Any]] = {
    "natural": {"likelihood": CATEGORICAL, "kl_clip": None},
    "natural, kl_clip": {"likelihood": CATEGORICAL},
    "eigenbasis": {"rule": "eigenbasis"},
    "spectral": {"rule": "spectral"},
}


class Paper(Processes):
    """The first of `size` processes, which counts what it would send."""

    def __init__(self, size: int, traffic: dict[str, Traffic] | None = None) -> None:
        super().__init__(None, traffic)
        self.size = size

    def divide(self, parts: Sequence[Sequence[int]]) -> Paper:
        return Paper(len(parts[0]), self._traffic)

    def _reduce(self, t: Tensor, operation: str = "SUM") -> None:
        pass

    def _broadcast(self, t: Tensor, rank: int, what: str) -> None:
        self._send(what, t.nbytes, lambda: None)

    def _gather(self, t: Tensor, what: str) -> Tensor:
        self._send(what, (self.size - 1) * t.nbytes, lambda: None)
        return t.new_empty(self.size * t.numel())


def shape_of(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def count(model: nn.Module, options: dict[str, Any], size: int, workers: int) -> dict[str, float]:
    """Return bytes per step by purpose, with statistics and inversions as the rule has them."""
    opt = pb.KFAC(model, **options)
    state, paper = opt.blocks, Paper(size)
    own, placement = state.preconditioner, Placement(paper, workers)
    keys = sorted(state.averages, key=lambda key: key.names)
    rare: list[Any] = []  # the sides that are summed before inversions alone
    often: list[Any] = []  # and those that are summed with statistics
    for key in keys:
        value = state.averages[key].value
        shapes = {f: t.shape for f, t in value.items()}
        shared = shared_sides(key, shapes, read=opt.kl_clip is not None)
        for f, t in value.items():
            (rare if f.side in shared else often).append(map_memory(shape_of, t))
    factors = 0.0
    for sides, every in ((rare, opt.invert_every), (often, opt.statistics_every)):
        sums = Paper(size)
        sum_sides(sides, sums, [True] * len(sides))
        factors += sum(own.bytes for own in sums.traffic().values()) / every
    for key in keys:
        held = own.inverses[key]
        for name, t in held.tensors().items():
            setattr(held, name, shape_of(t))
    own.ready.update(keys)
    placement.assign(own, keys)
    placement.send(own, keys)
    gradients = {n: shape_of(p) for n, p in model.named_parameters()}
    placement.complete(own, gradients, [], gradients)
    opt.close()
    steps = {"inverses": opt.invert_every, "directions": 1}
    sent = {what: own.bytes / steps[what] for what, own in paper.traffic().items()}
    return {"factors": factors, **sent}


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS / "traffic.json")
    options = parser.parse_args(arguments)
    size, results = options.processes, []
    for name, build in MODELS.items():
        model = build()
        weights = sum(p.nbytes for p in model.parameters())
        gradients = 2 * (size - 1) / size * weights
        print(f"{name}, {size} processes: gradients {gradients / 1e6:.1f} MB per step")
        for rule, given in RULES.items():
            for workers in (size, 1):
                sent = count(model, given, size, workers)
                total = sum(sent.values())
                row = {"model": name, "rule": rule, "processes": size, "workers": workers}
                results.append({**row, "gradients": gradients, **sent, "total": total})
                parts = ", ".join(f"{what} {b / 1e6:.2f}" for what, b in sent.items())
                print(
                    f"  {rule:17} workers {workers}: {total / 1e6:7.2f} MB per step, "
                    f"{total / gradients:6.1%} of the gradients ({parts})"
                )
    record = {"environment": environment(torch.device("cpu")), "results": results}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return results


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
