"""What a K-FAC optimizer can tell: coverage, the Gram itself, where it is degenerate, memory."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.capture import plain
from ..._core.errors import PullbackError
from ...grams.kronecker import Kronecker, Pair
from .blocks.coverage import Coverage, Row, described, expected
from .blocks.curvature import Curvature
from .blocks.degenerate import Degenerate, degenerate
from .blocks.layout import arranged
from .statistics.gather import Gatherer
from .statistics.sums import Key


class Reports:
    """Questions to a K-FAC optimizer, which change nothing."""

    model: nn.Module
    curvature: Curvature
    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    _gatherer: Gatherer
    _memory: Any
    _by_name: dict[str, nn.Parameter]

    def coverage(self) -> Coverage:
        """What every parameter's block is, and why; before any statistics, what is expected."""
        blocks = {n: k for k in self.curvature.averages for n in k.names}
        guess, rows = expected(self.model), []
        given = {id(p) for group in self.param_groups for p in group["params"]}
        for name, p in plain(self.model).named_parameters():
            shape = tuple(p.shape)
            _, kind = guess.get(name, ("", "plain parameter"))
            if not p.requires_grad:
                rows.append(Row(name, shape, "none", "frozen"))
            elif id(p) not in given:
                rows.append(Row(name, shape, "none", "not given to the optimizer"))
            elif not p.numel():
                rows.append(Row(name, shape, "none", "it has no entries"))
            elif name in blocks:
                key = blocks[name]
                block = self.curvature.block(key)
                sides = (block.left, block.right) if isinstance(block, Pair) else None
                reason = self._gatherer.reasons.get(name, kind)
                if key in self.curvature.notes:
                    reason += f"; {self.curvature.notes[key]}"
                rows.append(Row(name, shape, described(key, block.shape, sides), reason))
            elif self._memory["taken"]:
                why = "no output seen so far depended on it; its gradient is followed as it is"
                rows.append(Row(name, shape, "gradient", why))
            else:
                held, why = guess.get(
                    name, ("diagonal", "plain parameter: squares of sampled gradients")
                )
                rows.append(Row(name, shape, held, why))
        return Coverage(rows)

    def gram(self) -> Kronecker:
        """F̂ without damping, over the parameters that have a block, in the model's order."""
        held = self.curvature
        if not held.averages:
            raise PullbackError(
                "There are no statistics yet", "no step was taken", "Call step() first"
            )
        sizes = {n: p.numel() for n, p in plain(self.model).named_parameters()}
        covered = {n for k in held.averages for n in k.names}
        start, offsets = 0, {}
        for name, size in sizes.items():
            if name in covered:
                offsets[name], start = start, start + size
        index = []
        for key in held.averages:
            places = [
                torch.arange(offsets[n], offsets[n] + sizes[n]).view(self._by_name[n].shape)
                for n in key.names
            ]
            index.append(arranged(key, places, held.shape(key)[0]).flatten())
        blocks = [held.corrected(k) for k in held.averages]
        return Kronecker(blocks, torch.cat(index).to(blocks[0].diagonal().device))

    def average(self) -> dict[Key, dict[str, Tensor]]:
        """The averages as they are, to serve as an `Invariant` damping's reference."""
        return {k: copy.deepcopy(a.corrected()) for k, a in self.curvature.averages.items()}

    def degenerate(self) -> list[Degenerate]:
        """Blocks on which F̂ is no metric, and why: directions that change nothing."""
        return [d for k in self.curvature.averages for d in degenerate(k, self.curvature.block(k))]

    def memory(self) -> dict[str, int]:
        """Bytes held, by what for."""
        buffers = [s["momentum"] for s in self.state.values() if "momentum" in s]
        return {**self.curvature.memory(), "momentum": sum(t.nbytes for t in buffers)}
