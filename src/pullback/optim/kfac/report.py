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
from ..checks import GrowthWatch, find_user_stacklevel
from .assignment import GROUP_ASKS, Assignment
from .block_stack import Tensors
from .factors.averages import gram_of
from .factors.block import BlockKey, describe, names_of, to_block
from .rules import Rule
from .state import KFACState

#: the part of the parameters that may go without a layer's block before a warning
_LARGEST_PART_WITHOUT_BLOCK = 0.1
#: what is not known before the first statistics
UNKNOWN = "unknown"
#: why a matrix has no block although its layer is known
UNREACHED = (
    "no statistics reached it yet, as where its layer got no rows or the measured output "
    "does not depend on it"
)


@dataclass(frozen=True)
class KFACInfo:
    """What a step did.

    Attributes:
        accepted: whether the parameters moved.
        reason: why not, or empty.
        damping: λ in use.
        took_statistics: whether statistics were taken up.
        notes: what went wrong or was left out when blocks were inverted, by parameters.
        ratio: actual over predicted reduction, where it was measured.
        step_size, momentum: the model's best factors, where they were computed.
    """

    accepted: bool = True
    reason: str = ""
    damping: float = 0.0
    took_statistics: bool = False
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
        columns = list(zip(*table, strict=True))
        widths = [max(map(len, column)) for column in columns[:-1]]
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
        optimized: the names of the parameters that are optimized.
        reasons: what statistics have shown.
        without_block: the parameters for which they have shown that no block is proven.
    """

    state: KFACState
    optimized: Collection[str]
    reasons: Mapping[str, str]
    without_block: Collection[str]


def make_coverage(facts: CoverageFacts, params: Tensors) -> Coverage:
    """Return a row for each parameter, in their order."""
    blocks = {}
    for key in facts.state.measured_keys:
        blocks |= dict.fromkeys(key.names, key)
    rows = [_make_row(name, p, blocks.get(name), facts) for name, p in params.items()]
    coverage = Coverage(rows)
    takes_statistics = not facts.state.assignment.rule.is_elementwise
    coverage.is_preliminary = takes_statistics and not facts.state.measured_keys
    return coverage


def _make_row(name: str, p: Tensor, key: BlockKey | None, facts: CoverageFacts) -> Row:
    """Return the row of one parameter."""
    shape = tuple(p.shape)
    why_not_optimized = _explain_not_optimized(name, p, facts)
    if why_not_optimized:
        return Row(name, shape, "none", why_not_optimized, "none")
    if key is not None:
        return _make_measured_row(name, shape, key, facts)
    assignment = facts.state.assignment
    others = assignment.others
    is_settled = name in assignment.elementwise or name in facts.state.entry_names
    if not is_settled and not facts.state.schedule.statistics_count:
        rule = UNKNOWN
        if others is None:
            rule = assignment.rule.name
        return Row(name, shape, UNKNOWN, "the first statistics show what is done with it", rule)
    if others is not None:
        return Row(name, shape, "none", _explain_others(name, facts), others.name)
    reason = "no output seen so far depended on it"
    if assignment.is_unused(name):
        reason = UNUSED
    reason += "; its gradient is followed as it is"
    return Row(name, shape, "gradient", reason, assignment.rule.name)


def _explain_not_optimized(name: str, p: Tensor, facts: CoverageFacts) -> str:
    """Return why a parameter is not optimized at all; empty if it is."""
    if not p.requires_grad:
        return "frozen"
    if name not in facts.optimized:
        return "not given to the optimizer"
    if not p.numel():
        return "it has no entries"
    return ""


def _make_measured_row(
    name: str, shape: tuple[int, ...], key: BlockKey, facts: CoverageFacts
) -> Row:
    """Return the row of a parameter whose block has statistics."""
    assignment = facts.state.assignment
    block = facts.state.states.blocks[key]
    words = describe(key, facts.state.averages[key].value)
    reason = facts.reasons.get(name) or _explain_role(name, assignment)
    if block.note:
        reason += f"; {block.note}"
    if block.is_ready or assignment.others is None:
        return Row(name, shape, words, reason, block.rule.name)
    reason += "; its first state is not there yet, and until then it follows AdamW"
    return Row(name, shape, words, reason, assignment.others.name)


def _explain_others(name: str, facts: CoverageFacts) -> str:
    """Return why a parameter follows the rule for others."""
    assignment = facts.state.assignment
    if assignment.rule.is_elementwise:
        return "the rule takes every entry by itself"
    if name in assignment.left_out:
        return assignment.left_out[name]
    if assignment.is_unused(name):
        return UNUSED
    role = assignment.roles.get(name)
    is_loaded = role is not None and not role.reason
    if name in assignment.measured and name not in facts.without_block and not is_loaded:
        return UNREACHED
    if name in facts.reasons:
        return facts.reasons[name]
    return _explain_role(name, assignment)


def _explain_role(name: str, assignment: Assignment) -> str:
    """Return what shows the role of a parameter."""
    role = assignment.roles.get(name)
    if role is None:
        return "no forward pass has shown its role yet"
    if role.reason:
        return role.reason
    reason = f"{role.role.value} by the saved table"
    if name in assignment.measured:
        reason += "; the next statistics show how it is used"
    return reason


def explain_missing_blocks(assignment: Assignment, diagonals: Mapping[str, str]) -> dict[str, str]:
    """Return why parameters have no block of their layer, by name.

    They are `diagonals`, with the reason that the statistics have found. Where there is a rule for
    others, they are also the vectors that no known layer uses; and where no matrix follows the
    rule, all parameters. Those that a param group gives to the rule for others are left out.
    """
    reasons: dict[str, str] = {}
    has_matrices = any(name in assignment.roles for name in assignment.measured)
    for name in assignment.elementwise:
        role = assignment.roles.get(name)
        if role is None or assignment.left_out.get(name) == GROUP_ASKS:
            continue
        if not has_matrices or (role.role is Role.VECTOR and not role.is_used):
            reasons[name] = role.reason
    for name, why in diagonals.items():
        if assignment.is_unused(name):
            reasons[name] = UNUSED
        else:
            reasons[name] = why
    return reasons


def refine_reasons(
    model: nn.Module, assignment: Assignment, reasons: Mapping[str, str]
) -> dict[str, str]:
    """Return the reasons; those that say "no known layer" become what uses the parameter instead.

    The first forward pass has shown it, or a parametrization of the model.
    """
    parametrizations = _find_parametrizations(model)
    explained: dict[str, str] = {}
    for name, why in reasons.items():
        explained[name] = why
        if why != NO_LAYER:
            continue
        if name in parametrizations:
            explained[name] = (
                f"the layer's weight is computed from it ({parametrizations[name]}): "
                "no block is proven for that"
            )
        else:
            explained[name] = _explain_unknown_use(name, assignment)
    return explained


def _explain_unknown_use(name: str, assignment: Assignment) -> str:
    """Return what is known of a parameter that no known layer uses."""
    role = assignment.roles.get(name)
    if role is None or not role.reason:
        return NO_LAYER
    if role.role is Role.VECTOR:
        return role.reason
    return f"{role.reason}: no block is proven for that"


def _find_parametrizations(model: nn.Module) -> dict[str, str]:
    """Return the class names of the parametrizations of each parameter that has any."""
    parametrizations: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            class_names = ", ".join(type(m).__name__ for m in module)
            parametrizations |= {f"{path}.{n}": class_names for n in module._parameters}
        for hook in module._forward_pre_hooks.values():  # torch.nn.utils.weight_norm, say
            original = f"{getattr(hook, 'name', None)}_orig"
            if original in module._parameters:
                name = f"{path}.{original}" if path else original
                parametrizations[name] = type(hook).__name__
    return parametrizations


def assemble_gram(state: KFACState, params: Tensors) -> Kronecker:
    """Return F̂ without damping, over the parameters that have a block, in the model's order."""
    keys = [k for k in state.averages if k in state.measured_keys]
    if not keys:
        raise PullbackError("There are no statistics yet", "no step was taken", "Call step() first")
    covered = names_of(keys)
    offsets: dict[str, int] = {}
    start = 0
    for name, p in params.items():
        if name in covered:
            offsets[name] = start
            start += p.numel()
    index: list[Tensor] = []
    blocks: list[GramBlock] = []
    for key in keys:
        block = state.states.blocks[key]
        averages = state.make_factor_averages(key, state.averages[key])
        positions = [_number_entries(offsets[n], params[n]) for n in key.names]
        index.append(to_block(key, positions, block.shape.size).flatten())
        blocks.append(block.rule.gram(averages, block.state))
    return Kronecker(blocks, torch.cat(index).to(blocks[0].diagonal().device))


def _number_entries(start: int, p: Tensor) -> Tensor:
    return torch.arange(start, start + p.numel()).view(p.shape)


def list_notes(state: KFACState, has_skipped_statistics: bool) -> dict[str, str]:
    """Return the notes of the last refresh by the block's parameters, and one on statistics."""
    notes = {", ".join(key.names): note for key, note in state.states.notes.items()}
    if has_skipped_statistics:
        notes["statistics"] = "they were not finite, or not complete; the last good ones stay"
    return notes


class Notices:
    """Warnings to the user, each given once.

    The caller asks `has_warned_of_missing_blocks` first, since the reasons take a while to find.
    """

    def __init__(self) -> None:
        self._unmeasured: set[str] = set()
        self._has_warned_of_missing_blocks = False
        self._has_warned_not_finite = False
        self._growth = GrowthWatch()

    @property
    def has_warned_of_missing_blocks(self) -> bool:
        """Whether `warn_of_missing_blocks` was called."""
        return self._has_warned_of_missing_blocks

    def warn_unmeasured(
        self, state: KFACState, gradients: Tensors, without_block: Collection[str]
    ) -> None:
        """Warn of parameters that the loss reaches and the measured output does not.

        Those known to be `without_block` are left out: `warn_of_missing_blocks` names them.
        """
        explained = names_of(state.measured_keys) | self._unmeasured | {*without_block}
        lost = [n for n, g in gradients.items() if n not in explained and bool(g.any())]
        self._unmeasured.update(lost)
        if not lost:
            return
        treatment = "their gradient is followed as it is"
        others = state.assignment.others
        if others is not None:
            treatment = f"they follow {type(others).__name__}"
        warnings.warn(
            f"The loss reaches {', '.join(lost)}, on which the measured output does not "
            f"depend: {treatment}. Measure their output too (output=), "
            "or give them to another optimizer.",
            RuntimeWarning,
            stacklevel=find_user_stacklevel(),
        )

    def warn_of_missing_blocks(
        self, params: Tensors, reasons: Mapping[str, str], others: Rule | None
    ) -> None:
        """Warn if more than a tenth of what is trained has no block of its layer."""
        self._has_warned_of_missing_blocks = True
        sizes = {n: p.numel() for n, p in params.items() if p.requires_grad}
        reasons = {n: why for n, why in reasons.items() if n in sizes}
        part = sum(sizes[n] for n in reasons) / max(1, sum(sizes.values()))
        if part <= _LARGEST_PART_WITHOUT_BLOCK:
            return
        most = max(reasons, key=sizes.__getitem__)
        treatment = "are held as a diagonal"
        if others is not None:
            treatment = f"follow {type(others).__name__}"
        warnings.warn(
            f"{100 * part:.0f} % of the trained parameters {treatment}, {most} among them: "
            f"{reasons[most]}. coverage() says what is known of each.",
            RuntimeWarning,
            stacklevel=find_user_stacklevel(),
        )

    def warn_not_finite(self) -> None:
        """Warn, the first time, that a step was skipped because a gradient is not finite."""
        if self._has_warned_not_finite:
            return
        self._has_warned_not_finite = True
        warnings.warn(
            "A gradient or its direction is not finite: the step was skipped, and so are others "
            "like it, without another warning. Look for bad samples, or take a smaller lr; "
            "info.accepted of each step says whether it was taken.",
            RuntimeWarning,
            stacklevel=find_user_stacklevel(),
        )

    def watch_growth(self, loss: Any) -> None:
        """Warn of a closure's loss that has grown, where reading it waits for no device."""
        if isinstance(loss, Tensor):
            if loss.device.type != "cpu" or loss.numel() != 1:
                return
            loss = loss.item()
        if isinstance(loss, float) and self._growth.has_grown(loss):
            self._growth.warn(loss, "Take a smaller lr", find_user_stacklevel())


@dataclass(frozen=True)
class Degenerate:
    """One singular side of one block: its rank, its size, and the reason."""

    names: tuple[str, ...]
    side: str
    rank: int
    size: int
    reason: str


def find_degenerate(state: KFACState) -> list[Degenerate]:
    """Return the singular sides of all blocks that have statistics."""
    degenerate: list[Degenerate] = []
    for key, average in state.averages.items():
        if key in state.measured_keys:
            degenerate += _find_degenerate_sides(key, gram_of(key, average.normalize()))
    return degenerate


def _find_degenerate_sides(key: BlockKey, block: GramBlock) -> list[Degenerate]:
    """Return the singular sides of a block: directions of length zero, which change nothing.

    If the expected pullback metric of a layer is nondegenerate, so is its Kronecker block.
    """
    if isinstance(block, Units):
        diagonal = block.diagonal()
        dead = int((diagonal <= 0).any(1).sum())
        units = len(diagonal)
        if not dead:
            return []
        reason = f"{dead} units never matter"
        return [Degenerate(key.names, "units", units - dead, units, reason)]
    assert isinstance(block, Pair)
    singular_sides = []
    for name, side in (("output", block.output_factor), ("input", block.input_factor)):
        if factor_matrix.is_diagonal(side):
            values = side
        else:
            values = torch.linalg.eigvalsh(side)
        for rank, matrix in zip(
            factor_matrix.is_above_round_off(values).sum(-1).tolist(), side, strict=True
        ):
            if rank < len(matrix):
                reason = _explain_singular_side(name, matrix, rank)
                singular_sides.append(Degenerate(key.names, name, rank, len(matrix), reason))
    return singular_sides


def _explain_singular_side(name: str, matrix: Tensor, rank: int) -> str:
    """Return why a side is singular, as far as its entries show it."""
    if matrix.ndim == 1:
        diagonal = matrix
    else:
        diagonal = matrix.diagonal()
    size = len(diagonal)
    dead = int((diagonal <= 0).sum())
    reasons = []
    if dead:
        if name == "input":
            reasons.append(f"{dead} inputs are always zero")
        else:
            reasons.append(f"{dead} outputs receive no gradient")
    has_common_shift = name == "output" and _has_zero_row_sums(matrix, diagonal)
    if has_common_shift:
        reasons.append("moving all outputs alike changes nothing, as with softmax logits")
    if size - rank > dead and not has_common_shift:
        reasons.append(f"{size - rank - dead} directions did not occur in the statistics")
    return "; ".join(reasons)


def _has_zero_row_sums(matrix: Tensor, diagonal: Tensor) -> bool:
    """Return True if the vector of ones is in the null space of a full matrix, up to round-off."""
    if matrix.ndim != 2:
        return False
    floor = len(diagonal) * torch.finfo(matrix.dtype).eps ** 0.5
    return float(matrix.sum(0).abs().max()) <= floor * float(diagonal.max())
