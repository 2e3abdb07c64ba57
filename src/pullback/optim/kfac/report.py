"""What K-FAC can tell: a step's outcome, every parameter's block, and where F̂ is degenerate."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..._core.errors import PullbackError
from ...grams.kronecker import GramBlock, Kronecker, Pair, Units, factor_matrix
from ...maps.proof import NO_LAYER
from ..checks import warn_growth
from .factors.block import BlockKey, block_of, block_shape, describe, to_block
from .rules import Rule
from .state import KFACState
from .statistics.plan import Forecast
from .update import Tensors

_DIAGONAL = 0.1  # of the parameters that may go without a layer's block


@dataclass(frozen=True)
class KFACInfo:
    """What a step did.

    Attributes:
        accepted: whether the parameters moved.
        reason: why not, or empty.
        damping: λ in use.
        taken: whether statistics were taken up.
        notes: what went wrong or was left out when blocks were inverted, by parameters.
        ratio: actual over predicted reduction, where it was measured.
        step_size, momentum: the model's best factors, where they were computed.
    """

    accepted: bool = True
    reason: str = ""
    damping: float = 0.0
    taken: bool = False
    notes: dict[str, str] = field(default_factory=dict)
    ratio: float | None = None
    step_size: float | None = None
    momentum: float | None = None


@dataclass(frozen=True)
class Row:
    """One parameter: its block and the reason for it, and the rule that it follows."""

    name: str
    shape: tuple[int, ...]
    block: str
    reason: str
    rule: str = "natural"


class Coverage(tuple[Row, ...]):
    """One row per parameter; prints as a table.

    `forecast` says that no statistics were taken yet: blocks are what the kinds of modules suggest.
    """

    forecast: bool = False

    def __str__(self) -> str:
        table = [("parameter", "shape", "rule", "block", "reason")]
        table += [(r.name, "×".join(map(str, r.shape)), r.rule, r.block, r.reason) for r in self]
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line[:4], widths, strict=True)), line[4]])
            for line in table
        ]
        if self.forecast:
            lines.append("forecast: blocks are established by the first statistics")
        return "\n".join(lines)


def coverage_of(
    state: KFACState,
    params: Tensors,
    given: Collection[str],
    measured: Collection[str],
    kinds: Mapping[str, tuple[str, str]],
    reasons: Mapping[str, str],
    others: Mapping[str, str],
    rule: Rule,
) -> Coverage:
    """Return the rows of all parameters, of which those `given` are optimized.

    `kinds` are what is expected of the `measured` ones, and `reasons` what statistics have shown;
    `others` are why the rule is not for the rest.
    """
    blocks, taken = {n: k for k in state.learned for n in k.names}, state.schedule["taken"]
    notes, rows = state.preconditioner.notes, []
    for name, p in params.items():
        block, reason = kinds.get(name, ("diagonal", "plain parameter"))
        follows = type(rule).__name__.lower()
        if not p.requires_grad:
            block, reason, follows = "none", "frozen", "none"
        elif name not in given:
            block, reason, follows = "none", "not given to the optimizer", "none"
        elif not p.numel():
            block, reason, follows = "none", "it has no entries", "none"
        elif name in blocks:
            key = blocks[name]
            block = describe(key, state.averages[key].value)
            reason = reasons.get(name) or reason
            reason += f"; {notes[key]}" if key in notes else ""
            if rule.needs == "basis" and key not in state.preconditioner.ready:
                follows = "adam"
                reason += "; its eigenbases are not there yet, and until then it follows AdamW"
        elif rule.matrices and (name not in measured or taken or name in reasons):
            block, follows = "none", "adam"
            reason = reasons.get(name) or others.get(name) or "it has no dense side to whiten by"
        elif taken:
            block = "gradient"
            reason = "no output seen so far depended on it; its gradient is followed as it is"
        elif name not in kinds:
            reason = "plain parameter: the first statistics show what is done with it"
        rows.append(Row(name, tuple(p.shape), block, reason, follows))
    out = Coverage(rows)
    out.forecast = not state.learned
    return out


def left_to_adam(
    expected: Forecast, given: Tensors, measured: Collection[str], apart: Collection[str],
    longest: int,
) -> dict[str, str]:  # fmt: skip
    """Return why the rule is not for some of the `given` parameters; groups keep those `apart`.

    Sides up to `longest` are held as matrices.
    """
    found = {}
    for name, p in given.items():
        curvature, kind = expected.kinds.get(name, ("", ""))
        if name in measured:
            continue
        if name in apart:
            found[name] = "its param group asks for it"
        elif name in expected.biases:
            found[name] = f"a bias of {kind}"
        elif curvature == "units":
            found[name] = f"a gain of {kind}"
        elif name == expected.last:
            found[name] = f"the output layer, {kind}"
        elif curvature and "Embedding" not in kind and max(len(p), p[0].numel()) > longest:
            found[name] = f"{kind}: one of its sides is longer than max_factor={longest}"
        elif curvature:
            found[name] = f"{kind}: it holds vectors, not matrices"
        else:
            found[name] = NO_MATRIX
    return found


#: why the rule leaves a parameter of no known layer alone
NO_MATRIX = "it is no matrix, and in no layer of a known kind"


def name_parametrizations(model: nn.Module, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons, where a parametrization hides what a parameter does with its name."""
    made: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            kinds = ", ".join(type(m).__name__ for m in module)
            made |= {f"{path}.{n}": kinds for n in module._parameters}
        for hook in module._forward_pre_hooks.values():  # the older way
            own = f"{getattr(hook, 'name', None)}_orig"
            if own in module._parameters:
                made[f"{path}.{own}" if path else own] = type(hook).__name__
    return {
        n: f"the layer's weight is computed from it ({made[n]}): no block is proven for that"
        if why == NO_LAYER and n in made
        else why
        for n, why in reasons.items()
    }


def gram_of(state: KFACState, params: Tensors) -> Kronecker:
    """Return F̂ without damping, over the parameters that have a block, in the model's order."""
    keys = [k for k in state.averages if k in state.learned]
    if not keys:
        raise PullbackError("There are no statistics yet", "no step was taken", "Call step() first")
    covered, start, offsets = {n for k in keys for n in k.names}, 0, {}
    for name, p in params.items():
        if name in covered:
            offsets[name], start = start, start + p.numel()
    index = []
    for key in keys:
        own = [(offsets[n], params[n]) for n in key.names]
        places = [torch.arange(at, at + p.numel()).view(p.shape) for at, p in own]
        shape = block_shape(key, state.averages[key].value)
        index.append(to_block(key, places, shape).flatten())
    blocks = [state.preconditioner.block(k, state.averages[k]) for k in keys]
    return Kronecker(blocks, torch.cat(index).to(blocks[0].diagonal().device))


def notes_of(state: KFACState, skipped: bool) -> dict[str, str]:
    """Return what is to be said of blocks, by parameters, and of statistics that were `skipped`."""
    notes = {", ".join(k.names): note for k, note in state.preconditioner.notes.items()}
    if skipped:
        notes["statistics"] = "they were not finite, or not complete; the last good ones stay"
    return notes


def warn_unmeasured(state: KFACState, gradients: Tensors, said: set[str]) -> set[str]:
    """Say which parameters the loss reaches and the measured output does not, unless it was `said`.

    Returns those that were named now.
    """
    seen = {n for key in state.learned for n in key.names} | said
    lost = [n for n, g in gradients.items() if n not in seen and bool(g.any())]
    if lost:
        warnings.warn(
            f"The loss reaches {', '.join(lost)}, on which the measured output does not "
            "depend: their gradient is followed as it is. Measure their output too (output=), "
            "or give them to another optimizer.",
            RuntimeWarning,
            stacklevel=5,
        )
    return {*lost}


def warn_diagonal(params: Tensors, plain: Mapping[str, str], rule: Rule) -> None:
    """Say that more than a tenth of what is trained has no block of its layer: those `plain`."""
    sizes = {n: p.numel() for n, p in params.items() if p.requires_grad}
    plain = {n: why for n, why in plain.items() if n in sizes}
    share = sum(sizes[n] for n in plain) / max(1, sum(sizes.values()))
    if share > _DIAGONAL:
        most = max(plain, key=sizes.__getitem__)
        what = "follow AdamW" if rule.matrices else "are held as a diagonal"
        warnings.warn(
            f"{100 * share:.0f} % of the trained parameters {what}, {most} among them: "
            f"{plain[most]}. coverage() says what is known of each.",
            RuntimeWarning,
            stacklevel=5,
        )


def watch_growth(watch: list[Any], loss: Any) -> None:
    """Warn of a closure's loss that has grown, where reading it waits for no device.

    `watch` holds its first loss, and steps far above it.
    """
    if isinstance(loss, Tensor):
        loss = loss.item() if loss.device.type == "cpu" and loss.numel() == 1 else None
    if isinstance(loss, float):
        watch[:] = watch or [loss, 0]
        warn_growth(watch, loss, "Take a smaller lr", 5)


@dataclass(frozen=True)
class Degenerate:
    """One singular side of one block: its rank, its size, and the reason."""

    names: tuple[str, ...]
    side: str
    rank: int
    size: int
    reason: str


def degenerate_of(state: KFACState) -> list[Degenerate]:
    """Return the singular sides of all blocks that have statistics."""
    found = [(k, a) for k, a in state.averages.items() if k in state.learned]
    return [d for k, a in found for d in _degenerate_sides(k, block_of(k, a.corrected()))]


def _degenerate_sides(key: BlockKey, block: GramBlock) -> list[Degenerate]:
    """Return the singular sides of a block: directions of length zero, which change nothing.

    If the expected pullback metric of a layer is nondegenerate, so is its Kronecker block.
    """
    if isinstance(block, Units):
        diagonal = block.diagonal()
        dead, units = int((diagonal <= 0).any(1).sum()), len(diagonal)
        reason = f"{dead} units never matter"
        return [Degenerate(key.names, "units", units - dead, units, reason)] if dead else []
    assert isinstance(block, Pair)
    found = []
    for name, side in (("output", block.output_factor), ("input", block.input_factor)):
        values = side if factor_matrix.is_diagonal(side) else torch.linalg.eigvalsh(side)
        for rank, matrix in zip(
            factor_matrix.is_above_round_off(values).sum(-1).tolist(), side, strict=True
        ):
            if rank < len(matrix):
                reason = _reason(name, matrix, rank)
                found.append(Degenerate(key.names, name, rank, len(matrix), reason))
    return found


def _reason(name: str, matrix: Tensor, rank: int) -> str:
    diagonal = matrix if matrix.ndim == 1 else matrix.diagonal()
    size, dead = len(diagonal), int((diagonal <= 0).sum())
    parts = []
    if dead:
        what = "inputs are always zero" if name == "input" else "outputs receive no gradient"
        parts.append(f"{dead} {what}")
    if matrix.ndim == 2 and name == "output":
        floor = size * torch.finfo(matrix.dtype).eps ** 0.5
        if float(matrix.sum(0).abs().max()) <= floor * float(diagonal.max()):
            parts.append("moving all outputs alike changes nothing, as with softmax logits")
    if size - rank > dead and not parts[bool(dead) :]:
        parts.append(f"{size - rank - dead} directions did not occur in the statistics")
    return "; ".join(parts)
