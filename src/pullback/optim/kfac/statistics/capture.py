"""Statistics from ordinary forward and backward passes, pooled until the next step.

While the loss's gradient passes the model's output, covectors of the metric are sent down the same
graph. The user's loop does not change.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ...._core.capture import (
    Watch,
    find_trained_tensor,
    move_samples_first,
    select_returned_output,
    unwrap_model,
)
from ...._core.errors import PullbackError
from ...._core.flags import DeferredFlags
from ...._core.graph import (
    call_on_second_pass,
    reaches_parameters,
    refuse_reentrant,
    skip_dtype_casts,
)
from ...._core.groups import active_wrapper
from ...._core.space import compute_dtype
from ....grams import RowBlock
from ....grams.kronecker.packed_matrix import FactorMatrix, pack
from ....maps.layers import AffineBlock
from ....maps.record import ForwardRecord, Sites
from ....maps.roles import assign_roles
from ...checks import warn_derivatives, warn_mismatch
from ..assignment import Assignment
from ..factors.block import DIAGONAL, BlockKey, FactorKey
from ..options import Options
from ..rules import Statistics
from .cotangents import AllSums, measurement_context
from .covectors import Descent, NotFinite, draw_signs, generate_covectors, make_covectors
from .launch_thread import LaunchThread, sets_precision
from .record import RepeatedCall
from .structure import BlockStructure
from .sums import DERIVED, MISSED, UNREACHED, Pool, means

_LARGE = 2**24  # entries of an output from which on it is computed twice instead of kept
_ENGINE: Any = torch.autograd.Variable._execution_engine
_CHECKS = 3  # of the first gradients' length; the first one shows what loss it is
_SCALED = 1e3  # how much longer than the metric says a loss's gradient is, if it was scaled

#: the layers of a pass; or how to run it again, if it ran in compiled code
Source = ForwardRecord | RepeatedCall


class PendingPass:
    """What is kept of a forward pass until its output z, of this node, receives a gradient.

    The graph owns it, by a hook: so it owns neither z nor z's node, and is gone with the graph.
    `inputs` are the tensors among the call's arguments, for metrics that depend on them.
    """

    def __init__(
        self, z: Tensor, node: Any, number: int, source: Source, inputs: Sequence[Tensor]
    ) -> None:
        self.source: Source | None = source
        self.inputs = inputs
        self._value = z.detach()
        self._number = number
        self._dtype = z.dtype
        self._version = z._version
        if node is None:
            self._leaf = z
        else:
            self._leaf = None
        if isinstance(source, ForwardRecord) and node is not None:
            if z.numel() >= _LARGE and node is z.grad_fn and source.find_head(node):
                # while the loss is differentiated there would be one more tensor of this size
                self._value = None
            source.release(node)

    def clear(self) -> None:
        """Let go of everything; a user may keep the graph for long."""
        self.source = self._leaf = self._value = None
        self.inputs = ()

    def value(self) -> Tensor:
        if self._value is None:
            assert isinstance(self.source, ForwardRecord)
            return self.source.head_output(self._dtype)
        if self._value._version != self._version:
            raise PullbackError(
                "The model's output was changed in place",
                "the metric at the output needs the values that the model gave",
                "Change a copy: z = z + 1, not z += 1",
            )
        return self._value

    def root(self) -> Tensor | GradientEdge:
        """Return where z stands in the graph; only while its hook runs."""
        if self._leaf is not None:
            return self._leaf
        return GradientEdge(torch._C._current_autograd_node(), self._number)


class StatisticsCapture:
    """Watches a model and, when statistics are due, adds up what the options ask for.

    The first forward pass shows the roles of parameters, and the `table` tells which are measured.
    `counter` gives a number that is another one at each step, for the random draws. Where there are
    `several` processes, one of them may have no samples. Where parameters are sharded, `whole`
    gathers them: then every pass is repeated with these.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        table: Assignment,
        counter: Callable[[], int],
        several: bool = False,
        whole: Callable[[], dict[str, Tensor]] | None = None,
    ) -> None:
        self.model = model
        self.table = table
        self._options = options
        self._counter = counter
        self._several = several
        self._gather = whole
        #: whether `DistributedDataParallel` made the last call that can give gradients, and
        #: averages these
        self.wrapped = False
        #: called where statistics are complete, while the backward pass goes on
        self.completed: Callable[[], None] | None = None
        self._syncs = False  # whether the last call's gradients are averaged over processes
        self.pool = Pool()
        self.structure = BlockStructure(options)
        self._chosen: dict[str, Tensor] = {}
        self._forget_leaves()
        self.choose(table.measured)
        self._open: weakref.WeakSet[PendingPass] = weakref.WeakSet()
        self._begun: tuple[Source, list[Tensor]] | None = None
        #: `due` says that the next forward pass shall give statistics
        self.watch = Watch(self, model)
        self._checks = _CHECKS
        self._whole = False  # whether all positions of the last pass counted
        #: whether a second thread measures while a backward pass goes on; None for on a GPU
        self.overlaps: bool | None = None

    @property
    def wanted(self) -> bool:
        """Whether it is due, or a parameter was frozen or unfrozen since its block was made."""
        return self.watch.wants_compiled_calls or self.lacking

    @property
    def lacking(self) -> bool:
        """Whether a parameter that takes part has no block yet, or one with others."""
        leaves = self.leaves()
        if leaves is not self._covered and self.structure.covers(leaves):
            self._covered = leaves
        return leaves is not self._covered

    def choose(self, names: Iterable[str]) -> None:
        """Let only these parameters take part; the others are constants."""
        params = dict(unwrap_model(self.model).named_parameters())
        chosen: dict[str, Tensor] = {n: params[n] for n in names}
        is_same = list(chosen) == list(self._chosen)
        if is_same and all(map(is_, chosen.values(), self._chosen.values())):
            return
        self._chosen = chosen
        self._forget_leaves()

    def _forget_leaves(self) -> None:
        self._leaves: dict[str, Tensor] = {}
        self._flags: list[bool] = []
        self._sites: Sites | None = None
        self._covered: dict[str, Tensor] | None = None

    def leaves(self) -> dict[str, Tensor]:
        """Return the parameters that require a gradient, the same object while they do."""
        flags = [p.requires_grad for p in self._chosen.values()]
        if flags != self._flags:
            self._leaves = {n: p for n, p in self._chosen.items() if p.requires_grad}
            self._flags = flags
        return self._leaves

    def sites(self) -> Sites | None:
        """None where the model holds other tensors, as in `torch.func.functional_call`."""
        model = unwrap_model(self.model)
        if self._sites is not None and not self._sites.current:
            self._sites = None
            self.table.is_stale = True
        if self._sites is None:
            self._sites = Sites(model, ForwardRecord.kind)
        now = dict(model.named_parameters())
        if all(now.get(n, p) is p for n, p in self._chosen.items()):
            return self._sites
        return None

    def close(self) -> None:
        self.watch.close()
        self.reset()

    def clear(self) -> None:
        """Forget what was gathered: it belonged to gradients that were dropped."""
        self.pool = Pool(missed=MISSED[5] if self._waiting else MISSED[0])
        self.watch.reset()

    def reset(self) -> None:
        """Forget the passes that still wait as well: the parameters they used have changed."""
        for pending in list(self._open):
            pending.clear()
        self.clear()
        self.watch.called = False

    def generator(self, device: torch.device) -> torch.Generator:
        """Return a generator that follows from the counter: nothing random has to be saved."""
        seed = (self._counter() * 1_000_003 + self.pool.calls) % 2**63
        return torch.Generator(device).manual_seed(seed)

    def begin_call(self, args: Any, kwargs: Any, compiled: bool) -> Any:
        """Record the layers of a forward pass, if it can give statistics."""
        if torch.is_grad_enabled():
            wrapper = active_wrapper()
            self.wrapped = wrapper is not None
            self._syncs = getattr(wrapper, "require_backward_grad_sync", False)
        if not self.wanted:
            return None
        stack = contextlib.ExitStack()
        if not compiled:
            try:  # what the module calls may be compiled, and its layers' hooks would not fire
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            except RuntimeError:
                compiled = True  # by the caller, whose code was left for the hook
        with stack:
            if self._gather:
                sites = None
            else:
                sites = self.sites()
            reason = ""
            if (sites is None and not self._gather) or peek_interpreter_stack() is not None:
                reason = MISSED[1]
            elif not torch.is_grad_enabled():
                reason = MISSED[2]
            elif not self.model.training:
                reason = MISSED[3]
            if reason:
                self.pool.miss(reason)
                return None
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            if self._gather is not None:
                self._begun = RepeatedCall(self.model, args, kwargs, self._gather()), tensors
            elif compiled:
                self._begun = RepeatedCall(self.model, args, kwargs), tensors
            else:
                record = self._new_record(self.leaves(), sites)
                self._begun = stack.enter_context(record), tensors
            return stack.pop_all()
        return None

    def _new_record(self, leaves: dict[str, Tensor], sites: Sites | None = None) -> ForwardRecord:
        """Return the record of a pass, which follows outputs if a parameter has no role yet."""
        record = ForwardRecord(unwrap_model(self.model), leaves, sites)
        if self.table.lacks_role(leaves):
            record.follow_outputs()
        return record

    def _find_roles(self, record: ForwardRecord, output: Any, leaves: dict[str, Tensor]) -> None:
        """Give the parameters' roles to the table, and go on with those that are measured."""
        if record.outputs is None:
            return
        self.table.add_roles(assign_roles(unwrap_model(self.model), record, output, leaves))
        record.stop_following()
        if self._chosen.keys() != {*self.table.measured}:
            self.choose(self.table.measured)
            record.restrict({n: leaves[n] for n in self.leaves()})

    def _find_output(self, output: Any) -> Tensor:
        """Return the tensor at which statistics begin.

        Rules that read no metric take the first trained one of a tuple or dict by themselves.
        """
        options = self._options
        if options.output is None and not options.reads_metric:
            tensor = find_trained_tensor(output)
            if tensor is not None:
                return tensor
        return select_returned_output(output, options.output)

    def end_call(self, output: Any) -> None:
        """Wait for the gradient to come back to the output."""
        begun = self._begun
        self._begun = None
        if begun is None:
            return
        if isinstance(begun[0], ForwardRecord):
            self._find_roles(begun[0], output, self.leaves())
            if not self.leaves():
                return
        z = self._find_output(output)
        me = weakref.ref(self)
        if self._several and not z.numel():
            if z.requires_grad:
                z.register_hook(lambda _: (held := me()) and held.complete())
            return
        move_samples_first(z, self._options.batch_dim)  # refuses what no metric is of
        if not z.requires_grad:
            self.pool.miss(MISSED[4])
            return
        self.pool.miss(MISSED[5])
        node, number = skip_dtype_casts(z)
        pending = PendingPass(z, node, number, *begun)
        self._open.add(pending)

        # the graph holds this function, so it must not hold the graph
        def receive(cotangents: Any) -> None:
            if isinstance(cotangents, Tensor):
                delta = cotangents
            else:
                delta = cotangents[number]
            if delta is not None and (capture := me()) and pending.source is not None:
                capture.receive(pending, delta)

        if node is None or node is z.grad_fn:
            z.register_hook(receive)
        else:
            node.register_prehook(receive)

    @torch._disable_dynamo
    def receive(self, pending: PendingPass, cotangent: Tensor) -> None:
        """Take the statistics of a pass, whose output has received its gradient."""
        source = pending.source
        with source.whole() if isinstance(source, RepeatedCall) else contextlib.nullcontext():
            complete = self._measure(pending, cotangent)
        if complete:
            self.complete()

    def complete(self) -> None:
        """Tell that statistics are complete, unless another pass is to be added."""
        if self.completed is not None and self._syncs and not self._waiting:
            with torch.no_grad():
                self.completed()

    @property
    def _waiting(self) -> bool:
        """Whether the output of a pass has not received its gradient yet."""
        return any(p.source is not None for p in self._open)

    def _measure(self, pending: PendingPass, cotangent: Tensor) -> bool:
        """Add the sums of a pass; False where there are none, or not yet."""
        leaves = self.leaves()
        root = pending.root()
        # a gradient by the inputs alone: a penalty, an attack
        if self._gather is None and not reaches_parameters(leaves):
            refuse_reentrant(root)
            self._note_derivative()
            return False
        record = pending.source
        inputs = pending.inputs
        proofs = self.structure.proofs
        was_stale = self.table.is_stale
        empirical = self._options.fisher == "empirical"
        # whether the pass under way might do by itself: it has the layers, and no graph of its own
        alone = empirical and isinstance(record, ForwardRecord) and not record.compounds
        alone = alone and isinstance(root, GradientEdge) and not torch.is_grad_enabled()
        if isinstance(record, RepeatedCall):
            if record.params is not None:
                leaves = {n: record.params[n] for n in leaves}
            call = record
            record = self._new_record(leaves)
            with self.watch.pause_all(), torch.compiler.set_stance("force_eager"):
                output = call(record)
                self._find_roles(record, output, leaves)
                leaves = {n: leaves[n] for n in self.leaves()}
                root = self._find_output(output)
            z = [root.detach()]
            cotangent = cotangent.to(root.dtype)
        else:
            z = [pending.value()]
        pending.clear()
        if not leaves:
            return False
        assert record is not None
        if self._options.reads is Statistics.INPUTS:
            self.pool.calls += 1
            with torch.no_grad():
                self.pool.add(self.structure.measure_inputs(record, leaves).sums, 1.0)
            return True
        with measurement_context(cotangent.device):
            random = self.generator(cotangent.device)
            slope = cotangent.detach()
            self._check_loss(z[0], slope, random)
            self.pool.calls += 1
            large = z[0].numel() >= _LARGE
            deferred = self._whole and slope.is_cuda and (record.head is not None or not large)
            deferred = deferred and not empirical  # it cannot be measured again
            if deferred and not large:
                kept = z[0]
            else:
                kept = None
            dtype = z[0].dtype
            thread = self._second_thread(record, slope.device)
            try:  # z is not held any longer than it takes to draw from it
                found = make_covectors(self._options, z.pop(), slope, inputs, random, deferred)
                given = root, slope, record, leaves, self._options.sharing, found.keep
                if alone:
                    own = Descent(*given, inputs=True)
                else:
                    own = None
                add = partial(self._add_along, weakref.ref(self), self.pool, found.samples)
                if own is not None and self.structure.measure_along(own, add):
                    return False
                fresh = self.structure.measure(root, found, record, leaves, own, thread)
                if isinstance(found.whole, DeferredFlags) and not all(found.whole.flags()):
                    if kept is None:
                        value = record.head_output(dtype)
                    else:
                        value = kept
                    random.manual_seed(random.initial_seed())
                    found = make_covectors(self._options, value, slope, inputs, random)
                    add = partial(self._add_along, weakref.ref(self), self.pool, found.samples)
                    fresh = self.structure.measure(root, found, record, leaves, None, thread)
            except NotFinite:
                self.pool.samples = torch.nan
                return True
            self._whole = found.whole is not False
            if proofs and self.structure.proofs > proofs and not was_stale:
                self.table.is_stale = True  # the next pass shows roles on this new way
        if thread is not None:
            finish = partial(add, fresh.sums, thread)
            if self._several:  # sums over processes begin at once
                finish()
            else:
                _ENGINE.queue_callback(finish)
            return False
        self.pool.add(fresh.sums, found.samples)
        return True

    def _second_thread(self, record: ForwardRecord, device: torch.device) -> LaunchThread | None:
        """Return what measures during the backward pass; None where that could change a result."""
        once = self._options.metric.couples_samples or self._options.fisher == "empirical"
        if self.overlaps is None:
            wanted = device.type == "cuda"
        else:
            wanted = self.overlaps
        if once or record.compounds or not wanted or sets_precision(record.entries):
            return None
        return LaunchThread(device, record.entries)

    @staticmethod
    def _add_along(
        me: weakref.ref[StatisticsCapture],
        pool: Pool,
        samples: Any,
        sums: AllSums,
        thread: LaunchThread | None = None,
    ) -> None:
        """Add what was measured along the user's own pass, at its end."""
        capture = me()
        if thread is not None and not thread.join():
            if capture is not None:
                capture.overlaps = False  # from now on it is measured before the pass goes on
            return
        pool.add(sums, samples)
        if capture is not None:
            capture.complete()

    def _note_derivative(self) -> None:
        """Note a gradient that does not reach the parameters, and later whether a loss uses it."""
        self.pool.miss(UNREACHED)
        if torch.is_grad_enabled():
            pool = weakref.ref(self.pool)

            def used() -> None:
                if (held := pool()) is not None:
                    held.miss(DERIVED)

            call_on_second_pass(torch._C._current_autograd_node(), used)

    def _check_loss(self, z: Tensor, slope: Tensor, random: torch.Generator) -> None:
        """Warn of the first gradients where they are of another loss, or far longer: scaled."""
        options = self._options
        if self._checks == 0:
            return
        value, own = (move_samples_first(t, options.batch_dim) for t in (z, slope))
        if self._checks == _CHECKS:
            warn_mismatch(options.metric, value, own, stacklevel=2)
        self._checks -= 1
        if options.fisher != "empirical" or options.scaled:
            return
        drawn = generate_covectors(replace(options, fisher="mc", draws=1), value, own, None, random)
        typical = next(drawn)[0].norm(dtype=compute_dtype(own.dtype))
        if options.reduction == "mean":
            count = options.metric.samples(value)
        else:
            count = 1
        ratio = count * own.norm(dtype=typical.dtype) / typical
        if bool(typical > 0) and float(ratio) > _SCALED:
            self._checks = 0
            warnings.warn(
                f"The loss's gradient is about {ratio:.0e} times as long as the metric says. If "
                'the loss is scaled, give KFAC grad_scaler=...: fisher="empirical" takes the '
                "gradient as it is.",
                RuntimeWarning,
                stacklevel=2,
            )

    def take(self, loss_scale: float) -> dict[BlockKey, dict[FactorKey, FactorMatrix]] | None:
        """Return the means of what was pooled since the last step, and begin anew.

        "sum" multiplies them by the samples. None where nothing finite was met.
        """
        pool = self.pool
        if pool.missed == DERIVED:
            warn_derivatives(stacklevel=2)
        self.clear()
        if not pool.sums:
            if pool.samples > 0:
                return {}
            return None
        mean = self._options.reduction == "mean"
        if mean:
            scale = 1.0
        else:
            scale = pool.samples
        if self._options.fisher == "empirical":  # a mean's own cotangents are divided by N
            scale = pool.samples ** (2 if mean else 1) / loss_scale**2
        return means(pool, scale)


def averaged_parts(
    parts: Sequence[RowBlock], options: Options, generator: torch.Generator
) -> dict[BlockKey, dict[FactorKey, Any]]:
    """Return means for losses stated on derivatives of the network: one Kronecker product per term.

    Each derivative that a term carries forward is one more place that shares a layer's weight, with
    the homogeneous coordinate 1 at the value and 0 at its derivatives.
    """
    pool = Pool()
    for number, part in enumerate(parts):
        value = part.linearization.value
        if options.fisher == "mc":
            shape = (1, len(value), *part.factor.white)
            given = part.factor.apply(draw_signs(shape, value, generator))
        else:
            given = part.factor.covectors(value)
        for block in part.linearization.pullback_factored(given).blocks.values():
            if isinstance(block, AffineBlock) and block.weight is not None:
                held = pool.of(BlockKey("kronecker", block.names))
                sides = block.sides(options.sharing.longest)
                for name, side in zip(("left", "right"), sides, strict=True):
                    held.values[FactorKey(f"term {number}", name)] = pack(side)
                continue
            for name, rows in block.rows().items():
                squares = rows.square().sum((0, 1))[:, None, None]
                pool.of(BlockKey("diagonal", (name,))).add(DIAGONAL, squares)
    return {key: sums.values for key, sums in pool.sums.items()}
