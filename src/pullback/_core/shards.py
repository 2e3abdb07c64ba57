"""A model's parameters by name, of which `fully_shard` may have cut some into pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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
    """Return True if a tensor, or the data of a parameter, is spread over several processes."""
    return type(p).__name__ == "DTensor" or type(getattr(p, "data", None)).__name__ == "DTensor"


def get_local_piece(t: Tensor) -> Tensor:
    """Return this process's piece of a tensor, in its own memory."""
    if not is_sharded(t):
        return t
    sharded: Any = t.detach()
    return sharded.to_local()


def gather_whole(t: Tensor) -> Tensor:
    """Return the whole tensor; all processes that have pieces of it call this together."""
    detached: Any = t.detach()
    if is_sharded(t):
        return detached.full_tensor()
    return detached


def shard_like(t: Tensor, p: Tensor) -> Tensor:
    """Return a copy of a tensor, whole or in pieces, cut like the parameter p, in its dtype."""
    copy = t.detach().to(p.device, p.dtype, copy=True)
    target = _get_layout(p)
    if _get_layout(copy) == target:
        return copy
    if target is None:
        return gather_whole(copy)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = target
    return distribute_tensor(gather_whole(copy), mesh, placements, src_data_rank=None)


def _get_layout(t: Any) -> tuple[Any, Any] | None:
    """Return mesh and placements of a tensor in pieces; None for a whole one."""
    if is_sharded(t):
        return t.device_mesh, t.placements
    return None


@dataclass(frozen=True)
class Shard:
    """How a parameter is cut: along which axis, and between which processes."""

    axis: int
    processes: Processes


@dataclass
class _Exchange:
    """Pieces that the processes of one group send each other, and the rank that has each."""

    tensors: list[Tensor] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)


class ModelParameters:
    """The parameters of a model by name; `fully_shard` may have cut some along one axis each."""

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self.by_name: dict[str, Any] = dict(unwrap_model(model).named_parameters())
        self.names = {id(p): name for name, p in self.by_name.items()}
        self.shapes = {name: p.shape for name, p in self.by_name.items()}
        #: of those parameters that are in pieces: along which axis, between which processes
        self.shards = _find_shards(self.by_name, processes)
        #: tensors with the shapes, dtypes and devices of the whole parameters
        self.templates = {name: self._make_template(name) for name in self.by_name}

    def _make_template(self, name: str) -> Any:
        p = self.by_name[name]
        if name not in self.shards:
            return p
        return torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)

    def in_groups(self, groups: Groups) -> dict[str, Any]:
        """Return the parameters of these groups, by name."""
        by_name = {}
        for group in groups:
            for p in group["params"]:
                by_name[self.names[id(p)]] = p
        return by_name

    def find_group_numbers(self, groups: Groups) -> dict[str, int]:
        """Return the number of each parameter's group, by name."""
        numbers: dict[str, int] = {}
        for number, group in enumerate(groups):
            numbers |= dict.fromkeys(self.in_groups([group]), number)
        return numbers

    @torch.no_grad()
    def gather_whole(self, tensors: Mapping[str, Tensor], purpose: str) -> dict[str, Tensor]:
        """Return whole tensors by name: gradients, moves or the parameters themselves."""
        whole = dict(tensors)
        exchanges: dict[Processes, _Exchange] = {}
        for name, tensor in tensors.items():
            shard = self.shards.get(name)
            if shard is None:
                continue
            own_piece = get_local_piece(tensor)
            whole[name] = own_piece.new_empty(self.shapes[name])
            pieces = self._view_pieces(name, whole[name])
            pieces[shard.processes.rank].copy_(own_piece.movedim(shard.axis, 0))
            exchange = exchanges.setdefault(shard.processes, _Exchange())
            exchange.tensors += pieces
            exchange.owners += range(shard.processes.size)
        for processes, exchange in exchanges.items():
            processes.exchange(exchange.tensors, exchange.owners, purpose)
        return whole

    def _view_pieces(self, name: str, whole: Tensor) -> list[Tensor]:
        """Return all pieces as views, cut axis first; the last ones may be short or empty."""
        shard = self.shards[name]
        moved = whole.movedim(shard.axis, 0)
        size = shard.processes.size
        length = -(-len(moved) // size)
        ends = [min(len(moved), length * rank) for rank in range(size + 1)]
        return [moved[start:stop] for start, stop in pairwise(ends)]

    def cut_pieces(
        self, names: Sequence[str], whole: list[Tensor], *sharded: list[Any]
    ) -> tuple[list[Any], ...]:
        """Return this process's pieces of whole tensors by name, and of lists of cut tensors."""
        if not self.shards:
            return whole, *sharded
        pieces = list(whole)
        for i, name in enumerate(names):
            shard = self.shards.get(name)
            if shard is not None:
                own_piece = self._view_pieces(name, whole[i])[shard.processes.rank]
                pieces[i] = own_piece.movedim(0, shard.axis)
        return pieces, *(list(map(get_local_piece, tensors)) for tensors in sharded)

    def sum_pieces(self, names: Sequence[str], numbers: Tensor) -> Tensor:
        """Return numbers by parameter, (len(names),), summed over processes that have pieces."""
        sent: dict[Processes, list[int]] = {}
        for i, name in enumerate(names):
            if name in self.shards:
                sent.setdefault(self.shards[name].processes, []).append(i)
        if not sent:
            return numbers
        out = numbers.clone()
        for processes, indices in sent.items():
            out[indices] = processes.sum([numbers[indices]], "lengths")[0]
        return out

    def checksum(self, groups: Groups) -> Tensor:
        """Return a vector that replicas of these groups have in common.

        It has one number for every piece; the numbers of other processes' pieces are negative.
        """
        shard = next(iter(self.shards.values()), None)
        processes = Processes() if shard is None else shard.processes
        own_sum = checksum([get_local_piece(p) for p in self.in_groups(groups).values()])
        sums = torch.full((processes.size,), -1, device=own_sum.device)
        sums[processes.rank] = own_sum
        return sums

    def leaves(self) -> dict[str, Tensor]:
        """Return whole parameters, as leaves of a graph of their own."""
        leaves = {}
        for name, tensor in self.gather_whole(self.by_name, "parameters").items():
            leaves[name] = tensor.detach().requires_grad_(self.by_name[name].requires_grad)
        return leaves


def _find_shards(params: Mapping[str, Any], processes: Processes) -> dict[str, Shard]:
    """Return axis and processes of every parameter that is in pieces."""
    shards: dict[str, Shard] = {}
    groups: dict[Any, Processes] = {}
    for name, p in params.items():
        if not is_sharded(p):
            continue
        mesh = p.device_mesh
        dimensions = [i for i, at in enumerate(p.placements) if not at.is_replicate()]
        if len(dimensions) != 1 or type(p.placements[dimensions[0]]).__name__ != "Shard":
            raise PullbackError(
                f"Parameter {name!r} cannot be gathered",
                f"its placements are {p.placements}",
                "Shard it by fully_shard alone, over one dimension of the mesh",
            )
        dimension = dimensions[0]
        if (mesh, dimension) not in groups:
            groups[mesh, dimension] = processes.with_group(mesh.get_group(dimension))
        shards[name] = Shard(p.placements[dimension].dim, groups[mesh, dimension])
    return shards


@contextlib.contextmanager
def without_sharding_hooks(model: nn.Module) -> Iterator[None]:
    """Run modules inside without the hooks by which `fully_shard` gathers and frees parameters."""
    originals: list[tuple[Any, Any]] = []
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            others = {key: hook for key, hook in hooks.items() if not _is_sharding_hook(hook)}
            if len(others) < len(hooks):
                originals.append((hooks, dict(hooks)))
                hooks.clear()
                hooks.update(others)
    try:
        yield
    finally:
        for hooks, original in originals:
            hooks.clear()
            hooks.update(original)


def _is_sharding_hook(hook: Any) -> bool:
    return "fsdp" in str(getattr(hook, "__module__", ""))


def reshard(model: nn.Module) -> None:
    """Let every module keep its pieces and free gathered parameters."""
    for module in model.modules():
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            sharded: Any = module
            sharded.reshard()
