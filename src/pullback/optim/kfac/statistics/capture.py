"""Statistics from ordinary forward and backward passes, pooled until the next step.

While the loss's gradient passes the model's output, covectors of the metric are sent down the same
graph. The user's loop does not change.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ...._core.capture import (
    Watch,
    await_cotangent,
    find_trained_tensor,
    is_input_derivative,
    move_samples_first,
    select_returned_output,
    unwrap_model,
)
from ...._core.flags import DeferredFlags
from ...._core.graph import Root
from ...._core.groups import active_wrapper
from ...._core.space import compute_dtype
from ....grams.kronecker.packed_matrix import FactorMatrix
from ....maps.record import ForwardRecord, ModelLayers, RecordedPass, find_factor_layer
from ....maps.roles import assign_roles
from ...checks import find_user_stacklevel, warn_derivatives
from ...loss_checks import (
    OutputGradient,
    warn_mismatch,
    warn_missing_batch_axis,
    warn_squared_error,
)
from ..assignment import Assignment
from ..factors.block import BlockKey, FactorKey
from ..options import Options
from ..rules import Statistics
from .cotangents import AllSums, measurement_context
from .covectors import Covectors, NotFinite, generate_covectors, make_covectors
from .descent import Descent
from .launch_thread import LaunchThread, sets_precision
from .passes import PendingPass, ReceivedPass, Source, StartedCall
from .repeated_call import RepeatedCall
from .structure import BlockStructure
from .sums import Obstacle, Pool, compute_means

_ENGINE: Any = torch.autograd.Variable._execution_engine


@dataclass(frozen=True)
class CaptureLimits:
    """Bounds on what a loss's gradient may look like."""

    #: how many of the first gradients are checked; the first one shows what loss it is
    checks: int = 3
    #: how much longer than the metric says a loss's gradient is, if it was scaled
    scaled_ratio: float = 1e3


_LIMITS = CaptureLimits()


class MeasuredPass(NamedTuple):
    """The sums of a pass, complete when the thread has done its tasks, and its covectors."""

    sums: AllSums
    covectors: Covectors
    thread: LaunchThread | None


class StatisticsCapture:
    """Watches a model and, when statistics are due, adds up what the options ask for.

    The first forward pass shows the roles of parameters, and the `table` tells which are measured.
    `draw_seed` returns the seed of the random draws, another one at each step. Where parameters are
    sharded, `gather_params` returns whole ones: every pass is repeated with them.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        table: Assignment,
        draw_seed: Callable[[], int],
        gather_params: Callable[[], dict[str, Tensor]] | None = None,
    ) -> None:
        self.model = model
        self.table = table
        self._options = options
        self._draw_seed = draw_seed
        self._gather_params = gather_params
        #: whether `DistributedDataParallel` made the last call that can give gradients, and
        #: averages these
        self.is_wrapped = False
        #: called where statistics are complete, while the backward pass goes on; given where
        #: processes add theirs up, of which one may have no samples
        self.on_complete: Callable[[], None] | None = None
        self._syncs_gradients = (
            False  # whether the last call's gradients are averaged over processes
        )
        self.pool = Pool()
        self.structure = BlockStructure(options)
        self._measured: dict[str, Tensor] = {}
        self._forget_leaves()
        self.set_measured(table.measured)
        self._pending_passes: weakref.WeakSet[PendingPass] = weakref.WeakSet()
        self._started_call: StartedCall | None = None
        self.watch = Watch(self, model)
        self._checks_left = _LIMITS.checks
        self._first_gradient: OutputGradient | None = None  # until the first step reads it
        self._counted_all_positions = False  # whether all positions of the last pass counted
        #: whether a second thread measures while a backward pass goes on; None for on a GPU
        self.overlaps: bool | None = None

    @property
    def wants_statistics(self) -> bool:
        """Whether the next forward pass gives statistics: it was told to, or a block is missing."""
        return self.is_announced or self.lacks_block

    @property
    def is_announced(self) -> bool:
        """Whether the next forward pass was told to give statistics."""
        return self.watch.wants_compiled_calls

    def announce(self, is_due: bool) -> None:
        """Tell the next forward pass whether to give statistics; compiled code is guarded by it."""
        self.watch.wants_compiled_calls = is_due

    @property
    def lacks_block(self) -> bool:
        """Whether a measured parameter has no block yet, or shares one with a frozen parameter."""
        leaves = self.leaves()
        if leaves is not self._covered and self.structure.covers(leaves):
            self._covered = leaves
        return leaves is not self._covered

    def set_measured(self, names: Iterable[str]) -> None:
        """Measure these parameters from now on; all others count as constants."""
        params = dict(unwrap_model(self.model).named_parameters())
        measured: dict[str, Tensor] = {n: params[n] for n in names}
        has_same_names = list(measured) == list(self._measured)
        if has_same_names and all(map(is_, measured.values(), self._measured.values())):
            return
        self._measured = measured
        self._forget_leaves()

    def _forget_leaves(self) -> None:
        self._leaves: dict[str, Tensor] = {}
        self._requires_grad: list[bool] = []
        self._layers: ModelLayers | None = None
        self._covered: dict[str, Tensor] | None = None

    def leaves(self) -> dict[str, Tensor]:
        """Return the measured parameters that require a gradient; the same dict while they do."""
        flags = [p.requires_grad for p in self._measured.values()]
        if flags != self._requires_grad:
            self._leaves = {n: p for n, p in self._measured.items() if p.requires_grad}
            self._requires_grad = flags
        return self._leaves

    def layers(self) -> ModelLayers | None:
        """Return the model's layers; None where it holds other tensors.

        It does in `torch.func.functional_call`. Where layers were replaced, the table is marked as
        stale.
        """
        model = unwrap_model(self.model)
        if self._layers is not None and not self._layers.is_current:
            self._layers = None
            self.table.is_stale = True
        if self._layers is None:
            self._layers = ModelLayers(model, find_factor_layer)
        current = dict(model.named_parameters())
        if all(current.get(n, p) is p for n, p in self._measured.items()):
            return self._layers
        return None

    def close(self) -> None:
        """Stop watching the model, and forget everything."""
        self.watch.close()
        self.reset()

    def clear_pool(self) -> None:
        """Forget what was gathered: it belonged to gradients that were dropped."""
        self.pool = Pool()
        if self._has_pending:
            self.pool.note_obstacle(Obstacle.OUTPUT_NOT_REACHED)
        self.watch.reset()

    def reset(self) -> None:
        """Forget the passes that still wait as well: the parameters they used have changed."""
        for pending in list(self._pending_passes):
            pending.clear()
        self.clear_pool()
        self.watch.called = False

    def generator(self, device: torch.device) -> torch.Generator:
        """Return a generator that follows from the step's seed: no random state has to be saved."""
        seed = (self._draw_seed() * 1_000_003 + self.pool.calls) % 2**63
        return torch.Generator(device).manual_seed(seed)

    def begin_call(self, args: Any, kwargs: Any, compiled: bool) -> Any:
        """Return a context that records the layers of a call, or None if it gives no statistics.

        `Watch` calls this before each forward pass of the model, and `end_call` after it.
        """
        if torch.is_grad_enabled():
            self._note_wrapper()
        if not self.wants_statistics:
            return None
        stack = contextlib.ExitStack()
        if not compiled:
            # what the module calls may be compiled, and its layers' hooks would not fire
            compiled = not _force_eager(stack)
        with stack:
            layers = None
            if not self._gather_params:
                layers = self.layers()
            obstacle = self._find_obstacle(layers)
            if obstacle is not None:
                self.pool.note_obstacle(obstacle)
                return None
            tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            source = self._make_source(args, kwargs, compiled, layers)
            if isinstance(source, ForwardRecord):
                stack.enter_context(source)
            self._started_call = StartedCall(source, tensors)
            return stack.pop_all()
        return None

    def _note_wrapper(self) -> None:
        """Note whether `DistributedDataParallel` makes this call, and averages its gradients."""
        wrapper = active_wrapper()
        self.is_wrapped = wrapper is not None
        self._syncs_gradients = getattr(wrapper, "require_backward_grad_sync", False)

    def _find_obstacle(self, layers: ModelLayers | None) -> Obstacle | None:
        """Return why a call that begins cannot give statistics, if it cannot."""
        holds_others = layers is None and not self._gather_params
        if holds_others or peek_interpreter_stack() is not None:
            return Obstacle.OTHER_PARAMETERS
        if not torch.is_grad_enabled():
            return Obstacle.WITHOUT_GRADIENTS
        if not self.model.training:
            return Obstacle.EVALUATION_MODE
        return None

    def _make_source(
        self, args: Any, kwargs: Any, compiled: bool, layers: ModelLayers | None
    ) -> Source:
        """Return the record of a call's layers, or how to repeat a call that cannot be recorded."""
        if self._gather_params is not None:
            return RepeatedCall(self.model, args, kwargs, self._gather_params())
        if compiled:
            return RepeatedCall(self.model, args, kwargs)
        return self._new_record(self.leaves(), layers)

    def _new_record(
        self, leaves: dict[str, Tensor], layers: ModelLayers | None = None
    ) -> ForwardRecord:
        """Return the record of a pass, which follows outputs if a parameter has no role yet."""
        if layers is None:
            layers = ModelLayers(unwrap_model(self.model), find_factor_layer)
        record = ForwardRecord(layers, leaves)
        if self.table.lacks_role(leaves):
            record.follow_outputs()
        return record

    def _find_roles(self, record: ForwardRecord, output: Any, leaves: dict[str, Tensor]) -> None:
        """Give the parameters' roles to the table, and go on with those that are measured."""
        if record.outputs is None:
            return
        self.table.add_roles(assign_roles(unwrap_model(self.model), record, output, leaves))
        record.stop_following()
        if self._measured.keys() != {*self.table.measured}:
            self.set_measured(self.table.measured)
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
        call = self._started_call
        self._started_call = None
        if call is None:
            return
        if isinstance(call.source, ForwardRecord):
            self._find_roles(call.source, output, self.leaves())
            if not self.leaves():
                return
        z = self._find_output(output)
        if self.on_complete is not None and not z.numel():
            self._await_empty_gradient(z)
            return
        move_samples_first(z, self._options.batch_dim)  # refuses what no metric is of
        if not z.requires_grad:
            self.pool.note_obstacle(Obstacle.INDEPENDENT_OUTPUT)
            return
        self.pool.note_obstacle(Obstacle.OUTPUT_NOT_REACHED)
        self._await_gradient(z, call)

    def _await_empty_gradient(self, z: Tensor) -> None:
        """Tell that statistics are complete when the gradient passes an output of no samples."""
        me = weakref.ref(self)

        def complete(_: Tensor) -> None:
            capture = me()
            if capture is not None:
                capture.notify_if_complete()

        if z.requires_grad:
            z.register_hook(complete)

    def _await_gradient(self, z: Tensor, call: StartedCall) -> None:
        """Take the statistics of a call when the gradient passes its output."""
        me = weakref.ref(self)
        pending = PendingPass(z, call)
        self._pending_passes.add(pending)

        def receive(cotangent: Tensor) -> None:
            capture = me()
            if capture is not None and pending.source is not None:
                capture.receive(pending, cotangent)

        await_cotangent(z, receive)

    @torch._disable_dynamo
    def receive(self, pending: PendingPass, cotangent: Tensor) -> None:
        """Take the statistics of a pass, whose output has received its gradient."""
        with contextlib.ExitStack() as stack:
            if isinstance(pending.source, RepeatedCall):
                stack.enter_context(pending.source.whole())
            is_complete = self._measure(pending, cotangent)
        if is_complete:
            self.notify_if_complete()

    def notify_if_complete(self) -> None:
        """Tell that statistics are complete, unless another pass is to be added."""
        if self.on_complete is not None and self._syncs_gradients and not self._has_pending:
            with torch.no_grad():
                self.on_complete()

    @property
    def _has_pending(self) -> bool:
        """Whether the output of a pass has not received its gradient yet."""
        return any(p.source is not None for p in self._pending_passes)

    def _measure(self, pending: PendingPass, cotangent: Tensor) -> bool:
        """Add the sums of a pass; return False where there are none, or they are added later."""
        root = pending.root()
        if self._gather_params is None and is_input_derivative(self.leaves(), self._make_note()):
            self.pool.note_obstacle(Obstacle.PARAMETERS_NOT_REACHED)
            return False
        proofs = self.structure.proofs
        was_stale = self.table.is_stale
        received = self._open_pass(pending, root, cotangent)
        if not received.forward.leaves:
            return False
        if self._options.reads is Statistics.INPUTS:
            self._add_inputs(received)
            return True
        try:
            with measurement_context(received.cotangent.device):
                measured = self._measure_covectors(received)
        except NotFinite:
            self.pool.samples = torch.nan
            return True
        if measured is None:
            return False
        self._counted_all_positions = measured.covectors.counts_all is not False
        if proofs and self.structure.proofs > proofs and not was_stale:
            self.table.is_stale = True  # the next pass shows roles on this new way
        return self._add_measured(measured)

    def _open_pass(self, pending: PendingPass, root: Root, cotangent: Tensor) -> ReceivedPass:
        """Return what is measured of a pass; that of a repeated call is recorded now."""
        source = pending.source
        assert source is not None
        if isinstance(source, RepeatedCall):
            received = self._repeat_call(source, cotangent, pending.inputs)
        else:
            received = ReceivedPass(
                forward=RecordedPass(root, source, self.leaves()),
                cotangent=cotangent,
                inputs=pending.inputs,
                output=pending.value(),
                allows_user_pass=self._allows_user_pass(root, source),
            )
        pending.clear()
        return received

    def _allows_user_pass(self, root: Root, record: ForwardRecord) -> bool:
        """Whether the pass under way might do by itself: its cotangents are those asked for."""
        return (
            self._options.fisher == "empirical"
            and not record.compounds
            and isinstance(root, GradientEdge)
            and not torch.is_grad_enabled()
        )

    def _repeat_call(
        self, call: RepeatedCall, cotangent: Tensor, inputs: Sequence[Tensor]
    ) -> ReceivedPass:
        """Return the pass of a call that is repeated where its layers can be recorded."""
        leaves = self.leaves()
        if call.params is not None:
            leaves = {n: call.params[n] for n in leaves}
        record = self._new_record(leaves)
        with self.watch.pause_all(), torch.compiler.set_stance("force_eager"):
            output = call(record)
            self._find_roles(record, output, leaves)
            leaves = {n: leaves[n] for n in self.leaves()}
            root = self._find_output(output)
        return ReceivedPass(
            forward=RecordedPass(root, record, leaves),
            cotangent=cotangent.to(root.dtype),
            inputs=inputs,
            output=root.detach(),
            allows_user_pass=False,
        )

    def _add_inputs(self, received: ReceivedPass) -> None:
        """Add the moments of what layers saw, where nothing else is asked for."""
        self.pool.calls += 1
        with torch.no_grad():
            inputs = self.structure.measure_inputs(received.forward)
            self.pool.add(inputs.sums, 1.0)

    def _measure_covectors(self, received: ReceivedPass) -> MeasuredPass | None:
        """Return the sums of a pass over its covectors; None if the user's own pass gives them."""
        options = self._options
        forward = received.forward
        slope = received.cotangent.detach()
        random = self.generator(slope.device)
        assert received.output is not None
        self._check_loss(received.output, slope, received.inputs, random)
        self.pool.calls += 1
        deferred = self._can_defer_count(received, slope)
        retain = deferred and not received.is_large
        thread = self._start_launch_thread(forward.record, slope.device)
        # z is not held any longer than it takes to draw from it
        covectors = make_covectors(
            options,
            received.take_output(retain=retain),
            slope,
            received.inputs,
            random,
            deferred,
        )
        loss_descent = None
        if received.allows_user_pass:
            loss_descent = Descent(
                forward, slope, options.sharing, covectors.counted, adds_inputs=True
            )
            add = partial(self._finish_pass, weakref.ref(self), self.pool, covectors.samples)
            if self.structure.measure_user_pass(loss_descent, add):
                return None
        measure = self.structure.measure
        pool = measure(forward, covectors, loss_descent=loss_descent, thread=thread)
        counts_all = covectors.counts_all
        if isinstance(counts_all, DeferredFlags) and not all(counts_all.flags()):
            random.manual_seed(random.initial_seed())
            output = received.repeat_output()
            covectors = make_covectors(options, output, slope, received.inputs, random)
            pool = measure(forward, covectors, thread=thread)
        return MeasuredPass(pool.sums, covectors, thread)

    def _can_defer_count(self, received: ReceivedPass, slope: Tensor) -> bool:
        """Whether the device may be asked later if all positions count, as in the last pass.

        If they do not, the pass is measured again: its output must be at hand then.
        """
        if self._options.fisher == "empirical":  # it cannot be measured again
            return False
        is_repeatable = received.forward.record.head is not None or not received.is_large
        return self._counted_all_positions and slope.is_cuda and is_repeatable

    def _add_measured(self, measured: MeasuredPass) -> bool:
        """Add the sums of a pass, now or when the thread is done; return whether they are added."""
        samples = measured.covectors.samples
        if measured.thread is None:
            self.pool.add(measured.sums, samples)
            return True
        finish = partial(
            self._finish_pass, weakref.ref(self), self.pool, samples, measured.sums, measured.thread
        )
        if self.on_complete is not None:  # sums over processes begin at once
            finish()
        else:
            _ENGINE.queue_callback(finish)
        return False

    def _start_launch_thread(
        self, record: ForwardRecord, device: torch.device
    ) -> LaunchThread | None:
        """Return a thread that measures meanwhile; None where that could change a result."""
        options = self._options
        if options.metric.couples_samples or options.fisher == "empirical" or record.compounds:
            return None
        overlaps = self.overlaps
        if overlaps is None:
            overlaps = device.type == "cuda"
        if not overlaps or sets_precision(record.entries):
            return None
        return LaunchThread(device, record.entries)

    @staticmethod
    def _finish_pass(
        me: weakref.ref[StatisticsCapture],
        pool: Pool,
        samples: Any,
        sums: AllSums,
        thread: LaunchThread | None = None,
    ) -> None:
        """Add the sums of a pass that is over, and of the thread's tasks, which it waits for."""
        capture = me()
        if thread is not None and not thread.join():
            if capture is not None:
                capture.overlaps = False  # from now on it is measured before the pass goes on
            return
        pool.add(sums, samples)
        if capture is not None:
            capture.notify_if_complete()

    def _make_note(self) -> Callable[[], None]:
        """Return a function that notes that the loss contains derivatives by the inputs.

        It notes them in the pool of its time: `zero_grad` between a loss and its backward pass
        has emptied the one of now.
        """
        me = weakref.ref(self)

        def note_use() -> None:
            capture = me()
            if capture is not None:
                capture.pool.note_obstacle(Obstacle.INPUT_DERIVATIVES)

        return note_use

    def _check_loss(
        self, z: Tensor, slope: Tensor, inputs: Sequence[Tensor], random: torch.Generator
    ) -> None:
        """Warn of the first gradients where they are of another loss, or far longer: scaled.

        The very first one is kept for `check_squared_error`.
        """
        options = self._options
        if self._checks_left == 0:
            return
        value = move_samples_first(z, options.batch_dim)
        cotangent = move_samples_first(slope, options.batch_dim)
        if self._checks_left == _LIMITS.checks:
            stacklevel = find_user_stacklevel()
            has_warned = warn_mismatch(
                options.metric, value, cotangent, options.reduction, stacklevel
            )
            warn_missing_batch_axis(z, inputs, stacklevel)
            if not has_warned:
                self._first_gradient = OutputGradient.measure(value, cotangent)
        self._checks_left -= 1
        if options.fisher != "empirical" or options.accepts_scaled_loss:
            return
        drawn = generate_covectors(
            replace(options, fisher="mc", draws=1), value, cotangent, None, random
        )
        typical = next(drawn)[0].norm(dtype=compute_dtype(cotangent.dtype))
        if options.reduction == "mean":
            count = options.metric.samples(value)
        else:
            count = 1
        ratio = count * cotangent.norm(dtype=typical.dtype) / typical
        if bool(typical > 0) and float(ratio) > _LIMITS.scaled_ratio:
            self._checks_left = 0
            warnings.warn(
                f"The loss's gradient is about {ratio:.0e} times as long as the metric says. If "
                'the loss is scaled, give KFAC grad_scaler=...: fisher="empirical" takes the '
                "gradient as it is.",
                RuntimeWarning,
                stacklevel=find_user_stacklevel(),
            )

    def check_squared_error(self, loss: Any) -> None:
        """Warn if the loss of the first step's only pass is a squared error under another metric.

        A step without a closure has no loss: None.
        """
        gradient = self._first_gradient
        if gradient is None:
            return
        self._first_gradient = None
        is_number = isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1)
        if is_number and self.pool.calls == 1:
            stacklevel = find_user_stacklevel()
            warn_squared_error(self._options.metric, gradient, float(loss), stacklevel)

    def take_means(self, loss_scale: float) -> dict[BlockKey, dict[FactorKey, FactorMatrix]] | None:
        """Return the means of what was pooled since the last step, and empty the pool.

        The reduction "sum" multiplies them by the samples. Return None where outputs or gradients
        were not finite or no pass had samples, and no means where passes reached no block.
        """
        pool = self.pool
        if pool.obstacle is Obstacle.INPUT_DERIVATIVES:
            warn_derivatives(find_user_stacklevel())
        self.clear_pool()
        if not pool.sums:
            if pool.samples > 0:
                return {}
            return None
        is_mean = self._options.reduction == "mean"
        is_empirical = self._options.fisher == "empirical"
        if is_empirical and is_mean:  # a mean's own cotangents are divided by N
            scale = pool.samples**2 / loss_scale**2
        elif is_empirical:
            scale = pool.samples / loss_scale**2
        elif is_mean:
            scale = 1.0
        else:
            scale = pool.samples
        return compute_means(pool, scale)


def _force_eager(stack: contextlib.ExitStack) -> bool:
    """Run what follows in the stack without compiled code; False where that is the caller's."""
    try:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    except RuntimeError:
        return False  # compiled by the caller, whose code was left for the hook
    return True
