"""The block of every parameter, from the uses of layers that one forward pass has shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ....maps.layers import Layer
from ..factors.block import BlockKey, BlockKind

#: names of parameters by their part in a layer; None for those that are not trained
Names = Mapping[str, str | None]
_SEVERAL_SHAPES = "it is used as matrices of several shapes"


@dataclass(frozen=True)
class LayerUse:
    """One use of a layer, as a plan of blocks sees it.

    Attributes:
        names: of its parameters.
        curvature: "kronecker" or "units".
        can_join: whether weight and bias may share a block.
        form: groups, rows and columns of the weight as the parameter holds it.
        is_transposed: whether the weight is held as (inputs, outputs).
    """

    names: Names
    curvature: str
    can_join: bool
    form: tuple[int, int, int]
    is_transposed: bool = False

    @property
    def weight(self) -> str | None:
        """The name of the weight that is trained."""
        return self.names.get("weight")

    @property
    def bias(self) -> str | None:
        """The name of the bias that is trained."""
        return self.names.get("bias")


def make_layer_use(
    layer: Layer, module: nn.Module, names: Names, *, has_output_rows: bool
) -> LayerUse:
    """Return a module's use of its parameters.

    With `has_output_rows` a weight whose rows belong to inputs, as those of a transposed
    convolution do, is given as its transpose. An embedding's, which may be large, stays as it is.
    """
    is_transposed = layer.is_transposed
    if has_output_rows and layer.input_first and not layer.one_hot:
        is_transposed = True
    return LayerUse(names, layer.curvature, layer.joint, layer.form(module), is_transposed)


def find_conflicting_forms(uses: Sequence[LayerUse]) -> dict[str, str]:
    """Return the weights that are used as matrices of several shapes, each with this reason.

    They have no Kronecker block.
    """
    forms: dict[str, set[tuple[int, int, int] | str]] = {}
    for use in uses:
        form: tuple[int, int, int] | str = use.curvature  # gains, say, are no matrices
        if use.curvature == "kronecker":
            form = use.form
        if use.weight is not None:
            forms.setdefault(use.weight, set()).add(form)
    return {name: _SEVERAL_SHAPES for name, shapes in forms.items() if len(shapes) > 1}


class BlockPlan:
    """The block of every parameter that is used in one forward pass.

    Args:
        uses: of layers.
        diagonals: parameters to be held as diagonals, with the reason where there is one.
        is_joint: whether weight and bias of a layer share a block.
        remarks: reasons that `coverage` gives for other parameters.
    """

    def __init__(
        self,
        uses: Sequence[LayerUse],
        diagonals: Mapping[str, str],
        is_joint: bool,
        remarks: Mapping[str, str],
    ) -> None:
        self.diagonals = dict(diagonals)
        #: what `coverage` says of a parameter
        self.reasons = {**remarks, **{n: why for n, why in self.diagonals.items() if why}}
        # a weight that is used as it is too has the coordinates of that use
        self._untransposed = {use.weight for use in uses if not use.is_transposed}
        self._partners: dict[str | None, set[str | None]] = {}
        if is_joint:
            self._partners = self._find_partners(uses)
        self._blocks: dict[str, BlockKey] = {}
        for use in uses:
            for key in self._make_blocks(use):
                for name in key.names:
                    self._blocks.setdefault(name, key)
        for name in self.diagonals:
            self._blocks[name] = BlockKey(BlockKind.DIAGONAL, (name,))

    def _find_partners(self, uses: Sequence[LayerUse]) -> dict[str | None, set[str | None]]:
        """Return for weights and biases what they are used with; None where they cannot join."""
        partners: dict[str | None, set[str | None]] = {}
        for use in uses:
            weight_partner = use.bias
            bias_partner = use.weight
            if not use.can_join or (use.is_transposed and use.weight in self._untransposed):
                weight_partner = None
                bias_partner = None
            partners.setdefault(use.weight, set()).add(weight_partner)
            partners.setdefault(use.bias, set()).add(bias_partner)
        return partners

    def _make_blocks(self, use: LayerUse) -> list[BlockKey]:
        """Return one block for weight and bias if they are used together alone, else one each."""
        kind = BlockKind.KRONECKER
        if use.curvature == "units":
            kind = BlockKind.UNITS
        is_transposed = use.is_transposed and use.weight not in self._untransposed
        names = [n for n in (use.weight, use.bias) if n is not None and n not in self.diagonals]
        has_both = len(names) == 2
        if has_both and self._are_partners(use.weight, use.bias):
            return [BlockKey(kind, tuple(names), is_transposed=is_transposed)]
        keys = []
        for name in names:
            is_weight = name == use.weight
            is_bias = name == use.bias
            key = BlockKey(
                kind, (name,), is_bias=is_bias, is_transposed=is_transposed and is_weight
            )
            keys.append(key)
        return keys

    def _are_partners(self, weight: str | None, bias: str | None) -> bool:
        return self._partners.get(weight) == {bias} and self._partners.get(bias) == {weight}

    @property
    def keys(self) -> list[BlockKey]:
        """All blocks."""
        return list(dict.fromkeys(self._blocks.values()))

    def weight_block(self, names: Names) -> BlockKey | None:
        """Return the block of a layer's weight, if it is a Kronecker one."""
        key = self._blocks.get(names.get("weight") or "")
        if key is not None and key.is_kronecker:
            return key
        return None

    def bias_block(self, names: Names) -> BlockKey | None:
        """Return the block of a layer's bias, if it is one by itself."""
        key = self._blocks.get(names.get("bias") or "")
        if key is not None and key.is_kronecker and key.is_bias:
            return key
        return None

    def unit_blocks(self, names: Names) -> dict[BlockKey, list[int]]:
        """Return the blocks of gain and shift, each with its indices among trained parameters."""
        positions: dict[BlockKey, list[int]] = {}
        for i, name in enumerate(n for n in names.values() if n is not None):
            key = self._blocks.get(name)
            if key is not None and key.kind == BlockKind.UNITS:
                positions.setdefault(key, []).append(i)
        return positions
