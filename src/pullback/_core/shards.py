"""A model's parameters by name; those that `fully_shard` has cut are gathered, and cut again."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capture import unwrap_model
from .errors import PullbackError
from .flags import checksum
from .processes import Processes

#: an optimizer's param groups
Groups = Iterable[Mapping[str, Any]]


def is_sharded(p: object) -> bool:
    """Whether a tensor lies on several processes."""
    return type(p).__name__ == "DTensor" or type(getattr(p, "data", None)).__name__ == "DTensor"


def get_local_piece(t: Tensor) -> Tensor:
    """Return this process's piece of a tensor, in its own memory."""
    whole: Any = t.detach()
    return whole.to_local() if is_sharded(t) else t


def gather_whole(t: Tensor) -> Tensor:
    """Return all pieces of a tensor together; the processes that have them call it."""
    own: Any = t.detach()
    return own.full_tensor() if is_sharded(t) else own


def shard_like(t: Tensor, p: Tensor) -> Tensor:
    """Return a copy of a tensor, whole or in pieces, cut as a parameter is, in its dtype."""
    own = t.detach().to(p.device, p.dtype, copy=True)
    given: list[Any] = [own, p]
    cuts = [(x.device_mesh, x.placements) if is_sharded(x) else None for x in given]
    if cuts[0] == cuts[1]:
        return own
    if cuts[1] is None:
        return gather_whole(own)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(gather_whole(own), *cuts[1], src_data_rank=None)


class ModelParameters:
    """The parameters of a model by name; `fully_shard` may have cut some along one axis each."""

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self.by_name: dict[str, Any] = dict(unwrap_model(model).named_parameters())
        self.names = {id(p): n for n, p in self.by_name.items()}
        self.shapes = {n: p.shape for n, p in self.by_name.items()}
        #: of those that are cut: the axis, and the processes that have the pieces
        self.shards = _shards(self.by_name, processes)
        #: what shows shapes, dtypes and devices
        self.templates = {
            n: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
            if n in self.shards
            else p
            for n, p in self.by_name.items()
        }

    def in_groups(self, groups: Groups) -> dict[str, Any]:
        """Return the parameters of these groups, by name."""
        return {self.names[id(p)]: p for group in groups for p in group["params"]}

    def select_from_group(
        self, group: Mapping[str, Any], names: Container[str]
    ) -> tuple[list[str], list[Any]]:
        """Return those of a group's parameters that have one of these names, names first."""
        own = {n: p for p in group["params"] if (n := self.names[id(p)]) in names}
        return list(own), list(own.values())

    @torch.no_grad()
    def gather_whole(self, held: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """Return whole tensors by name: gradients, moves or the parameters themselves."""
        out = dict(held)
        sent: dict[Processes, tuple[list[Tensor], list[int]]] = {}
        for name, t in held.items():
            if name not in self.shards:
                continue
            (axis, processes), piece = self.shards[name], get_local_piece(t)
            out[name] = whole = piece.new_empty(self.shapes[name])
            every = self._pieces(name, whole)
            every[processes.rank].copy_(piece.movedim(axis, 0))
            tensors, owners = sent.setdefault(processes, ([], []))
            tensors += every
            owners += range(processes.size)
        for processes, (tensors, owners) in sent.items():
            processes.exchange(tensors, owners, what)
        return out

    def _pieces(self, name: str, whole: Tensor) -> list[Tensor]:
        """Return all pieces as views, cut axis first; the last ones may be short or empty."""
        axis, processes = self.shards[name]
        moved, size = whole.movedim(axis, 0), processes.size
        length = -(-len(moved) // size)
        ends = [min(len(moved), length * rank) for rank in range(size + 1)]
        return [moved[ends[rank] : ends[rank + 1]] for rank in range(size)]

    def cut_pieces(
        self, names: Sequence[str], whole: list[Tensor], *held: list[Any]
    ) -> tuple[list[Any], ...]:
        """Return this process's pieces of whole tensors by name, and of what is held in pieces."""
        if not self.shards:
            return whole, *held
        cut = list(whole)
        for i, name in enumerate(names):
            if name in self.shards:
                axis, processes = self.shards[name]
                cut[i] = self._pieces(name, whole[i])[processes.rank].movedim(0, axis)
        return cut, *(list(map(get_local_piece, some)) for some in held)

    def checksum(self, groups: Groups) -> Tensor:
        """Return numbers that replicas of these groups have in common.

        There is one for every piece, negative where another process has it.
        """
        pieces = next((own for _, own in self.shards.values()), Processes())
        own = checksum([get_local_piece(p) for p in self.in_groups(groups).values()])
        out = torch.full((pieces.size,), -1, device=own.device)
        out[pieces.rank] = own
        return out

    def leaves(self) -> dict[str, Tensor]:
        """Return whole parameters, as leaves of a graph of their own."""
        found = self.gather_whole(self.by_name, "parameters")
        return {
            n: t.detach().requires_grad_(self.by_name[n].requires_grad) for n, t in found.items()
        }


def _shards(params: Mapping[str, Any], processes: Processes) -> dict[str, tuple[int, Processes]]:
    """Return the axis and the processes of every parameter that is cut."""
    out: dict[str, tuple[int, Processes]] = {}
    groups: dict[Any, Processes] = {}
    for name, p in params.items():
        if not is_sharded(p):
            continue
        cuts = [(i, at) for i, at in enumerate(p.placements) if not at.is_replicate()]
        if len(cuts) != 1 or type(cuts[0][1]).__name__ != "Shard":
            raise PullbackError(
                f"Parameter {name!r} cannot be gathered",
                f"its placements are {p.placements}",
                "Shard it by fully_shard alone, over one dimension of the mesh",
            )
        (dimension, at), mesh = cuts[0], p.device_mesh
        if (mesh, dimension) not in groups:
            groups[mesh, dimension] = processes.with_group(mesh.get_group(dimension))
        out[name] = at.dim, groups[mesh, dimension]
    return out


@contextlib.contextmanager
def without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Let modules run without the hooks by which `fully_shard` gathers and frees parameters."""
    changed: list[tuple[Any, Any]] = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            homes = {n: str(getattr(hook, "__module__", "")) for n, hook in hooks.items()}
            kept = {n: hook for n, hook in hooks.items() if "fsdp" not in homes[n]}
            if len(kept) < len(hooks):
                changed.append((hooks, dict(hooks)))
                hooks.clear()
                hooks.update(kept)
    try:
        yield
    finally:
        for hooks, before in changed:
            hooks.clear()
            hooks.update(before)


def reshard(model: nn.Module) -> None:
    """Let every module hold its pieces, and no gathered parameters."""
    for module in model.modules():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            own: Any = module
            own.reshard()
