"""One covector through a recorded forward pass: which block a parameter gets, and its sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._core.space import compute_dtype
from ...maps.layers.moments import Sharing
from ..checks import refuse_sparse
from .inverse import Inverse
from .pending import Root
from .plan import Plan
from .statistics import Pull, pulled, refuse_reentrant, replayed, unexplained
from .sums import Key, Sums
from .tape import Tape


class NotFinite(Exception):
    """The covector met values that are not finite, from which nothing can be learned."""


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
        self._plans: dict[Any, Plan] = {}
        self._last: dict[Any, Any] = {}

    def knows(self, leaves: Mapping[str, Tensor]) -> bool:
        """Whether each of them has a block of parameters among them."""
        return all(n in self.partners and leaves.keys() >= {*self.partners[n]} for n in leaves)

    def pull(
        self,
        root: Root,
        covector: Tensor,
        tape: Tape,
        leaves: Mapping[str, Tensor],
        sums: dict[Key, Sums],
        keep: Tensor | None,
        *,
        inputs: bool,
    ) -> None:
        """Pull a covector back from the output and add what the layers meet.

        Args:
            root: the output.
            covector: of the output's shape and dtype.
            tape: the layers on the way.
            leaves: the parameters that take part.
            sums: where to add.
            keep: which places of the output count.
            inputs: whether to add the inputs as well, once per pass.
        """
        edges = tape.edges(None if isinstance(root, Tensor) else root.node)
        signature = (
            tuple((e.path, tuple(e.names.items())) for e in tape.entries),
            tuple(w.path for w in tape.wholes),
            tuple(leaves),
        )
        plan = self._plans.get((signature, self._last.get(signature)))
        asked = list(leaves) if plan is None else [n for n in plan.plain if n in leaves]
        found = pulled(root, covector, edges + [leaves[n] for n in asked])
        met = tuple(d is not None for d in found[: len(edges)])
        if plan is not None and met != self._last[signature]:  # other branches than the last time
            plan, asked = self._plans.get((signature, met)), list(leaves)
            found = pulled(root, covector, edges + list(leaves.values()))
        self._last[signature] = met
        deltas, gradients = found[: len(edges)], dict(zip(asked, found[len(edges) :], strict=True))
        layers, ends = deltas[: len(tape.entries)], _ends(tape, deltas[len(tape.entries) :])
        if plan is None:
            if any(g is None for g in gradients.values()):
                refuse_reentrant(root)
            plan = self._establish(tape, layers, ends, gradients)
            if _settled(plan, gradients):
                self._plans[signature, met] = plan
        self._adopt(plan)
        pull = Pull(tape, plan, self._sharing, keep, self.bases)
        if inputs:
            pull.inputs(sums, layers)
        pull.outputs(sums, layers)
        for whole, cotangents in zip(tape.wholes, ends, strict=True):
            if any(c is not None for c in cotangents):
                pull.taps(sums, whole, cotangents, inputs)
        for name, gradient in gradients.items():
            if name in plan.plain and gradient is not None:
                flat = gradient.flatten().to(compute_dtype(gradient.dtype))
                squares = flat.square()[:, None, None]
                sums.setdefault(Key("diagonal", (name,)), Sums()).add_squares(squares)

    def _establish(
        self, tape: Tape, deltas: Sequence[Any], ends: Sequence[list[Any]], truth: dict[str, Any]
    ) -> Plan:
        """Which block each parameter gets, by proof."""
        for name, gradient in truth.items():
            refuse_sparse(name, gradient)
        if not all(torch.isfinite(n) for n in _norms(truth).values()):
            raise NotFinite
        uses = [(e.names, e.layer.curvature, e.layer.joint) for e in tape.entries]
        taps = []
        for whole, cotangents in zip(tape.wholes, ends, strict=True):
            if any(c is not None for c in cotangents):
                taps += replayed(whole, cotangents)
        uses += [
            ({"weight": tape.name(t.weight), "bias": tape.name(t.bias)}, "kronecker", True)
            for t, _ in taps
        ]
        return Plan(uses, unexplained(tape, deltas, taps, truth), self._joint)

    def _adopt(self, plan: Plan) -> None:
        """What holds for the parameters from now on."""
        new = {n: key.names for key in plan.keys for n in key.names}
        kept = {n: names for n, names in self.partners.items() if not new.keys() & {*names}}
        self.partners = {**kept, **new}
        self.reasons = {n: r for n, r in self.reasons.items() if n not in new} | plan.plain


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
