"""Statistics from ordinary forward and backward passes, pooled until the next step.

While the loss's gradient passes the model's output, covectors of the metric are sent down the same
graph. The user's loop does not change.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    peek_interpreter_stack,  # pyright: ignore[reportMissingModuleSource]
)
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from ...._core.capture import Watch, picked, plain, samples_first, select
from ...._core.errors import PullbackError
from ...._core.graph import below_casts, on_second_pass, reaches_parameters, refuse_reentrant
from ...._core.space import compute_dtype
from ....grams import Part
from ....grams.kronecker.packed import packed
from ....maps.layers import AffineBlock
from ..factors.factor import DIAGONAL, BlockKey, Factor
from .covectors import Recipe, covectors, covectors_of
from .record import ForwardRecord, ParameterSites, RepeatedCall
from .structure import NotFinite, Structure
from .sums import DERIVED, MISSED, UNREACHED, Pool, means

_LARGE = 2**24  # entries of an output from which on it is computed twice instead of kept
_SCALED = 1e3  # how much longer than the metric says a loss's gradient is, if it was scaled


class PendingPass:
    """What is kept of a forward pass until its output z receives a gradient.

    The graph owns it, by a hook: so it owns neither z nor z's node, and is gone with a graph
    through which nobody propagates.

    Args:
        z: the output that the metric sees.
        node, number: where z stands in the graph.
        record: the layers on the way, or None if the pass ran in compiled code.
        call: how to run the pass again, if it ran in compiled code.
        inputs: the tensors among the call's arguments, for metrics that depend on them.
    """

    def __init__(
        self,
        z: Tensor,
        node: Any,
        number: int,
        record: ForwardRecord | None,
        call: RepeatedCall | None,
        inputs: Sequence[Tensor],
    ) -> None:
        self.record, self.call, self.inputs = record, call, inputs
        self._dtype, self._version, self._number = z.dtype, z._version, number
        if record is not None and node is not None:
            if z.numel() >= _LARGE and node is z.grad_fn:
                record.find_head(z, node)
            record.release(node)
        self._again = record is not None and record.head is not None
        # while the loss is differentiated there would be one more tensor of this size
        self._value = None if self._again else z.detach()
        self._leaf = z if node is None else None

    @property
    def empty(self) -> bool:
        """Whether it was taken already."""
        return self.record is None and self.call is None

    def clear(self) -> None:
        """Let go of everything; a user may keep the graph for long."""
        self.record = self.call = self._leaf = self._value = None
        self.inputs = ()

    def value(self) -> Tensor:
        """z as it was."""
        if self._again:
            assert self.record is not None
            return self.record.head_output(self._dtype)
        assert self._value is not None
        if self._value._version != self._version:
            raise PullbackError(
                "The model's output was changed in place",
                "the metric at the output needs the values that the model gave",
                "Change a copy: z = z + 1, not z += 1",
            )
        return self._value

    def root(self) -> Tensor | GradientEdge:
        """Where z stands in the graph; only while its hook runs."""
        if self._leaf is not None:
            return self._leaf
        return GradientEdge(torch._C._current_autograd_node(), self._number)


class StatisticsCapture:
    """Watches a model and, when statistics are due, adds up the moments of its layers.

    Args:
        model: as it is called.
        recipe: what is measured.
        counter: gives a number that is another one at each step, for the random draws.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, counter: Callable[[], int]) -> None:
        self.model, self.recipe, self._counter = model, recipe, counter
        self.pool = Pool()
        self.structure = Structure(recipe.sharing, recipe.joint, recipe.ekfac)
        self.choose(name for name, _ in plain(model).named_parameters())
        self._open: weakref.WeakSet[PendingPass] = weakref.WeakSet()
        self._begun: tuple[ForwardRecord | None, RepeatedCall | None, list[Tensor]] | None = None
        self._watch = Watch(self, model)
        self._checks = 3  # of the first gradients' length

    # --- what is wanted -----------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether the next forward pass shall give statistics."""
        return self._watch.due

    @due.setter
    def due(self, value: bool) -> None:
        self._watch.due = value

    @property
    def called(self) -> bool:
        """Whether the model was called since the last step."""
        return self._watch.called

    @property
    def wanted(self) -> bool:
        """Whether it is due, or a parameter was frozen or unfrozen since its block was made."""
        return self.due or self.lacking

    @property
    def lacking(self) -> bool:
        """Whether a parameter that takes part has no block yet, or one with others."""
        flags, leaves = self._sites.leaves()
        if flags == self._flags:
            return False
        if not self.structure.covers(leaves):
            return True
        self._flags = flags
        return False

    def choose(self, names: Iterable[str]) -> None:
        """Let only these parameters take part; the others are constants."""
        held = dict(plain(self.model).named_parameters())
        chosen = {n: held[n] for n in names}
        self._flags: tuple[bool, ...] = ()
        self._sites = ParameterSites(plain(self.model), chosen)

    def close(self) -> None:
        """Remove the hooks."""
        self._watch.close()
        self.settle()

    def clear(self) -> None:
        """Forget what was gathered: it belonged to gradients that were dropped."""
        waiting = any(not p.empty for p in self._open)
        self.pool = Pool(missed=MISSED[5] if waiting else MISSED[0])
        self._watch.reset()

    def settle(self) -> None:
        """Forget the passes that still wait as well: the parameters they used have changed."""
        for pending in list(self._open):
            pending.clear()
        self.pool = Pool()
        self._watch.reset()
        self._watch.called = False

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let the model's calls inside give no statistics."""
        with self._watch.paused():
            yield

    def generator(self, device: torch.device) -> torch.Generator:
        """Draws of their own, so that the training's random numbers stay what they were.

        They follow from the counter alone: nothing random has to be saved.
        """
        seed = (self._counter() * 1_000_003 + self.pool.calls) % 2**63
        return torch.Generator(device).manual_seed(seed)

    # --- the forward pass ---------------------------------------------------------------------

    def begin_call(self, args: Any, kwargs: Any, compiled: bool) -> Any:
        """Record the layers of a forward pass, if it can give statistics."""
        if not self.wanted:
            return None
        stack = contextlib.ExitStack()
        if not compiled:
            try:  # what the module calls may be compiled, and its layers' hooks would not fire
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            except RuntimeError:
                compiled = True  # by the caller, whose code was left for the hook
        with stack:
            reason, sites = self._unfit(), self._sites.sites()
            if not reason and sites is None:
                reason = MISSED[1]
            if reason:
                self.pool.miss(reason)
                return None
            leaves = pytree.tree_leaves((args, kwargs))
            tensors = [t for t in leaves if isinstance(t, Tensor)]
            record = call = None
            if compiled:
                call = RepeatedCall(self.model, args, kwargs)
            else:
                record = ForwardRecord(plain(self.model), self._sites.leaves()[1], sites)
                stack.enter_context(record)
            self._begun = (record, call, tensors)
            return stack.pop_all()
        return None

    def _unfit(self) -> str:
        if peek_interpreter_stack() is not None:
            return MISSED[1]
        if not torch.is_grad_enabled():
            return MISSED[2]
        return "" if self.model.training else MISSED[3]

    def end_call(self, output: Any) -> None:
        """Wait for the gradient to come back to the output."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        z = picked(output, self.recipe.output)
        samples_first(z, self.recipe.batch_dim)  # refuses what no metric is of
        if not z.requires_grad:
            self.pool.miss(MISSED[4])
            return
        self.pool.miss(MISSED[5])
        node, number = below_casts(z)
        pending, me = PendingPass(z, node, number, *begun), weakref.ref(self)
        self._open.add(pending)

        # the graph holds this function, so it must not hold the graph
        def receive(cotangents: Any) -> None:
            cotangent = cotangents if isinstance(cotangents, Tensor) else cotangents[number]
            if cotangent is not None and (capture := me()) is not None and not pending.empty:
                _receive(capture, pending, cotangent)

        if node is None or node is z.grad_fn:
            z.register_hook(receive)
        else:
            node.register_prehook(receive)

    # --- the backward pass --------------------------------------------------------------------

    def receive(self, pending: PendingPass, cotangent: Tensor) -> None:
        """Take the statistics of a pass, whose output has received its gradient."""
        leaves, root = self._sites.leaves()[1], pending.root()
        if not reaches_parameters(leaves):  # a gradient by the inputs alone: a penalty, an attack
            refuse_reentrant(root)
            self._note_derivative()
            return
        record, inputs, call = pending.record, pending.inputs, pending.call
        if call is None:
            z = pending.value()
        else:
            record = ForwardRecord(plain(self.model), leaves)
            with self._watch.paused(), torch.compiler.set_stance("force_eager"):
                root = select(call(record), self.recipe.output)
            z = root.detach()
        pending.clear()
        assert record is not None
        given = [z]
        with torch.no_grad(), _set_fwd_grad_enabled(False), _no_autocast(z):
            random, slope = self.generator(z.device), cotangent.detach()
            self._check_scale(z, slope, random)
            self.pool.calls += 1
            del z  # it is not held any longer than it takes to draw from it
            self._measure(root, given, slope, inputs, random, record, leaves)

    def _measure(
        self,
        root: Any,
        z: list[Tensor],
        slope: Tensor,
        inputs: Sequence[Tensor],
        random: torch.Generator,
        record: ForwardRecord,
        leaves: Mapping[str, Tensor],
    ) -> None:
        found, fresh = covectors_of(self.recipe, z.pop(), slope, inputs, random), Pool()
        if found is None:
            self.pool.samples = torch.nan
            return
        try:
            self.structure.measure(root, found, record, leaves, fresh)
        except NotFinite:
            self.pool.samples = torch.nan
            return
        self.pool.add(fresh.sums, found.samples)

    def _note_derivative(self) -> None:
        """A gradient is at the output that does not reach the parameters.

        Its own graph, where it has one, may be for use in a loss.
        """
        self.pool.miss(UNREACHED)
        if torch.is_grad_enabled():
            pool = weakref.ref(self.pool)

            def used() -> None:
                if (held := pool()) is not None:
                    held.miss(DERIVED)

            on_second_pass(torch._C._current_autograd_node(), used)

    def _check_scale(self, z: Tensor, slope: Tensor, random: torch.Generator) -> None:
        """Warn where the loss's own gradient is far longer than the metric's covectors.

        A gradient that a `GradScaler` scaled would be taken for the empirical Fisher's.
        """
        recipe = self.recipe
        if recipe.fisher != "empirical" or recipe.scaled or self._checks == 0:
            return
        self._checks -= 1
        if (ratio := _length_ratio(recipe, z, slope, random)) > _SCALED:
            self._checks = 0
            warnings.warn(
                f"The loss's gradient is about {ratio:.0e} times as long as the metric says. If "
                'the loss is scaled, give KFAC grad_scaler=...: fisher="empirical" takes the '
                "gradient as it is.",
                RuntimeWarning,
                stacklevel=2,
            )

    # --- what was gathered --------------------------------------------------------------------

    def take(self) -> Pool:
        """What was pooled since the last step, which is forgotten here."""
        pool = self.pool
        pool.warn_derivatives()
        self.clear()
        return pool


def averaged(pool: Pool, recipe: Recipe, loss_scale: float) -> dict[BlockKey, dict[Factor, Any]]:
    """The means of what was pooled; "sum" multiplies them by the samples."""
    samples, mean = pool.samples, recipe.reduction == "mean"
    scale: Any = 1.0 if mean else samples
    if recipe.fisher == "empirical":  # a mean's own cotangents are divided by N
        scale = samples ** (2 if mean else 1) / loss_scale**2
    return means(pool, scale)


def averaged_parts(
    parts: Sequence[Part], recipe: Recipe, generator: torch.Generator
) -> dict[BlockKey, dict[Factor, Any]]:
    """Means for losses stated on derivatives of the network: one Kronecker product per term.

    The terms' maps carry derivatives forward through the layers: each of them is one more place
    that shares a layer's weight, with the homogeneous coordinate 1 at the value and 0 at its
    derivatives.
    """
    found: dict[BlockKey, dict[Factor, Any]] = {}
    for number, part in enumerate(parts):
        value = part.linear.value
        if recipe.fisher == "mc":
            shape = (1, len(value), *part.factor.white)
            coins = torch.randint(0, 2, shape, device=value.device, generator=generator)
            given = part.factor.apply((2 * coins - 1).to(value.dtype))
        else:
            given = part.factor.covectors(value)
        for block in part.linear.factored(given).blocks.values():
            if isinstance(block, AffineBlock) and block.weight is not None:
                left, right = block.sides(recipe.sharing.longest)
                role = f"term {number}"
                own = {Factor(role, "left"): packed(left), Factor(role, "right"): packed(right)}
                found.setdefault(BlockKey("kronecker", block.names), {}).update(own)
                continue
            for name, rows in block.rows().items():
                squares = rows.square().sum((0, 1))[:, None, None]
                held = found.setdefault(BlockKey("diagonal", (name,)), {})
                held[DIAGONAL] = held[DIAGONAL] + squares if DIAGONAL in held else squares
    return found


def _length_ratio(recipe: Recipe, z: Tensor, slope: Tensor, random: torch.Generator) -> float:
    """The length of N·∂loss/∂z over that of the metric's covectors."""
    metric, axis = recipe.metric, recipe.batch_dim
    value, own = (samples_first(t, axis) for t in (z, slope))
    value, own = (t.to(compute_dtype(t.dtype)) for t in (value, own))
    if metric.couples_samples:
        return 0.0
    typical = next(covectors(metric, "mc", value, own, generator=random)).norm()
    count = metric.samples(value) if recipe.reduction == "mean" else 1
    return float(count * own.norm() / typical) if bool(typical > 0) else 0.0


def _no_autocast(z: Tensor) -> Any:
    return torch.autocast(z.device.type, enabled=False)


@torch._disable_dynamo
def _receive(capture: StatisticsCapture, pending: PendingPass, cotangent: Tensor) -> None:
    capture.receive(pending, cotangent)
