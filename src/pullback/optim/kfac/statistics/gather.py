"""Statistics from ordinary forward and backward passes, pooled until the next step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    peek_interpreter_stack,  # pyright: ignore[reportMissingModuleSource]
)
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.utils import _pytree as pytree

from ...._core.capture import picked, plain, select
from ..blocks.inverse import Inverse
from . import sweep
from .draws import Draws, draws
from .graph import accumulates, refuse_reentrant
from .holdings import Holdings
from .known import Changed, NotFinite
from .measure import Measure
from .outputs import refuse_output
from .pending import Again, Pending, Root
from .pool import MISSED, Pool, Recipe
from .sums import Key, averaged
from .tape import Tape
from .watch import Watch


class Gatherer:
    """Watches a model and, when told that statistics are due, adds up the moments of its layers."""

    def __init__(self, model: nn.Module, recipe: Recipe, seed: int) -> None:
        self.model, self.recipe = model, recipe
        self.pool = Pool()
        self._measure = Measure(recipe.sharing, recipe.joint, recipe.ekfac)
        self._chosen: dict[str, Tensor] = dict(plain(model).named_parameters())
        self._flags: tuple[bool, ...] = ()
        self._holdings = Holdings(plain(model), self._chosen)
        #: whether every place of the last output counted
        self._whole = False
        self._open: weakref.WeakSet[Pending] = weakref.WeakSet()
        self._seed, self._generator = seed, None
        self._now: tuple[Tape | None, Again | None, Any] = (None, None, None)
        self._watch = Watch(self, model)

    @property
    def due(self) -> bool:
        """Whether the next forward pass shall give statistics."""
        return self._watch.due

    @due.setter
    def due(self, value: bool) -> None:
        self._watch.due = value

    @property
    def missed(self) -> str:
        """Why no statistics were taken."""
        return MISSED[self.pool.missed]

    @property
    def reasons(self) -> dict[str, str]:
        """Why a parameter is held as a diagonal."""
        return self._measure.reasons

    @property
    def bases(self) -> Mapping[Key, Inverse]:
        """Eigenbases in which second moments of gradients are wanted, by block."""
        return self._measure.bases

    @bases.setter
    def bases(self, value: Mapping[Key, Inverse]) -> None:
        self._measure.bases = value

    def choose(self, names: Iterable[str]) -> None:
        """Only these parameters take part; the others are constants."""
        held = dict(plain(self.model).named_parameters())
        self._chosen, self._flags = {n: held[n] for n in names}, ()
        self._holdings = Holdings(plain(self.model), self._chosen)

    def close(self) -> None:
        """Remove the hooks."""
        self._watch.close()
        self.settle()

    def clear(self) -> None:
        """Forget what was gathered: it belonged to gradients that were dropped."""
        self._measure.aside.drop()
        self.pool = Pool(missed=5 if any(not p.empty for p in self._open) else 0)
        self._watch.reset()

    def settle(self) -> None:
        """Forget the passes that still wait as well: the parameters they used have changed."""
        self._measure.aside.drop()
        for pending in list(self._open):
            pending.clear()
        self.pool = Pool()
        self._watch.reset()

    @property
    def lacking(self) -> bool:
        """Whether a parameter was frozen or unfrozen since its block was established."""
        flags, leaves = self._holdings.leaves()
        if flags == self._flags:
            return False
        if not self._measure.knows(leaves):
            return True
        self._flags = flags
        return False

    def _wanted(self) -> bool:
        return self.due or self.lacking

    def _begin(self, args: Any, kwargs: Any, compiled: bool) -> Any:
        reason = self._unfit()
        if reason:
            self.pool.miss(reason)
            return None
        sites = self._holdings.sites()
        if sites is None:
            self.pool.miss(1)
            return None
        tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        tape = None if compiled else Tape(plain(self.model), self._holdings.leaves()[1], sites)
        again = Again(self.model, args, kwargs) if compiled else None
        self._now = (tape, again, next(tensors, None))
        return contextlib.nullcontext() if tape is None else tape

    def _unfit(self) -> int:
        if peek_interpreter_stack() is not None:
            return 1
        if not torch.is_grad_enabled():
            return 2
        return 0 if self.model.training else 3

    def _end(self, output: Any) -> None:
        (tape, again, inputs), self._now = self._now, (None, None, None)
        z = picked(output, self.recipe.output)
        refuse_output(z)
        if not z.requires_grad:
            self.pool.miss(4)
            return
        self.pool.miss(5)
        pending, me = Pending(z, tape, again, inputs), weakref.ref(self)
        self._open.add(pending)

        # the graph holds this function, so it must not hold the graph
        def receive(cotangent: Tensor) -> None:
            gatherer = me()
            if gatherer is not None and not pending.empty:
                _received(gatherer, pending, cotangent)

        z.register_hook(receive)

    def _receive(self, pending: Pending, cotangent: Tensor) -> None:
        leaves, root = self._holdings.leaves()[1], pending.root()
        if not accumulates(leaves):  # a gradient by the inputs alone: a penalty, an attack
            refuse_reentrant(root)
            self.pool.miss_leaves()
            return
        z, tape, inputs = pending.value(), pending.tape, pending.inputs
        again, value = pending.call, pending.again
        pending.clear()
        if again is not None:
            tape = Tape(plain(self.model), leaves)
            with self._watch.aside():
                root = select(again(tape), self.recipe.output)
            z = root.detach()
        assert tape is not None
        aside = self._measure.aside
        aside.begin(z, [e.input for e in tape.entries])
        with torch.no_grad(), _set_fwd_grad_enabled(False), _no_autocast(z):
            random, slope = self.random(z.device), cotangent.detach()
            # sums of earlier passes are not kept apart, to be able to go back to them
            hope = self._whole and sweep.waits(z) and not self.pool.sums
            if hope and value is None:
                hope, value = pending.small, partial(_same, z) if pending.small else None
            found = draws(self.recipe, z, slope, inputs, random, hope=hope)
            del z  # nor does anybody below hold it any longer than it takes to draw from it
            self.pool.calls += 1
            try:
                self._take(root, found, tape, leaves)
            except Changed:
                assert value is not None
                found = draws(self.recipe, value(), slope, inputs, random)
                self._take(root, found, tape, leaves)
        if aside.on:  # all is launched when the backward pass is over
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(aside.join)

    def _take(
        self, root: Root, found: Draws | None, tape: Tape, leaves: Mapping[str, Tensor]
    ) -> None:
        if found is None:
            self.pool.samples = torch.nan
            return
        samples, self._whole = found.samples, found.whole
        left = None
        try:
            left = self._measure.learn(root, found, tape, leaves, self.pool.sums)
        except NotFinite:
            samples = torch.nan
        if found.later is not None:  # the device has passed that place long ago
            [self._whole] = found.later()
            if not self._whole:
                self._measure.aside.drop()
                self.pool.sums = {}
                raise Changed
        if left is not None:
            self._measure.finish(left, tape)
        self.pool.samples = self.pool.samples + samples

    def averages(self, reduction: str, loss_scale: float) -> dict[Key, dict[str, Tensor]]:
        """Means over what was pooled, which is forgotten; "sum" multiplies them by the samples."""
        self._measure.aside.join()
        pool, samples = self.pool, self.pool.samples
        pool.warn()
        scale: Any = 1.0 if reduction == "mean" else samples
        if self.recipe.fisher == "empirical":  # a mean's own cotangents are divided by N
            scale = samples ** (2 if reduction == "mean" else 1) / loss_scale**2
        self.clear()
        return averaged(pool.sums, samples, scale)

    def random(self, device: torch.device) -> torch.Generator:
        """Draws of their own, so that the training's random numbers stay what they were."""
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator

    def state_dict(self) -> dict[str, Any]:
        """The draws' state and what was established."""
        return {
            "generator": None if self._generator is None else self._generator.get_state(),
            "device": None if self._generator is None else str(self._generator.device),
            "reasons": dict(self.reasons),
            "partners": {n: list(names) for n, names in self._measure.partners.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        self._generator = None
        if state["generator"] is not None:
            self._generator = torch.Generator(state["device"])
            self._generator.set_state(state["generator"].cpu())
        self._measure.load(state["reasons"], state["partners"])
        self._flags = ()


def _no_autocast(z: Tensor) -> Any:
    return torch.autocast(z.device.type, enabled=False)


def _same(z: Tensor) -> Tensor:
    return z


@torch._disable_dynamo
def _received(gatherer: Gatherer, pending: Pending, cotangent: Tensor) -> None:
    gatherer._receive(pending, cotangent)
