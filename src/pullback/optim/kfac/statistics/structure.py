"""Which block each parameter has, proven once per way through the model, and its sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...._core.graph import Root, last_edges, pull, refuse_reentrant
from ....grams.kronecker.inverse import Inverse
from ....maps.layers.moments import Sharing
from ....maps.proof import Proof
from ...checks import refuse_sparse
from ..factors.factor import BlockKey
from .compound import CompoundReplays
from .cotangents import CotangentPass, Descent
from .coupling import unrelated_parameters
from .covectors import Covectors
from .plan import BlockPlan, LayerUse, Target, targets_of
from .record import ForwardRecord
from .samples import covector_everywhere, layout_signature, locate_samples, unknown_layouts
from .sums import Pool, square_gradients

_ROUTES = 256  # ways through a network that are remembered


class NotFinite(Exception):
    """The covector met values that are not finite, from which nothing can be learned."""


@dataclass(frozen=True)
class Route:
    """What was established about one way through the model."""

    plan: BlockPlan
    #: by use of a layer
    targets: Sequence[Target]
    #: which uses of layers, and which ends of compound ones, a covector met
    met: tuple[Any, ...]
    #: the uses below which there is no other
    last: list[int]
    #: whether the proof holds from now on
    settled: bool


class Structure:
    """Adds up moments, and knows which block every parameter has.

    Args:
        sharing: how places that share a weight enter.
        joint: whether weight and bias share a block.
        ekfac: whether corrected eigenvalues will be wanted.
    """

    def __init__(self, sharing: Sharing, joint: bool, ekfac: bool) -> None:
        self._sharing, self._joint = sharing, joint
        #: whether all layers have to tell samples apart
        self._apart = ekfac or sharing.reduce
        #: eigenbases in which second moments of gradients are wanted, by block
        self.bases: Mapping[BlockKey, Inverse] = {}
        #: why a parameter is held as a diagonal
        self.reasons: dict[str, str] = {}
        #: the parameters that share a block with this one
        self.partners: dict[str, tuple[str, ...]] = {}
        self._routes: dict[Any, Route] = {}
        self._plan: BlockPlan | None = None

    def covers(self, leaves: Mapping[str, Tensor]) -> bool:
        """Whether each of them has a block of parameters among them."""
        return all(n in self.partners and leaves.keys() >= {*self.partners[n]} for n in leaves)

    def measure(
        self,
        root: Root,
        found: Covectors,
        record: ForwardRecord,
        leaves: Mapping[str, Tensor],
        pool: Pool,
    ) -> None:
        """Pull back all covectors of one pass and add up; its inputs are added once.

        Raises:
            NotFinite: nothing can be learned.
        """
        inputs = found.reach is None
        if found.reach is not None:  # inputs count where any of the covectors reaches
            seen = Pool()
            self._pull(Descent(root, found.reach, record, leaves, found.keep, True, None, {}), seen)
            for key, own in seen.sums.items():
                for role, moments in own.inputs.items():
                    pool.of(key).add_inputs(role, moments)
        for covector, coupling in found.every:
            unrelated = unrelated_parameters(record, self._sharing, coupling)
            way = Descent(root, covector, record, leaves, found.keep, inputs, coupling, unrelated)
            self._pull(way, pool)
            inputs = False

    def _pull(self, way: Descent, pool: Pool) -> None:
        """Pull one covector back from the output and add up what the layers met."""
        samples, entries = self._samples(way), way.record.entries
        sizes = layout_signature(entries, self._sharing, samples, apart=self._apart)
        signature = (*way.signature, sizes)
        route = self._routes.get(signature)
        if route is not None and self._follow(way, route, pool):
            return
        # the first time, or another way through the same layers
        route = self._prove_everywhere(way, pool) or self._prove(way, pool)
        if route.settled:
            self._routes[signature] = route
            if len(self._routes) > _ROUTES:
                del self._routes[next(iter(self._routes))]

    def _follow(self, way: Descent, route: Route, pool: Pool) -> bool:
        """One pass on a route that is known; False, and nothing added, if it is another one."""
        down, plan = self._pass(way, route.targets, None), route.plan
        asked = [n for n in plan.plain if n in way.leaves]
        cotangents, gradients = down.run(route.last, asked)
        if _met(down, cotangents) != route.met:
            return False
        self._add(way, down, plan, route.targets, _replays(way, cotangents), pool, gradients)
        return True

    def _prove_everywhere(self, way: Descent, pool: Pool) -> Route | None:
        """Prove all of the model first where a covector of single positions shows a part of it."""
        large = way.record.head is not None  # one of these is drawn at all positions that count
        if large or way.coupling is not None or bool(way.covector.all()):
            return None
        whole = replace(way, covector=covector_everywhere(way.covector), inputs=False)
        route = self._prove(whole, Pool())
        return route if self._follow(way, route, pool) else None

    def _prove(self, way: Descent, pool: Pool) -> Route:
        """One pass where nothing is known: the structure is proven on the way."""
        record, leaves, proof = way.record, way.leaves, Proof()
        layouts = [""] * len(record.entries)
        if way.coupling is None:
            layouts = locate_samples(
                way.root, way.covector, record.entries, way.edges, leaves, self._sharing,
                apart=self._apart,
            )  # fmt: skip
        first = targets_of(record.entries, None, way.unrelated, layouts)
        down = self._pass(way, first, proof)
        cotangents, gradients = down.run([], list(leaves))
        if any(g is None for g in gradients):
            refuse_reentrant(way.root)
        truth = dict(zip(leaves, gradients, strict=True))
        replays = _replays(way, cotangents)
        replays.prove(proof, way.root, leaves)
        plan = self._establish(way, proof, replays, truth, layouts)
        targets = targets_of(record.entries, plan, way.unrelated, layouts)
        plain = [truth[n] for n in plan.plain if n in leaves]
        self._add(way, down, plan, targets, replays, pool, plain)
        ends = last_edges(way.root, way.edges[: len(record.entries)])
        norms = _norms({n: g for n, g in truth.items() if n not in plan.plain})
        settled = all(bool(norm > 0) for norm in norms)  # a gradient of zero proves nothing
        return Route(plan, targets, _met(down, cotangents), ends, settled)

    def _pass(self, way: Descent, targets: Sequence[Target], proof: Proof | None) -> CotangentPass:
        samples = self._samples(way)
        return CotangentPass(way, targets, self._sharing, samples, self.bases, proof)

    def _samples(self, way: Descent) -> int:
        covector = way.covector
        return covector.shape[min(self._sharing.batch_dim, covector.ndim - 1)]

    def _add(
        self,
        way: Descent,
        down: CotangentPass,
        plan: BlockPlan,
        targets: Sequence[Target],
        replays: CompoundReplays,
        pool: Pool,
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Add what was met to its blocks; `gradients` are those of plain parameters."""
        self._adopt(plan)
        names = [n for n in plan.plain if n in way.leaves]
        if way.coupling is not None and names:  # theirs is another covector
            related = way.coupling.related_covector(way.covector)
            gradients = pull(way.root, related, [way.leaves[n] for n in names])
        down.add_to(pool, targets)
        replays.add_to(pool, plan, self._sharing, way.keep, inputs=way.inputs)
        square_gradients(dict(zip(names, gradients, strict=True)), pool)

    def _establish(
        self,
        way: Descent,
        proof: Proof,
        replays: CompoundReplays,
        truth: Mapping[str, Tensor | None],
        layouts: Sequence[str],
    ) -> BlockPlan:
        """Which block each parameter gets, by proof."""
        for name, gradient in truth.items():
            refuse_sparse(name, gradient)
        if not all(torch.isfinite(n) for n in _norms(truth)):
            raise NotFinite
        entries = way.record.entries
        uses = [LayerUse(e.names, e.layer.curvature, e.layer.joint) for e in entries]
        remarks = replays.remarks | unknown_layouts(entries, layouts)
        plain = {**proof.unexplained(truth), **way.unrelated}
        return BlockPlan([*uses, *replays.uses], plain, self._joint, remarks)

    def _adopt(self, plan: BlockPlan) -> None:
        """Note what holds for the parameters from now on."""
        if plan is self._plan:
            return
        self._plan = plan
        unused = {n for n, why in plan.plain.items() if not why and n in self.partners}
        new = {n: key.names for key in plan.keys for n in key.names if n not in unused}
        kept = {n: names for n, names in self.partners.items() if not new.keys() & {*names}}
        self.partners = {**kept, **new}
        self.reasons = {n: r for n, r in self.reasons.items() if n not in new} | plan.reasons


def _replays(way: Descent, cotangents: Sequence[Tensor | None]) -> CompoundReplays:
    related = way.coupling is not None  # where compound layers are held as diagonals
    return CompoundReplays(way.record, [None] * len(cotangents) if related else cotangents)


def _met(down: CotangentPass, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Which uses of layers, and which ends of compound ones, a covector met."""
    return (*sorted(down.met), *(c is not None for c in cotangents))


def _norms(gradients: Mapping[str, Tensor | None]) -> Sequence[Tensor]:
    given = [g for g in gradients.values() if g is not None and g.numel()]
    return torch._foreach_norm(given) if given else []
