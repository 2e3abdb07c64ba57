r"""The rule for bilinear layers: y_o = Σ_ij W_oij x_i z_j, so that log-scales obey W = y−x−z."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.ledger import Producer, view_rows
from ..graph.scales import ZERO, collapse
from ..graph.values import NONE, Act, Ref
from ..graph.walk import Walk, rule

_AXES = [[1, 3], [0], [1, 2], [2, 3]]  # what nn.Bilinear calls


@rule("_trilinear")
def bilinear(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """x (n, i), W (o, i, j) and z (n, j)."""
    first, weight, second = args[:3]
    if not isinstance(weight, Ref) or [list(axes) for axes in args[3:7]] != _AXES:
        return NotImplemented
    x, z = walk.act(first), walk.act(second)
    outputs = weight.view[0]
    atoms = walk.scales.fresh(outputs, walk.ledger.call())
    one, two = (walk.scales.merge(a.scale, [0]) for a in (x, z))  # (1, i), (1, j)
    if bool((one != ZERO).any()) and bool((two != ZERO).any()):
        rows = atoms.view(-1, 1, 1)
        down = [walk.scales.power(one[0, :, None][None], -1), walk.scales.power(two[:, None], -1)]
        walk.hold(weight, rows, *down)
    return Act.of(atoms, (x.shape[0], outputs), _units(walk, (x, z), weight, atoms))


def _units(walk: Walk, sides: tuple[Act, Act], weight: Ref, atoms: Tensor) -> Tensor:
    """Those of the outputs; the inputs are read along axes 1 and 2 of the weight."""
    places = [view_rows(weight, axis, axis) for axis in range(3)]
    if weight.view != weight.sizes or any(at is None or at[0] != d for d, at in enumerate(places)):
        walk.touch(*sides)
        return torch.tensor(NONE)
    about = weight.name.rpartition(".")[0]
    rows = torch.arange(len(atoms))
    made = walk.ledger.produce(Producer("bilinear", weight.name, rows, atoms, about=about))
    reader = len(walk.ledger.producers) - 1
    for axis, side in enumerate(sides, 1):
        units, width = collapse(side.unit), side.shape[1]
        if units.shape[0] == 1:
            walk.ledger.read(
                "bilinear", units[0].expand(width), range(width), reader=reader, axis=axis
            )
        else:
            walk.ledger.touch(units)
    return made
