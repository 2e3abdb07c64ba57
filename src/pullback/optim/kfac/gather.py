"""Statistics from ordinary forward and backward passes, pooled until the next step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..._core.capture import Selector, plain, select
from ..._core.errors import PullbackError
from ..._core.space import compute_dtype
from ...maps.layers.moments import Sharing
from ...metrics import Metric
from .covectors import covectors
from .curvature import Inverse
from .plan import Plan
from .statistics import Pull, pulled, replayed, unexplained
from .sums import Key, Sums
from .tape import Tape
from .watch import Watch, trainable


@dataclass(frozen=True)
class Recipe:
    """What is measured: the metric at the output, and how places and samples count."""

    metric: Metric
    fisher: str
    sharing: Sharing
    joint: bool
    draws: int
    output: Selector
    batch_dim: int


@dataclass
class Pool:
    """Everything gathered since the last step."""

    sums: dict[Key, Sums] = field(default_factory=dict)
    samples: Tensor | float = 0.0
    calls: int = 0


class Gatherer:
    """Watches a model and, when told that statistics are due, adds up the moments of its layers."""

    def __init__(self, model: nn.Module, recipe: Recipe, seed: int) -> None:
        self.model, self.recipe = model, recipe
        self.due = True
        self.pool = Pool()
        #: why no statistics were taken, for the error
        self.missed = "the model was not called"
        self.reasons: dict[str, str] = {}
        #: eigenbases in which second moments of gradients are wanted, by block
        self.bases: Mapping[Key, Inverse] = {}
        self._plans: dict[Any, Plan] = {}
        self._open: dict[int, tuple[Tensor, Tape, Any]] = {}
        self._count = 0
        self._seed, self._generator = seed, None
        self._known: frozenset[str] = frozenset()
        self._tape: Tape | None = None
        self._inputs: Any = None
        self._watch = Watch(self, model)

    def close(self) -> None:
        """Remove the hooks."""
        self._watch.close()
        self._open.clear()

    def clear(self) -> None:
        """Forget what was gathered: it belonged to gradients that were used or dropped."""
        self.pool = Pool()
        self._open.clear()
        self.missed = "the model was not called"

    def _begin(self, args: Any, kwargs: Any) -> Tape | None:
        leaves = trainable(self.model)
        if not self.due and self._known >= leaves.keys():
            return None
        if not torch.is_grad_enabled():
            self.missed = "the model was called without gradients"
            return None
        if not self.model.training:
            self.missed = "the model was in evaluation mode"
            return None
        self._inputs = next(
            (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None
        )
        self._tape = Tape(plain(self.model), leaves)
        return self._tape

    def _end(self, output: Any) -> None:
        tape, self._tape = self._tape, None
        assert tape is not None
        z = select(output, self.recipe.output)
        if not z.requires_grad:
            self.missed = "the model's output does not depend on its parameters"
            return
        self.missed = "no gradient reached the model's output"
        self._count += 1
        number, me = self._count, weakref.ref(self)
        self._open[number] = (z, tape, self._inputs)

        # the graph holds this function, so it must not hold the graph
        def receive(cotangent: Tensor) -> None:
            gatherer = me()
            if gatherer is not None and number in gatherer._open:
                gatherer._take(*gatherer._open.pop(number), cotangent)

        z.register_hook(receive)

    @torch.no_grad()
    def _take(self, z: Tensor, tape: Tape, inputs: Any, cotangent: Tensor) -> None:
        recipe = self.recipe
        if not tape.entries and not tape.wholes and not trainable(self.model):
            return
        with torch.autocast(z.device.type, enabled=False):
            value = self._arranged(z.detach())
            slope = self._arranged(cotangent.detach())
            mask = recipe.metric.counted(value, slope)
            samples: Tensor | float = recipe.metric.samples(value)
            if mask is not None:
                samples = samples * mask.to(value.dtype).mean()
            drawn = covectors(
                recipe.metric,
                recipe.fisher,
                value,
                slope,
                draws=recipe.draws,
                inputs=self._first(inputs, len(value)),
                generator=self.random(z.device),
            )
            first = True
            for covector in drawn:
                covector = covector if mask is None else covector * mask
                self._pull(z, tape, self._placed(covector, z), self._keep(mask, z), first)
                first = False
            self.pool.samples = self.pool.samples + samples
            self.pool.calls += 1

    def _pull(
        self, z: Tensor, tape: Tape, covector: Tensor, keep: Tensor | None, first: bool
    ) -> None:
        leaves = trainable(self.model)
        signature = (
            tuple((e.path, tuple(e.names.items())) for e in tape.entries),
            tuple(w.path for w in tape.wholes),
            tuple(leaves),
        )
        edges: list[Any] = [e.edge for e in tape.entries]
        for whole in tape.wholes:
            edges += [e for e in whole.edges if e is not None]
        plan = self._plans.get(signature)
        asked = list(leaves) if plan is None else [n for n in plan.plain if n in leaves]
        found = pulled(z, covector, edges + [leaves[n] for n in asked])
        deltas, gradients = found[: len(edges)], dict(zip(asked, found[len(edges) :], strict=True))
        ends = self._ends(tape, deltas[len(tape.entries) :])
        if plan is None:
            plan = self._establish(tape, deltas[: len(tape.entries)], ends, gradients)
            self._plans[signature] = plan
            self._known = self._known | leaves.keys()
            self.reasons.update(plan.plain)
        pull = Pull(tape, plan, self.recipe.sharing, keep, self.bases)
        if first:
            pull.inputs(self.pool.sums, deltas[: len(tape.entries)])
        pull.outputs(self.pool.sums, deltas[: len(tape.entries)])
        for whole, cotangents in zip(tape.wholes, ends, strict=True):
            if any(c is not None for c in cotangents):
                pull.taps(self.pool.sums, whole, cotangents, first)
        for name, gradient in gradients.items():
            if name in plan.plain and gradient is not None:
                flat = gradient.flatten().to(compute_dtype(gradient.dtype))
                key = Key("diagonal", (name,))
                squares = flat.square()[:, None, None]
                self.pool.sums.setdefault(key, Sums()).add_squares(squares)

    @staticmethod
    def _ends(tape: Tape, found: Sequence[Tensor | None]) -> list[list[Tensor | None]]:
        """The cotangents at each compound layer's outputs."""
        pieces = iter(found)
        return [[None if e is None else next(pieces) for e in w.edges] for w in tape.wholes]

    def _establish(
        self, tape: Tape, deltas: Sequence[Any], ends: Sequence[list[Any]], truth: dict[str, Any]
    ) -> Plan:
        """Which block each parameter gets, by proof."""
        uses = [(e.names, e.layer.curvature, e.layer.joint) for e in tape.entries]
        taps = []
        for whole, cotangents in zip(tape.wholes, ends, strict=True):
            if any(c is not None for c in cotangents):
                taps += replayed(whole, cotangents)
        uses += [
            ({"weight": tape.name(t.weight), "bias": tape.name(t.bias)}, "kronecker", True)
            for t, _ in taps
        ]
        return Plan(uses, unexplained(tape, deltas, taps, truth), self.recipe.joint)

    def random(self, device: torch.device) -> torch.Generator:
        """Draws of their own, so that the training's random numbers stay what they were."""
        if self._generator is None or self._generator.device != device:
            self._generator = torch.Generator(device).manual_seed(self._seed)
        return self._generator

    def _arranged(self, z: Tensor) -> Tensor:
        """Samples first, at least one event axis, in the dtype of linear algebra."""
        if z.ndim == 0 or z.numel() == 0:
            raise PullbackError(
                "The model's output has no samples",
                f"its shape is {tuple(z.shape)}",
                "Return one value per sample, and skip empty batches",
            )
        z = z.movedim(self.recipe.batch_dim, 0).to(compute_dtype(z.dtype))
        return z[:, None] if z.ndim == 1 else z

    def _placed(self, covector: Tensor, z: Tensor) -> Tensor:
        """Back to the layout of the output."""
        covector = covector.view(len(covector)) if z.ndim == 1 else covector
        return covector.movedim(0, self.recipe.batch_dim)

    def _keep(self, mask: Tensor | None, z: Tensor) -> Tensor | None:
        """Which of the output's places count, where the last axis is the event."""
        if mask is None or mask.shape[-1] != 1 or z.ndim < 2:
            return None
        return mask[..., 0].movedim(0, self.recipe.batch_dim)

    def _first(self, inputs: Any, samples: int) -> Any:
        axis = self.recipe.batch_dim
        if isinstance(inputs, Tensor) and inputs.ndim > axis and inputs.shape[axis] == samples:
            return inputs.detach().movedim(axis, 0)
        return inputs

    def state_dict(self) -> dict[str, Any]:
        """The draws' state and what was established."""
        return {
            "generator": None if self._generator is None else self._generator.get_state(),
            "device": None if self._generator is None else str(self._generator.device),
            "reasons": dict(self.reasons),
            "known": sorted(self._known),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state."""
        if state["generator"] is not None:
            self._generator = torch.Generator(state["device"])
            self._generator.set_state(state["generator"].cpu())
        self.reasons, self._known = dict(state["reasons"]), frozenset(state["known"])
