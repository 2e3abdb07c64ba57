"""Which parameters a model's layers explain, established by proof and not by trust.

Two reverse passes with random cotangents settle it once per model and shape: for each layer,
the axis on which the samples stand; for each parameter, whether the layers' formula gives
what autograd gives. A parameter that fails is served by materialized rows, per sample under vmap
or row by row, and named.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from .._core.errors import reraise_fatal
from .._core.graph import collect_reachable_nodes, disable_fused_attention, find_arithmetic_dtype
from .._core.space import relative_tolerance
from .base import Covered, Pulled
from .layers import Block, RowsBlock, Use
from .layers.moments import SampleLayout, detect_layout
from .layers.registry import CotangentStructure
from .proof import Proof, accumulate
from .record import Entry

if TYPE_CHECKING:
    from .module import ModuleLinearization


def cotangents(
    linear: ModuleLinearization,
    edges: list[Any],
    layouts: Sequence[SampleLayout],
    covectors: Tensor,
    *,
    batched: bool,
) -> list[Tensor]:
    """Per edge the cotangents (N, R, ...), samples first, by one vectorized pass or by R."""
    if batched and edges:
        found: Any = linear.gradients(covectors, edges, batched=True)
        pairs = zip(found, layouts, strict=True)
        return [
            layout.apply_to_covectors(gradient).to(linear.space.dtype) for gradient, layout in pairs
        ]
    out: list[Tensor] = []
    for r, u in enumerate(covectors if edges else ()):
        found = linear.gradients(u, edges)
        for i, (gradient, layout) in enumerate(zip(found, layouts, strict=True)):
            placed = layout(gradient)
            if r == 0:
                shape = (placed.shape[0], len(covectors), *placed.shape[1:])
                out.append(linear.space.zeros(*shape))
            out[i][:, r] = placed
    return out


def vectorizes(
    linear: ModuleLinearization, edges: list[Any], u: Tensor, truth: Sequence[Tensor | None]
) -> bool:
    """Whether the vectorized pass works for this graph, at speed, and agrees with the plain one."""
    if not edges:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where an operation has no batching rule
            found = linear.gradients(torch.stack([u, -u]), edges, batched=True)
    except (RuntimeError, UserWarning, NotImplementedError) as error:
        reraise_fatal(error)
        return False
    limit = relative_tolerance(find_arithmetic_dtype(linear.graph))
    for got, want in zip(found, truth, strict=False):
        if got is None or want is None or not want.numel():
            continue
        error = torch.maximum((got[0] - want).abs().max(), (got[1] + want).abs().max())
        if not bool(error <= limit * want.abs().max()):
            return False
    return True


#: kinds of nodes that read or write positions by a tensor of indices, or by a mask
_KINDS = ("Index", "Gather", "Scatter", "Take", "MaskedSelect", "MaskedScatter")


def chooses_by_index(root: Tensor) -> bool:
    """Whether positions are chosen by index on the way to `root`.

    The indices are numbers, which another batch has others of: experts get their samples in
    another order, while the graph has the same nodes.
    """
    return any(node.name().startswith(_KINDS) for node in collect_reachable_nodes(root.grad_fn))


_CHUNK = 2**28  # bytes of rows formed at once under vmap


def sample_rows(
    linear: ModuleLinearization, names: Sequence[str], covectors: Tensor, known: str | None
) -> tuple[dict[str, Tensor], str]:
    """Rows (N, R, numel) by name, and the way that worked.

    The vmapped rows are trusted only if they add up to autograd's own gradient: dropout, or an
    argument that is wrongly taken for a batch, makes them differ, and then each row gets a
    reverse pass of its own on the recorded graph.
    """
    if known != "reverse passes":
        try:
            rows = _vmapped(linear, names, covectors)
        except Exception as error:  # a model may refuse a batch of one in any way it likes
            reraise_fatal(error)
            rows = None
        if rows is not None and _adds_up(linear, rows, covectors):
            return rows, "vmap"
    return _row_by_row(linear, names, covectors), "reverse passes"


def _vmapped(
    linear: ModuleLinearization, names: Sequence[str], covectors: Tensor
) -> dict[str, Tensor]:
    source = linear.map
    call = linear.map.call
    samples = linear.value.shape[0]
    axis = source.batch_dim
    fixed = {n: p.detach() for n, p in linear.leaves.items()}
    free = {n: fixed.pop(n) for n in names}
    flat, spec = pytree.tree_flatten((call.args, call.kwargs))
    batched = [isinstance(t, Tensor) and t.ndim > axis and t.shape[axis] == samples for t in flat]

    def rows(values: list[Any], u: Tensor) -> dict[str, Tensor]:
        full = [
            v.unsqueeze(axis) if b else t for v, b, t in zip(values, batched, flat, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(full, spec)
        pull = vjp(lambda p: source.call_with({**fixed, **p}, *args, **kwargs)[0], free)[1]
        pulled = [pull(row)[0] for row in u]
        return {n: torch.stack([p[n] for p in pulled]) for n in names}

    values = [t if b else torch.zeros(samples) for t, b in zip(flat, batched, strict=True)]
    axes = [axis if b else 0 for b in batched]
    size = sum(p.numel() for p in free.values()) * covectors.shape[0]
    chunk = max(1, _CHUNK // (size * linear.value.element_size()))
    u = covectors.movedim(1, 0).to(linear.graph.dtype)
    with call.replay_context(), disable_fused_attention():  # the fused one has no vmap rule
        out = vmap(rows, in_dims=(axes, 0), chunk_size=chunk, randomness="different")(values, u)
    return {n: v.reshape(*v.shape[:2], -1).to(linear.space.dtype) for n, v in out.items()}


def _adds_up(linear: ModuleLinearization, rows: dict[str, Tensor], covectors: Tensor) -> bool:
    """Whether Σ c_nr row_nr equals autograd's Jᵀ Σ c_nr u_nr for random c."""
    r, n = covectors.shape[:2]
    generator = torch.Generator().manual_seed(1)
    c = torch.randn(n, r, generator=generator, dtype=torch.float64).to(linear.value)
    u = torch.einsum("nr,rn...->n...", c, covectors.to(c))
    truth = linear.gradients(u, [linear.leaves[name] for name in rows])
    sums = {n: torch.einsum("nrp,nr->p", some, c.to(some)) for n, some in rows.items()}
    limit = relative_tolerance(linear.graph.dtype, 10)
    return not _unexplained(linear, [sums], dict(zip(rows, truth, strict=True)), limit)


def _unexplained(
    linear: ModuleLinearization,
    sums: Iterable[Mapping[str, Tensor]],
    truth: Mapping[str, Tensor | None],
    limit: float,
) -> dict[str, str]:
    """The parameters whose sums of rows are not autograd's gradient, and why."""
    proof = Proof(limit)
    for some in sums:
        proof.add(some, 0.0, 0.0, 0)
    # a parameter that the layers reach and the graph does not has the gradient zero
    return proof.unexplained(
        {n: linear.space.zeros(1) if g is None else g for n, g in truth.items()}
    )


def _row_by_row(
    linear: ModuleLinearization, names: Sequence[str], covectors: Tensor
) -> dict[str, Tensor]:
    r, n = covectors.shape[:2]
    leaves = [linear.leaves[name] for name in names]
    rows = {name: linear.space.zeros(n, r, linear.leaves[name].numel()) for name in names}
    for i, k in product(range(n), range(r)):
        u = torch.zeros_like(linear.graph)
        u[i] = covectors[k, i]
        for name, g in zip(names, linear.gradients(u, leaves), strict=True):
            if g is not None:
                rows[name][i, k] = g.flatten()
    return rows


@dataclass
class LayerStructure:
    """The plan for one model and input shape: layouts of the layers used, and the rest."""

    layouts: dict[int, SampleLayout]
    rest: tuple[str, ...]
    reasons: dict[str, str]
    rows_by: str | None = None
    #: whether one vectorized reverse pass serves all covectors
    batched: bool = False
    #: by group of parameters, which structure its cotangents had when they were last tested
    structure_tests: dict[Any, dict[CotangentStructure, bool]] = field(default_factory=dict)
    #: whether the plan serves other linearizations: every layer answered the probe (under a
    #: zero-initialized output layer any layout fits), and no index says where samples stand
    settled: bool = True

    @classmethod
    def establish(cls, linear: ModuleLinearization) -> LayerStructure:
        """Probe with covectors u and c∘u, c one random number per sample."""
        z = linear.value
        leaves = linear.leaves
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z)
        c = (1 + torch.rand(z.shape[0], generator=generator, dtype=torch.float64)).to(z)
        edges: list[Any] = [e.edge for e in linear.entries]
        found: Any = linear.gradients(u, edges + list(leaves.values()))
        if edges:
            scaled = linear.gradients(u * c.view(-1, *[1] * (u.ndim - 1)), edges)
        else:
            scaled = ()
        truth = dict(zip(leaves, found[len(edges) :], strict=True))

        layouts = {}
        reasons = {}
        exact = find_arithmetic_dtype(linear.graph)
        for i, (entry, one, two) in enumerate(zip(linear.entries, found, scaled, strict=False)):
            layout = None
            if one is not None and two is not None:
                layout = detect_layout(one, two, c, entry.features, exact)
            if layout is not None:
                layouts[i] = layout
            else:
                for name in filter(None, entry.names.values()):
                    reasons[name] = f"{entry.path}: no axis of its output counts the samples"
        answered = all(g is None or bool(g.any()) for g in found[: len(edges)])
        settled = answered and not chooses_by_index(linear.graph)
        plan = cls(layouts, (), reasons, settled=settled)
        deltas = {i: layout(found[i])[:, None].to(z.dtype) for i, layout in layouts.items()}
        blocks = plan._blocks(linear, deltas)
        plan._verify(blocks, truth, linear)
        plan.batched = vectorizes(linear, edges, u, found)
        return plan

    def _verify(
        self, blocks: list[Block], truth: Mapping[str, Tensor | None], linear: ModuleLinearization
    ) -> None:
        """Keep the parameters whose layer formula reproduces autograd's gradient."""
        ones = linear.value.new_ones(linear.value.shape[0], 1)
        sums = (b.lift(ones) for b in blocks)
        limit = relative_tolerance(find_arithmetic_dtype(linear.graph), 10)
        for name, why in _unexplained(linear, sums, truth, limit).items():
            self.reasons.setdefault(name, why)
        self.rest = tuple(n for n in truth if n in self.reasons)

    def pullback(self, linear: ModuleLinearization, covectors: Tensor) -> Pulled:
        """One reverse pass per covector gives every layer's cotangents."""
        used = [i for i, e in enumerate(linear.entries) if i in self.layouts and self._wanted(e)]
        edges = [linear.entries[i].edge for i in used]
        layouts = [self.layouts[i] for i in used]
        found = cotangents(linear, edges, layouts, covectors, batched=self.batched)
        blocks = self._blocks(linear, dict(zip(used, found, strict=True)))
        if self.rest:
            rows, self.rows_by = sample_rows(linear, self.rest, covectors, self.rows_by)
            blocks.append(RowsBlock(rows))
        shape = (linear.value.shape[0], covectors.shape[0])
        return Pulled(linear.space, shape, blocks, self._coverage(blocks))

    def _wanted(self, entry: Entry) -> bool:
        return any(n is not None and n not in self.rest for n in entry.names.values())

    def _blocks(self, linear: ModuleLinearization, deltas: Mapping[int, Tensor]) -> list[Block]:
        """One block per set of parameters; parameters shared between sets become plain rows."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i in deltas:
            groups.setdefault(linear.entries[i].key, []).append(i)
        blocks = []
        for indices in groups.values():
            first = linear.entries[indices[0]]
            names = {r: None if n in self.rest else n for r, n in first.names.items()}
            if all(n is None for n in names.values()):
                continue
            uses = []
            for i in indices:
                entry = linear.entries[i]
                x = self.layouts[i](linear.entries[i].input)
                if x.is_floating_point():
                    x = x.to(linear.space.dtype)
                uses.append(Use(entry.module, x, deltas[i], entry.features))
            block = first.layer.block(names, uses)
            block.structure_tests = self.structure_tests.setdefault(first.key, {})
            blocks.append(block)
        return join_tied_blocks(blocks)

    def _coverage(self, blocks: list[Block]) -> list[Covered]:
        covered = []
        for block in blocks:
            for name in block.names:
                reason = self.reasons.get(name, "known layer")
                if name in self.rest:
                    route = f"rows by {self.rows_by}"
                else:
                    route = block.route
                covered.append(Covered(name, route, reason))
        return covered


def join_tied_blocks(blocks: list[Block]) -> list[Block]:
    """Blocks with disjoint names: where a parameter stands in several, their rows are added."""
    counts = Counter(name for block in blocks for name in block.names)
    tied = [b for b in blocks if any(counts[n] > 1 for n in b.names)]
    if not tied:
        return blocks
    rows: dict[str, Tensor] = {}
    for block in tied:
        accumulate(rows, block.rows())
    return [b for b in blocks if b not in tied] + [RowsBlock(rows)]
