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
from ...maps.proof import NO_LAYER, UNUSED
from ...maps.roles import Role
from ..checks import find_user_stacklevel, warn_growth
from .assignment import Assignment
from .factors.averages import gram_of as factor_gram
from .factors.block import BlockKey, describe, to_block
from .stacks import Tensors
from .state import KFACState

#: share of the parameters that may go without a layer's block before that is said
_PLAIN_SHARE = 0.1


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

    `is_preliminary` says that no statistics were taken yet, so that blocks are not known.
    """

    is_preliminary: bool = False

    def __str__(self) -> str:
        table = [("parameter", "shape", "rule", "block", "reason")]
        table += [(r.name, "×".join(map(str, r.shape)), r.rule, r.block, r.reason) for r in self]
        widths = [max(len(line[column]) for line in table) for column in range(4)]
        lines = [_format_line(line, widths) for line in table]
        if self.is_preliminary:
            lines.append("preliminary: the first statistics show blocks and rules")
        return "\n".join(lines)


def _format_line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, cells[-1]])


@dataclass(frozen=True)
class CoverageFacts:
    """What is known of parameters when a table of them is asked for.

    Attributes:
        state: averages and states of blocks, and the table of roles.
        chosen: the parameters that are optimized.
        reasons: what statistics have shown.
    """

    state: KFACState
    chosen: Collection[str]
    reasons: Mapping[str, str]


def coverage_of(facts: CoverageFacts, params: Tensors) -> Coverage:
    """Return the rows of all parameters."""
    blocks = {}
    for key in facts.state.learned:
        blocks |= dict.fromkeys(key.names, key)
    rows = [_row_of(name, p, blocks.get(name), facts) for name, p in params.items()]
    coverage = Coverage(rows)
    coverage.is_preliminary = not facts.state.learned
    return coverage


def _row_of(name: str, p: Tensor, key: BlockKey | None, facts: CoverageFacts) -> Row:
    """Return the row of one parameter."""
    shape = tuple(p.shape)
    why_none = _why_no_rule(name, p, facts)
    if why_none:
        return Row(name, shape, "none", why_none, "none")
    if key is not None:
        return _measured_row(name, shape, key, facts)
    assignment = facts.state.assignment
    others = assignment.others
    is_settled = name in assignment.elementwise or name in facts.state.entry_names
    if not is_settled and not facts.state.schedule.taken:
        rule = assignment.rule.name if others is None else UNKNOWN
        return Row(name, shape, UNKNOWN, "the first statistics show what is done with it", rule)
    if others is not None:
        return Row(name, shape, "none", _why_others(name, facts), others.name)
    reason = "no output seen so far depended on it"
    if assignment.is_unused(name):
        reason = UNUSED
    reason += "; its gradient is followed as it is"
    return Row(name, shape, "gradient", reason, assignment.rule.name)


def _why_no_rule(name: str, p: Tensor, facts: CoverageFacts) -> str:
    """Return why a parameter is not optimized at all, or nothing."""
    if not p.requires_grad:
        return "frozen"
    if name not in facts.chosen:
        return "not given to the optimizer"
    return "" if p.numel() else "it has no entries"


def _measured_row(name: str, shape: tuple[int, ...], key: BlockKey, facts: CoverageFacts) -> Row:
    """Return the row of a parameter whose block has statistics."""
    assignment = facts.state.assignment
    block = facts.state.states.blocks[key]
    words = describe(key, facts.state.averages[key].value)
    reason = facts.reasons.get(name) or _role_reason(name, assignment)
    if block.note:
        reason += f"; {block.note}"
    if block.is_ready or assignment.others is None:
        return Row(name, shape, words, reason, block.rule.name)
    reason += "; its first state is not there yet, and until then it follows AdamW"
    return Row(name, shape, words, reason, assignment.others.name)


def _why_others(name: str, facts: CoverageFacts) -> str:
    """Return why a parameter follows the rule for others."""
    assignment = facts.state.assignment
    if assignment.rule.is_elementwise:
        return "the rule takes every entry by itself"
    if name in assignment.left_out:
        return assignment.left_out[name]
    if assignment.is_unused(name):
        return UNUSED
    return facts.reasons.get(name) or _role_reason(name, assignment)


def _role_reason(name: str, assignment: Assignment) -> str:
    """Return what shows the role of a parameter."""
    role = assignment.roles.get(name)
    if role is None or not role.reason:
        return "known from a checkpoint"
    return role.reason


def plain_reasons(assignment: Assignment, plain: Mapping[str, str]) -> dict[str, str]:
    """Return why parameters have no block of their layer, of what statistics hold as `plain`.

    With a rule for others these are also the parameters that no known layer uses, and all of them
    where no matrix follows the rule.
    """
    reasons: dict[str, str] = {}
    has_matrices = any(name in assignment.roles for name in assignment.measured)
    for name in assignment.elementwise:
        role = assignment.roles.get(name)
        if role is None or role.role is not Role.VECTOR:
            continue
        if not role.is_used or not has_matrices:
            reasons[name] = role.reason
    for name, why in plain.items():
        reasons[name] = UNUSED if assignment.is_unused(name) else why
    return reasons


#: what is not known before the first statistics
UNKNOWN = "unknown"


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
    covered = {n for key in keys for n in key.names}
    offsets: dict[str, int] = {}
    start = 0
    for name, p in params.items():
        if name in covered:
            offsets[name] = start
            start += p.numel()
    index: list[Tensor] = []
    blocks: list[GramBlock] = []
    for key in keys:
        block, averages = state.describe(key, state.averages[key])
        places = [_positions(offsets[n], params[n]) for n in key.names]
        index.append(to_block(key, places, block.shape.size).flatten())
        blocks.append(block.rule.gram(averages, block.state))
    return Kronecker(blocks, torch.cat(index).to(blocks[0].diagonal().device))


def _positions(start: int, p: Tensor) -> Tensor:
    return torch.arange(start, start + p.numel()).view(p.shape)


def notes_of(state: KFACState, skipped: bool) -> dict[str, str]:
    """Return what is to be said of blocks, by parameters, and of statistics that were `skipped`."""
    notes = {", ".join(key.names): note for key, note in state.states.notes.items()}
    if skipped:
        notes["statistics"] = "they were not finite, or not complete; the last good ones stay"
    return notes


class Notices:
    """Warnings, each given once."""

    def __init__(self) -> None:
        self._unmeasured: set[str] = set()
        self._has_warned_plain = False
        self._has_warned_not_finite = False
        #: the first loss of a closure, and steps far above it
        self._growth: list[Any] = []

    @property
    def has_warned_plain(self) -> bool:
        """Whether `warn_plain` was called."""
        return self._has_warned_plain

    def warn_unmeasured(self, state: KFACState, gradients: Tensors, known: Collection[str]) -> None:
        """Say which parameters the loss reaches and the measured output does not.

        Those `known` to have no block are said elsewhere.
        """
        seen = {n for key in state.learned for n in key.names} | self._unmeasured | {*known}
        lost = [n for n, g in gradients.items() if n not in seen and bool(g.any())]
        self._unmeasured.update(lost)
        if not lost:
            return
        others = state.assignment.others
        what = "their gradient is followed as it is" if others is None else "they follow AdamW"
        warnings.warn(
            f"The loss reaches {', '.join(lost)}, on which the measured output does not "
            f"depend: {what}. Measure their output too (output=), "
            "or give them to another optimizer.",
            RuntimeWarning,
            stacklevel=6,
        )

    def warn_plain(self, params: Tensors, plain: Mapping[str, str], has_others: bool) -> None:
        """Say that more than a tenth of what is trained has no block of its layer."""
        self._has_warned_plain = True
        sizes = {n: p.numel() for n, p in params.items() if p.requires_grad}
        plain = {n: why for n, why in plain.items() if n in sizes}
        share = sum(sizes[n] for n in plain) / max(1, sum(sizes.values()))
        if share <= _PLAIN_SHARE:
            return
        most = max(plain, key=sizes.__getitem__)
        what = "follow AdamW" if has_others else "are held as a diagonal"
        warnings.warn(
            f"{100 * share:.0f} % of the trained parameters {what}, {most} among them: "
            f"{plain[most]}. coverage() says what is known of each.",
            RuntimeWarning,
            stacklevel=6,
        )

    def warn_not_finite(self) -> None:
        """Say, the first time, that a step was skipped because a gradient is not finite."""
        if self._has_warned_not_finite:
            return
        self._has_warned_not_finite = True
        warnings.warn(
            "A gradient is not finite: the step was skipped, and so are others like it, without "
            "another warning. Look for bad samples, or take a smaller lr; info.accepted of each "
            "step says whether it was taken.",
            RuntimeWarning,
            stacklevel=find_user_stacklevel(),
        )

    def watch_growth(self, loss: Any) -> None:
        """Warn of a closure's loss that has grown, where reading it waits for no device."""
        if isinstance(loss, Tensor):
            loss = loss.item() if loss.device.type == "cpu" and loss.numel() == 1 else None
        if isinstance(loss, float):
            self._growth[:] = self._growth or [loss, 0]
            warn_growth(self._growth, loss, "Take a smaller lr", 6)


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
    degenerate: list[Degenerate] = []
    for key, average in state.averages.items():
        if key in state.learned:
            degenerate += _degenerate_sides(key, factor_gram(key, average.divided()))
    return degenerate


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
