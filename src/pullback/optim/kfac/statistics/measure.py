"""One covector through a recorded forward pass: which block a parameter gets, and its sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...._core.space import compute_dtype
from ....maps.layers.moments import Sharing
from ...checks import refuse_sparse
from ..blocks.inverse import Inverse
from .coupling import Coupling, apart
from .graph import last, pulled, refuse_reentrant
from .head import below
from .pending import Root
from .plan import Plan
from .proof import Proof
from .sums import Key, Sums
from .sweep import Sweep, basis_by, wanted_by
from .tape import Tape
from .taps import add_taps, replayed, roles


class NotFinite(Exception):
    """The covector met values that are not finite, from which nothing can be learned."""


class Changed(Exception):
    """The model went another way than before, and the covector is gone: another one is needed."""


@dataclass(frozen=True)
class Known:
    """What was established about one way through the model."""

    plan: Plan
    #: which uses of layers, and which ends of compound ones, a covector met
    met: tuple[Any, ...]
    #: the uses below which there is no other
    last: list[int]
    #: whether the proof holds from now on
    settled: bool


class Measure:
    """Adds up moments, and knows which block every parameter has.

    Args:
        sharing: how places that share a weight enter.
        joint: whether weight and bias share a block.
    """

    def __init__(self, sharing: Sharing, joint: bool) -> None:
        self._sharing, self._joint = sharing, joint
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
            tuple((e.path, tuple(e.names.items())) for e in tape.entries),
            tuple(w.path for w in tape.wholes),
            tuple(leaves),
            tuple(split.items()),
        )
        rest = (keep, edges, inputs, coupling, split)
        known = self._known.get(signature)
        if known is not None:
            done = self._sweep(root, covector, tape, leaves, sums, known, *rest)
            if done:
                return
            if not covector:
                del self._known[signature]
                raise Changed
        # the first time, or another way through the same layers
        known = self._sweep(root, covector, tape, leaves, sums, None, *rest)
        assert isinstance(known, Known)
        if known.settled:
            self._known[signature] = known

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
        proof = Proof() if plan is None else None
        sweep = Sweep(
            tape.entries, self._sharing, keep, inputs=inputs, wanted=wanted_by(plan, split),
            basis=basis_by(tape.entries, self.bases), proof=proof, coupling=coupling,
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
        taps = [
            replayed(whole, end)
            for whole, end in zip(tape.wholes, _ends(tape, cotangents), strict=True)
            if coupling is None and any(c is not None for c in end)
        ]
        if plan is None:
            assert proof is not None
            if any(g is None for g in gradients):
                refuse_reentrant(root)
            plan = self._establish(tape, proof, taps, truth, split)
        self._adopt(plan)
        sweep.assign(plan, sums)
        for one in taps:
            add_taps(sums, one, plan, self._sharing, tape.name, inputs=inputs)
        plain = {n: g for n, g in truth.items() if n in plan.plain}
        if coupling is not None and plain:  # theirs is another covector
            found = pulled(root, coupling.related(covector[0]), [leaves[n] for n in plain])
            plain = dict(zip(plain, found, strict=True))
        _square(plain, sums)
        if known is not None:
            return True
        return Known(plan, met, last(root, edges[:count]), _settled(plan, truth))

    def _establish(
        self,
        tape: Tape,
        proof: Proof,
        taps: Sequence[Any],
        truth: dict[str, Any],
        split: Mapping[str, str],
    ) -> Plan:
        """Which block each parameter gets, by proof."""
        for name, gradient in truth.items():
            refuse_sparse(name, gradient)
        if not all(torch.isfinite(n) for n in _norms(truth).values()):
            raise NotFinite
        uses = [(e.names, e.layer.curvature, e.layer.joint) for e in tape.entries]
        for one in taps:
            proof.taps(one, tape.name)
            uses += [(roles(tap, tape.name), "kronecker", True) for tap, _ in one]
        return Plan(uses, {**proof.unexplained(truth), **split}, self._joint)

    def _adopt(self, plan: Plan) -> None:
        """What holds for the parameters from now on."""
        if plan is self._plan:
            return
        self._plan = plan
        new = {n: key.names for key in plan.keys for n in key.names}
        kept = {n: names for n, names in self.partners.items() if not new.keys() & {*names}}
        self.partners = {**kept, **new}
        self.reasons = {n: r for n, r in self.reasons.items() if n not in new} | plan.plain


def _square(gradients: Mapping[str, Tensor | None], sums: dict[Key, Sums]) -> None:
    """The parameters that are held as diagonals."""
    for name, gradient in gradients.items():
        if gradient is not None:
            flat = gradient.flatten().to(compute_dtype(gradient.dtype))
            squares = flat.square()[:, None, None]
            sums.setdefault(Key("diagonal", (name,)), Sums()).add_squares(squares)


def _ends(tape: Tape, found: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
    """The cotangents at each compound layer's outputs."""
    pieces = iter(found)
    return [[None if e is None else next(pieces) for e in w.edges] for w in tape.wholes]


def _norms(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    given = {n: g for n, g in gradients.items() if g is not None and g.numel()}
    if not given:
        return {}
    return dict(zip(given, torch._foreach_norm(list(given.values())), strict=True))


def _settled(plan: Plan, gradients: Mapping[str, Tensor | None]) -> bool:
    """Whether the proof holds from now on: a gradient of zero proves nothing."""
    return all(bool(norm > 0) for n, norm in _norms(gradients).items() if n not in plan.plain)
