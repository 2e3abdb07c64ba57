"""The state of K-FAC: typed here, and published under `optimizer.state[p]` for checkpoints.

For every parameter p, from construction on and with keys that do not depend on the data:

    momentum   like p
    schedule   numbers that belong to all parameters: one dict that all of them share
    average    by role and side the factors of the block that p leads, and their mass
    inverse    left, right (and scale) of that block, and whether they are ready
    mean       plain means of the factors, where the damping asks for them
    spectrum   corrected eigenvalues and their mass, with ekfac=True

A bias that shares the block of its weight has empty dicts there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ...grams.kronecker.inverse import Inverse
from ...grams.kronecker.packed import Side, as_side, memory
from .factors.average import Average, ema_update
from .factors.factor import SPECTRUM, BlockKey, Factor, Factors, block_shape
from .factors.preconditioner import Preconditioner
from .statistics.plan import Forecast

_SCHEDULE = ("step", "taken", "damping", "retry")


@dataclass
class KFACState:
    """Averages and inverses of all blocks, and where the schedule stands."""

    preconditioner: Preconditioner
    #: whether plain means are kept beside the averages
    mean: bool
    #: steps done, statistics taken, λ, and whether a rejected step asks for new inverses
    schedule: dict[str, Any]
    averages: dict[BlockKey, Average] = field(default_factory=dict)
    #: blocks that have statistics; the others are forecast
    learned: set[BlockKey] = field(default_factory=set)

    def allocate(self, key: BlockKey, like: Factors) -> None:
        """Make room for a block of these factors' shapes."""
        self.averages[key] = Average.empty(like, mean=self.mean)
        self.preconditioner.allocate(key, self.averages[key])
        self.learned.discard(key)

    def make_room(self, found: Mapping[BlockKey, Factors]) -> bool:
        """Make room for statistics whose blocks are new or have other shapes; say if it did."""
        leaders = {n: k for k in self.averages for n in k.names}
        changed = False
        for key, factors in found.items():
            own = {f: t for f, t in factors.items() if f != SPECTRUM}
            for old in {leaders[n] for n in key.names if leaders.get(n, key) != key}:
                changed |= self.drop(old)  # a bias was frozen, say, and the weight is by itself now
            average = self.averages.get(key)
            if average is not None and average.fits(own):
                continue
            if average is not None and key in self.learned and average.of_shapes(own):
                self.move(key, memory(next(iter(own.values()))))
            else:
                self.allocate(key, own)
            changed = True
        return changed

    def move(self, key: BlockKey, like: Tensor) -> None:
        """Bring a block to another device or dtype."""
        to, own = (like.device, like.dtype), self.preconditioner
        self.averages[key] = self.averages[key].to(*to)
        if key in own.spectra:
            own.spectra[key] = own.spectra[key].to(*to)
        inverse = own.inverses[key]
        if inverse.dtype == like.dtype:
            moved = {n: t.to(like.device) for n, t in inverse.tensors().items()}
            own.inverses[key] = replace(inverse, **moved)
        else:  # made anew from the averages
            own.allocate(key, self.averages[key])
        own.regroup()

    def drop(self, key: BlockKey) -> bool:
        """Forget a block; say if there was one."""
        self.preconditioner.drop(key)
        self.learned.discard(key)
        return self.averages.pop(key, None) is not None

    def update(self, found: Mapping[BlockKey, Factors], ema: float, broken: Tensor | None) -> None:
        """Take up the statistics of one step; nothing changes where the flag `broken` is 1."""
        ema_update([(self.averages[k], own) for k, own in found.items()], ema, broken)
        self.learned.update(found)
        self.schedule["taken"] += 1

    @property
    def complete(self) -> bool:
        """Whether every block with statistics has an inverse."""
        return self.learned <= self.preconditioner.ready

    def memory(self) -> dict[str, int]:
        """Bytes held, by what for."""
        own = self.preconditioner
        spectra = [t for s in own.spectra.values() for t in s.tensors()]
        averages = [t for a in self.averages.values() for t in a.tensors()]
        inverses = [t for i in own.inverses.values() for t in i.tensors().values()]
        return {
            "averages": sum(t.nbytes for t in averages + spectra),
            "inverses": sum(t.nbytes for t in inverses),
        }


# --- published and taken up again ---------------------------------------------------------------


def publish(
    state: KFACState, into: MutableMapping[Tensor, dict[str, Any]], params: Mapping[str, Tensor]
) -> None:
    """Write the state under its parameters; tensors are the state's own, not copies."""
    parts = ("average", "inverse", *(["mean"] if state.mean else []))
    parts += ("spectrum",) if state.preconditioner.ekfac else ()
    for p in params.values():
        into[p] |= {"schedule": state.schedule, **{part: {} for part in parts}}
    for key, average in state.averages.items():
        own, held = into[params[key.names[0]]], state.preconditioner
        own["average"] = {**_nested(average.value), "mass": average.mass}
        own["inverse"] = {**held.inverses[key].tensors(), "ready": int(key in held.ready)}
        if state.mean:
            own["mean"] = {**_nested(average.mean), "count": average.count}
        if key in held.spectra:
            spectrum = held.spectra[key]
            own["spectrum"] = {"values": memory(spectrum.value[SPECTRUM]), "mass": spectrum.mass}


def _nested(factors: Factors) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for factor, t in factors.items():
        out.setdefault(factor.role, {})[factor.side] = memory(t)
    return out


def _factors(nested: Mapping[str, Any], p: Tensor) -> dict[Factor, Side]:
    return {
        Factor(role, side): as_side(_own(t, p))
        for role, own in nested.items()
        if isinstance(own, Mapping)
        for side, t in own.items()
    }


def _own(t: Tensor, p: Tensor) -> Tensor:
    """A copy on the parameter's device, in its own dtype."""
    return t.detach().to(p.device, copy=True)


def restore(
    state: KFACState,
    saved: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, Tensor],
    expected: Forecast,
) -> None:
    """Take up a published state, by parameter name.

    Args:
        state: an empty one.
        saved: what `publish` wrote, by name.
        params: the model's, by name.
        expected: which parameters are partners.
    """
    held = state.preconditioner
    for name, own in saved.items():
        if not own["average"]:
            continue
        p, factors = params[name], _factors(own["average"], params[name])
        key = _key_of(name, p, factors, expected)
        size, wanted = prod(block_shape(key, factors)), sum(params[n].numel() for n in key.names)
        if size != wanted:
            names = " and ".join(key.names)
            raise foreign(f"{names} had {size} entries, and have {wanted} now")
        state.allocate(key, factors)
        average = state.averages[key]
        average.value, average.mass = factors, _own(own["average"]["mass"], p)
        if state.mean:
            average.mean, average.count = _factors(own["mean"], p), own["mean"]["count"]
        tensors = {n: _own(t, p) for n, t in own["inverse"].items() if n != "ready"}
        held.inverses[key] = Inverse(
            **{"left": None, **tensors}, factors=held.inverses[key].factors
        )
        if own["inverse"]["ready"]:
            held.ready.add(key)
        if key in held.spectra:
            values, mass = own["spectrum"]["values"], own["spectrum"]["mass"]
            held.spectra[key] = Average({SPECTRUM: _own(values, p)}, _own(mass, p))
        if average.started:
            state.learned.add(key)
    schedule = next(iter(saved.values()))["schedule"]
    state.schedule.update({n: _number(schedule[n]) for n in _SCHEDULE})


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _key_of(name: str, p: Tensor, factors: Factors, expected: Forecast) -> BlockKey:
    """The block whose first parameter this is, from the roles and shapes of its factors."""
    roles = {f.role for f in factors}
    partner, shape = expected.partners.get(name), next(iter(factors.values())).shape
    if roles == {"diagonal"}:
        return BlockKey("diagonal", (name,))
    bias = name in expected.biases
    if roles == {"units"}:
        joint = shape[-1] == 2 and partner is not None
        return BlockKey("units", (name, partner) if joint else (name,), bias=bias)  # pyright: ignore[reportArgumentType]
    if roles == {"bias"}:
        return BlockKey("kronecker", (name,), bias=True)
    width = p.numel() // max(1, len(p))
    joint = block_shape(BlockKey("kronecker", (name,)), factors)[2] > width and partner is not None
    return BlockKey("kronecker", (name, partner) if joint else (name,))  # pyright: ignore[reportArgumentType]


def saved_by_name(
    state_dict: Any, names: Iterable[list[str]], wanted: Iterable[str]
) -> dict[str, Any]:
    """What `KFAC.state_dict()` holds for each parameter, by name, if all of it is there.

    Args:
        state_dict: what the user gave.
        names: of the parameters in each param group.
        wanted: the keys that each parameter's state has.
    """
    try:
        groups, saved = state_dict["param_groups"], dict(state_dict["state"])
        numbers = [number for group in groups for number in group["params"]]
    except (KeyError, TypeError, ValueError) as error:
        raise _not_ours("it has no state by parameter") from error
    if "pullback" in saved:
        raise PullbackError(
            "The saved state is of an older version",
            "averages and inverses are kept under their parameters now",
            "Start the optimizer anew from the model's own state",
        )
    every = [name for own in names for name in own]
    if [len(group["params"]) for group in groups] != [len(own) for own in names]:
        raise foreign("its param groups differ")
    out = {}
    for number, name in zip(numbers, every, strict=True):
        own = saved.get(number)
        if own is None:  # frozen parameters may be left out
            continue
        if not isinstance(own, Mapping) or "average" not in own:
            raise _not_ours("it holds no averages")
        missing = [key for key in wanted if key not in own]
        missing += [n for n in _SCHEDULE if n not in own.get("schedule", {})]
        if missing:
            raise PullbackError(
                "The saved state is not whole",
                f"{', '.join(missing)} is not in it",
                "Load what KFAC.state_dict() gave, as it was, into an optimizer with the same "
                "options",
            )
        out[name] = own
    if not out:
        raise _not_ours("it holds no averages")
    return out


def _not_ours(why: str) -> PullbackError:
    return PullbackError("The saved state is not KFAC's", why, "Load what KFAC.state_dict() gave")


def foreign(why: str) -> PullbackError:
    """The error for a state that belongs to other parameters."""
    return PullbackError(
        "The saved state is that of another network",
        why,
        "Load it into the optimizer of a model that was built in the same way",
    )


class Undo:
    """Everything that a step may change, put back after an exception.

    Args:
        state: of the optimizer.
        params: those that may move.
        buffers: their momentum.
        learning: whether statistics or inverses may be renewed.
    """

    def __init__(
        self,
        state: KFACState,
        params: Iterable[Tensor],
        buffers: Iterable[Tensor],
        *,
        learning: bool,
    ) -> None:
        own = state.preconditioner
        self._state = state
        self._schedule, self._notes = dict(state.schedule), dict(own.notes)
        self._dicts = [(held, dict(held)) for held in (state.averages, own.inverses, own.spectra)]
        self._sets = [(held, set(held)) for held in (state.learned, own.ready)]
        self._counts = [(a, a.count) for a in state.averages.values()]
        self._tensors = [(t, t.detach().clone()) for t in (*params, *buffers)]
        self._inverses = []
        if learning:
            every = (*state.averages.values(), *own.spectra.values())
            self._tensors += [(t, t.clone()) for a in every for t in a.tensors()]
            self._inverses = [
                (i, n, t.clone()) for i in own.inverses.values() for n, t in i.tensors().items()
            ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put all of it back."""
        own = self._state.preconditioner
        self._state.schedule.update(self._schedule)
        own.notes.clear()
        own.notes.update(self._notes)
        for held, before in self._dicts:
            held.clear()
            held.update(before)  # pyright: ignore[reportCallIssue, reportArgumentType]
        for now, before in self._sets:
            now.clear()
            now.update(before)
        for average, count in self._counts:
            average.count = count
        for t, before in self._tensors:
            t.copy_(before)
        for inverse, name, before in self._inverses:
            setattr(inverse, name, before)
        own.regroup()
