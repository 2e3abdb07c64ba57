"""`torch.distributed.checkpoint` reads K-FAC's state into an optimizer that has taken no step.

A fresh optimizer knows the shapes of its parameters, and not which blocks a forward pass will show.
So its `state_dict()` does not name the averages and states that a checkpoint holds, and torch's own
planner reads only what is named. This one names what the checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

#: keys of nested dicts as a checkpoint has them: numbers of parameters are written out
Path = tuple[str, ...]


class KFACLoadPlanner(DefaultLoadPlanner):
    """Read all that a checkpoint holds of K-FAC: `dcp.load(state, planner=KFACLoadPlanner())`.

    Everything else is read as by torch's planner, whose options it takes.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Add room for what is missing in the states of K-FAC's parameters, and plan to fill it."""
        if metadata is not None:
            for path, state in _find_parameter_states(state_dict):
                _add_missing(state, path, metadata)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _find_parameter_states(tree: Any, path: Path = ()) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the states of parameters that K-FAC optimizes, each with its path in the tree."""
    if not isinstance(tree, dict):
        return
    if isinstance(tree.get("table"), Mapping) and "schedule" in tree:
        yield path, tree
        return
    for key, branch in tree.items():
        yield from _find_parameter_states(branch, (*path, str(key)))


def _add_missing(state: dict[str, Any], path: Path, metadata: Metadata) -> None:
    """Add what the checkpoint holds below this path.

    Tensors are read to the host, whole ones also of sharded models: every process takes up the
    parts that it holds.
    """
    for name, saved_path in (metadata.planner_data or {}).items():
        if tuple(map(str, saved_path[: len(path)])) != path:
            continue
        *branches, leaf = saved_path[len(path) :]
        branch = state
        for key in branches:
            branch = branch.setdefault(key, {})
        storage = metadata.state_dict_metadata[name]
        if leaf in branch:
            continue
        branch[leaf] = 0
        if isinstance(storage, TensorStorageMetadata):
            branch[leaf] = torch.empty(storage.size, dtype=storage.properties.dtype, device="cpu")
