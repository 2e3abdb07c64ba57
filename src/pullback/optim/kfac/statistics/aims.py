"""What the uses of layers are measured for, decided once for all passes that go the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ....maps.layers import Layer
from ....maps.record import Entry, Site
from ..blocks.inverse import Inverse
from .plan import Plan
from .sums import Key, Term


@dataclass(frozen=True, slots=True, eq=False)
class Aim:
    """One use of a layer: whether anything is learned from it, and the blocks that learn."""

    layer: Layer
    wanted: bool
    #: whether it may have given a view of its rows (places, O)
    rows: bool
    #: the roles of the parameters that take part, and whether these are among them
    roles: list[str]
    weight: bool
    bias: bool
    term: Term
    #: the blocks of the weight, of a bias by itself, and of gains and shifts: which of the roles
    #: they have, None for all
    weights: Key | None = None
    biases: Key | None = None
    units: Sequence[tuple[Key, list[int] | None]] = ()
    #: where the samples stand, as `samples.located` says
    layout: str = ""


def aims(
    entries: Sequence[Entry], plan: Plan | None, apart: Collection[str], layouts: Sequence[str]
) -> list[Aim]:
    """By use; those of `apart` have no block to add to, and without a plan none is known yet."""
    plain = apart if plan is None else plan.plain
    return [_aim(e.site, plan, plain, at) for e, at in zip(entries, layouts, strict=True)]


def _aim(site: Site, plan: Plan | None, plain: Collection[str], layout: str) -> Aim:
    names, layer = site.names, site.layer
    roles = [r for r, n in names.items() if n is not None]
    wanted = any(n is not None and n not in plain for n in names.values())
    own = ("weight" in roles, "bias" in roles, Term.of(layer))
    aim = Aim(layer, wanted, type(site.module) is nn.Linear, roles, *own, layout=layout)
    if plan is None:
        return aim
    units = [
        (key, None if some == roles else [roles.index(r) for r in some])
        for key, some in plan.units(names)
    ]
    return replace(aim, weights=plan.weight(names), biases=plan.bias(names), units=units)


def basis_by(
    entries: Sequence[Entry], bases: Mapping[Key, Inverse]
) -> Callable[[Entry], tuple[Key, Inverse] | None] | None:
    """The eigenbases of a use's block, where it is the block's only use."""
    by_weight = {k.names[0]: k for k, b in bases.items() if b.scale is not None and not k.bias}
    if not by_weight:
        return None
    uses = Counter(e.names.get("weight") for e in entries)

    def basis(entry: Entry) -> tuple[Key, Inverse] | None:
        weight = entry.names.get("weight")
        key = by_weight.get(weight or "")
        return None if key is None or uses[weight] > 1 else (key, bases[key])

    return basis
