r"""Statistics: covectors pulled back through the model's own graph, and the layers' moments.

While the loss's gradient passes the output z, covectors φ with E[φφᵀ] = M are sent down the same
graph. They meet every layer with its input a and give δ there, from which the two sides of
F ≈ Σ δδᵀ/N ⊗ mean āāᵀ are summed up. What is known of a layer is proven once: Σ δ ⊗ ā must be the
gradient that autograd finds, or the parameter is held as a diagonal, and named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..._core.errors import PullbackError
from ..._core.space import compute_dtype, tolerance
from ...maps.layers import AffineBlock, Block, Tap, Use
from ...maps.layers.moments import Moments, Sharing, moments, second_moment
from ...maps.layers.scale import Scale
from ...maps.record import Entry
from .inverse import Inverse
from .plan import Plan
from .sums import Key, Sums, Term
from .tape import Tape, Whole


@dataclass
class Pull:
    """One pass of covectors through a recorded forward pass."""

    tape: Tape
    plan: Plan
    sharing: Sharing
    keep: Tensor | None
    bases: Mapping[Key, Inverse]

    def inputs(self, sums: dict[Key, Sums], found: Sequence[Tensor | None]) -> None:
        """The input side of every use that covectors reach; it does not depend on them."""
        for entry, delta in zip(self.tape.entries, found, strict=True):
            key = self.plan.weight(entry.names)
            if delta is None or key is None or entry.layer.curvature == "units":
                continue
            sides = entry.layer.inputs(entry.module, entry.input, self.sharing, self.keep)
            sums.setdefault(key, Sums()).add_inputs(_term(entry), sides)

    def outputs(self, sums: dict[Key, Sums], found: Sequence[Tensor | None]) -> None:
        """The output side of every use, from one covector's cotangents."""
        for entry, delta in zip(self.tape.entries, found, strict=True):
            if delta is None:
                continue
            module, layer, x = entry.module, entry.layer, entry.input
            if layer.curvature == "units":
                assert isinstance(layer, Scale)
                for key, roles in self.plan.units(entry.names):
                    squares = layer.units(module, x, delta, roles, self.sharing)
                    sums.setdefault(key, Sums()).add_squares(squares)
                continue
            if (key := self.plan.weight(entry.names)) is not None:
                second = layer.outputs(module, x, delta, self.sharing)
                sums.setdefault(key, Sums()).add_outputs(_term(entry), second)
                self._correct(sums[key], key, entry, delta)
            if (key := self.plan.bias(entry.names)) is not None:
                second = layer.shifts(module, x, delta, self.sharing)
                _bias(sums.setdefault(key, Sums()), second)

    def _correct(self, held: Sums, key: Key, entry: Entry, delta: Tensor) -> None:
        """Second moments of the samples' gradients in the eigenbases, where these are wanted."""
        basis = self.bases.get(key)
        uses = sum(e.names.get("weight") == key.names[0] for e in self.tape.entries)
        if basis is None or basis.scale is None or uses > 1:
            return
        block, _ = _block(entry, delta, self.sharing, key.names)
        if isinstance(block, AffineBlock):
            held.add_squares(block.squares(basis.left, basis.right))

    def taps(self, sums: dict[Key, Sums], whole: Whole, cotangents: list[Any], first: bool) -> None:
        """Replay a compound layer and add its affine maps."""
        for tap, deltas in replayed(whole, cotangents):
            names = {"weight": self.tape.name(tap.weight), "bias": self.tape.name(tap.bias)}
            term = Term("tap", False)
            if (key := self.plan.weight(names)) is not None:
                held = sums.setdefault(key, Sums())
                if first:
                    held.add_inputs(term, _tap_inputs(tap, self.sharing))
                held.add_outputs(term, _tap_outputs(deltas, self.sharing))
            if (key := self.plan.bias(names)) is not None:
                _bias(sums.setdefault(key, Sums()), _tap_outputs(deltas, self.sharing))


def _bias(held: Sums, second: Tensor) -> None:
    """A bias by itself: its input is 1 everywhere."""
    term = Term("bias", False)
    ones = torch.ones_like(second[:, :1] if second.ndim == 2 else second[:, 0, :1])
    held.inputs[term] = Moments(ones, ones, 1.0)
    held.add_outputs(term, second)


def _term(entry: Entry) -> Term:
    return Term(type(entry.layer).__name__, entry.layer.input_first)


def replayed(whole: Whole, cotangents: list[Tensor | None]) -> list[tuple[Tap, list[Tensor]]]:
    """The taps of a compound layer with their cotangents, step by step."""
    outputs, taps = whole.compound.replay(whole.module, whole.args, whole.kwargs)
    pairs = [(y, d.to(y.dtype)) for y, d in zip(outputs, cotangents, strict=True) if d is not None]
    targets = [z for tap in taps for z in tap.outputs]
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], targets, [d for _, d in pairs], allow_unused=True
        )
    )
    out = []
    for tap in taps:
        deltas = [next(found) for _ in tap.outputs]
        filled = [
            torch.zeros_like(z) if d is None else d
            for d, z in zip(deltas, tap.outputs, strict=True)
        ]
        out.append((tap, filled))
    return out


def _tap_inputs(tap: Tap, sharing: Sharing) -> Moments:
    found = moments(torch.cat([a.detach() for a in tap.inputs], 1), sharing)
    if len(set(tap.places)) == 1:
        return Moments(found.second, found.first, tap.places[0])
    return Moments(found.second, found.first, found.first.new_tensor(tap.places))


def _tap_outputs(deltas: Sequence[Tensor], sharing: Sharing) -> Tensor:
    return second_moment(torch.cat(list(deltas), 1), sharing)


def pulled(
    root: Tensor | GradientEdge, covector: Tensor, targets: Sequence[GradientEdge | Tensor]
) -> tuple[Tensor | None, ...]:
    """The covector pulled back to these places of the graph, which stays as it is."""
    asked: Any = list(targets)
    try:
        return torch.autograd.grad([root], asked, [covector], retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        raise _reentrant() from error


def refuse_reentrant(root: Tensor | GradientEdge) -> None:
    """Raise where a reentrant checkpoint hides the parameters from the graph."""
    seen: set[Any] = set()
    stack: list[Any] = [root.grad_fn if isinstance(root, Tensor) else root.node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if "CheckpointFunction" in node.name():
            raise _reentrant()
        stack.extend(n for n, _ in node.next_functions)


def _reentrant() -> PullbackError:
    return PullbackError(
        "The model uses reentrant activation checkpointing",
        "its graph cannot be asked for the cotangents inside",
        "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )


def unexplained(
    tape: Tape,
    found: Sequence[Tensor | None],
    wholes: Sequence[tuple[Tap, list[Tensor]]],
    truth: Mapping[str, Tensor | None],
) -> dict[str, str]:
    """The parameters whose gradient is not Σ δ ⊗ ā of the layers seen, and why.

    Where the terms cancel, as for a bias before a normalization, both are round-off: they may
    differ by that of their terms, ε‖δ‖‖ā‖.
    """
    got: dict[str, Tensor] = {}
    noise: dict[str, Tensor] = {}

    def add(name: str | None, value: Tensor, delta: Tensor, x: Tensor) -> None:
        if name is not None:
            value, eps = value.flatten(), torch.finfo(value.dtype).eps
            size = x.to(value.dtype).norm() if x.is_floating_point() else 0.0
            terms = 10 * eps * delta.to(value.dtype).norm() * (size + delta.numel() ** 0.5)
            got[name] = got[name] + value if name in got else value
            noise[name] = noise[name] + terms if name in noise else terms

    for entry, delta in zip(tape.entries, found, strict=True):
        if delta is not None:
            for name, value in _gradient(entry, delta).items():
                add(name, value, delta, entry.input)
    for tap, deltas in wholes:
        d, a = torch.cat(list(deltas), 1), torch.cat(list(tap.inputs), 1)
        if tap.weight is not None:
            add(tape.name(tap.weight), d.mT @ a, d, a)
        if tap.bias is not None:
            add(tape.name(tap.bias), d.sum(1), d, a)
    reasons = {}
    for name, gradient in truth.items():
        if name not in got:
            reasons[name] = "no layer with known structure uses it"
            continue
        if gradient is None:
            continue
        want = gradient.flatten().to(got[name].dtype)
        limit = 10 * tolerance(gradient.dtype) + (0.05 if _half(tape, found) else 0.0)
        if not bool((got[name] - want).norm() <= limit * want.norm() + noise[name]):
            reasons[name] = "it is also used outside its layer, or the layer was changed"
    return reasons


def _half(tape: Tape, found: Sequence[Tensor | None]) -> bool:
    return any(d is not None and d.dtype in (torch.float16, torch.bfloat16) for d in found)


def _gradient(entry: Entry, delta: Tensor) -> dict[str, Tensor]:
    """Σ δ ⊗ ā of one use, by the layer's own rows."""
    block, samples = _block(entry, delta, Sharing(), set(entry.names.values()))
    return block.lift(delta.new_ones(samples, 1, dtype=compute_dtype(delta.dtype)))


def _block(
    entry: Entry, delta: Tensor, sharing: Sharing, wanted: Collection[str | None]
) -> tuple[Block, int]:
    """The block of rows of one use, and how many samples it has."""
    features = entry.layer.features(entry.module, delta.ndim)
    dtype, x = compute_dtype(delta.dtype), entry.input
    x = x.to(dtype) if x.is_floating_point() else x
    lead = delta.ndim - features
    if lead == 0:
        x, delta = x[None], delta[None]
    elif lead > 1:
        x, delta = x.movedim(sharing.batch_dim, 0), delta.movedim(sharing.batch_dim, 0)
    names = {r: n if n in wanted else None for r, n in entry.names.items()}
    use = Use(entry.module, x, delta.to(dtype)[:, None], features)
    return entry.layer.block(names, [use]), len(delta)
