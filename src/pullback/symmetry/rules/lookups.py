"""Rules for tables of vectors: each column has a scale of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..graph.ledger import Producer
from ..graph.scales import FIXED
from ..graph.values import Act, Ref
from ..graph.walk import Walk, rule, shapes

_SUM, _MEAN, _MAX = range(3)


@rule("embedding")
def embedding(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rows of a table."""
    table, shape = args[0], shapes(node)[0]
    if isinstance(table, Act):
        return Act.of(walk.scales.merge(table.scale, [0])[0], shape)
    atoms, made = _looked_up(walk, table, shape[-1], "embedding", shiftable=True)
    return Act.of(atoms, shape, walk.ledger.produce(made))


@rule("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag")
def embedding_bag(walk: Walk, node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Sums, means or maxima of rows of a table, with weights or without."""
    table, mode = args[0], int(args[4]) if len(args) > 4 else int(kwargs.get("mode", _SUM))
    weights = args[6] if len(args) > 6 else kwargs.get("per_sample_weights")
    shape, *others = shapes(node)
    rest = [Act.constant(other) for other in others]
    factor = torch.tensor(FIXED)
    if isinstance(weights, (Act, Ref)):
        act = walk.act(weights)
        walk.touch(act)
        factor = walk.scales.merge(act.scale, range(len(act.shape))).reshape(())
    if isinstance(table, Act):
        columns = walk.scales.merge(table.scale, [0])[0]
        walk.touch(table)
        return [Act.of(walk.scales.product(columns, factor), shape), *rest]
    # a constant passes a mean or a maximum; what it adds to a sum depends on the bag
    kind = {_SUM: "bag", _MEAN: "embedding", _MAX: "table"}[mode]
    plain = not isinstance(weights, (Act, Ref))
    atoms, made = _looked_up(walk, table, shape[-1], kind, shiftable=plain and mode != _SUM)
    unit = walk.ledger.produce(made)
    return [Act.of(walk.scales.product(atoms, factor), shape, unit if plain else None), *rest]


def _looked_up(
    walk: Walk, table: Ref, width: int, kind: str, *, shiftable: bool
) -> tuple[Tensor, Producer]:
    """New scales of the columns, and the table as a layer."""
    atoms = walk.scales.fresh(width, walk.ledger.call())
    walk.hold(table, atoms)
    line = torch.arange(width)
    about = table.name.rpartition(".")[0]
    entries = table.placed(line.expand(table.view)) if shiftable else None
    return atoms, Producer(kind, table.name, line, atoms, table=entries, about=about)
