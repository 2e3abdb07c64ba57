"""One covector through a recorded forward pass: which block a parameter gets, and its sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...._core.space import compute_dtype
from ....maps.layers.moments import Sharing
from ...checks import refuse_sparse
from ..blocks.inverse import Inverse
from .aims import aims, basis_by
from .coupling import Coupling, apart
from .draws import Draws
from .graph import last, pulled, refuse_reentrant
from .head import below
from .known import Changed, Known, NotFinite, norms, settled
from .pending import Root
from .plan import Plan
from .proof import Proof
from .samples import located, sizes, unknown
from .sums import Key, Sums, held_by
from .sweep import Sweep
from .tape import Tape
from .taps import Replays

_WAYS = 256  # through a network that are remembered


class Measure:
    """Adds up moments, and knows which block every parameter has.

    Args:
        sharing: how places that share a weight enter.
        joint: whether weight and bias share a block.
        ekfac: whether corrected eigenvalues will be wanted.
    """

    def __init__(self, sharing: Sharing, joint: bool, ekfac: bool) -> None:
        self._sharing, self._joint, self._apart = sharing, joint, ekfac or sharing.reduce
        #: eigenbases in which second moments of gradients are wanted, by block
        self.bases: Mapping[Key, Inverse] = {}
        #: why a parameter is held as a diagonal
        self.reasons: dict[str, str] = {}
        #: the parameters that share a block with this one
        self.partners: dict[str, tuple[str, ...]] = {}
        self._known: dict[Any, Known] = {}
        self._plan: Plan | None = None

    def knows(self, leaves: Mapping[str, Tensor]) -> bool:
        """Whether each of them has a block of parameters among them."""
        return all(n in self.partners and leaves.keys() >= {*self.partners[n]} for n in leaves)

    def load(self, reasons: Mapping[str, str], partners: Mapping[str, Sequence[str]]) -> None:
        """Take up what was established before."""
        self._plan, self.reasons = None, dict(reasons)
        self.partners = {n: tuple(names) for n, names in partners.items()}

    def learn(
        self,
        root: Root,
        found: Draws,
        tape: Tape,
        leaves: Mapping[str, Tensor],
        sums: dict[Key, Sums],
    ) -> None:
        """Pull back all covectors of one pass; its inputs are added once."""
        inputs = found.reach is None
        if found.reach is not None:
            seen: dict[Key, Sums] = {}
            self.pull(root, found.reach, tape, leaves, seen, found.keep, inputs=True)
            for key, own in seen.items():
                for term, moments in own.inputs.items():
                    held_by(sums, key).add_inputs(term, moments)
        for covector, coupling in found.covectors:
            self.pull(
                root, covector, tape, leaves, sums, found.keep, inputs=inputs, coupling=coupling
            )
            inputs = False

    def pull(
        self,
        root: Root,
        covector: list[Tensor],
        tape: Tape,
        leaves: Mapping[str, Tensor],
        sums: dict[Key, Sums],
        keep: Tensor | None,
        *,
        inputs: bool,
        coupling: Coupling | None = None,
    ) -> None:
        """Pull a covector back from the output and add what the layers meet.

        Args:
            root: the output.
            covector: of the output's shape and dtype, in a list from which it may be taken.
            tape: the layers on the way.
            leaves: the parameters that take part.
            sums: where to add.
            keep: which places of the output count.
            inputs: whether to add the inputs as well, once per pass.
            coupling: how the samples are related, where the metric does.

        Raises:
            Changed: it has to be called again with another covector.
        """
        split = apart(tape, self._sharing, coupling)
        edges = tape.edges(None if isinstance(root, Tensor) else root.node)
        signature = (
            tuple([e.site.mark for e in tape.entries]),
            tuple([(w.path, w.note) for w in tape.wholes]),
            tuple(leaves),
            tuple(split.items()),
            tape.nodes,
            sizes(tape.entries, self._sharing, self._samples(covector[0]), apart=self._apart),
        )
        rest = (keep, edges, inputs, coupling, split)
        known = self._known.get(signature)
        if known is not None:
            if self._sweep(root, covector, tape, leaves, sums, known, *rest):
                return
            if not covector:
                del self._known[signature]
                raise Changed
        # the first time, or another way through the same layers
        known = self._sweep(root, covector, tape, leaves, sums, None, *rest)
        assert isinstance(known, Known)
        if known.settled:
            self._known[signature] = known
            if len(self._known) > _WAYS:
                del self._known[next(iter(self._known))]

    def _sweep(
        self,
        root: Root,
        covector: list[Tensor],
        tape: Tape,
        leaves: Mapping[str, Tensor],
        sums: dict[Key, Sums],
        known: Known | None,
        keep: Tensor | None,
        edges: Sequence[GradientEdge],
        inputs: bool,
        coupling: Coupling | None,
        split: Mapping[str, str],
    ) -> Known | bool:
        """One pass; without anything known the structure is proven on the way."""
        count, plan = len(tape.entries), None if known is None else known.plan
        proof = Proof() if known is None else None
        if known is None:
            layouts = [""] * count
            if coupling is None:
                layouts = located(
                    root, covector[0], tape.entries, edges, leaves, self._sharing, apart=self._apart
                )
            goals = aims(tape.entries, None, split, layouts)
        else:
            layouts, goals = [], known.aims
        sweep = Sweep(
            tape.entries, self._sharing, keep, inputs=inputs, aims=goals,
            basis=basis_by(tape.entries, self.bases), proof=proof, coupling=coupling,
            samples=self._samples(covector[0]),
        )  # fmt: skip
        asked = list(leaves) if plan is None else [n for n in plan.plain if n in leaves]
        ends = [] if known is None else known.last
        head = tape.head if known is not None and coupling is None else None
        start = None if head is None else below(sweep, root, covector, tape, head, asked)
        handles = sweep.hooks(edges[:count])
        try:
            targets = [edges[i] for i in ends] + list(edges[count:]) + [leaves[n] for n in asked]
            found = list(pulled(*(start or (root, covector[0])), targets))
        finally:
            for handle in handles:
                handle.remove()
        rest = found[len(ends) :]
        del found[len(ends) :]
        for i in reversed(ends):  # the first layers' cotangents are large, and not kept
            if (delta := found.pop()) is not None:
                sweep.consume(i, delta)
            del delta
        cotangents, gradients = rest[: len(edges) - count], rest[len(edges) - count :]
        met = (*sorted(sweep.met), *(c is not None for c in cotangents))
        if known is not None and met != known.met:
            return False
        truth = dict(zip(asked, gradients, strict=True))
        replays = Replays(tape, cotangents if coupling is None else [None] * len(cotangents))
        if plan is None:
            assert proof is not None
            if any(g is None for g in gradients):
                refuse_reentrant(root)
            proof.replays(replays, root, leaves)
            plan = self._establish(tape, proof, replays, truth, split, layouts)
            goals = aims(tape.entries, plan, split, layouts)
        self._adopt(plan)
        sweep.assign(goals, sums)
        replays.add(sums, plan, self._sharing, keep, inputs=inputs)
        plain = {n: g for n, g in truth.items() if n in plan.plain}
        if coupling is not None and plain:  # theirs is another covector
            found = pulled(root, coupling.related(covector[0]), [leaves[n] for n in plain])
            plain = dict(zip(plain, found, strict=True))
        _square(plain, sums)
        if known is not None:
            return True
        return Known(plan, goals, met, last(root, edges[:count]), settled(plan, truth))

    def _samples(self, covector: Tensor) -> int:
        return covector.shape[min(self._sharing.batch_dim, covector.ndim - 1)]

    def _establish(
        self,
        tape: Tape,
        proof: Proof,
        replays: Replays,
        truth: dict[str, Any],
        split: Mapping[str, str],
        layouts: Sequence[str],
    ) -> Plan:
        """Which block each parameter gets, by proof."""
        for name, gradient in truth.items():
            refuse_sparse(name, gradient)
        if not all(torch.isfinite(n) for n in norms(truth).values()):
            raise NotFinite
        uses = [(e.names, e.layer.curvature, e.layer.joint) for e in tape.entries]
        uses += replays.uses
        remarks = replays.remarks | unknown(tape.entries, layouts)
        return Plan(uses, {**proof.unexplained(truth), **split}, self._joint, remarks)

    def _adopt(self, plan: Plan) -> None:
        """What holds for the parameters from now on."""
        if plan is self._plan:
            return
        self._plan = plan
        new = {n: key.names for key in plan.keys for n in key.names}
        kept = {n: names for n, names in self.partners.items() if not new.keys() & {*names}}
        self.partners = {**kept, **new}
        self.reasons = {n: r for n, r in self.reasons.items() if n not in new} | plan.reasons


def _square(gradients: Mapping[str, Tensor | None], sums: dict[Key, Sums]) -> None:
    """The parameters that are held as diagonals."""
    for name, gradient in gradients.items():
        if gradient is not None:
            flat = gradient.flatten().to(compute_dtype(gradient.dtype))
            squares = flat.square()[:, None, None]
            sums.setdefault(Key("diagonal", (name,)), Sums()).add_squares(squares)
