"""K-FAC's state under `optimizer.state[p]`, as checkpoints save it, and how it is taken up again.

For every parameter p:

    momentum   like p, where its param group has momentum
    length     what the KL clip knows of its last move
    schedule   numbers that belong to all parameters: one dict that all of them share
    table      p's row of the table: its role, and the block that it leads
    state      the rule's tensors for that block, and whether they are ready
    average    if p leads a block with statistics: its factors by use and side, and their mass
    mean       plain means of these factors, where the damping asks for them

All leaves are tensors and numbers, and tensors that are not there from construction on have axes:
torch's functions for checkpoints take over no others. Keys are names of enums and of a rule's own
fields. The table has the same keys and shapes from construction on. Before the first step
`KFACLoadPlanner` lets `torch.distributed.checkpoint` read everything. Torch's own planner reads the
table alone, which says what averages and states there are: then a second load reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.shards import gather_whole, get_local_piece, is_sharded, shard_like
from ..._core.space import compute_dtype
from ...grams.kronecker.packed_matrix import FactorMatrix, from_entries, get_entries
from .block_stack import Block, Tensors
from .factors.block import BlockKey, BlockKind, FactorKey, Factors, block_shape
from .replicas import placeholder
from .schedule import COUNTS
from .state import KFACState
from .table import FactorShape, SavedRow, TableWriter, make_foreign_error, read_row
from .update import State

#: keys of a parameter's state that older versions wrote
_OLD_KEYS = ("inverse", "spectrum")
#: what stands beside the tensors of a block's state
_NUMBERS = ("ready", "born")
Cut = Callable[[BlockKey, Tensor], Tensor]


def _leave_whole(key: BlockKey, t: Tensor) -> Tensor:
    return t


# --- published ------------------------------------------------------------------------------------


def publish(state: KFACState, into: State, params: Tensors, cut: Cut = _leave_whole) -> None:
    """Write the state under its parameters; tensors are its own, or what `cut` makes of them."""
    has_mean = state.references is not None
    leaders = {key.names[0]: key for key in state.states.blocks}
    writer = TableWriter(list(params), state.assignment)
    for name, p in params.items():
        saved = into[p]
        key = leaders.get(name)
        saved["schedule"] = state.schedule.numbers
        device = None
        if p.requires_grad or key is not None:
            device = p.device
        saved["table"] = writer.make_row(name, key, _get_averages(state, key), device)
        saved["state"] = {"ready": 0, "born": 0}
        saved["average"] = {}
        if has_mean:
            saved["mean"] = {}
        if key is None:
            continue
        block = state.states.blocks[key]
        if block.rule.is_elementwise:
            saved["state"] = _save_entries(block, p)
            continue
        piece = partial(cut, key)
        average = state.averages[key]
        saved["average"] = {**_nest_factors(average.value, piece), "mass": average.mass.view(1)}
        tensors = {n: piece(t) for n, t in block.state.tensors().items()}
        saved["state"] = {**tensors, "ready": int(block.is_ready), "born": block.born}
        if has_mean:
            count = torch.tensor([average.count], device=average.mass.device)
            saved["mean"] = {**_nest_factors(average.mean, piece), "count": count}


def _get_averages(state: KFACState, key: BlockKey | None) -> Factors:
    """Return a block's averages; none for no block, and for one without factors."""
    if key is None or key not in state.averages:
        return {}
    return state.averages[key].value


def _save_entries(block: Block, p: Any) -> dict[str, Any]:
    """Return the state of a parameter's entries, in the shape and pieces of the parameter."""
    entries: dict[str, Any] = {"ready": 1, "born": block.born}
    for name, t in block.state.tensors().items():
        shaped = t.view(get_local_piece(p).shape)
        entries[name] = shaped
        if is_sharded(p):
            from torch.distributed.tensor import DTensor

            layout = {"shape": p.shape, "stride": p.stride(), "run_check": False}
            entries[name] = DTensor.from_local(shaped, p.device_mesh, p.placements, **layout)
    return entries


def _nest_factors(factors: Factors, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return changed entries of factors by use and, below that, by side."""
    nested: dict[str, Any] = {}
    for factor, t in factors.items():
        nested.setdefault(factor.use, {})[str(factor.side)] = change(get_entries(t))
    return nested


# --- taken up again -------------------------------------------------------------------------------


def restore(state: KFACState, saved: Mapping[str, Mapping[str, Any]], params: Tensors) -> None:
    """Fill an empty state with what `publish` wrote, by name.

    Blocks are reserved first, so that every process takes up the tensors that it is to hold. Where
    only the table was read from a checkpoint, blocks stay reserved, and another load fills them.
    """
    try:
        _restore(state, saved, params)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise make_incomplete_error(f"its averages cannot be read ({error!r})") from error


def _restore(state: KFACState, saved: Mapping[str, Mapping[str, Any]], params: Tensors) -> None:
    """Do what `restore` says, with the errors of a state that has another form."""
    rows = {name: read_row(name, row["table"], params) for name, row in saved.items()}
    state.assignment.roles = {n: row.role for n, row in rows.items() if row.role is not None}
    measured = _select_measured(rows)
    has_averages = any(saved[name].get("average") for name in measured)
    state.awaits_load = bool(measured) and not has_averages
    _reserve_blocks(state, measured, saved, params)
    for name, row in rows.items():
        if row.key is not None and name not in measured:
            _fill_entries(state, name, saved[name]["state"], params[name], is_whole=has_averages)
    state.replicas.assign_owners(state.states, state.averages, state.averages.keys())
    if not state.awaits_load:
        _fill_blocks(state, saved, params)
    numbers = next(iter(saved.values()))["schedule"]
    state.schedule.numbers.update({name: _as_number(numbers[name]) for name in COUNTS})


def _reserve_blocks(
    state: KFACState, measured: Mapping[str, SavedRow], saved: Mapping[str, Mapping[str, Any]],
    params: Tensors,
) -> None:  # fmt: skip
    """Reserve the saved blocks that have averages, by the name of each one's leader."""
    for name, row in measured.items():
        assert row.key is not None
        factor_shapes = row.factors
        if not state.awaits_load:
            factor_shapes = _list_factor_shapes(saved[name]["average"])
        _reserve_block(state, row.key, factor_shapes, params)


def _select_measured(rows: Mapping[str, SavedRow]) -> dict[str, SavedRow]:
    """Return the rows of blocks with averages, by the name of each one's leader."""
    return {
        name: row
        for name, row in rows.items()
        if row.key is not None and row.key.kind != BlockKind.ENTRIES
    }


def _fill_blocks(state: KFACState, saved: Mapping[str, Mapping[str, Any]], params: Tensors) -> None:
    """Read averages and states of all blocks, which are reserved, from their leaders."""
    for key in list(state.averages):
        name = key.names[0]
        _refuse_other_rule(state, key, saved[name]["state"])
        _fill_block(state, key, saved[name], params[name])


def _as_number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _read_factors(
    nested: Mapping[str, Any], change: Callable[[Tensor], Tensor]
) -> dict[FactorKey, FactorMatrix]:
    """Return factors of changed entries; `_nest_factors` is the inverse."""
    factors: dict[FactorKey, FactorMatrix] = {}
    for use, sides in nested.items():
        if isinstance(sides, Mapping):
            for side, t in sides.items():
                factors[FactorKey(use, side)] = from_entries(change(t))
    return factors


def _list_factor_shapes(nested: Mapping[str, Any]) -> list[FactorShape]:
    """Return the factors of saved averages with their shapes."""
    factor_shapes = []
    for use, sides in nested.items():
        if isinstance(sides, Mapping):
            for side, t in sides.items():
                factor_shapes.append(FactorShape(FactorKey(use, side), t.shape))
    return factor_shapes


def _reserve_block(
    state: KFACState, key: BlockKey, factor_shapes: Sequence[FactorShape], params: Tensors
) -> None:
    """Reserve a saved block; raise where it is not that of these parameters."""
    leader = params[key.names[0]]
    dtype = compute_dtype(leader.dtype)
    factors: dict[FactorKey, FactorMatrix] = {}
    for factor in factor_shapes:
        zeros = torch.zeros((), dtype=dtype, device=leader.device)
        factors[factor.key] = from_entries(zeros.expand(factor.shape))
    size = prod(block_shape(key, factors))
    current_size = sum(params[n].numel() for n in key.names)
    if size != current_size:
        names = " and ".join(key.names)
        raise make_foreign_error(f"{names} had {size} entries, and have {current_size} now")
    if not state.assignment.follows_rule(key, factors):
        raise _make_other_rule_error(f"what it keeps for {key.names[0]} is no block of this rule")
    state.reserve_block(key, factors)


def _refuse_other_rule(state: KFACState, key: BlockKey, saved: Mapping[str, Any]) -> None:
    """Raise where the saved tensors of a block are not those of this rule."""
    expected = state.states.blocks[key].state.tensors().keys()
    names = {n for n in saved if n not in _NUMBERS}
    if expected != names:
        raise _make_other_rule_error(
            f"what it keeps for {key.names[0]} is {_list_names(names)}, and this rule keeps "
            f"{_list_names(expected)}"
        )


def _list_names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _fill_entries(
    state: KFACState, name: str, saved: Mapping[str, Any], p: Tensor, *, is_whole: bool
) -> None:
    """Take up the state of a parameter's entries, or of the piece that this process has.

    Where only the table was read there is none yet: then the optimizer awaits another load. A state
    that `is_whole` has all that was saved.
    """
    moments = {n: t for n, t in saved.items() if n not in _NUMBERS}
    if state.assignment.others is None:
        raise _make_other_rule_error(f"{name} followed a rule for single entries")
    for t in moments.values():
        if t.shape != p.shape:
            raise make_incomplete_error(f"the moments of {name!r} have another shape")
    key = state.allocate_entries(name, p)
    block = state.states.blocks[key]
    room_by_name = block.state.tensors()
    if room_by_name and not moments and not is_whole:
        state.awaits_load = True
        return
    _refuse_other_rule(state, key, saved)
    tensors: dict[str, Tensor] = {}
    for n, room in room_by_name.items():
        piece = get_local_piece(shard_like(moments[n].to(room.dtype), p.detach().to(room.dtype)))
        tensors[n] = piece.reshape(room.shape).contiguous()
    block.state = replace(block.state, **tensors)
    block.born = int(_as_number(saved["born"]))


def _fill_block(state: KFACState, key: BlockKey, saved: Mapping[str, Any], p: Tensor) -> None:
    """Read the average and the state of a block, as far as this process holds them.

    Pieces of sharded tensors are gathered one by one.
    """

    def read(is_held: bool, t: Tensor) -> Tensor:
        t = gather_whole(t)
        if is_held:
            return t.to(p.device, copy=True)
        return placeholder(t, p.device)

    average = state.averages[key]
    read_factor = partial(read, state.replicas.keeps_average(key))
    mass = read(True, saved["average"]["mass"]).view(())
    average.value = _read_factors(saved["average"], read_factor)
    average.mass = mass
    if state.references is not None:
        average.mean = _read_factors(saved["mean"], read_factor)
        average.count = int(_as_number(saved["mean"]["count"]))
    block = state.states.blocks[key]
    tensors: dict[str, Tensor] = {}
    for name, t in saved["state"].items():
        if name not in _NUMBERS:
            tensors[name] = read(not block.is_absent, t)
    block.state = replace(block.state, **tensors)
    entries = get_entries(next(iter(average.value.values())))
    block.shape = replace(block.shape, dtype=entries.dtype, device=entries.device)
    block.is_ready = bool(_as_number(saved["state"]["ready"]))
    state.states.invalidate_stacks()
    block.born = int(_as_number(saved["state"]["born"]))
    state.reserved.discard(key)
    if bool(mass > 0):
        state.measured_keys.add(key)


# --- refused --------------------------------------------------------------------------------------


def select_saved_states(
    state_dict: Any, names: Sequence[Sequence[str]], required_keys: Collection[str]
) -> dict[str, Any]:
    """Return the saved state of each parameter, by name; raise where something is missing.

    `names` are those of each param group, and `required_keys` those of every parameter's state.
    """
    by_name = _match_names(state_dict, names)
    _refuse_old(by_name)
    if not by_name or not all(map(_has_table, by_name.values())):
        raise _make_unrelated_error("it holds no table of blocks under its parameters")
    for state in by_name.values():
        missing = [key for key in required_keys if key not in state]
        missing += [n for n in COUNTS if n not in state.get("schedule", {})]
        if missing:
            raise make_incomplete_error(f"{', '.join(missing)} is not in it")
    return by_name


def _match_names(state_dict: Any, names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return what was saved under the parameters' numbers, by name."""
    try:
        numbers = [group["params"] for group in state_dict["param_groups"]]
        saved = dict(state_dict["state"])
    except (KeyError, TypeError, ValueError) as error:
        raise _make_unrelated_error("it has no state by parameter") from error
    if list(map(len, numbers)) != list(map(len, names)):
        raise make_foreign_error("its param groups differ")
    by_name: dict[str, Any] = {}
    for name, number in zip(chain(*names), chain(*numbers), strict=True):
        if saved.get(number) is None:  # frozen parameters may be left out
            continue
        by_name[name] = saved[number]
        if not isinstance(number, str) and str(number) in saved:
            # torch.distributed.checkpoint puts numbers that it reads under keys of its own
            by_name[name] = _merge(saved[number], saved[str(number)])
    return by_name


def _merge(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts with the leaves of `changes` in their places."""
    merged = dict(tree)
    for key, value in changes.items():
        if isinstance(value, Mapping):
            merged[key] = _merge(merged.get(key, {}), value)
        else:
            merged[key] = value
    return merged


def _has_table(state: Any) -> bool:
    return isinstance(state, Mapping) and "table" in state


def _refuse_old(saved: Mapping[str, Any]) -> None:
    """Raise for a state that an older version has written."""
    for state in saved.values():
        if not isinstance(state, Mapping):
            continue
        has_old_table = "table" in state and "normalized" not in state["table"]
        if has_old_table or any(key in state for key in _OLD_KEYS):
            raise PullbackError(
                "The saved state is that of an older version",
                "it has no table of the parameters' roles and blocks, or one that does not say "
                "whose length has an effect",
                "Start the optimizer anew from the model's state: averages are back after some "
                "statistics",
            )


def make_half_loaded_error() -> PullbackError:
    """Return the error for a step of an optimizer that has read the table of a checkpoint alone."""
    return PullbackError(
        "The state was loaded in part",
        "torch.distributed.checkpoint reads what the optimizer names, and it knows the names of "
        "averages and states since this load",
        "Load with planner=pullback.optim.kfac.KFACLoadPlanner(), or a second time in the same way",
    )


def _make_other_rule_error(why: str) -> PullbackError:
    remedy = "Load it into an optimizer with the same rule= and its options"
    return PullbackError("The saved state is of another rule", why, remedy)


def make_incomplete_error(why: str) -> PullbackError:
    """Return the error for a state of which something is missing."""
    return PullbackError(
        "The saved state is not whole",
        why,
        "Load what KFAC.state_dict() gave, as it was, into an optimizer with the same options",
    )


def _make_unrelated_error(why: str) -> PullbackError:
    remedy = (
        "Load what KFAC.state_dict() of this version gave, or start anew from the model's state"
    )
    return PullbackError("The saved state is not KFAC's", why, remedy)
