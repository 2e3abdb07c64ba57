"""Which parameters a model's layers explain, established by proof and not by trust.

Two reverse passes with random cotangents settle it once per model and shape: for each layer,
the axis on which the samples stand; for each parameter, whether the layers' formula gives
what autograd gives. A parameter that fails is served by materialized rows, and named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._core.graph import arithmetic
from .._core.space import tolerance
from .base import Covered, Pulled
from .layers import Block, RowsBlock, Use
from .layers.moments import Layout, detect
from .proof import Proof
from .record import Entry, Recorder
from .replay import Replay
from .reverse import batched_cotangents, looped_cotangents, vectorizes
from .routing import routed
from .unstructured import sample_rows


@dataclass
class Structure:
    """The plan for one model and input shape: layouts of the layers used, and the rest."""

    layouts: dict[int, Layout]
    rest: tuple[str, ...]
    reasons: dict[str, str]
    rows_by: str | None = None
    #: whether one vectorized reverse pass serves all covectors
    batched: bool = False
    #: by group of parameters, the shapes its cotangents were seen to have or not
    looks: dict[Any, dict[str, bool]] = field(default_factory=dict)
    #: whether the plan serves other linearizations: every layer answered the probe (under a
    #: zero-initialized output layer any layout fits), and no index says where samples stand
    settled: bool = True

    @classmethod
    def establish(cls, linear: Replay, recorder: Recorder) -> Structure:
        """Probe with covectors u and c∘u, c one random number per sample."""
        z, leaves = linear.value, linear.leaves
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z)
        c = (1 + torch.rand(z.shape[0], generator=generator, dtype=torch.float64)).to(z)
        edges: list[Any] = [e.edge for e in recorder.entries]
        found = linear.gradients(u, edges + list(leaves.values()))
        scaled = linear.gradients(u * c.view(-1, *[1] * (u.ndim - 1)), edges) if edges else ()
        truth = dict(zip(leaves, found[len(edges) :], strict=True))

        layouts, reasons, exact = {}, {}, arithmetic(linear.graph)
        for i, (entry, one, two) in enumerate(zip(recorder.entries, found, scaled, strict=False)):
            layout = None
            if one is not None and two is not None:
                layout = detect(one, two, c, entry.features, exact)
            if layout is not None:
                layouts[i] = layout
            else:
                for name in filter(None, entry.names.values()):
                    reasons[name] = f"{entry.path}: no axis of its output counts the samples"
        heard = [g is None or bool(g.any()) for g in found[: len(edges)]]
        plan = cls(layouts, (), reasons, settled=all(heard) and not routed(linear.graph))
        deltas = {i: found[i] for i in layouts}
        blocks = plan._blocks(
            linear, recorder, {i: _placed(d, layouts[i], linear) for i, d in deltas.items()}
        )
        plan._verify(blocks, truth, linear)
        plan.batched = vectorizes(linear, edges, u, found)
        return plan

    def _verify(
        self, blocks: list[Block], truth: Mapping[str, Tensor | None], linear: Replay
    ) -> None:
        """Keep the parameters whose layer formula reproduces autograd's gradient."""
        ones = linear.value.new_ones(linear.value.shape[0], 1)
        proof = Proof(tolerance(arithmetic(linear.graph), 10))
        for block in blocks:
            proof.add(block.lift(ones), 0.0, 0.0, 0)
        # a parameter that the layers reach and the graph does not has the gradient zero
        found = {n: linear.space.zeros(1) if g is None else g for n, g in truth.items()}
        for name, why in proof.unexplained(found).items():
            self.reasons.setdefault(name, why)
        self.rest = tuple(n for n in truth if n in self.reasons)

    def pullback(self, linear: Replay, recorder: Recorder, covectors: Tensor) -> Pulled:
        """One reverse pass per covector gives every layer's cotangents."""
        used = [i for i, e in enumerate(recorder.entries) if i in self.layouts and self._wanted(e)]
        edges = [recorder.entries[i].edge for i in used]
        layouts = [self.layouts[i] for i in used]
        reverse = batched_cotangents if self.batched else looped_cotangents
        deltas = dict(zip(used, reverse(linear, edges, layouts, covectors), strict=True))
        count = covectors.shape[0]
        blocks = self._blocks(linear, recorder, deltas)
        if self.rest:
            rows, self.rows_by = sample_rows(linear, self.rest, covectors, self.rows_by)
            blocks.append(RowsBlock(rows))
        shape = (linear.value.shape[0], count)
        return Pulled(linear.space, shape, blocks, self._coverage(blocks))

    def _wanted(self, entry: Entry) -> bool:
        return any(n is not None and n not in self.rest for n in entry.names.values())

    def _blocks(
        self, linear: Replay, recorder: Recorder, deltas: Mapping[int, Tensor]
    ) -> list[Block]:
        """One block per set of parameters; parameters shared between sets become plain rows."""
        groups: dict[tuple[str | None, ...], list[int]] = {}
        for i in deltas:
            groups.setdefault(recorder.entries[i].key, []).append(i)
        blocks = []
        for indices in groups.values():
            first = recorder.entries[indices[0]]
            names = {r: None if n in self.rest else n for r, n in first.names.items()}
            if all(n is None for n in names.values()):
                continue
            uses = [self._use(linear, recorder.entries[i], i, deltas[i]) for i in indices]
            block = first.layer.block(names, uses)
            block.looks = self.looks.setdefault(first.key, {})
            blocks.append(block)
        return untied(blocks)

    def _use(self, linear: Replay, entry: Entry, i: int, delta: Tensor) -> Use:
        x = self.layouts[i](entry.input)
        if x.is_floating_point():
            x = x.to(linear.space.dtype)
        return Use(entry.module, x, delta, entry.features)

    def _coverage(self, blocks: list[Block]) -> list[Covered]:
        covered = []
        for block in blocks:
            for name in block.names:
                reason = self.reasons.get(name, "known layer")
                route = f"rows by {self.rows_by}" if name in self.rest else block.route
                covered.append(Covered(name, route, reason))
        return covered


def _placed(delta: Tensor | None, layout: Layout, linear: Replay) -> Tensor:
    assert delta is not None
    return layout(delta).unsqueeze(1).to(linear.space.dtype)


def untied(blocks: list[Block]) -> list[Block]:
    """Blocks with disjoint names: where a parameter stands in several, their rows are added."""
    counts: dict[str, int] = {}
    for block in blocks:
        for name in block.names:
            counts[name] = counts.get(name, 0) + 1
    tied = [b for b in blocks if any(counts[n] > 1 for n in b.names)]
    if not tied:
        return blocks
    rows: dict[str, Tensor] = {}
    for block in tied:
        for name, value in block.rows().items():
            rows[name] = rows[name] + value if name in rows else value
    return [b for b in blocks if b not in tied] + [RowsBlock(rows)]
