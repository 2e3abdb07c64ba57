"""One covector's way down the model, and where each layer on it has its samples.

Gains and shifts, reduced places and corrected eigenvalues are sums over samples, of which each may
have several places. A layer shows them on the output's axis of samples as a rule; but a model may
turn its axes over, fold them into one, or pick some places. Where sizes leave a doubt, a covector
of some samples shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...._core.graph import Root, pull
from ....maps.layers.moments import Sharing, candidates, find_layout
from ....maps.record import Entry
from .covectors import Coupling, samples_axis
from .launch_thread import LaunchThread
from .record import ForwardRecord

#: the layout of a use where the samples' places are not known
UNKNOWN = "unknown"
_REMARK = "which of its places belong to one sample is not known, and each is taken for one"


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
    #: which places of the output count
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
        """The output's axis of samples."""
        return min(self.sharing.batch_dim, self.covector.ndim - 1)

    @property
    def samples(self) -> int:
        """How many samples there are."""
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
            return list(pull(self.root, self.covector, targets))
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
        """How the places of a use enter; each for itself where the samples are not known."""
        if not layout:
            return self.sharing
        lead = tuple(entry.shape[: len(entry.shape) - entry.features])
        fitting = [at for at in candidates(lead, self.samples) if at.kind == layout]
        known = {"layout": fitting[0]} if fitting else {"reduce": False}
        return replace(self.sharing, **known)

    def locate_samples(self, apart: bool) -> list[str]:
        """By use: empty where the axis tells, the kind of a `SampleLayout`, or `UNKNOWN`.

        `apart` says that all layers have to tell samples apart, and not only gains and shifts.
        """
        entries = self.record.entries
        out = [""] * len(entries)
        doubtful = [i for i, e in self._told_apart(apart) if self._doubtful(e)]
        if self.coupling is not None or not doubtful:
            return out
        # about half of the samples, always the same: the first one and not the last
        chosen = torch.rand(self.samples, generator=torch.Generator().manual_seed(0)) < 0.5
        chosen[-1], chosen[0] = False, True
        chosen = chosen.to(self.covector.device)

        def observe(i: int, delta: Tensor) -> None:
            if delta.numel():
                delta = delta.reshape(*entries[i].shape, 1)
                layout = find_layout(delta, chosen, entries[i].features + 1)
                out[i] = out[i] if layout is None else layout.kind

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
