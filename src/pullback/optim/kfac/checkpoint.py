"""K-FAC's state under `optimizer.state[p]`, as checkpoints save it, and how it is taken up again.

For every parameter p:

    momentum   like p, where its param group has momentum
    length     what the KL clip knows of its last move
    schedule   numbers that belong to all parameters: one dict that all of them share
    table      its block: kind, partner, and how the weight is held
    average    by use and side the factors of the block that p leads, and their mass
    mean       plain means of the factors, where the damping asks for them
    state      the rule's tensors for that block, and whether they are ready

A bias that shares the block of its weight has numbers alone there. All leaves are tensors and
numbers; keys are names of enums and of a rule's own fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.shards import gather_whole, get_local_piece, is_sharded, shard_like
from ...grams.kronecker.packed_matrix import FactorMatrix, from_entries, get_entries
from .factors.block import BlockKey, BlockKind, FactorKey, Factors, block_shape
from .schedule import COUNTS
from .stacks import Block, Tensors
from .state import KFACState
from .update import State

#: kinds of blocks by the number that stands for them
_KINDS = (BlockKind.KRONECKER, BlockKind.UNITS, BlockKind.DIAGONAL, BlockKind.ENTRIES)
_NO_BLOCK = -1
#: keys of a parameter's state that older versions wrote
_OLD_KEYS = ("inverse", "spectrum")
Cut = Callable[[BlockKey, Tensor], Tensor]


def _keep(key: BlockKey, t: Tensor) -> Tensor:
    return t


# --- published ------------------------------------------------------------------------------------


def publish(state: KFACState, into: State, params: Tensors, cut: Cut = _keep) -> None:
    """Write the state under its parameters; tensors are its own, or what `cut` makes of them."""
    has_mean = state.references is not None
    numbers = {name: i for i, name in enumerate(params)}
    elementwise = state.entry_names | {*state.assignment.elementwise}
    for name, p in params.items():
        own = into[p]
        own["schedule"] = state.schedule.numbers
        own["table"] = _row(None, numbers)
        own["state"] = {"ready": 0}
        if name not in elementwise:
            own["average"] = {"mass": 0.0}  # a number keeps a dict that a flat file would lose
            if has_mean:
                own["mean"] = {"count": 0}
    for key, block in state.states.blocks.items():
        if key.names[0] not in params:
            continue
        own = into[params[key.names[0]]]
        own["table"] = _row(key, numbers)
        if block.rule.is_elementwise:
            own["state"] = _entries(block, params[key.names[0]])
            continue
        piece = partial(cut, key)
        average = state.averages[key]
        own["average"] = {**_nested(average.value, piece), "mass": average.mass}
        tensors = {n: piece(t) for n, t in block.state.tensors().items()}
        own["state"] = {**tensors, "ready": int(block.is_ready), "born": block.born}
        if has_mean:
            own["mean"] = {**_nested(average.mean, piece), "count": average.count}


def _row(key: BlockKey | None, numbers: Mapping[str, int]) -> dict[str, int]:
    """Return a row of the table in numbers; a parameter that leads no block has an empty one."""
    if key is None:
        return {"kind": _NO_BLOCK, "partner": -1, "bias": 0, "transposed": 0}
    return {
        "kind": _KINDS.index(BlockKind(key.kind)),
        "partner": numbers[key.names[1]] if len(key.names) > 1 else -1,
        "bias": int(key.bias),
        "transposed": int(key.turned),
    }


def _entries(block: Block, p: Any) -> dict[str, Any]:
    """Return the state of a parameter's entries, in the shape and pieces of the parameter."""
    out: dict[str, Any] = {"ready": 1, "born": block.born}
    for name, t in block.state.tensors().items():
        shaped = t.view(get_local_piece(p).shape)
        out[name] = shaped
        if is_sharded(p):
            from torch.distributed.tensor import DTensor

            layout = {"shape": p.shape, "stride": p.stride(), "run_check": False}
            out[name] = DTensor.from_local(shaped, p.device_mesh, p.placements, **layout)
    return out


def _nested(factors: Factors, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for factor, t in factors.items():
        out.setdefault(factor.role, {})[str(factor.side)] = change(get_entries(t))
    return out


# --- taken up again -------------------------------------------------------------------------------


def restore(state: KFACState, saved: Mapping[str, Mapping[str, Any]], params: Tensors) -> None:
    """Fill an empty state with what `publish` wrote, by name.

    Blocks are shown first, so that every process takes up the tensors that it is to hold.
    """
    try:
        _restore(state, saved, params)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise incomplete(f"its averages cannot be read ({error!r})") from error


def _restore(state: KFACState, saved: Mapping[str, Mapping[str, Any]], params: Tensors) -> None:
    names = list(params)
    for name, own in saved.items():
        key = _key_of(name, own["table"], names)
        if key is None:
            continue
        if key.kind == BlockKind.ENTRIES:
            _fill_entries(state, name, own["state"], params[name])
        else:
            _show_block(state, key, own, params)
    state.replicas.place(state.states, state.averages, state.averages.keys())
    for key in state.averages:
        _fill_block(state, key, saved[key.names[0]], params[key.names[0]])
    numbers = next(iter(saved.values()))["schedule"]
    state.schedule.numbers.update({name: _number(numbers[name]) for name in COUNTS})


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _key_of(name: str, row: Mapping[str, Any], names: Sequence[str]) -> BlockKey | None:
    """Return the block that a parameter leads, from its row of the table."""
    kind = int(_number(row["kind"]))
    if kind == _NO_BLOCK:
        return None
    partner = int(_number(row["partner"]))
    members = (name,) if partner < 0 else (name, names[partner])
    bias = bool(_number(row["bias"]))
    transposed = bool(_number(row["transposed"]))
    return BlockKey(str(_KINDS[kind]), members, bias=bias, turned=transposed)


def _placeholder(t: Tensor, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=t.dtype, device=device).expand(t.shape)


def _factors(
    nested: Mapping[str, Any], change: Callable[[Tensor], Tensor]
) -> dict[FactorKey, FactorMatrix]:
    factors: dict[FactorKey, FactorMatrix] = {}
    for use, sides in nested.items():
        if isinstance(sides, Mapping):
            for side, t in sides.items():
                factors[FactorKey(use, side)] = from_entries(change(t))
    return factors


def _show_block(state: KFACState, key: BlockKey, own: Mapping[str, Any], params: Tensors) -> None:
    """Reserve a saved block; raise where it is not that of these parameters, or of this rule."""
    show = partial(_placeholder, device=params[key.names[0]].device)
    factors = _factors(own["average"], show)
    size = prod(block_shape(key, factors))
    wanted = sum(params[n].numel() for n in key.names)
    if size != wanted:
        names = " and ".join(key.names)
        raise _foreign(f"{names} had {size} entries, and have {wanted} now")
    state.reserve(key, factors)
    expected = state.states.blocks[key].state.tensors().keys()
    found = {n for n, t in own["state"].items() if n not in ("ready", "born")}
    if expected != found:
        raise PullbackError(
            "The saved state is of another rule",
            f"what it keeps for {key.names[0]} is {', '.join(sorted(found))}, and this rule keeps "
            f"{', '.join(sorted(expected))}",
            "Load it into an optimizer with the same rule=",
        )


def _fill_entries(state: KFACState, name: str, own: Mapping[str, Any], p: Tensor) -> None:
    """Take up the state of a parameter's entries, or of the piece that this process has."""
    others = state.assignment.others
    found = {n: t for n, t in own.items() if n not in ("ready", "born")}
    if others is None:
        raise PullbackError(
            "The saved state is of another rule",
            f"{name} followed a rule for single entries",
            "Load it into an optimizer with the same rule=",
        )
    for t in found.values():
        if t.shape != p.shape:
            raise incomplete(f"the moments of {name!r} have another shape")
    key = state.allocate_entries(name, p)
    block = state.states.blocks[key]
    tensors: dict[str, Tensor] = {}
    for n, room in block.state.tensors().items():
        piece = get_local_piece(shard_like(found[n].to(room.dtype), p.detach().to(room.dtype)))
        tensors[n] = piece.reshape(room.shape).contiguous()
    block.state = replace(block.state, **tensors)
    block.born = int(_number(own["born"]))


def _fill_block(state: KFACState, key: BlockKey, own: Mapping[str, Any], p: Tensor) -> None:
    """Take up what this process holds of a block; pieces are brought together one by one."""

    def take(here: bool, t: Tensor) -> Tensor:
        t = gather_whole(t)
        return t.to(p.device, copy=True) if here else _placeholder(t, p.device)

    average = state.averages[key]
    kept = partial(take, state.replicas.keeps(key))
    mass = take(True, own["average"]["mass"])
    average.value = _factors(own["average"], kept)
    average.mass = mass
    if state.references is not None:
        average.mean = _factors(own["mean"], kept)
        average.count = int(_number(own["mean"]["count"]))
    block = state.states.blocks[key]
    tensors = {
        n: take(not block.is_absent, t)
        for n, t in own["state"].items()
        if n not in ("ready", "born")
    }
    block.state = replace(block.state, **tensors)
    like = get_entries(next(iter(average.value.values())))
    block.shape = replace(block.shape, dtype=like.dtype, device=like.device)
    block.is_ready = bool(_number(own["state"]["ready"]))
    block.born = int(_number(own["state"]["born"]))
    state.reserved.discard(key)
    if bool(mass > 0):
        state.learned.add(key)


# --- refused --------------------------------------------------------------------------------------


def saved_by_name(
    state_dict: Any, names: Sequence[Sequence[str]], wanted: Iterable[str]
) -> dict[str, Any]:
    """Return the saved state of each parameter, by name; raise where something is missing.

    `names` are those of each param group, and `wanted` the keys of every parameter's state.
    """
    try:
        numbers = [group["params"] for group in state_dict["param_groups"]]
        saved = dict(state_dict["state"])
    except (KeyError, TypeError, ValueError) as error:
        raise _not_ours("it has no state by parameter") from error
    if list(map(len, numbers)) != list(map(len, names)):
        raise _foreign("its param groups differ")
    pairs = zip(chain(*names), chain(*numbers), strict=True)
    # frozen parameters may be left out
    out = {name: saved[n] for name, n in pairs if saved.get(n) is not None}
    _refuse_old(out)
    if not out or any(not isinstance(own, Mapping) or "table" not in own for own in out.values()):
        raise _not_ours("it holds no table of blocks under its parameters")
    for own in out.values():
        missing = [key for key in wanted if key not in own]
        missing += [n for n in COUNTS if n not in own.get("schedule", {})]
        if missing:
            raise incomplete(f"{', '.join(missing)} is not in it")
    return out


def _refuse_old(saved: Mapping[str, Any]) -> None:
    for own in saved.values():
        if isinstance(own, Mapping) and any(key in own for key in _OLD_KEYS):
            raise PullbackError(
                "The saved state is that of an older version",
                "it names blocks by classes of layers, and has no table of them",
                "Start the optimizer anew from the model's state: averages are back after some "
                "statistics",
            )


def incomplete(why: str) -> PullbackError:
    """Return the error for a state of which something is missing."""
    return PullbackError(
        "The saved state is not whole",
        why,
        "Load what KFAC.state_dict() gave, as it was, into an optimizer with the same options",
    )


def _not_ours(why: str) -> PullbackError:
    remedy = (
        "Load what KFAC.state_dict() of this version gave, or start anew from the model's state"
    )
    return PullbackError("The saved state is not KFAC's", why, remedy)


def _foreign(why: str) -> PullbackError:
    return PullbackError(
        "The saved state is that of another network",
        why,
        "Load it into the optimizer of a model that was built in the same way",
    )
