"""Which block each parameter has, proven once per way through the model, and its sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...._core.graph import Root, find_last_edges, pull_back, refuse_reentrant
from ...._core.space import compute_dtype
from ....maps.layers import Compound, Layer
from ....maps.layers.moments import Moments
from ....maps.layers.registry import LayerInput
from ....maps.proof import ELSEWHERE, HOOKED, NO_LAYER, Proof
from ....maps.record import Entry, ForwardRecord
from ...checks import refuse_sparse
from ..factors.block import DIAGONAL, Bases, BlockKey
from ..options import Options
from .compound import CompoundReplays, tap_moments
from .cotangents import AllSums, CotangentPass, UseMoments, UserPass, alike, form_inputs
from .covectors import Covectors, Descent, NotFinite, unknown_layouts, used_by_functions
from .launch_thread import LaunchThread
from .plan import BlockPlan, different_forms, use_of
from .sums import Pool, factors_of

_ROUTES = 256  # ways through a network that are remembered
_PLACES = 4096  # at which a layer's inputs are measured where they alone are
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Route:
    """What was established about one way through the model."""

    plan: BlockPlan
    #: by use of a layer, where its samples stand
    layouts: Sequence[str]
    #: which uses of layers, and which ends of compound ones, a covector reaches
    reached: tuple[Any, ...]
    #: the uses below which there is no other
    last: list[int]
    #: by modules' modes, whether the user's own backward pass gives the same sums
    alike: dict[tuple[bool, ...], bool] = field(default_factory=dict)


class BlockStructure:
    """Adds up what the options ask for, and knows which block every parameter has."""

    def __init__(self, options: Options) -> None:
        self._sharing = options.sharing
        self._options = options
        #: whether all layers have to tell samples apart
        self._apart = options.ekfac or options.sharing.reduce
        #: eigenbases in which second moments of gradients are wanted, by block
        self.bases: Mapping[BlockKey, Bases] = {}
        #: why a parameter is held as a diagonal
        self.reasons: dict[str, str] = {}
        #: those parameters by the last proof, with the reason
        self.plain: dict[str, str] = {}
        #: the parameters that share a block with this one
        self.partners: dict[str, tuple[str, ...]] = {}
        #: how often a way through the model was proven
        self.proofs = 0
        self._routes: dict[Any, Route] = {}
        self._plan: BlockPlan | None = None

    def covers(self, leaves: Mapping[str, Tensor]) -> bool:
        """Whether each of them has a block of parameters among them."""
        return all(n in self.partners and leaves.keys() >= {*self.partners[n]} for n in leaves)

    def measure_along(
        self, own: Descent, add: Callable[[AllSums], None], *, tried: bool = True
    ) -> bool:
        """Give the sums along the user's own pass to `add`, at its end; False where it may not do.

        It may where it was `tried` and gave what a second pass did. It does not if samples meet, as
        in batch normalization, since their signs matter then; nor if the loss depends on the layers
        by another way than the measured output.
        """
        signature = own.signature(self._apart)
        modes = own.record.modes
        route = self._routes.get(signature)
        if route is None or route.alike.get(modes) is not (True if tried else None):
            return False
        # diagonals are the squares of gradients, which the pass under way adds up
        diagonals = bool(route.plan.plain) and self._options.measures_diagonals
        if diagonals or own.upcoming() != route.reached:
            return False

        def finish(down: CotangentPass) -> None:
            pool = Pool()
            if down.reached == route.reached:
                self._note(route.plan)
                self._add(down, route.plan, pool)
                add(pool.sums)
            elif tried:  # nothing is added, and the next pass proves the route again
                self._routes.pop(signature, None)
            else:
                route.alike[modes] = False

        UserPass(CotangentPass(own, route.layouts, route.plan.plain, self.bases), finish)
        return True

    def _try_along(self, own: Descent, covector: Tensor, expected: Pool) -> None:
        """Find out whether the user's own pass gives these sums of a second one."""
        route = self._routes.get(own.signature(self._apart))
        modes = own.record.modes
        if route is not None and modes not in route.alike and own.differs(covector):
            known = route.alike

            def compare(sums: AllSums) -> None:
                known[modes] = alike(own, sums, expected.sums)

            self.measure_along(own, compare, tried=False)

    def measure(
        self,
        root: Root,
        found: Covectors,
        record: ForwardRecord,
        leaves: Mapping[str, Tensor],
        own: Descent | None = None,
        thread: LaunchThread | None = None,
    ) -> Pool:
        """Pull back all covectors of one pass and return the sums; inputs are added once.

        `own` is the loss's own cotangent, if the user's pass might give the next sums by itself.
        The sums are complete when the `thread` has done its tasks.
        """
        pool = Pool()
        inputs = found.reach is None
        given = record, leaves, self._sharing, found.keep
        if found.reach is not None:  # inputs count where any of the covectors reaches
            seen = Pool()
            self._pull(Descent(root, found.reach, *given, True), seen)
            for key, sums in seen.sums.items():
                pool.of(key).inputs.update(sums.inputs)
        for covector, coupling in found.every:
            if coupling:
                unrelated = coupling.unrelated(record, self._sharing)
            else:
                unrelated = {}
            way = Descent(root, covector, *given, inputs, coupling, unrelated, thread)
            self._pull(way, pool)
            inputs = False
            if own is not None:
                self._try_along(own, covector, pool)
        return pool

    def measure_inputs(self, record: ForwardRecord, leaves: Mapping[str, Tensor]) -> Pool:
        """Return the sums of what layers saw, with a flat metric on their outputs."""
        pool = Pool()
        uses = [UseMoments(e, self._sharing) for e in record.entries if e.names.get("weight")]
        for own in uses:
            own.seen = LayerInput(own.entry.module, _some_places(own.entry), None)
        form_inputs([own for own in uses if own.entry.layer.curvature == "kronecker"])
        # a weight that is used transposed as well is whitened by what it sees as it is
        untransposed = {u.entry.names["weight"] for u in uses if not u.entry.layer.is_transposed}
        for own in uses:
            name = own.entry.names["weight"]
            layer = own.entry.layer
            if name is None or own.inputs is None:
                continue
            if not (layer.is_transposed and name in untransposed):
                key = BlockKey("kronecker", (name,), turned=layer.is_transposed)
                _add_inputs(pool, key, layer, own.inputs, leaves[name])
        for call in record.compounds:
            for tap in call.compound.replay(call.module, call.args, call.kwargs)[1]:
                name = record.name(tap.weight)
                if name is not None:
                    key = BlockKey("kronecker", (name,))
                    moments = tap_moments(tap, self._sharing)
                    _add_inputs(pool, key, call.compound, moments, leaves[name])
        self.partners = {n: (n,) for n in leaves}
        measured = {n for key in pool.sums for n in key.names}
        self.plain = {n: NO_LAYER for n in leaves if n not in measured}
        self.reasons = dict(self.plain)
        return pool

    def _pull(self, way: Descent, pool: Pool) -> None:
        """Pull one covector back from the output and add up what is measured."""
        signature = way.signature(self._apart)
        route = self._routes.get(signature)
        if route is not None and self._follow(way, route, pool):
            return
        # the first time, or another way through the same layers
        if way.thread is not None:
            way.thread.join()
            way.thread = None
        route, proven = self._prove_everywhere(way, pool) or self._prove(way, pool)
        if proven:
            self._routes[signature] = route
            if len(self._routes) > _ROUTES:
                del self._routes[next(iter(self._routes))]

    def _follow(self, way: Descent, route: Route, pool: Pool) -> bool:
        """Pull back on a known route; False, and nothing added, if it is another one."""
        down = CotangentPass(way, route.layouts, route.plan.plain, self.bases)
        down.run(route.last, [n for n in route.plan.plain if n in way.leaves])
        if down.reached != route.reached:
            return False
        CompoundReplays(way, down.cotangents).add_to(pool, route.plan)
        self._note(route.plan)
        if way.thread is None:
            self._add(down, route.plan, pool)
        else:
            way.thread.do(partial(self._add, down, route.plan, pool))
        return True

    def _prove_everywhere(self, way: Descent, pool: Pool) -> tuple[Route, bool] | None:
        """Prove all of the model first where a covector of single positions shows a part of it."""
        large = way.record.head is not None  # one of these is drawn at all positions that count
        if large or way.coupling is not None or bool(way.covector.all()):
            return None
        found = self._prove(replace(way, covector=way.everywhere(), inputs=False), Pool())
        if self._follow(way, found[0], pool):
            return found
        return None

    def _prove(self, way: Descent, pool: Pool) -> tuple[Route, bool]:
        """Prove the structure on the way; return it, and whether it holds from now on."""
        self.proofs += 1
        entries = way.record.entries
        leaves = way.leaves
        proof = Proof()
        layouts = way.locate_samples(self._apart)
        down = CotangentPass(way, layouts, way.unrelated, self.bases, proof)
        down.run([], list(leaves))
        if any(g is None for g in down.gradients.values()):
            refuse_reentrant(way.root)
        replays = CompoundReplays(way, down.cotangents)
        replays.prove(proof)
        for name, gradient in down.gradients.items():
            refuse_sparse(name, gradient)
        if not all(torch.isfinite(n) for n in _norms(down.gradients)):
            raise NotFinite
        uses = [use_of(e.layer, e.module, e.names) for e in entries] + replays.uses
        remarks = used_by_functions(entries) | replays.remarks | unknown_layouts(entries, layouts)
        plain = {
            **different_forms(uses),
            **_name_hooks(proof.find_unexplained(down.gradients), leaves),
            **way.unrelated,
        }
        if any(plain.values()) and not way.record.sites.listening:
            way.record.sites.listening = True  # a function may use what no module showed
        plan = BlockPlan(uses, plain, self._options.joint, remarks)
        ends = find_last_edges(way.root, way.edges[: len(entries)])
        replays.add_to(pool, plan)
        self._note(plan)
        self._add(down, plan, pool)
        norms = _norms({n: g for n, g in down.gradients.items() if n not in plan.plain})
        proven = all(bool(norm > 0) for norm in norms)  # a gradient of zero proves nothing
        return Route(plan, layouts, down.reached, ends), proven

    def _note(self, plan: BlockPlan) -> None:
        """Note what holds for the parameters from now."""
        if plan is self._plan:
            return
        self._plan = plan
        self.plain = {n: why for n, why in plan.plain.items() if why}
        unused = {n for n, why in plan.plain.items() if not why and n in self.partners}
        new = {n: key.names for key in plan.keys for n in key.names if n not in unused}
        kept = {n: names for n, names in self.partners.items() if not new.keys() & {*names}}
        self.partners = {**kept, **new}
        self.reasons = {n: r for n, r in self.reasons.items() if n not in new} | plan.reasons

    def _add(self, down: CotangentPass, plan: BlockPlan, pool: Pool) -> None:
        way = down.descent
        down.add_to(pool, plan)
        names = [n for n in plan.plain if n in way.leaves]
        gradients = [down.gradients.get(n) for n in names]
        if way.coupling is not None and names:  # theirs is another covector
            related = way.coupling.related_covector(way.covector, way.axis)
            gradients = pull_back(way.root, related, [way.leaves[n] for n in names])
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                flat = gradient.flatten().to(compute_dtype(gradient.dtype))
                held = pool.of(BlockKey("diagonal", (name,)))
                held.add(DIAGONAL, flat.square()[:, None, None])


def _add_inputs(
    pool: Pool, key: BlockKey, layer: Layer | Compound, moments: Moments, weight: Tensor
) -> None:
    """Add the moments of a weight's inputs, with a flat metric on its outputs."""
    sums = pool.of(key)
    inputs, outputs = factors_of(layer, key)
    sums.add(inputs, moments)
    groups = moments.second.shape[0]
    columns = moments.second.shape[-1]
    if outputs not in sums.values:
        rows = weight.numel() // (groups * columns)
        sums.values[outputs] = moments.first.new_ones(groups, rows)


def _name_hooks(reasons: Mapping[str, str], leaves: Mapping[str, Tensor]) -> dict[str, str]:
    """The reasons, where a gradient hook rather than another use explains a difference."""
    out = dict(reasons)
    for name, reason in reasons.items():
        if reason == ELSEWHERE and leaves[name]._backward_hooks:
            out[name] = HOOKED
    return out


def _some_places(entry: Entry) -> Tensor:
    """Return the inputs at enough positions: a root needs no more.

    Of a linear layer single positions, of a convolution whole samples.
    """
    x = entry.input
    module = entry.module
    if type(module) is nn.Linear and x.numel():
        x = x.reshape(-1, x.shape[-1])
        positions = len(x)
        columns = x.shape[-1]
    elif isinstance(module, _CONVOLUTIONS) and x.numel() and x.ndim == module.weight.ndim:
        positions = prod(entry.shape) // module.out_channels
        columns = module.weight[0].numel()
    else:
        return x
    return x[:: min(len(x), max(1, positions // max(_PLACES, 2 * columns)))]


def _norms(gradients: Mapping[str, Tensor | None]) -> Sequence[Tensor]:
    given = [g for g in gradients.values() if g is not None and g.numel()]
    if given:
        return torch._foreach_norm(given)
    return []
