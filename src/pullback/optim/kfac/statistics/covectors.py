r"""Covectors φ at the output with E[φφᵀ] = M, which are pulled back to measure the layers.

A metric M = P (K⁻¹ ⊗ I) Pᵀ with K = L Lᵀ relates the samples of a batch.
With V_oi = δ_oi ⊗ ā_i, the gradient of output o (of Pᵀz) at sample i, a layer's exact block is

    G = Σ_ij K⁻¹_ij Σ_o V_oi V_ojᵀ / B.

Its Kronecker product is that of ordinary K-FAC for the inputs L⁻¹ā and the cotangents L⁻¹δ_o,

    A = āᵀK⁻¹ā / 1ᵀK⁻¹1,        S = Σ_o δ_oᵀK⁻¹δ_o / B,        G ≈ S ⊗ A.

Both sides are quadratic in L⁻¹, so one is divided by a Z of that degree; Z = 1ᵀK⁻¹1 is B at K = I,
and makes the bias's block exact. Those of gains and shifts in normalizations are exact. Covectors
must be *the same for all samples* up to a sign which is taken off again: independent draws would
cancel every term with i ≠ j. Where samples meet, as in batch normalization, the signs turn the
cotangents that come from other samples into noise of mean zero.

A `Descent` is one covector's way down the model. It knows where each layer on it has its samples:
gains and shifts, reduced positions and corrected eigenvalues are sums over samples, of which each
may have several positions. A layer shows them on the output's axis of samples as a rule; but a
model may turn its axes over, fold them into one, or pick some positions. Where sizes leave a doubt,
a covector of some samples shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...._core.capture import find_first_input, move_samples_first
from ...._core.errors import PullbackError
from ...._core.flags import DeferredFlags
from ...._core.graph import Root, pull_back
from ...._core.space import compute_dtype
from ....maps.layers.moments import Moments, Sharing, find_layout, list_layouts
from ....maps.layers.scale import form_unit_rows
from ....maps.record import Entry, ForwardRecord
from ....metrics import Fisher, Metric
from ..options import Options
from .launch_thread import LaunchThread

_ENTRIES = 2**25  # of the output whose scores are drawn at once
#: the layout of a use where the samples' positions are not known
UNKNOWN = "unknown"
_REMARK = "which of its positions belong to one sample is not known, and each is taken for one"


class NotFinite(Exception):
    """Outputs or gradients are not finite, so that nothing can be learned from the pass."""


@dataclass(frozen=True)
class Coupling:
    """The samples' relation L⁻¹ (N, N), and the signs (N,) that the covector at hand has."""

    inverse: Tensor
    signs: Tensor

    def whiten(self, x: Tensor, axis: int, *, signed: bool = False) -> Tensor:
        """L⁻¹ x along the axis of samples, after the covector's signs are taken off."""
        if signed:
            matrix = self.inverse * self.signs
        else:
            matrix = self.inverse
        moved = x.movedim(axis, 0)
        flat = matrix.to(x.dtype) @ moved.reshape(len(moved), -1)
        return flat.view(moved.shape).movedim(0, axis)

    def related_covector(self, covector: Tensor, axis: int) -> Tensor:
        """Return φ_i = (L⁻ᵀε)_i P_i v for the covector ε_i P_i v: E[(Jᵀφ)²] = diag(JᵀMJ)."""
        factor = (self.inverse.mT @ self.signs) * self.signs
        along = [-1 if i == axis else 1 for i in range(covector.ndim)]
        return covector * factor.to(covector.dtype).view(along)

    def whitened_use(self, entry: Entry, delta: Tensor, sharing: Sharing) -> tuple[Tensor, Tensor]:
        """A use's input a as it is, and L⁻¹δ, both in full precision."""
        axis = samples_axis(entry, sharing)
        dtype = compute_dtype(delta.dtype)
        return entry.input.to(dtype), self.whiten(delta.to(dtype), axis, signed=True)

    def units(self, entry: Entry, delta: Tensor, roles: list[str], sharing: Sharing) -> Tensor:
        """Σ_ij K⁻¹_ij row_i row_jᵀ of gains and shifts, unit by unit: (U, k, k)."""
        layer: Any = entry.layer
        rows = form_unit_rows(
            [layer.compute_unit_sums(entry.module, entry.input, delta, roles, sharing)]
        )
        rows = self.whiten(rows, 0, signed=True)
        return torch.einsum("nuk,nul->ukl", rows, rows)

    def unrelated(self, record: ForwardRecord, sharing: Sharing) -> dict[str, str]:
        """Return the parameters held as diagonals since samples cannot be related, and why."""
        out: dict[str | None, str] = {}
        for entry in record.entries:
            axis = samples_axis(entry, sharing)
            shapes = (tuple(entry.shape), entry.input.shape)
            if any(len(s) <= axis or s[axis] != len(self.signs) for s in shapes):
                reason = f"the layer's output {shapes[0]} does not show them"
                out |= dict.fromkeys(entry.names.values(), reason)
            elif not entry.input.is_floating_point():
                out |= dict.fromkeys(entry.names.values(), "hence every index to every other")
        for call in record.compounds:
            reason = f"the maps inside {type(call.module).__name__} do not show them"
            out |= dict.fromkeys(map(record.name, call.module.parameters()), reason)
        said = "the metric relates samples, and"
        return {n: f"{said} {why}" for n, why in out.items() if n is not None}

    def inputs(self, entry: Entry, x: Tensor, sharing: Sharing) -> Moments:
        """Σ āāᵀ of L⁻¹ā with ā = (a, 1), and its number of positions as 1ᵀK⁻¹1 counts them."""
        axis = samples_axis(entry, sharing)
        found = entry.layer.input_moments(entry.module, self.whiten(x, axis), sharing, None)
        weights = self.inverse.mT @ self.inverse.sum(1)  # K⁻¹1
        # Σ_ij K⁻¹_ij a_i is linear in a: that of one sample, the weighted sum of all
        total = torch.tensordot(weights.to(x.dtype), x.movedim(axis, 0), 1)[None]
        cheap = replace(sharing, longest=0)  # its second moment is of no use
        one = entry.layer.input_moments(entry.module, total.movedim(0, axis), cheap, None)
        return Moments(found.second, one.first, found.positions * weights.mean())


def samples_axis(entry: Entry, sharing: Sharing) -> int:
    """The axis of a layer's input and output that counts samples."""
    lead = len(entry.shape) - entry.features
    if lead <= 1:
        return 0
    return min(sharing.batch_dim, lead - 1)


@dataclass(frozen=True)
class Covectors:
    """Covectors in the layout of the output z, without z itself: it may be large."""

    every: Iterator[tuple[Tensor, Coupling | None]]
    samples: Tensor | float
    #: which positions of the output count, None for all
    keep: Tensor | None
    #: a covector of all positions that count, where the others are of single positions
    reach: Tensor | None
    #: whether all positions count, or flags on the device that say so
    whole: bool | DeferredFlags


def covectors_of(
    options: Options,
    z: Tensor,
    cotangent: Tensor,
    inputs: Sequence[Tensor],
    generator: torch.Generator,
    deferred: bool = False,
) -> Covectors:
    """Return the covectors at z, from ∂loss/∂z and the call's tensors; raise NotFinite at NaN.

    If `deferred`, do not wait for the device: whether all positions count is read later from
    `whole`, and whether z is finite from the statistics.
    """
    axis = options.batch_dim
    metric = options.metric
    value = move_samples_first(z, axis)
    slope = move_samples_first(cotangent, axis)
    if deferred:
        some = metric.uncounted(value, slope)
    else:
        some = None
    if some is None and not bool(value.amax() < torch.inf):  # NaN neither; −inf may mask a class
        raise NotFinite
    if some is None:
        mask = metric.counted(value, slope)
    else:
        mask = None
    if some is None:
        whole = mask is None
    else:
        whole = DeferredFlags(~some.view(1), takes_statistics=False)
    samples: Tensor | float = metric.samples(value)
    if mask is not None:
        samples = samples * mask.double().mean()
    keep = _kept_places(mask, z, axis)
    ndim = cotangent.ndim
    dtype = cotangent.dtype
    first = find_first_input(inputs, len(value), axis)

    def placed(pair: tuple[Tensor, Coupling | None]) -> tuple[Tensor, Coupling | None]:
        if mask is None:
            covector = pair[0]
        else:
            covector = pair[0] * mask
        if ndim == 1:
            covector = covector.view(len(covector))
        return covector.movedim(0, axis).to(dtype), pair[1]

    reach = None
    if keep is not None and options.fisher == "exact" and not metric.couples_samples:
        one = replace(options, fisher="mc", draws=1)
        reach = placed(next(covectors(one, value, slope, first, generator)))[0]
    found = covectors(options, value, slope, first, generator)
    return Covectors(map(placed, found), samples, keep, reach, whole)


def _kept_places(mask: Tensor | None, z: Tensor, batch_dim: int) -> Tensor | None:
    """Which of the output's positions count: the mask without the one axis it is constant along."""
    if mask is None or mask.ndim != z.ndim or z.ndim < 2:
        return None
    mask = mask.movedim(0, batch_dim)
    event = [i for i in range(z.ndim) if mask.shape[i] == 1 and z.shape[i] > 1]
    if len(event) == 1:
        return mask.squeeze(event[0])
    return None


def covectors(
    options: Options,
    z: Tensor,
    cotangent: Tensor,
    inputs: Tensor | None,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Coupling | None]]:
    """Covectors (N, *event) whose outer products add up to M, on average or exactly.

    The signs of "exact" and "empirical" covectors are random by sample: it does not matter for
    layers, and makes the square of a summed gradient an estimate of the summed squares. Where the
    metric relates samples, each covector comes with their relation.
    """
    metric = options.metric
    fisher = options.fisher
    draws = options.draws
    signs = (len(z), *[1] * (z.ndim - 1))
    if fisher == "empirical" and not metric.couples_samples:  # as it is: it may be large
        yield cotangent * random_signs(signs, cotangent, generator), None
        return
    if fisher != "mc" or not isinstance(metric, Fisher):  # which takes some samples at a time
        z, cotangent = (t.to(compute_dtype(t.dtype)) for t in (z, cotangent))
    if metric.couples_samples:
        yield from _coupled(options, z, inputs, generator)
        return
    if not isinstance(metric, Fisher) and metric.factor(z, inputs=inputs).couples_samples:
        raise coupling_error(metric, "it does not declare them: couples_samples is False")
    if fisher == "exact":
        for column in metric.factor(z, inputs=inputs).covectors(z):
            yield column * random_signs(signs, z, generator), None
        return
    for _ in range(draws - 1):
        yield _draw(metric, z, inputs, generator).div_(draws**0.5), None
    last = [_draw(metric, z, inputs, generator)]
    del z, cotangent  # the logits of a language model are larger than its activations
    yield last.pop() if draws == 1 else last.pop().div_(draws**0.5), None


def _coupled(
    options: Options, z: Tensor, inputs: Tensor | None, generator: torch.Generator
) -> Iterator[tuple[Tensor, Coupling]]:
    """Covectors that all samples share, up to signs, and how samples are related.

    "exact" runs through the columns of P, "mc" draws v ∈ {±1}^m once for the whole batch.
    """
    factor = options.metric.factor(z, inputs=inputs)
    draws = options.draws
    if factor.coupling is None:
        raise coupling_error(options.metric, "its factor does not say how")
    lower = factor.coupling
    separate = factor.separate()
    eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    inverse = torch.linalg.solve_triangular(lower, eye, upper=False)

    def signed(covector: Tensor) -> tuple[Tensor, Coupling]:
        signs = random_signs((len(z),), z, generator)
        along = signs.view(-1, *[1] * (covector.ndim - 1))
        return covector * along, Coupling(inverse, signs)

    if options.fisher == "exact":
        yield from map(signed, separate.covectors(z))
        return
    for _ in range(draws):
        v = random_signs(separate.white, z, generator)
        yield signed(separate.apply(v.expand(len(z), *v.shape)) / draws**0.5)


def _draw(metric: Metric, z: Tensor, inputs: Tensor | None, generator: torch.Generator) -> Tensor:
    """One covector; scores in full precision are formed of some samples at a time."""
    if not isinstance(metric, Fisher):
        factor = metric.factor(z, inputs=inputs)
        return factor.apply(random_signs((len(z), *factor.white), z, generator))
    likelihood: Any = metric.likelihood
    if likelihood.halves:
        return likelihood.score(z, generator)
    step = max(1, _ENTRIES * len(z) // max(1, z.numel()))
    dtype = compute_dtype(z.dtype)
    if step >= len(z):
        return likelihood.score(z.to(dtype), generator)
    out = torch.empty_like(z)
    for one, some in zip(out.split(step), z.split(step), strict=True):
        one.copy_(likelihood.score(some.to(dtype), generator))
    return out


def random_signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """±1 with equal probability, in the dtype of `like`."""
    coins = torch.randint(0, 2, shape, device=like.device, generator=generator)
    return (2 * coins - 1).to(like.dtype)


def coupling_error(metric: Metric, why: str) -> PullbackError:
    """Return the error for a metric with blocks between samples that are not known."""
    return PullbackError(
        "The metric couples the samples of a batch",
        f"{metric!r} has blocks between samples, and {why}",
        "Use NaturalGradient with this metric, or KFAC with a metric of single samples",
    )


@dataclass
class Descent:
    """A covector at the output, and what it is pulled back to."""

    root: Root
    #: of the output's shape and dtype
    covector: Tensor
    #: the layers on the way, and the parameters that take part
    record: ForwardRecord
    leaves: Mapping[str, Tensor]
    sharing: Sharing
    #: which positions of the output count
    keep: Tensor | None
    #: whether to add the inputs as well, once per forward pass
    inputs: bool
    #: how the metric relates samples, and parameters held as diagonals since it cannot, with reason
    coupling: Coupling | None = None
    unrelated: Mapping[str, str] = field(default_factory=dict)
    #: measures while the covector goes on; None to measure at once
    thread: LaunchThread | None = None

    @cached_property
    def edges(self) -> list[GradientEdge]:
        """Where cotangents are wanted, as `ForwardRecord.edges`."""
        return self.record.edges(None if isinstance(self.root, Tensor) else self.root.node)

    @cached_property
    def axis(self) -> int:
        return min(self.sharing.batch_dim, self.covector.ndim - 1)

    @property
    def samples(self) -> int:
        return self.covector.shape[self.axis]

    def signature(self, apart: bool) -> tuple[Any, ...]:
        """Return what tells this way through the model from others, with the sizes that matter."""
        record = self.record
        return (
            tuple([e.site.mark for e in record.entries]),
            tuple([(c.path, c.note) for c in record.compounds]),
            tuple(self.leaves),
            tuple(self.unrelated.items()),
            record.nodes,
            self.samples == 1,
            tuple([self._on_batch_axis(e) for _, e in self._told_apart(apart)]),
        )

    def pull(
        self, targets: Sequence[Any], uses: Sequence[int], observe: Callable[[int, Tensor], None]
    ) -> list[Tensor | None]:
        """Pull the covector back to these targets; `observe` the cotangents of uses on the way."""

        def before(i: int, number: int, cotangents: Sequence[Tensor | None]) -> None:
            if (delta := cotangents[number]) is not None:
                observe(i, delta)

        edges = [(i, self.edges[i]) for i in uses]
        handles = [e.node.register_prehook(partial(before, i, e.output_nr)) for i, e in edges]
        try:
            return list(pull_back(self.root, self.covector, targets))
        finally:
            for handle in handles:
                handle.remove()

    def upcoming(self) -> tuple[int, ...]:
        """Return the uses that the user's backward pass under way is going to reach."""
        will = torch._C._will_engine_execute_node
        return tuple([i for i, edge in enumerate(self.edges) if will(edge.node)])

    def differs(self, covector: Tensor) -> bool:
        """Whether a covector with signs would show that samples meet: some have another sign."""
        same = torch.equal(covector, self.covector) or torch.equal(covector, -self.covector)
        return self.samples == 1 or not same

    def everywhere(self) -> Tensor:
        """A fixed random covector, nonzero at all positions and about as long as the metric's."""
        random = torch.Generator(self.covector.device).manual_seed(0)
        like = torch.empty_like(self.covector)
        return like.normal_(0, like.shape[-1] ** -0.5, generator=random)

    def sharing_at(self, entry: Entry, layout: str) -> Sharing:
        """How the positions of a use enter; each for itself where the samples are not known."""
        if not layout:
            return self.sharing
        lead = tuple(entry.shape[: len(entry.shape) - entry.features])
        fitting = [at for at in list_layouts(lead, self.samples) if at.axis == layout]
        if fitting:
            known = {"layout": fitting[0]}
        else:
            known = {"reduce": False}
        return replace(self.sharing, **known)

    def locate_samples(self, apart: bool) -> list[str]:
        """By use: empty where the axis tells, the axis of a `SampleLayout`, or `UNKNOWN`.

        `apart` says that all layers have to tell samples apart, and not only gains and shifts.
        """
        entries = self.record.entries
        out = [""] * len(entries)
        doubtful = [i for i, e in self._told_apart(apart) if self._doubtful(e)]
        if self.coupling is not None or not doubtful:
            return out
        # about half of the samples, always the same: the first one and not the last
        chosen = torch.rand(self.samples, generator=torch.Generator().manual_seed(0)) < 0.5
        chosen[-1] = False
        chosen[0] = True
        chosen = chosen.to(self.covector.device)

        def observe(i: int, delta: Tensor) -> None:
            if delta.numel():
                delta = delta.reshape(*entries[i].shape, 1)
                layout = find_layout(delta, chosen, entries[i].features + 1)
                out[i] = out[i] if layout is None else layout.axis

        for i in doubtful:
            out[i] = "" if self._on_batch_axis(entries[i]) else UNKNOWN
        mask = chosen.view([-1 if i == self.axis else 1 for i in range(self.covector.ndim)])
        part = replace(self, covector=self.everywhere().mul_(mask))
        part.pull(list(self.leaves.values()), doubtful, observe)
        return out

    def _told_apart(self, apart: bool) -> list[tuple[int, Entry]]:
        every = enumerate(self.record.entries)
        return [(i, e) for i, e in every if apart or e.layer.curvature == "units"]

    def _doubtful(self, entry: Entry) -> bool:
        lead = entry.shape[: len(entry.shape) - entry.features]
        alike = lead.count(self.samples) > 1
        return len(lead) > 0 and (alike or not self._on_batch_axis(entry))

    def _on_batch_axis(self, entry: Entry) -> bool:
        """Whether the output's axis of samples has their number here as well."""
        return entry.shape[samples_axis(entry, self.sharing)] == self.samples


def unknown_layouts(entries: Sequence[Entry], layouts: Sequence[str]) -> dict[str, str]:
    """What `UNKNOWN` means for the parameters of such uses."""
    uses = [e for e, at in zip(entries, layouts, strict=True) if at == UNKNOWN]
    return {n: f"{type(e.module).__name__}; {_REMARK}" for e in uses for n in e.names.values() if n}


def used_by_functions(entries: Sequence[Entry]) -> dict[str, str]:
    """What functions do with parameters that no module of a known kind showed."""
    used = [e for e in entries if e.site.function]
    return {n: f"used as by {type(e.module).__name__}" for e in used for n in e.names.values() if n}
