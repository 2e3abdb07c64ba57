"""The state of K-FAC: typed here, and published under `optimizer.state[p]` for checkpoints.

For every parameter p, from construction on and with keys that do not depend on the data:

    momentum   like p
    schedule   numbers that belong to all parameters: one dict that all of them share
    average    by role and side the factors of the block that p leads, and their mass
    inverse    left, right (and scale) of that block, and whether they are ready
    mean       plain means of the factors, where the damping asks for them
    spectrum   corrected eigenvalues and their mass, with ekfac=True

A bias that shares the block of its weight has numbers alone there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..._core.flags import are_finite_in_place
from ..._core.shards import gather_whole
from ...grams.kronecker.inverse import MOMENTS, Inverse
from ...grams.kronecker.packed_matrix import FactorMatrix, from_entries, get_entries
from .factors.block import (
    SPECTRUM,
    Average,
    BlockKey,
    FactorKey,
    Factors,
    block_shape,
    ema_update,
    to_block,
)
from .factors.damping import refuse_reference
from .factors.preconditioner import Preconditioner, placeholder
from .replicas import Replicas
from .statistics.plan import Forecast
from .update import Guard, State, Tensors

_ALONE = BlockKey("kronecker", ("",))
_HALF = 0.5  # weights of the past below it would keep the round-off of what is forgotten
_SCHEDULE = ("step", "taken", "damping", "retry")


#: the means of one statistics step
BlockMeans = Mapping[BlockKey, dict[FactorKey, FactorMatrix]]


@dataclass
class KFACState:
    """Averages and inverses of all blocks, and where the schedule stands."""

    preconditioner: Preconditioner
    #: the processes that share the work
    replicas: Replicas
    #: steps done, statistics taken, λ, and whether a rejected step asks for new inverses
    schedule: dict[str, Any]
    averages: dict[BlockKey, Average] = field(default_factory=dict)
    #: blocks that have statistics; the others are forecast
    learned: set[BlockKey] = field(default_factory=set)
    #: forecast blocks whose tensors show their shapes and take no memory yet
    reserved: set[BlockKey] = field(default_factory=set)
    #: where the model's parameters were at the last step
    devices: list[torch.device] = field(default_factory=list)

    def allocate(self, key: BlockKey, like: Factors) -> None:
        """Make room for a block of these factors' shapes."""
        self.averages[key] = Average.empty(like, mean=self.preconditioner.damping.referenced)
        self.preconditioner.allocate(key, self.averages[key])
        self.learned.discard(key)
        self.reserved.discard(key)

    def reserve(self, key: BlockKey, like: Factors) -> None:
        """Show a block of these shapes; memory is taken with its first statistics."""
        self.allocate(key, like)
        self.averages[key].change(placeholder)
        self.preconditioner.change(key, placeholder)
        self.reserved.add(key)

    def reserve_expected(self, expected: Forecast) -> None:
        """Show the blocks that are expected, of parameters that have none with statistics."""
        learned = {n for key in self.learned for n in key.names}
        for key, factors in expected.factors.items():
            if key not in self.averages and learned.isdisjoint(key.names):
                for other in [k for k in self.averages if not {*key.names}.isdisjoint(k.names)]:
                    self.drop(other)  # a bias whose weight came with another group
                self.reserve(key, factors)

    def make_room(self, found: Mapping[BlockKey, Factors]) -> bool:
        """Make room for statistics whose blocks are new or have other shapes; say if it did."""
        leaders = {n: k for k in self.averages for n in k.names}
        changed = False
        for key, factors in found.items():
            own = {f: t for f, t in factors.items() if f != SPECTRUM}
            for old in {leaders[n] for n in key.names if leaders.get(n, key) != key}:
                changed |= self.drop(old)  # a bias was frozen, say, and the weight is by itself now
            average = self.averages.get(key)
            if average is not None and average.fits(own) and key not in self.reserved:
                continue
            if average is not None and key in self.learned and average.of_shapes(own):
                self.move(key, get_entries(next(iter(own.values()))))
            else:
                self.allocate(key, own)
            changed = True
        return changed

    def move(self, key: BlockKey, like: Tensor) -> None:
        """Bring a block to another device or dtype."""
        own = self.preconditioner
        self.averages[key].change(lambda t: t.to(like))
        if own.inverses[key].dtype == like.dtype:
            own.change(key, lambda t: t.to(like.device))
        else:  # made anew from the averages
            own.allocate(key, self.averages[key])

    def follow(self, params: Tensors) -> None:
        """Bring blocks to the devices of their parameters, where the model was moved."""
        now = [p.device for p in params.values()]
        moved, self.devices = now != self.devices, now
        for key in self.learned if moved else ():
            mass, device = self.averages[key].mass, params[key.names[0]].device
            if mass.device != device:
                self.move(key, mass.to(device))
        if moved:
            self.replicas.release(self.preconditioner, self.averages)

    def drop(self, key: BlockKey) -> bool:
        """Forget a block; say if there was one."""
        self.preconditioner.drop(key)
        self.learned.discard(key)
        self.reserved.discard(key)
        return self.averages.pop(key, None) is not None

    def inherit(self, old: KFACState, saved: Container[str]) -> None:
        """Take the place of `old`; blocks of parameters that were not `saved` are reserved."""
        for key, average in old.averages.items():
            if not any(n in saved for n in key.names) and key not in self.averages:
                self.reserve(key, average.value)  # they were frozen when it was saved
        old.schedule.update(self.schedule)  # the dict itself is shared
        self.schedule = old.schedule
        self.replicas.forget_shares()

    # --- statistics → averages → inverses → directions ------------------------------------------

    def learn(self, found: BlockMeans, ema: float, guard: Guard) -> bool:
        """Take up the statistics of one step, if all of them are finite."""
        new = [get_entries(t) for own in found.values() for t in own.values()]
        if not guard.holds(self.replicas.processes.all_agree(are_finite_in_place(new))):
            return False
        refuse_reference(self.preconditioner.damping, found)
        if not guard.deferred and self.make_room(found):
            keys = self.averages.keys() - self.reserved
            self.replicas.place(self.preconditioner, self.averages, keys)
        spectra = {k: own.pop(SPECTRUM) for k, own in found.items() if SPECTRUM in own}
        self.replicas.split(self.blocks)
        held = {k: own if self.replicas.keeps(k) else {} for k, own in found.items()}
        ema_update([(self.averages[k], own) for k, own in held.items()], ema, guard.broken)
        self.learned.update(found)
        self.schedule["taken"] += 1
        if spectra:
            self.preconditioner.correct(spectra, ema, self.schedule["damping"])
        return True

    def stack(self, params: Tensors, like: Tensors) -> bool:
        """Bring inverses to their parameters and into few stacks; True if that had to be done."""
        self.follow(params)
        if self.preconditioner.stacked:
            return False
        self.preconditioner.stack(like)
        return True

    def directions(
        self, gradients: Tensors, good: Tensor | None
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the rule's directions by name, and in few tensors."""
        own = self.preconditioner
        found, stacks = self.replicas.complete(own, *own.directions(gradients, good), gradients)
        if own.rule.matrices:
            return {n: found[n] for n in gradients if n in found}, stacks
        # without a block the gradient is followed
        stacks += [g for n, g in gradients.items() if n not in found]
        return {n: found.get(n, g) for n, g in gradients.items()}, stacks

    @property
    def bases(self) -> dict[BlockKey, Inverse]:
        """The eigenbases in which statistics are to be taken."""
        own = self.preconditioner
        return {k: own.inverses[k] for k in own.spectra if k in own.ready}

    def inverts(self, count: int, every: int) -> bool:
        """Whether inverses are to be renewed with this many statistics taken up."""
        step = self.schedule["step"]
        return step % every == 0 or (step < every and count & (count - 1) == 0)

    def renew(self, taken: bool, every: int) -> None:
        """Renew inverses when it is time, and make those that are missing."""
        own, schedule = self.preconditioner, self.schedule
        due = schedule["retry"] or (taken and self.inverts(schedule["taken"], every))
        keys = self.learned if due else self.learned - own.ready
        schedule["retry"] = 0
        if keys:
            self.replicas.whole(self.blocks)
            keys = sorted(keys, key=lambda key: key.names)
            self.replicas.renew(own, self.averages, keys, schedule["damping"])

    @property
    def blocks(self) -> list[tuple[BlockKey, Average]]:
        """The blocks that have statistics, in an order that all processes have."""
        keys = sorted(self.learned, key=lambda key: key.names)
        return [(key, self.averages[key]) for key in keys]

    def squared_length(self, move: Tensors, like: Tensors) -> Tensor:
        """Return xᵀF̂x for a move x by name; each process adds what its shares give."""
        own, total = self.preconditioner, []
        for key, average in self.blocks:
            if move.keys().isdisjoint(key.names):
                continue
            some = [move[n] if n in move else torch.zeros_like(like[n]) for n in key.names]
            v = to_block(key, [t.to(average.mass.dtype) for t in some], own.shapes[key])
            corner = self.replicas.corner(key, average)
            given = corner is not None
            total.append(own.product(key, average, v, corner) if given else v.new_zeros(()))
        if not total:  # no statistics yet
            return next(iter(move.values())).new_zeros(())
        return self.replicas.total(torch.stack([t.to(total[0]) for t in total]).sum()).clamp(min=0)

    def guardable(self, found: Mapping[BlockKey, Factors], ema: float) -> bool:
        """Whether these statistics can be taken up under a flag on the device.

        All blocks have inverses and room for them, and there is such a kernel.
        """
        if not self.learned <= self.preconditioner.ready or not self.learned.issuperset(found):
            return False
        kept = [(self.averages[k], own) for k, own in found.items() if self.replicas.keeps(k)]
        return ema >= _HALF and all(average.adds_up(new) for average, new in kept)

    def memory(self) -> dict[str, int]:
        """Return the bytes held, by what for."""
        own = self.preconditioner
        spectra = [t for s in own.spectra.values() for t in (*s.sides(), s.mass)]
        held = [k for k in self.averages if k not in self.reserved]
        averages = [self.averages[k].mass for k in held]
        averages += [t for k in held if self.replicas.keeps(k) for t in self.averages[k].sides()]
        present = [k for k in held if k not in own.absent]
        inverses = [t for k in present for t in own.inverses[k].tensors().values()]
        return {
            "averages": sum(t.nbytes for t in averages + spectra),
            "inverses": sum(t.nbytes for t in inverses),
        }


# --- published and taken up again ---------------------------------------------------------------


def publish(
    state: KFACState,
    into: State,
    params: Tensors,
    cut: Callable[[BlockKey, Tensor], Tensor] = lambda _, t: t,
) -> None:
    """Write the state under its parameters; tensors are its own, or what `cut` makes of them."""
    for p in params.values():  # a number keeps a dict that a flattened checkpoint would lose
        into[p] |= {"schedule": state.schedule, "average": {"mass": 0.0}, "inverse": {"ready": 0}}
        if state.preconditioner.damping.referenced:
            into[p]["mean"] = {"count": 0}
        if state.preconditioner.ekfac:
            into[p]["spectrum"] = {"mass": 0.0}
    for key, average in state.averages.items():
        own, held, piece = into[params[key.names[0]]], state.preconditioner, partial(cut, key)
        own["average"] = {**_nested(average.value, piece), "mass": average.mass}
        inverse = {n: piece(t) for n, t in held.inverses[key].tensors().items()}
        own["inverse"] = {**inverse, "ready": int(key in held.ready)}
        if state.preconditioner.damping.referenced:
            own["mean"] = {**_nested(average.mean, piece), "count": average.count}
        if key in held.spectra:
            values, mass = get_entries(held.spectra[key].value[SPECTRUM]), held.spectra[key].mass
            own["spectrum"] = {"values": piece(values), "mass": mass}


def _nested(factors: Factors, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for factor, t in factors.items():
        out.setdefault(factor.role, {})[factor.side] = change(get_entries(t))
    return out


def _factors(
    nested: Mapping[str, Any], change: Callable[[Tensor], Tensor]
) -> dict[FactorKey, FactorMatrix]:
    return {
        FactorKey(role, side): from_entries(change(t))
        for role, own in nested.items()
        if isinstance(own, Mapping)
        for side, t in own.items()
    }


def restore(
    state: KFACState, saved: Mapping[str, Mapping[str, Any]], params: Tensors, expected: Forecast
) -> None:
    """Fill an empty state with what `publish` wrote, by name; partners are as `expected`.

    Blocks are shown first, so that every process takes up the tensors that it is to hold.
    """
    try:
        given = {n: own["average"] for n, own in saved.items()}
        where = {n: partial(placeholder, device=params[n].device) for n in given}
        shown = {n: _factors(own, where[n]) for n, own in given.items()}
        # those without factors of their own share the block of a weight
        shared = [n for n, own in shown.items() if not own]
        for name, own in shown.items():
            if own:
                key = _key_of(name, params, own, expected, shared)
                _show_block(state, key, own, saved[name], params)
        state.replicas.place(state.preconditioner, state.averages, state.averages.keys())
        for key in state.averages:
            _fill_block(state, key, saved[key.names[0]], params[key.names[0]])
        schedule = next(iter(saved.values()))["schedule"]
        for name in _SCHEDULE:
            value = schedule[name]
            state.schedule[name] = value.item() if isinstance(value, Tensor) else value
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise incomplete(f"its averages cannot be read ({error!r})") from error


def _show_block(
    state: KFACState, key: BlockKey, factors: Factors, own: Mapping[str, Any], params: Tensors
) -> None:
    """Reserve a saved block; raise where it is not that of these parameters, or of this rule."""
    size, wanted = prod(block_shape(key, factors)), sum(params[n].numel() for n in key.names)
    if size != wanted:
        names = " and ".join(key.names)
        raise _foreign(f"{names} had {size} entries, and have {wanted} now")
    state.reserve(key, factors)
    both = own["inverse"], state.preconditioner.inverses[key].tensors()
    moments = [{n: t.shape for n, t in some.items() if n in MOMENTS} for some in both]
    if moments[0] != moments[1]:
        raise PullbackError(
            "The saved state is of another rule",
            f"moments of {key.names[0]} are not those that this one keeps",
            "Load it into an optimizer with the same rule=",
        )


def _fill_block(state: KFACState, key: BlockKey, own: Mapping[str, Any], p: Tensor) -> None:
    """Take up what this process holds of a block; pieces are brought together one by one."""

    def take(here: bool, t: Tensor) -> Tensor:
        t = gather_whole(t)
        return t.to(p.device, copy=True) if here else placeholder(t, p.device)

    held, average = state.preconditioner, state.averages[key]
    every, kept = partial(take, True), partial(take, state.replicas.keeps(key))
    average.value, average.mass = _factors(own["average"], kept), every(own["average"]["mass"])
    if state.preconditioner.damping.referenced:
        average.mean, average.count = _factors(own["mean"], kept), own["mean"]["count"]
    here, room = key not in held.absent, held.inverses[key]
    tensors: Any = {n: take(here, t) for n, t in own["inverse"].items() if n != "ready"}
    held.inverses[key] = Inverse(**{"left": None, **tensors}, factors=room.factors)
    state.reserved.discard(key)
    if own["inverse"]["ready"]:
        held.ready.add(key)
    if key in held.spectra:
        values, mass = (every(own["spectrum"][part]) for part in ("values", "mass"))
        held.spectra[key] = Average({SPECTRUM: values}, mass)
    if average.mass > 0:
        state.learned.add(key)


def _key_of(
    name: str, params: Tensors, factors: Factors, expected: Forecast, shared: Sequence[str]
) -> BlockKey:
    """Return the block whose first parameter this is, from the roles and shapes of its factors."""
    p, roles, partner = params[name], {f.role for f in factors}, expected.partners.get(name)
    sided = roles.isdisjoint({"diagonal", "units", "bias"})
    if partner is None and sided and (more := prod(block_shape(_ALONE, factors)) - p.numel()) > 0:
        near = name.rpartition(".")[0]  # what functions add beside it, mostly of the same module
        fitting = [n for n in shared if params[n].numel() == more]
        own = [n for n in fitting if n.rpartition(".")[0] == near]
        partner = next(iter([*own, *fitting]), None)
    names = (name,) if partner is None else (name, partner)
    if roles == {"diagonal"}:
        return BlockKey("diagonal", (name,))
    if roles == {"units"}:
        joint = next(iter(factors.values())).shape[-1] == 2
        return BlockKey("units", names if joint else (name,), bias=name in expected.biases)
    if roles == {"bias"}:
        return BlockKey("kronecker", (name,), bias=True)
    joint = prod(block_shape(_ALONE, factors)) > p.numel()
    turned = roles == {"transposed_product"}  # elsewhere it is held as the parameter is
    return BlockKey("kronecker", names if joint else (name,), turned=turned)


def saved_by_name(
    state_dict: Any, names: Sequence[Sequence[str]], wanted: Iterable[str]
) -> dict[str, Any]:
    """Return the saved state of each parameter, by name; raise where something is missing.

    `names` are those of each param group, and `wanted` the keys of a parameter's state.
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
    if not out or any(not isinstance(o, Mapping) or "average" not in o for o in out.values()):
        raise _not_ours("it holds no averages under its parameters")
    for own in out.values():
        missing = [key for key in wanted if key not in own]
        missing += [n for n in _SCHEDULE if n not in own.get("schedule", {})]
        if missing:
            raise incomplete(f"{', '.join(missing)} is not in it")
    return out


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
