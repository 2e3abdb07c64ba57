"""Which parameters a model's layers explain, established by proof and not by trust.

Two reverse passes with random cotangents settle it once per model and shape: for each layer,
the axis on which the samples stand; for each parameter, whether the layers' formula gives
what autograd gives. A parameter that fails is served by materialized rows, per sample under vmap
or row by row, and named.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils import _pytree as pytree

from .._core.capture import Call
from .._core.errors import reraise_fatal
from .._core.graph import collect_reachable_nodes, disable_fused_attention, find_arithmetic_dtype
from .._core.space import ParameterSpace, relative_tolerance
from .base import Covered, Pulled
from .layers import Block, RowsBlock, Use
from .layers.moments import SampleLayout, Sharing, detect_layout
from .layers.registry import CotangentStructure
from .proof import Proof, accumulate
from .record import Entry


class ReplayedModel(Protocol):
    """A model with a recorded call, as `ModuleMap` is one."""

    @property
    def call(self) -> Call: ...

    @property
    def batch_dim(self) -> int: ...

    def call_with(self, params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor: ...


class LinearizedCall(Protocol):
    """What proofs and rows read of a model's call; `ModuleLinearization` has these members."""

    @property
    def map(self) -> ReplayedModel: ...

    @property
    def space(self) -> ParameterSpace: ...

    @property
    def leaves(self) -> Mapping[str, Tensor]:
        """The parameters that the graph is built on."""
        ...

    @property
    def entries(self) -> Sequence[Entry]:
        """The uses of known layers."""
        ...

    @property
    def graph(self) -> Tensor:
        """The output z, with its graph."""
        ...

    @property
    def value(self) -> Tensor:
        """The output z, without its graph."""
        ...

    def gradients(
        self, u: Tensor, inputs: list[Any], *, batched: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of ⟨u, z⟩ in parameters or layer outputs."""
        ...


def collect_cotangents(
    linear: LinearizedCall,
    edges: list[Any],
    layouts: Sequence[SampleLayout],
    covectors: Tensor,
    *,
    batched: bool,
) -> list[Tensor]:
    """Return the cotangents (N, R, ...) at each edge, samples first.

    One vectorized reverse pass gives them if `batched`, else R passes.
    """
    if not edges:
        return []
    if batched:
        gradients: Any = linear.gradients(covectors, edges, batched=True)
        by_edge = []
        for gradient, layout in zip(gradients, layouts, strict=True):
            by_edge.append(layout.apply_to_covectors(gradient).to(linear.space.dtype))
        return by_edge
    if len(covectors) == 1:
        gradients = linear.gradients(covectors[0], edges)
        pairs = zip(gradients, layouts, strict=True)
        return [layout(gradient)[:, None].to(linear.space.dtype) for gradient, layout in pairs]
    out: list[Tensor] = []
    for r, u in enumerate(covectors):
        gradients = linear.gradients(u, edges)
        for i, (gradient, layout) in enumerate(zip(gradients, layouts, strict=True)):
            by_sample = layout(gradient)
            if r == 0:
                shape = (by_sample.shape[0], len(covectors), *by_sample.shape[1:])
                out.append(linear.space.zeros(*shape))
            out[i][:, r] = by_sample
    return out


def can_vectorize(
    linear: LinearizedCall, edges: list[Any], u: Tensor, truth: Sequence[Tensor | None]
) -> bool:
    """Return True if a vectorized pass works at full speed and agrees with the plain one."""
    if not edges:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch warns where an operation has no batching rule
            pairs = linear.gradients(torch.stack([u, -u]), edges, batched=True)
    except (RuntimeError, UserWarning, NotImplementedError) as error:
        reraise_fatal(error)
        return False
    limit = relative_tolerance(find_arithmetic_dtype(linear.graph))
    for pair, gradient in zip(pairs, truth, strict=False):
        if pair is None or gradient is None or not gradient.numel():
            continue
        error = torch.maximum((pair[0] - gradient).abs().max(), (pair[1] + gradient).abs().max())
        if not bool(error <= limit * gradient.abs().max()):
            return False
    return True


#: names of nodes that read or write positions by a tensor of indices, or by a mask
_INDEXING_NODES = ("Index", "Gather", "Scatter", "Take", "MaskedSelect", "MaskedScatter")


def has_indexing(root: Tensor) -> bool:
    """Return True if an operation on the way to `root` selects positions by a tensor of indices.

    Another batch has other indices: experts get their samples in another order, while the graph
    has the same nodes.
    """
    return any(
        node.name().startswith(_INDEXING_NODES) for node in collect_reachable_nodes(root.grad_fn)
    )


@dataclass(frozen=True)
class _Limits:
    """Bounds of the memory and of the number of passes that rows take."""

    #: bytes of rows that are formed at once under vmap
    chunk_bytes: int = 2**28
    #: reverse passes that a pullback is divided into, about
    most_groups: int = 8


_LIMITS = _Limits()


class RowsMethod(Enum):
    """How the rows of parameters that no layer explains are formed."""

    VMAP = "vmap"
    REVERSE_PASSES = "reverse passes"


def form_sample_rows(
    linear: LinearizedCall,
    names: Sequence[str],
    covectors: Tensor,
    known_method: RowsMethod | None,
) -> tuple[dict[str, Tensor], RowsMethod]:
    """Return rows (N, R, numel) by name, and the method that worked.

    The rows by vmap are trusted only if they add up to autograd's gradient. Dropout, or an argument
    that is wrongly taken for a batch, makes them differ; then each row gets a reverse pass of its
    own on the recorded graph. So it does if that is the `known_method`, from an earlier call.
    """
    if known_method is not RowsMethod.REVERSE_PASSES:
        try:
            rows = _form_rows_by_vmap(linear, names, covectors)
        except Exception as error:  # a model may refuse a batch of one with any exception
            reraise_fatal(error)
            rows = None
        if rows is not None and _have_right_sum(linear, rows, covectors):
            return rows, RowsMethod.VMAP
    return _form_row_by_row(linear, names, covectors), RowsMethod.REVERSE_PASSES


class _BatchedArguments:
    """The arguments of a call, of which tensors with an axis of samples are mapped over.

    `mapped` and `axes` are for vmap: the tensors with their axes, and dummies for other arguments.
    """

    def __init__(self, call: Any, axis: int, samples: int) -> None:
        self._axis = axis
        self._arguments, self._spec = pytree.tree_flatten((call.args, call.kwargs))
        self._has_samples = [self._counts_samples(t, samples) for t in self._arguments]
        self.mapped = []
        self.axes = []
        for argument, has_samples in zip(self._arguments, self._has_samples, strict=True):
            if has_samples:
                self.mapped.append(argument)
                self.axes.append(axis)
            else:
                self.mapped.append(torch.zeros(samples))
                self.axes.append(0)

    def _counts_samples(self, argument: Any, samples: int) -> bool:
        if not isinstance(argument, Tensor) or argument.ndim <= self._axis:
            return False
        return argument.shape[self._axis] == samples

    def select_sample(self, slices: Sequence[Tensor]) -> tuple[Any, Any]:
        """Return arguments and keyword arguments for one sample, from its slices of `mapped`."""
        arguments = list(self._arguments)
        for i, has_samples in enumerate(self._has_samples):
            if has_samples:
                arguments[i] = slices[i].unsqueeze(self._axis)
        return pytree.tree_unflatten(arguments, self._spec)


def _form_rows_by_vmap(
    linear: LinearizedCall, names: Sequence[str], covectors: Tensor
) -> dict[str, Tensor]:
    """Return rows (N, R, numel) by name: one call of the model for each sample, under vmap."""
    source = linear.map
    call = linear.map.call
    constants = {n: p.detach() for n, p in linear.leaves.items()}
    free = {n: constants.pop(n) for n in names}
    arguments = _BatchedArguments(call, source.batch_dim, linear.value.shape[0])

    def form_rows(slices: list[Tensor], u: Tensor) -> dict[str, Tensor]:
        args, kwargs = arguments.select_sample(slices)

        def function(point: dict[str, Tensor]) -> Tensor:
            return source.call_with({**constants, **point}, *args, **kwargs)[0]

        pull = vjp(function, free)[1]
        pulled = [pull(row)[0] for row in u]
        rows = {}
        for name in names:
            rows[name] = torch.stack([gradients[name] for gradients in pulled])
        return rows

    size = sum(p.numel() for p in free.values()) * covectors.shape[0]
    chunk = max(1, _LIMITS.chunk_bytes // (size * linear.value.element_size()))
    u = covectors.movedim(1, 0).to(linear.graph.dtype)
    mapped_rows = vmap(
        form_rows, in_dims=(arguments.axes, 0), chunk_size=chunk, randomness="different"
    )
    with call.replay_context(), disable_fused_attention():  # the fused one has no vmap rule
        rows = mapped_rows(arguments.mapped, u)
    return {n: v.reshape(*v.shape[:2], -1).to(linear.space.dtype) for n, v in rows.items()}


def _have_right_sum(linear: LinearizedCall, rows: dict[str, Tensor], covectors: Tensor) -> bool:
    """Return True if the rows add up to autograd's gradient: Σ c_nr row_nr = Jᵀ Σ c_nr u_nr.

    The numbers c are random.
    """
    r, n = covectors.shape[:2]
    generator = torch.Generator().manual_seed(1)
    c = torch.randn(n, r, generator=generator, dtype=torch.float64).to(linear.value)
    u = torch.einsum("nr,rn...->n...", c, covectors.to(c))
    truth = linear.gradients(u, [linear.leaves[name] for name in rows])
    sums = {n: torch.einsum("nrp,nr->p", r, c.to(r)) for n, r in rows.items()}
    proof = Proof(relative_tolerance(linear.graph.dtype, 10))
    proof.add(sums, 0.0, 0.0, 0)
    return not _find_unexplained(linear, proof, dict(zip(rows, truth, strict=True)))


def _find_unexplained(
    linear: LinearizedCall, proof: Proof, truth: Mapping[str, Tensor | None]
) -> dict[str, str]:
    """Return the parameters whose gradient is not the proven one, with the reason.

    A parameter that the graph does not reach has a gradient of zero.
    """
    true_gradients: dict[str, Tensor | None] = {}
    for name, gradient in truth.items():
        if gradient is None:
            gradient = linear.space.zeros(1)
        true_gradients[name] = gradient
    return proof.find_unexplained(true_gradients)


def _form_row_by_row(
    linear: LinearizedCall, names: Sequence[str], covectors: Tensor
) -> dict[str, Tensor]:
    """Return rows (N, R, numel) by name, one reverse pass for each sample and covector."""
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
    """What the layers of one model explain, for one shape of inputs."""

    #: by use of a layer, where its samples stand
    layouts: dict[int, SampleLayout]
    #: the parameters that no layer explains, which get rows
    unexplained: tuple[str, ...]
    #: why, by parameter
    reasons: dict[str, str]
    #: how their rows were formed last
    rows_method: RowsMethod | None = None
    #: whether one vectorized reverse pass serves all covectors
    is_vectorized: bool = False
    #: by group of parameters, which structure its cotangents had when they were last tested
    structure_tests: dict[Any, dict[CotangentStructure, bool]] = field(default_factory=dict)
    #: whether the plan serves other linearizations: all layers had cotangents in the probe (under
    #: a zero-initialized output layer any layout fits), and no index moves samples
    is_reusable: bool = True

    @classmethod
    def establish(cls, linear: LinearizedCall) -> LayerStructure:
        """Return the structure of a call, from a probe with covectors u and c∘u.

        The random c has one number per sample.
        """
        z = linear.value
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z)
        scales = (1 + torch.rand(z.shape[0], generator=generator, dtype=torch.float64)).to(z)
        edges: list[Any] = [entry.edge for entry in linear.entries]
        gradients = linear.gradients(u, edges + list(linear.leaves.values()))
        at_layers: Any = gradients[: len(edges)]
        scaled: Sequence[Tensor | None] = ()
        if edges:
            scaled = linear.gradients(u * scales.view(-1, *[1] * (u.ndim - 1)), edges)

        layouts = _detect_layouts(linear, at_layers, scaled, scales)
        reasons = _explain_missing_layouts(linear, layouts)
        truth = dict(zip(linear.leaves, gradients[len(edges) :], strict=True))
        limit = relative_tolerance(find_arithmetic_dtype(linear.graph), 10)
        proof = Proof(limit)
        for i, layout in layouts.items():
            proof.add_use(linear.entries[i], at_layers[i], Sharing(layout=layout))
        reasons = {**_find_unexplained(linear, proof, truth), **reasons}
        has_cotangents = all(g is None or bool(g.any()) for g in at_layers)
        return cls(
            layouts=layouts,
            unexplained=tuple(name for name in truth if name in reasons),
            reasons=reasons,
            is_vectorized=can_vectorize(linear, edges, u, at_layers),
            is_reusable=has_cotangents and not has_indexing(linear.graph),
        )

    def pullback(self, linear: LinearizedCall, covectors: Tensor) -> Pulled:
        """Return the covectors pulled back: blocks of the layers, and rows of other parameters."""
        return self.pull_back_uses(linear, covectors, self._find_uses(linear), self.unexplained)

    def _find_uses(self, linear: LinearizedCall) -> list[int]:
        """Return the uses of layers that explain a parameter."""
        uses = [i for i, entry in enumerate(linear.entries) if i in self.layouts]
        return [i for i in uses if self._explains(linear.entries[i])]

    def divide_uses(
        self, linear: LinearizedCall, covector_count: int, budget: int
    ) -> list[list[int]]:
        """Return the uses of layers in groups whose cotangents fit `budget` bytes.

        There are about `_LIMITS.most_groups` at most, since each takes a reverse pass of its own.
        If a parameter has several uses there is one group: their rows are added up.
        """
        uses = self._find_uses(linear)
        names: Counter[str | None] = Counter()
        for i in uses:
            names.update(filter(None, linear.entries[i].names.values()))
        if any(count > 1 for count in names.values()):
            return [uses]
        bytes_per_entry = covector_count * linear.value.element_size()
        sizes = {i: prod(linear.entries[i].shape) * bytes_per_entry for i in uses}
        limit = max(budget, sum(sizes.values()) // _LIMITS.most_groups)
        groups: list[list[int]] = [[]]
        group_bytes = 0
        for i in uses:
            if groups[-1] and group_bytes + sizes[i] > limit:
                groups.append([])
                group_bytes = 0
            groups[-1].append(i)
            group_bytes += sizes[i]
        return groups

    def pull_back_uses(
        self,
        linear: LinearizedCall,
        covectors: Tensor,
        uses: Sequence[int],
        unexplained: Sequence[str],
    ) -> Pulled:
        """Return the rows of the parameters of these uses, and of these unexplained parameters."""
        edges = [linear.entries[i].edge for i in uses]
        layouts = [self.layouts[i] for i in uses]
        cotangents = collect_cotangents(
            linear, edges, layouts, covectors, batched=self.is_vectorized
        )
        blocks = self._form_blocks(linear, dict(zip(uses, cotangents, strict=True)))
        if unexplained:
            rows, self.rows_method = form_sample_rows(
                linear, unexplained, covectors, self.rows_method
            )
            blocks.append(RowsBlock(rows))
        shape = (linear.value.shape[0], covectors.shape[0])
        return Pulled(linear.space, shape, blocks, self._describe_coverage(blocks))

    def _explains(self, entry: Entry) -> bool:
        """Return True if the layer explains one of its parameters."""
        return any(n is not None and n not in self.unexplained for n in entry.names.values())

    def _form_blocks(self, linear: LinearizedCall, deltas: Mapping[int, Tensor]) -> list[Block]:
        """Return a block for each set of parameters that uses share, given their cotangents.

        Parameters in several sets become plain rows.
        """
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i in deltas:
            groups.setdefault(linear.entries[i].key, []).append(i)
        blocks = []
        for key, indices in groups.items():
            first = linear.entries[indices[0]]
            names = dict(first.names)
            for role, name in first.names.items():
                if name in self.unexplained:
                    names[role] = None
            if all(name is None for name in names.values()):
                continue
            uses = [self._arrange_use(linear, i, deltas[i]) for i in indices]
            block = first.layer.block(names, uses)
            block.structure_tests = self.structure_tests.setdefault(key, {})
            blocks.append(block)
        return join_tied_blocks(blocks)

    def _arrange_use(self, linear: LinearizedCall, i: int, delta: Tensor) -> Use:
        """Return a layer's use with its input's samples first, in the dtype of the rows."""
        entry = linear.entries[i]
        x = self.layouts[i](entry.input)
        if x.is_floating_point():
            x = x.to(linear.space.dtype)
        return Use(entry.module, x, delta, entry.features)

    def _describe_coverage(self, blocks: list[Block]) -> list[Covered]:
        """Return how each parameter is covered."""
        covered = []
        for block in blocks:
            route = block.route
            for name in block.names:
                reason = self.reasons.get(name, "known layer")
                if name in self.unexplained and self.rows_method is not None:
                    covered.append(Covered(name, f"rows by {self.rows_method.value}", reason))
                else:
                    covered.append(Covered(name, route, reason))
        return covered


def _detect_layouts(
    linear: LinearizedCall,
    gradients: Sequence[Tensor | None],
    scaled: Sequence[Tensor | None],
    scales: Tensor,
) -> dict[int, SampleLayout]:
    """Return where the samples of each layer stand, without layers for which no axis fits."""
    layouts = {}
    dtype = find_arithmetic_dtype(linear.graph)
    for i, entry in enumerate(linear.entries):
        gradient = gradients[i]
        scaled_gradient = scaled[i]
        if gradient is None or scaled_gradient is None:
            continue
        layout = detect_layout(gradient, scaled_gradient, scales, entry.features, dtype)
        if layout is not None:
            layouts[i] = layout
    return layouts


def _explain_missing_layouts(
    linear: LinearizedCall, layouts: Mapping[int, SampleLayout]
) -> dict[str, str]:
    """Return the reason for the parameters of layers without a layout."""
    reasons = {}
    for i, entry in enumerate(linear.entries):
        if i not in layouts:
            for name in filter(None, entry.names.values()):
                reasons[name] = f"{entry.path}: no axis of its output counts the samples"
    return reasons


def join_tied_blocks(blocks: list[Block]) -> list[Block]:
    """Return blocks with disjoint names: rows of a parameter in several blocks are added."""
    counts: Counter[str] = Counter()
    for block in blocks:
        counts.update(block.names)
    tied = [b for b in blocks if any(counts[n] > 1 for n in b.names)]
    if not tied:
        return blocks
    rows: dict[str, Tensor] = {}
    for block in tied:
        accumulate(rows, block.rows())
    return [b for b in blocks if b not in tied] + [RowsBlock(rows)]
