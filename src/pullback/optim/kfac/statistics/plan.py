"""Which parameters are measured, and the block of each: from the uses of one pass, or forecast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...._core.capture import unwrap_model
from ...._core.space import compute_dtype
from ....maps.layers import Compound, Layer, find_layer
from ..factors.block import DIAGONAL, UNITS, BlockKey, FactorKey
from ..options import Options
from ..rules import Statistics
from .sums import BIAS, factors_of

Names = Mapping[str, str | None]


class LayerUse(NamedTuple):
    """One use of a layer: its parameters by role, and what is held for them."""

    names: Names
    curvature: str
    #: whether weight and bias may share a block
    joint: bool
    #: groups, rows and columns of the weight as the parameter holds it
    form: tuple[int, int, int]
    #: whether the weight is held transposed
    turned: bool = False


def use_of(layer: Layer, module: nn.Module, names: Names) -> LayerUse:
    """Return a module's use of its parameters."""
    return LayerUse(names, layer.curvature, layer.joint, layer.form(module), layer.is_transposed)


def different_forms(uses: Sequence[LayerUse]) -> dict[str, str]:
    """Return the weights that are used as matrices of several shapes, which have no block."""
    forms: dict[str, set[tuple[int, int, int] | str]] = {}
    for use in uses:
        if use.curvature == "kronecker":
            kind = use.form
        else:
            kind = use.curvature
        if (name := use.names.get("weight")) is not None:
            forms.setdefault(name, set()).add(kind)
    why = "it is used as matrices of several shapes"
    return {name: why for name, found in forms.items() if len(found) > 1}


class BlockPlan:
    """The block of every parameter, from the uses of layers in one forward pass.

    `plain` are parameters to be held as diagonals, with the reason where there is one; `joint` says
    whether weight and bias of a layer share a block; `remarks` are reasons for other parameters.
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
        partners: dict[str | None, set[str | None]] = {}
        straight = {use.names.get("weight") for use in uses if not use.turned}
        for names, _, together, _, turned in uses:
            weight = names.get("weight")
            bias = names.get("bias")
            together = together and not (turned and weight in straight)
            for one, other in ((weight, bias), (bias, weight)):
                partners.setdefault(one, set()).add(other if together and joint else None)
        self._blocks: dict[str, BlockKey] = {}
        for names, curvature, _, _, turned in uses:
            weight = names.get("weight")
            bias = names.get("bias")
            turned = turned and weight not in straight
            given = [n for n in (weight, bias) if n is not None and n not in self.plain]
            if curvature == "units":
                kind = "units"
            else:
                kind = "kronecker"
            both = partners[weight] == {bias} and partners[bias] == {weight}
            for name in given:
                key = BlockKey(kind, (name,), bias=name == bias, turned=turned and name == weight)
                if len(given) == 2 and both:
                    key = BlockKey(kind, tuple(given), turned=turned)
                self._blocks.setdefault(name, key)
        for name in self.plain:
            self._blocks[name] = BlockKey("diagonal", (name,))

    @property
    def keys(self) -> list[BlockKey]:
        return list(dict.fromkeys(self._blocks.values()))

    def weight_block(self, names: Names) -> BlockKey | None:
        """The block of a layer's weight, if it is a Kronecker one."""
        key = self._blocks.get(names.get("weight") or "")
        if key is not None and key.kronecker:
            return key
        return None

    def bias_block(self, names: Names) -> BlockKey | None:
        """The block of a layer's bias, if it is one by itself."""
        key = self._blocks.get(names.get("bias") or "")
        if key is not None and key.kronecker and key.bias:
            return key
        return None

    def unit_blocks(self, names: Names) -> dict[BlockKey, list[int]]:
        """The blocks of gain and shift, each with its indices among the parameters that train."""
        positions: dict[BlockKey, list[int]] = {}
        for i, name in enumerate(n for n in names.values() if n is not None):
            key = self._blocks.get(name)
            if key is not None and key.kind == "units":
                positions.setdefault(key, []).append(i)
        return positions


@dataclass(frozen=True)
class Forecast:
    """What is expected of every parameter, from the kinds of modules alone."""

    #: zeros of each block's factors, without memory
    factors: dict[BlockKey, dict[FactorKey, Tensor]]
    #: block and kind of module, by parameter
    kinds: dict[str, tuple[str, str]]
    #: the bias beside a weight, and all biases
    partners: dict[str, str]
    biases: set[str]
    #: the weight of the last layer that has a Kronecker block
    last: str | None


def forecast(model: nn.Module, chosen: Mapping[str, Tensor], options: Options) -> Forecast:
    """Plan the blocks of these parameters as if every module were used once, and as its kind is.

    Where inputs alone are measured, the metric on a layer's outputs is flat, a diagonal.
    """
    longest = options.sharing.longest
    flat = options.reads is Statistics.INPUTS
    names = {id(p): n for n, p in chosen.items()}
    every = list(unwrap_model(model).modules())
    inside = {m for c in every if find_layer(c, Compound) for m in c.modules() if m is not c}
    found = [use for module in every if module not in inside for use in _uses(module, names)]
    covered = {n for use, *_ in found for n in use.names.values()}
    rest = {n: "" for n in chosen if n not in covered}
    plan = BlockPlan([use for use, *_ in found], rest, options.joint)
    factors: dict[BlockKey, dict[FactorKey, Tensor]] = {k: {} for k in plan.keys}
    kinds: dict[str, tuple[str, str]] = {}
    for use, layer, groups, text in found:
        held = {r: chosen[n] for r, n in use.names.items() if n is not None}
        for name in filter(None, use.names.values()):
            kinds.setdefault(name, (use.curvature, text))
        for key in plan.unit_blocks(use.names):
            size = held[next(iter(held))].numel()
            k = len(key.names)
            factors[key][UNITS] = _empty(chosen[key.names[0]], (size, k, k))
        if (key := plan.weight_block(use.names)) is not None:
            w = held["weight"]
            one_hot = getattr(layer, "one_hot", False)
            rows = len(w) // groups
            columns = w.numel() // max(1, len(w))
            for factor, thin in zip(factors_of(layer, key), (one_hot, False), strict=True):
                if factor.side == "left":
                    n = rows
                else:
                    n = columns
                thin = thin or n > longest or (flat and factor == factors_of(layer, key)[1])
                bordered = key.joint and factor.side == "right"
                if thin:
                    shape = (groups, n + bordered)
                else:
                    shape = (groups, n, n)
                factors[key][factor] = _empty(w, shape)
                if bordered and not thin:
                    factors[key][FactorKey(factor.role, "mean")] = _empty(w, (groups, n))
        if (key := plan.bias_block(use.names)) is not None:
            b = held["bias"]
            if use.joint:
                apart = groups
            else:
                apart = 1
            n = b.numel() // apart
            if n > longest:
                shape = (apart, n)
            else:
                shape = (apart, n, n)
            factors[key] |= {BIAS[1]: _empty(b, shape), BIAS[0]: _empty(b, (apart, 1))}
    for name in rest:
        p = chosen[name]
        factors[BlockKey("diagonal", (name,))][DIAGONAL] = _empty(p, (p.numel(), 1, 1))
    pairs = [(use.names.get("weight"), use.names.get("bias")) for use, *_ in found]
    partners = {w: b for w, b in pairs if w is not None and b is not None}
    ends = [use.names["weight"] for use, *_ in found if plan.weight_block(use.names) is not None]
    biases = {b for _, b in pairs if b is not None}
    return Forecast(factors, kinds, partners, biases, ends[-1] if ends else None)


def _uses(
    module: nn.Module, names: Mapping[int, str]
) -> Iterator[tuple[LayerUse, Layer | Compound, int, str]]:
    """The uses that a module makes of its parameters, with layer, groups, and its kind in words."""
    kind = type(module).__name__
    found = find_layer(module, (Layer, Compound))
    if isinstance(found, Layer) and found.curvature != "rows":
        own = {r: names.get(id(p)) for r, p in found.parameters(module).items()}
        if any(n is not None for n in own.values()):
            yield use_of(found, module, own), found, found.form(module)[0], kind
    elif isinstance(found, Compound):
        note = found.describe_omission(module)
        text = f"{kind}, replayed" + (f" without {note}" if note else "")
        for weight, bias, groups in found.list_affine_maps(module):
            own = {"weight": names.get(id(weight)), "bias": names.get(id(bias))}
            if weight is None:
                form = (groups, 0, 0)
            else:
                form = (groups, len(weight), weight.shape[-1])
            yield LayerUse(own, "kronecker", True, form), found, groups, text


def _empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor that says shape, dtype and device, expanded from one entry."""
    return torch.zeros((), dtype=compute_dtype(like.dtype), device=like.device).expand(shape)
