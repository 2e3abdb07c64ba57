"""Which block every parameter belongs to: settled from the uses of one pass, or forecast."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...._core.capture import plain
from ...._core.space import compute_dtype
from ....maps.layers import Compound, Layer, find
from ....maps.layers.moments import Sharing
from ....maps.record import Entry, Site
from ..factors.factor import DIAGONAL, UNITS, BlockKey, Factor
from .sums import BIAS, Role

Names = Mapping[str, str | None]


class LayerUse(NamedTuple):
    """One use of a layer: its parameters by role, what is held for them, and whether weight and
    bias may share a block.
    """

    names: Names
    curvature: str
    joint: bool


class BlockPlan:
    """Blocks by parameter name.

    Args:
        uses: the uses of layers in one forward pass.
        plain: parameters to be held as diagonals, with the reason where there is one.
        joint: whether weight and bias of a layer share a block.
        remarks: what is to be said of parameters that have a block of their layer.
    """

    def __init__(
        self,
        uses: Sequence[LayerUse],
        plain: Mapping[str, str],
        joint: bool,
        remarks: Mapping[str, str] | None = None,
    ) -> None:
        self.plain = dict(plain)
        #: what `coverage` says of a parameter
        self.reasons = {**(remarks or {}), **{n: why for n, why in self.plain.items() if why}}
        partners: dict[str, set[str | None]] = {}
        for names, _, together in uses:
            weight, bias = names.get("weight"), names.get("bias")
            for one, other in ((weight, bias), (bias, weight)):
                if one is not None:
                    partners.setdefault(one, set()).add(other if together and joint else None)
        self._blocks: dict[str, BlockKey] = {}
        for names, curvature, _ in uses:
            weight, bias = self._free(names.get("weight")), self._free(names.get("bias"))
            apart = any(
                n is not None and partners[n] != {m} for n, m in ((weight, bias), (bias, weight))
            )
            kind = "units" if curvature == "units" else "kronecker"
            given = [n for n in (weight, bias) if n is not None]
            if len(given) == 2 and not apart:
                self._enter(BlockKey(kind, tuple(given)))
            else:
                for name in given:
                    self._enter(BlockKey(kind, (name,), bias=name == bias))
        for name in self.plain:
            self._blocks[name] = BlockKey("diagonal", (name,))

    @property
    def keys(self) -> list[BlockKey]:
        """The blocks, each once."""
        return list(dict.fromkeys(self._blocks.values()))

    def _free(self, name: str | None) -> str | None:
        return None if name in self.plain else name

    def _enter(self, key: BlockKey) -> None:
        for name in key.names:
            self._blocks.setdefault(name, key)

    def weight_block(self, names: Names) -> BlockKey | None:
        """The block of a layer's weight, if it is a Kronecker one."""
        key = self._blocks.get(names.get("weight") or "")
        return key if key is not None and key.kronecker else None

    def bias_block(self, names: Names) -> BlockKey | None:
        """The block of a layer's bias, if it is one by itself."""
        key = self._blocks.get(names.get("bias") or "")
        return key if key is not None and key.kronecker and key.bias else None

    def unit_blocks(self, names: Names) -> list[tuple[BlockKey, list[str]]]:
        """The blocks of gain and shift, each with the roles it holds."""
        roles: dict[BlockKey, list[str]] = {}
        for role, name in names.items():
            key = self._blocks.get(name or "")
            if key is not None and key.kind == "units":
                roles.setdefault(key, []).append(role)
        return list(roles.items())


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One use of a layer: whether anything is learned from it, and the blocks that learn."""

    layer: Layer
    wanted: bool
    #: whether the layer may have given a view of its rows (places, O)
    rows: bool
    #: the roles of the parameters that take part
    roles: list[str]
    role: Role
    #: the blocks of the weight, of a bias by itself, and of gains and shifts: which of the roles
    #: they have, None for all
    weights: BlockKey | None = None
    biases: BlockKey | None = None
    units: Sequence[tuple[BlockKey, list[int] | None]] = ()
    #: where the samples stand, as `locate_samples` says
    layout: str = ""


def targets_of(
    entries: Sequence[Entry],
    plan: BlockPlan | None,
    unrelated: Collection[str],
    layouts: Sequence[str],
) -> list[Target]:
    """By use; without a plan no block is known yet, but none of `unrelated` will have one."""
    without = unrelated if plan is None else plan.plain
    return [_target(e.site, plan, without, at) for e, at in zip(entries, layouts, strict=True)]


def _target(site: Site, plan: BlockPlan | None, without: Collection[str], layout: str) -> Target:
    names, layer = site.names, site.layer
    roles = [r for r, n in names.items() if n is not None]
    wanted = any(n is not None and n not in without for n in names.values())
    linear = type(site.module) is nn.Linear
    target = Target(layer, wanted, linear, roles, Role.of(layer), layout=layout)
    if plan is None:
        return target
    units = [
        (key, None if some == roles else [roles.index(r) for r in some])
        for key, some in plan.unit_blocks(names)
    ]
    weights, biases = plan.weight_block(names), plan.bias_block(names)
    return replace(target, weights=weights, biases=biases, units=units)


# --- before any statistics --------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """What is expected of every parameter, from the kinds of modules alone."""

    #: zeros of each block's factors, without memory
    factors: dict[BlockKey, dict[Factor, Tensor]]
    #: block and kind of module, by parameter
    kinds: dict[str, tuple[str, str]]
    #: the bias beside a weight, and all biases
    partners: dict[str, str]
    biases: set[str]


def forecast(
    model: nn.Module, chosen: Mapping[str, Tensor], sharing: Sharing, joint: bool
) -> Forecast:
    """Plan the blocks of these parameters as if every module were used once, and as its kind is."""
    names = {id(p): n for n, p in chosen.items()}
    every = list(plain(model).modules())
    inside = {m for c in every if find(c, Compound) for m in c.modules() if m is not c}
    found = [use for module in every if module not in inside for use in _uses(module, names)]
    covered = {n for use, *_ in found for n in use.names.values()}
    rest = {n: "" for n in chosen if n not in covered}
    plan = BlockPlan([use for use, *_ in found], rest, joint)
    factors: dict[BlockKey, dict[Factor, Tensor]] = {k: {} for k in plan.keys}
    kinds: dict[str, tuple[str, str]] = {}
    for use, role, groups, diagonal, text in found:
        held = {r: chosen[n] for r, n in use.names.items() if n is not None}
        for name in use.names.values():
            if name is not None:
                kinds.setdefault(name, (use.curvature, text))
        for key, _ in plan.unit_blocks(use.names):
            size, k = held[next(iter(held))].numel(), len(key.names)
            factors[key][UNITS] = _empty(chosen[key.names[0]], (size, k, k))
        if (key := plan.weight_block(use.names)) is not None:
            w = held["weight"]
            rows, columns = len(w) // groups, w.numel() // max(1, len(w))
            for factor, thin in zip(role.factors, (diagonal, False), strict=True):
                n = rows if factor.side == "left" else columns
                thin = thin or n > sharing.longest
                bordered = key.joint and factor.side == "right"
                shape = (groups, n + bordered) if thin else (groups, n, n)
                factors[key][factor] = _empty(w, shape)
                if bordered and not thin:
                    factors[key][Factor(role.name, "mean")] = _empty(w, (groups, n))
        if (key := plan.bias_block(use.names)) is not None:
            b, apart = held["bias"], groups if use.joint else 1
            n, (inputs, outputs) = b.numel() // apart, BIAS.factors
            shape = (apart, n) if n > sharing.longest else (apart, n, n)
            factors[key] |= {outputs: _empty(b, shape), inputs: _empty(b, (apart, 1))}
    for name in rest:
        p = chosen[name]
        factors[BlockKey("diagonal", (name,))][DIAGONAL] = _empty(p, (p.numel(), 1, 1))
    pairs = [(use.names.get("weight"), use.names.get("bias")) for use, *_ in found]
    partners = {w: b for w, b in pairs if w is not None and b is not None}
    return Forecast(factors, kinds, partners, {b for _, b in pairs if b is not None})


def _uses(
    module: nn.Module, names: Mapping[int, str]
) -> Iterator[tuple[LayerUse, Role, int, bool, str]]:
    """The uses that a module makes of its parameters, with role, groups, and its kind in words."""
    kind = type(module).__name__
    layer: Layer | None = find(module)
    if layer is not None and layer.curvature != "rows":
        own = {r: names.get(id(p)) for r, p in layer.parameters(module).items()}
        if any(n is not None for n in own.values()):
            use = LayerUse(own, layer.curvature, layer.joint)
            yield use, Role.of(layer), layer.groups(module), layer.one_hot, kind
    compound: Compound | None = find(module, Compound)
    if compound is not None:
        note, role = compound.note(module), Role(type(compound).__name__)
        text = f"{kind}, replayed" + (f" without {note}" if note else "")
        for weight, bias, groups in compound.maps(module):
            own = {"weight": names.get(id(weight)), "bias": names.get(id(bias))}
            yield LayerUse(own, "kronecker", True), role, groups, False, text


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor that says shape, dtype and device, expanded from one entry."""
    dtype: Any = compute_dtype(like.dtype)
    some = torch.zeros((), dtype=dtype, device=like.device)
    return some.expand(shape) if prod(shape) else some.new_zeros(shape)
