"""A covector's way from the output of a recorded pass down to its first layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from .coupling import Coupling
from .graph import pulled
from .head import below
from .pending import Root
from .sweep import Sweep
from .tape import Tape


@dataclass
class Descent:
    """What is pulled back from where.

    Args:
        root: the output.
        covector: of the output's shape and dtype, in a list from which it may be taken.
        tape: the layers on the way.
        leaves: the parameters that take part.
        keep: which places of the output count.
        inputs: whether to add the inputs as well, once per pass.
        coupling: how the samples are related, where the metric does.
        split: parameters that are held as diagonals since the samples cannot be related there.
    """

    root: Root
    covector: list[Tensor]
    tape: Tape
    leaves: Mapping[str, Tensor]
    keep: Tensor | None
    inputs: bool
    coupling: Coupling | None
    split: Mapping[str, str]

    @cached_property
    def edges(self) -> list[GradientEdge]:
        """Where cotangents are wanted: the layers' outputs, then those of compound layers."""
        return self.tape.edges(None if isinstance(self.root, Tensor) else self.root.node)

    @property
    def mark(self) -> tuple[Any, ...]:
        """What tells this way from others, beside the sizes."""
        tape = self.tape
        return (
            tuple([e.site.mark for e in tape.entries]),
            tuple([(w.path, w.note) for w in tape.wholes]),
            tuple(self.leaves),
            tuple(self.split.items()),
            tape.nodes,
        )

    def run(
        self, sweep: Sweep, ends: Sequence[int], asked: Sequence[str], *, known: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Go down, past all layers if the `ends` below which there is no other are asked for.

        Returns:
            The cotangents at compound layers, and the gradients of the parameters `asked` for.
        """
        count, edges, leaves = len(self.tape.entries), self.edges, self.leaves
        head = self.tape.head if known and self.coupling is None else None
        start = None
        if head is not None:
            start = below(sweep, self.root, self.covector, self.tape, head, asked)
        handles = sweep.hooks(edges[:count])
        try:
            targets = [edges[i] for i in ends] + edges[count:] + [leaves[n] for n in asked]
            found = list(pulled(*(start or (self.root, self.covector[0])), targets))
        finally:
            for handle in handles:
                handle.remove()
        rest = found[len(ends) :]
        del found[len(ends) :]
        for i in reversed(ends):  # the first layers' cotangents are large, and not kept
            if (delta := found.pop()) is not None:
                sweep.consume(i, delta)
            del delta
        return rest[: len(edges) - count], rest[len(edges) - count :]
