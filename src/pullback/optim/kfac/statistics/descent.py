"""One covector's way down the model, and where the layers on it have their samples.

Gains and shifts, reduced positions and corrected eigenvalues are sums over samples, of which each
may have several positions. A layer shows them on the output's axis of samples as a rule; but a
model may turn its axes over, fold them into one, or pick some positions. Where sizes leave a doubt,
a covector of some samples shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ....maps.layers import describe_layer
from ....maps.layers.moments import Sharing, find_layout_of_chosen, list_layouts
from ....maps.record import Entry, RecordedPass
from .covectors import Coupling, find_samples_axis, shape_along
from .launch_thread import LaunchThread

#: the layout of a use where the samples' positions are not known
UNKNOWN = "unknown"
_REMARK = "which of its positions belong to one sample is not known, and each is taken for one"


@dataclass
class Descent:
    """A covector at the output, and what it is pulled back to."""

    #: the layers on the way, and the parameters that take part
    forward: RecordedPass
    #: of the output's shape and dtype
    covector: Tensor
    sharing: Sharing
    #: which positions of the output count
    counted: Tensor | None
    #: whether to add the inputs' moments too, as one covector of each forward pass does
    adds_inputs: bool
    #: how the metric relates samples, and parameters held as diagonals since it cannot, with reason
    coupling: Coupling | None = None
    unrelated: Mapping[str, str] = field(default_factory=dict)
    #: measures while the covector goes on; None to measure at once
    thread: LaunchThread | None = None

    @cached_property
    def axis(self) -> int:
        """The covector's axis of samples."""
        return min(self.sharing.batch_dim, self.covector.ndim - 1)

    @property
    def samples(self) -> int:
        """How many samples the covector has."""
        return self.covector.shape[self.axis]

    def signature(self, separates_samples: bool) -> tuple[Any, ...]:
        """Return a key that is equal for two passes if one `Route` is proven for both."""
        record = self.forward.record
        separated = self._list_separated(separates_samples)
        return (
            tuple([e.site.mark for e in record.entries]),
            tuple([(c.path, c.omission) for c in record.compounds]),
            tuple(self.forward.leaves),
            tuple(self.unrelated.items()),
            record.node_count,
            self.samples == 1,
            tuple([self._shows_samples(record.entries[i]) for i in separated]),
        )

    def find_upcoming(self) -> tuple[int, ...]:
        """Return the uses that the user's backward pass under way is going to reach."""
        will = torch._C._will_engine_execute_node
        return tuple([i for i, edge in enumerate(self.forward.edges) if will(edge.node)])

    def can_prove_separation(self, signed: Tensor) -> bool:
        """Return True if equal sums of this covector and of `signed` prove that no samples meet.

        `signed` is this covector with a random sign for each sample. If all signs are the same,
        sums are equal in any case. A single sample meets no other.
        """
        is_same = torch.equal(signed, self.covector) or torch.equal(signed, -self.covector)
        return self.samples == 1 or not is_same

    def draw_everywhere(self) -> Tensor:
        """Return a fixed random covector, nonzero everywhere and about as long as the metric's."""
        random = torch.Generator(self.covector.device).manual_seed(0)
        covector = torch.empty_like(self.covector)
        return covector.normal_(0, covector.shape[-1] ** -0.5, generator=random)

    def find_sharing(self, entry: Entry, layout: str) -> Sharing:
        """Return how the positions of a use enter: each for itself if its samples are unknown."""
        if not layout:
            return self.sharing
        lead = tuple(entry.shape[: len(entry.shape) - entry.features])
        fitting = [at for at in list_layouts(lead, self.samples) if at.axis == layout]
        if fitting:
            return replace(self.sharing, layout=fitting[0])
        return replace(self.sharing, reduce=False)

    def locate_samples(self, separates_samples: bool) -> list[str]:
        """Return by use: "" where the axis tells, the axis of a `SampleLayout`, or `UNKNOWN`.

        `separates_samples` says that all layers have to separate their samples, and not only gains
        and shifts.
        """
        entries = self.forward.record.entries
        axes = [""] * len(entries)
        separated = self._list_separated(separates_samples)
        doubtful = [i for i in separated if self._is_doubtful(entries[i])]
        if self.coupling is not None or not doubtful:
            return axes
        for i in doubtful:
            if not self._shows_samples(entries[i]):
                axes[i] = UNKNOWN
        chosen = self._choose_samples()

        def observe(i: int, delta: Tensor) -> None:
            if not delta.numel():
                return
            delta = delta.reshape(*entries[i].shape, 1)
            layout = find_layout_of_chosen(delta, chosen, entries[i].features + 1)
            if layout is not None:
                axes[i] = layout.axis

        mask = chosen.view(shape_along(self.axis, self.covector.ndim))
        leaves = list(self.forward.leaves.values())
        self.forward.pull(self.draw_everywhere().mul_(mask), leaves, doubtful, observe)
        return axes

    def _choose_samples(self) -> Tensor:
        """Return flags (N,) of about half of the samples: the first one and not the last.

        They are always the same.
        """
        flags = torch.rand(self.samples, generator=torch.Generator().manual_seed(0)) < 0.5
        flags[-1] = False
        flags[0] = True
        return flags.to(self.covector.device)

    def _list_separated(self, separates_samples: bool) -> list[int]:
        """Return the uses of layers that have to separate their samples."""
        entries = self.forward.record.entries
        if separates_samples:
            return list(range(len(entries)))
        return [i for i, entry in enumerate(entries) if entry.layer.curvature == "units"]

    def _is_doubtful(self, entry: Entry) -> bool:
        """Whether the sizes of a use leave a doubt where its samples stand."""
        lead = entry.shape[: len(entry.shape) - entry.features]
        is_ambiguous = lead.count(self.samples) > 1
        return len(lead) > 0 and (is_ambiguous or not self._shows_samples(entry))

    def _shows_samples(self, entry: Entry) -> bool:
        """Whether the output's axis of samples has their number here as well."""
        return entry.shape[find_samples_axis(entry, self.sharing)] == self.samples


def describe_unknown_layouts(entries: Sequence[Entry], layouts: Sequence[str]) -> dict[str, str]:
    """Return what `UNKNOWN` means for the parameters of such uses, by name."""
    remarks: dict[str, str] = {}
    for entry, layout in zip(entries, layouts, strict=True):
        if layout == UNKNOWN:
            remark = f"{describe_layer(entry.module)}; {_REMARK}"
            remarks |= {n: remark for n in entry.names.values() if n}
    return remarks


def describe_function_uses(entries: Sequence[Entry]) -> dict[str, str]:
    """Return what functions do with parameters that no module of a known kind showed, by name."""
    remarks: dict[str, str] = {}
    for entry in entries:
        if entry.site.is_function:
            remark = f"a function uses it, in {describe_layer(entry.module)}"
            if isinstance(entry.module, (nn.Linear, nn.modules.conv._ConvNd)):
                remark = f"a function uses it as {describe_layer(entry.module)} does"
            remarks |= {n: remark for n in entry.names.values() if n}
    return remarks
