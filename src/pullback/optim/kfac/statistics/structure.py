"""Which block each parameter has, proven once per way through the model, and its sums."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...._core.graph import find_last_edges, pull_back, refuse_reentrant
from ...._core.space import compute_dtype
from ....maps.layers import Compound, Layer
from ....maps.layers.moments import Moments
from ....maps.layers.registry import LayerInput
from ....maps.proof import ELSEWHERE, HOOKED, NO_LAYER, Proof
from ....maps.record import Entry, ForwardRecord, RecordedPass
from ....maps.replay import CompoundReplays
from ...checks import refuse_sparse
from ..factors.block import DIAGONAL, Bases, BlockKey, BlockKind
from ..options import Options
from .compound import add_map_moments, compute_tap_moments, list_map_uses
from .cotangents import (
    AllSums,
    CotangentPass,
    UseMoments,
    UserPass,
    are_sums_equal,
    compute_pending_input_moments,
)
from .covectors import Covectors, NotFinite
from .descent import Descent, describe_function_uses, describe_unknown_layouts
from .launch_thread import LaunchThread
from .plan import BlockPlan, find_conflicting_forms, make_layer_use
from .sums import Pool, get_factor_keys


@dataclass(frozen=True)
class StructureLimits:
    """Bounds on what is remembered and measured."""

    #: proven ways through a network; a model with more of them proves the oldest one anew
    routes: int = 256
    #: positions at which inputs are measured where nothing else is: an inverse root of the input
    #: factor needs no more
    positions: int = 4096


_LIMITS = StructureLimits()
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Route:
    """What was established about one way through the model."""

    plan: BlockPlan
    #: by use of a layer, where its samples stand
    layouts: Sequence[str]
    #: which uses of layers, and which outputs of compound ones, a covector reaches
    reached: tuple[Any, ...]
    #: the uses below which there is no other
    last_uses: list[int]
    #: by modules' modes, whether the user's own backward pass gives the same sums
    agrees_with_user_pass: dict[tuple[bool, ...], bool] = field(default_factory=dict)


class ProvenRoute(NamedTuple):
    """A route, and whether it is certain: it is not where a gradient is zero."""

    route: Route
    is_certain: bool


class BlockStructure:
    """Adds up what the options ask for, and knows which block every parameter has."""

    def __init__(self, options: Options) -> None:
        self._sharing = options.sharing
        self._options = options
        #: whether all layers have to separate their samples
        self._separates_samples = options.measures_spectrum or options.sharing.reduce
        #: eigenbases in which second moments of gradients are wanted, by block
        self.bases: Mapping[BlockKey, Bases] = {}
        #: why a parameter is held as a diagonal
        self.reasons: dict[str, str] = {}
        #: those parameters by the last proof, with the reason
        self.diagonals: dict[str, str] = {}
        #: the weights that a known layer has used, where inputs alone are measured
        self._known_inputs: set[str] = set()
        #: the parameters that share a block with this one
        self.partners: dict[str, tuple[str, ...]] = {}
        #: how often a way through the model was proven
        self.proofs = 0
        self._routes: dict[Any, Route] = {}
        self._plan: BlockPlan | None = None

    def covers(self, leaves: Mapping[str, Tensor]) -> bool:
        """Return True if each parameter has a block all of whose parameters are among these."""
        return all(n in self.partners and leaves.keys() >= {*self.partners[n]} for n in leaves)

    def forget(self, names: Collection[str]) -> None:
        """Forget the blocks of these parameters and their partners, until a pass shows them."""
        if not names:
            return
        remaining: dict[str, tuple[str, ...]] = {}
        for name, partners in self.partners.items():
            if {*names}.isdisjoint(partners):
                remaining[name] = partners
        self.partners = remaining
        self._plan = None

    def measure_user_pass(
        self, loss_descent: Descent, add: Callable[[AllSums], None], *, is_trial: bool = False
    ) -> bool:
        """Measure along the user's own backward pass; return False if that cannot give the sums.

        At the end of that pass `add` receives the sums. They are those of a second pass where a
        trial on this route has shown it (`is_trial`, once per route). They differ if samples meet,
        as in batch normalization, since their signs matter then, or if the loss depends on the
        layers by another way than the measured output.
        """
        signature = loss_descent.signature(self._separates_samples)
        modes = loss_descent.forward.record.modes
        route = self._routes.get(signature)
        if route is None:
            return False
        agrees = route.agrees_with_user_pass.get(modes)
        if is_trial:
            is_allowed = agrees is None
        else:
            is_allowed = agrees is True
        if not is_allowed:
            return False
        # diagonals are the squares of gradients, which the pass under way adds up
        has_diagonals = bool(route.plan.diagonals) and self._options.measures_diagonals
        if has_diagonals or loss_descent.find_upcoming() != route.reached:
            return False

        def finish(cotangent_pass: CotangentPass) -> None:
            pool = Pool()
            if cotangent_pass.reached_uses == route.reached:
                self._adopt_plan(route.plan)
                self._add(cotangent_pass, route.plan, pool)
                add(pool.sums)
            elif is_trial:
                route.agrees_with_user_pass[modes] = False
            else:  # nothing is added, and the next pass proves the route again
                self._routes.pop(signature, None)

        UserPass(
            CotangentPass(loss_descent, route.layouts, route.plan.diagonals, self.bases), finish
        )
        return True

    def _compare_with_user_pass(
        self, loss_descent: Descent, covector: Tensor, expected: Pool
    ) -> None:
        """Note at the end of the user's own pass whether it gave these sums of a second one."""
        route = self._routes.get(loss_descent.signature(self._separates_samples))
        modes = loss_descent.forward.record.modes
        if route is None or modes in route.agrees_with_user_pass:
            return
        if not loss_descent.can_prove_separation(covector):
            return
        agreement = route.agrees_with_user_pass

        def compare(sums: AllSums) -> None:
            agreement[modes] = are_sums_equal(loss_descent, sums, expected.sums)

        self.measure_user_pass(loss_descent, compare, is_trial=True)

    def measure(
        self,
        forward: RecordedPass,
        covectors: Covectors,
        loss_descent: Descent | None = None,
        thread: LaunchThread | None = None,
    ) -> Pool:
        """Return the sums of one pass, over all its covectors; inputs are added once.

        `loss_descent` has the loss's own cotangent, if the user's pass might give the next sums by
        itself. The sums are complete when the `thread` has done its tasks.
        """
        pool = Pool()
        make_descent = partial(
            Descent,
            forward=forward,
            sharing=self._sharing,
            counted=covectors.counted,
        )
        needs_inputs = covectors.reach is None
        if covectors.reach is not None:  # inputs count where any of the covectors reaches
            reached = Pool()
            self._pull(make_descent(covector=covectors.reach, adds_inputs=True), reached)
            for key, sums in reached.sums.items():
                pool.of(key).inputs.update(sums.inputs)
        for covector, coupling in covectors.pairs:
            if coupling is None:
                unrelated = {}
            else:
                unrelated = coupling.find_unrelated(forward.record, self._sharing)
            descent = make_descent(
                covector=covector,
                adds_inputs=needs_inputs,
                coupling=coupling,
                unrelated=unrelated,
                thread=thread,
            )
            self._pull(descent, pool)
            needs_inputs = False
            if loss_descent is not None:
                self._compare_with_user_pass(loss_descent, covector, pool)
        return pool

    def measure_inputs(self, forward: RecordedPass) -> Pool:
        """Return the sums of what layers saw, and give each weight a block with output factor 1."""
        record = forward.record
        leaves = forward.leaves
        pool = Pool()
        self._add_layer_inputs(pool, record, leaves)
        self._add_compound_inputs(pool, record, leaves)
        for key in pool.sums:
            self._known_inputs.update(key.names)
        self._known_inputs.update(_find_weights_without_rows(record))
        self.partners = {n: (n,) for n in leaves}
        self.diagonals = {n: NO_LAYER for n in leaves if n not in self._known_inputs}
        self.reasons = dict(self.diagonals)
        return pool

    def _add_layer_inputs(
        self, pool: Pool, record: ForwardRecord, leaves: Mapping[str, Tensor]
    ) -> None:
        """Add the inputs' moments of all layers with a trained weight."""
        uses = self._compute_input_moments(record)
        # a weight that is used transposed as well is whitened by what it sees as it is
        untransposed = {u.entry.names["weight"] for u in uses if not u.entry.layer.input_first}
        for use in uses:
            name = use.entry.names["weight"]
            layer = use.entry.layer
            if name is None or use.inputs is None:
                continue
            if layer.input_first and name in untransposed:
                continue
            key = BlockKey(BlockKind.KRONECKER, (name,), is_transposed=layer.input_first)
            _add_inputs(pool, key, layer, use.inputs, leaves[name])

    def _compute_input_moments(self, record: ForwardRecord) -> list[UseMoments]:
        """Return the uses of trained weights; those of linear maps have their inputs' moments."""
        uses = [
            UseMoments(entry, self._sharing, layer_input=_subsample_input(entry))
            for entry in record.entries
            if entry.names.get("weight") and entry.input.numel()  # no rows have no mean
        ]
        linear_uses = [use for use in uses if use.entry.layer.curvature == "kronecker"]
        compute_pending_input_moments(linear_uses)
        return uses

    def _add_compound_inputs(
        self, pool: Pool, record: ForwardRecord, leaves: Mapping[str, Tensor]
    ) -> None:
        """Add the inputs' moments of the trained weights inside compound layers."""
        for call in record.compounds:
            _, taps = call.compound.replay(call.module, call.args, call.kwargs)
            for tap in taps:
                name = record.name(tap.weight)
                if name is not None:
                    key = BlockKey(BlockKind.KRONECKER, (name,))
                    moments = compute_tap_moments(tap, self._sharing)
                    _add_inputs(pool, key, call.compound, moments, leaves[name])

    def _pull(self, descent: Descent, pool: Pool) -> None:
        """Pull one covector back from the output and add up what is measured."""
        signature = descent.signature(self._separates_samples)
        route = self._routes.get(signature)
        if route is not None and self._follow(descent, route, pool):
            return
        # the first time, or another way through the same layers
        if descent.thread is not None:
            descent.thread.join()
            descent.thread = None
        proven = self._prove_everywhere(descent, pool) or self._prove(descent, pool)
        if proven.is_certain:
            self._routes[signature] = proven.route
            if len(self._routes) > _LIMITS.routes:
                del self._routes[next(iter(self._routes))]

    def _follow(self, descent: Descent, route: Route, pool: Pool) -> bool:
        """Pull a covector back on a known route and add its sums.

        Return False, with nothing added, if the covector took another route.
        """
        cotangent_pass = CotangentPass(descent, route.layouts, route.plan.diagonals, self.bases)
        diagonals = [n for n in route.plan.diagonals if n in descent.forward.leaves]
        cotangent_pass.run(route.last_uses, diagonals)
        if cotangent_pass.reached_uses != route.reached:
            return False
        if descent.forward.record.compounds:
            add_map_moments(_replay_compounds(cotangent_pass), descent, pool, route.plan)
        self._adopt_plan(route.plan)
        if descent.thread is None:
            self._add(cotangent_pass, route.plan, pool)
        else:
            descent.thread.do(partial(self._add, cotangent_pass, route.plan, pool))
        return True

    def _prove_everywhere(self, descent: Descent, pool: Pool) -> ProvenRoute | None:
        """Return a route that another covector has proven, one without zeros, and add the sums.

        A covector with zeros, as at positions that do not count, may miss a part of the model and
        so prove too much. Return None, with nothing added, for a covector without zeros, and for
        one that takes another route.
        """
        is_large = descent.forward.record.head is not None  # drawn at all positions that count
        if is_large or descent.coupling is not None or bool(descent.covector.all()):
            return None
        proven = self._prove(
            replace(descent, covector=descent.draw_everywhere(), adds_inputs=False), Pool()
        )
        if self._follow(descent, proven.route, pool):
            return proven
        return None

    def _prove(self, descent: Descent, pool: Pool) -> ProvenRoute:
        """Return the route of this covector with the structure proven on it, and add its sums."""
        self.proofs += 1
        forward = descent.forward
        proof = Proof()
        layouts = descent.locate_samples(self._separates_samples)
        cotangent_pass = CotangentPass(descent, layouts, descent.unrelated, self.bases, proof)
        cotangent_pass.run([], list(forward.leaves))
        if any(g is None for g in cotangent_pass.gradients.values()):
            refuse_reentrant(forward.root)
        replays = _replay_compounds(cotangent_pass)
        replays.prove(proof)
        _check_gradients(cotangent_pass.gradients)
        unexplained = proof.find_unexplained(cotangent_pass.gradients)
        plan = self._make_plan(descent, layouts, replays, unexplained)
        last_uses = find_last_edges(forward.root, forward.edges[: len(layouts)])
        add_map_moments(replays, descent, pool, plan)
        self._adopt_plan(plan)
        self._add(cotangent_pass, plan, pool)
        explained = {n: g for n, g in cotangent_pass.gradients.items() if n not in plan.diagonals}
        norms = _compute_norms(explained)
        is_certain = all(bool(norm > 0) for norm in norms)  # a gradient of zero proves nothing
        return ProvenRoute(Route(plan, layouts, cotangent_pass.reached_uses, last_uses), is_certain)

    def _make_plan(
        self,
        descent: Descent,
        layouts: Sequence[str],
        replays: CompoundReplays,
        unexplained: Mapping[str, str],
    ) -> BlockPlan:
        """Return the plan of blocks for these uses; `unexplained` gradients become diagonals.

        Where there are such, the model's layers listen to functions from the next pass on.
        """
        entries = descent.forward.record.entries
        has_output_rows = self._options.has_output_rows
        uses = [
            make_layer_use(e.layer, e.module, e.names, has_output_rows=has_output_rows)
            for e in entries
        ]
        uses += list_map_uses(replays)
        remarks = {
            **describe_function_uses(entries),
            **replays.describe_omissions(),
            **describe_unknown_layouts(entries, layouts),
        }
        diagonals = {
            **find_conflicting_forms(uses),
            **_name_hooks(unexplained, descent.forward.leaves),
            **descent.unrelated,
        }
        layers = descent.forward.record.layers
        if any(diagonals.values()) and not layers.is_listening:
            layers.is_listening = True  # a function may use what no module showed
        return BlockPlan(uses, diagonals, self._options.joint, remarks)

    def _adopt_plan(self, plan: BlockPlan) -> None:
        """Let the parameters of this plan have its blocks from now on."""
        if plan is self._plan:
            return
        self._plan = plan
        self.diagonals = {n: reason for n, reason in plan.diagonals.items() if reason}
        planned = self._find_partners(plan)
        unplanned: dict[str, tuple[str, ...]] = {}
        for name, partners in self.partners.items():
            if planned.keys().isdisjoint(partners):
                unplanned[name] = partners
        self.partners = {**unplanned, **planned}
        self.reasons = {n: r for n, r in self.reasons.items() if n not in planned} | plan.reasons

    def _find_partners(self, plan: BlockPlan) -> dict[str, tuple[str, ...]]:
        """Return the parameters of each one's block; unused ones that have a block stay in it."""
        partners: dict[str, tuple[str, ...]] = {}
        for key in plan.keys:
            for name in key.names:
                is_unused = name in plan.diagonals and not plan.diagonals[name]
                if not is_unused or name not in self.partners:
                    partners[name] = key.names
        return partners

    def _add(self, cotangent_pass: CotangentPass, plan: BlockPlan, pool: Pool) -> None:
        """Add what one pass measured, and the squared gradients of parameters held as diagonals."""
        descent = cotangent_pass.descent
        cotangent_pass.add_to(pool, plan)
        forward = descent.forward
        names = [n for n in plan.diagonals if n in forward.leaves]
        gradients = [cotangent_pass.gradients.get(n) for n in names]
        if descent.coupling is not None and names:  # theirs is another covector
            related = descent.coupling.relate_covector(descent.covector, descent.axis)
            gradients = pull_back(forward.root, related, [forward.leaves[n] for n in names])
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                flat = gradient.flatten().to(compute_dtype(gradient.dtype))
                sums = pool.of(BlockKey(BlockKind.DIAGONAL, (name,)))
                sums.add(DIAGONAL, flat.square()[:, None, None])


def _replay_compounds(cotangent_pass: CotangentPass) -> CompoundReplays:
    """Return the compound layers that the covector reached.

    Where the metric relates samples their parameters are held as diagonals: none is replayed.
    """
    cotangents: Sequence[Tensor | None] = cotangent_pass.cotangents
    if cotangent_pass.descent.coupling is not None:
        cotangents = [None] * len(cotangents)
    return CompoundReplays(cotangent_pass.descent.forward, cotangents)


def _find_weights_without_rows(record: ForwardRecord) -> list[str]:
    """Return the weights of known layers that were called with empty inputs, as idle experts."""
    weights = [entry.names.get("weight") for entry in record.entries if not entry.input.numel()]
    return [name for name in weights if name is not None]


def _add_inputs(
    pool: Pool, key: BlockKey, layer: Layer | Compound, moments: Moments, weight: Tensor
) -> None:
    """Add the moments of a weight's inputs, and a diagonal of ones as its output factor."""
    sums = pool.of(key)
    inputs, outputs = get_factor_keys(layer, key)
    sums.add(inputs, moments)
    groups = moments.second.shape[0]
    columns = moments.second.shape[-1]
    if outputs not in sums.values:
        rows = weight.numel() // (groups * columns)
        sums.values[outputs] = moments.first.new_ones(groups, rows)


def _name_hooks(reasons: Mapping[str, str], leaves: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the reasons, with a gradient hook named where one may explain the difference."""
    named = dict(reasons)
    for name, reason in reasons.items():
        if reason == ELSEWHERE and leaves[name]._backward_hooks:
            named[name] = HOOKED
    return named


def _subsample_input(entry: Entry) -> LayerInput:
    """Return what a layer saw at some positions, enough for an inverse root of its input factor.

    They are single positions of a linear layer, and whole samples of a convolution.
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
        return LayerInput(module, x, None)
    stride = max(1, positions // max(_LIMITS.positions, 2 * columns))
    return LayerInput(module, x[:: min(len(x), stride)], None)


def _check_gradients(gradients: Mapping[str, Tensor | None]) -> None:
    """Refuse sparse gradients, and raise NotFinite where one is not finite."""
    for name, gradient in gradients.items():
        refuse_sparse(name, gradient)
    if not all(torch.isfinite(norm) for norm in _compute_norms(gradients)):
        raise NotFinite


def _compute_norms(gradients: Mapping[str, Tensor | None]) -> Sequence[Tensor]:
    """Return the lengths of the gradients that have entries."""
    nonempty = [g for g in gradients.values() if g is not None and g.numel()]
    if nonempty:
        return torch._foreach_norm(nonempty)
    return []
