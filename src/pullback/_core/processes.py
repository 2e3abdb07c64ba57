"""Several processes that act as one: a `torch.distributed` group, and what is sent in it.

Every method but the constructor is collective: all processes of the group call it, in the same
order. With one process each of them returns what it was given, and nothing is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, Generic, TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import PullbackError

S = TypeVar("S")
T = TypeVar("T")


@dataclass
class Traffic:
    """What one process sent: calls, bytes, and the seconds that the host spent in them.

    Bytes are those of ring algorithms: 2(n−1)/n of the size of a summed buffer, (n−1)/n of a
    gathered one, the whole size of a broadcast one. Messages of a few numbers count as calls only.
    """

    calls: int = 0
    bytes: float = 0.0
    seconds: float = 0.0


class Pending(Generic[T]):
    """A result that is under way between processes; `wait` returns it when it is there."""

    def __init__(
        self, result: Callable[[], T], works: Sequence[Any] = (), sent: Traffic | None = None
    ) -> None:
        self._result, self._works, self._sent = result, works, sent

    def wait(self) -> T:
        """Return the result; on CUDA the device waits, and the host goes on."""
        start = perf_counter()
        for work in self._works:
            work.wait()
        if self._sent is not None:
            self._sent.seconds += perf_counter() - start
        self._works, self._sent = (), None
        return self._result()

    def then(self, change: Callable[[T], S]) -> Pending[S]:
        """Return what is made of the result when it is there."""
        return Pending(lambda: change(self._result()), self._works, self._sent)


class Processes:
    """The processes of a group; none at all, or a group of one, is this process alone."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, traffic: dict[str, Traffic] | None = None
    ) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._traffic: dict[str, Traffic] = {} if traffic is None else traffic

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        return self  # a group is a connection, which cannot be copied

    def __reduce__(self) -> tuple[Any, ...]:
        # a pickle finds the default group of the process that reads it
        if not self.is_single and dist.is_initialized() and self.size != dist.get_world_size():
            raise PullbackError(
                "A part of the processes cannot be pickled",
                f"its group has {self.size} of {dist.get_world_size()}, and is not found again",
                "Save state_dict(), and load it into an optimizer that is built with its group",
            )
        return _default, (self.size > 1,)

    @property
    def is_single(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    @property
    def device(self) -> torch.device:
        """Where numbers that belong to no tensor are sent from."""
        if self.group is None or "cpu" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def traffic(self) -> dict[str, Traffic]:
        """Return what this process sent so far, by purpose."""
        return {what: replace(sent) for what, sent in self._traffic.items()}

    def with_group(self, group: dist.ProcessGroup) -> Processes:
        """Return the processes of another group, whose traffic counts here too."""
        return Processes(group, self._traffic)

    def join_subgroup(self, parts: Sequence[Sequence[int]]) -> Processes:
        """Return that of these parts to which this process belongs, whose traffic counts here too.

        All processes of the program take part where a group has to be made.
        """
        own = next(ranks for ranks in parts if self.rank in ranks)
        if len(own) in (1, self.size):
            return self if len(own) == self.size else Processes()
        if self.size != dist.get_world_size():
            raise PullbackError(
                "The group cannot be divided",
                f"it has {self.size} of {dist.get_world_size()} processes, and the others would "
                "have to take part",
                "Let all processes train together, or leave workers out",
            )
        every = dist.get_process_group_ranks(self.group)
        made = {tuple(ranks): dist.new_group([every[rank] for rank in ranks]) for ranks in parts}
        group: Any = made[tuple(own)]
        return self.with_group(group)

    def duplicate(self) -> Processes | None:
        """Return a new group of the same processes: order in it does not depend on other groups.

        All processes of the program take part. There is none for a part of them, since the others
        would not know. It lasts as long as the program.
        """
        if self.is_single or self.group is None or self.size != dist.get_world_size():
            return None
        own: Any = self.group
        options = getattr(own._get_backend(self.device), "options", None)
        limit = getattr(options, "_timeout", None)  # None is torch's own
        group: Any = dist.new_group(timeout=limit, backend=dist.get_backend(own))
        return self.with_group(group)

    # --- tensors --------------------------------------------------------------------------------

    def sum(self, tensors: Sequence[Tensor], what: str = "sums") -> list[Tensor]:
        """Return the sums of the tensors over all processes, the same bits everywhere."""
        return self.launch_sum(tensors, what).wait()

    def launch_sum(self, tensors: Sequence[Tensor], what: str = "sums") -> Pending[list[Tensor]]:
        """Begin to `sum` the tensors, which may be changed meanwhile."""
        if self.is_single or not tensors:
            return Pending(lambda: list(tensors))
        out: list[Any] = [None] * len(tensors)
        works = []
        for places in _by_kind(tensors):
            some = [tensors[i] for i in places]
            flat = _packed(some)
            share = 2 * (self.size - 1) / self.size
            call = partial(self._reduce, flat, later=True)
            works.append(self._send(what, share * flat.nbytes, call))
            for i, t in zip(places, _split(flat, [t.shape for t in some]), strict=True):
                out[i] = t
        return Pending(lambda: out, works, self._traffic[what])

    def sum_to(
        self, tensors: Sequence[Tensor], owners: Sequence[int], what: str = "sums"
    ) -> list[Tensor]:
        """Return the tensors, of which each owner has the sum over all processes.

        Shapes, dtypes and owners are the same everywhere.
        """
        out = list(tensors)
        if self.is_single:
            return out
        for places in _by_kind(tensors):
            by_rank = [[i for i in places if owners[i] == r] for r in range(self.size)]
            none = tensors[places[0]].new_empty(0)
            flats = [_packed([none, *(tensors[i] for i in own)]) for own in by_rank]
            longest, total = max(map(len, flats)), sum(map(len, flats))
            if self.size * longest > 2 * total:  # mostly padding
                for rank, flat in enumerate(flats):
                    if len(flat):
                        to = {"group": self.group, "group_dst": rank}
                        self._send(what, flat.nbytes, partial(dist.reduce, flat, **to))
                found = flats[self.rank]
            else:
                every = none.new_zeros(self.size, longest)
                for row, flat in zip(every, flats, strict=True):
                    row[: len(flat)] = flat
                found, sent = none.new_empty(longest), (self.size - 1) / self.size * every.nbytes
                to = {"output": found, "input": every.view(-1), "group": self.group}
                self._send(what, sent, partial(dist.reduce_scatter_tensor, **to))
            own = by_rank[self.rank]
            for i, t in zip(own, _split(found, [tensors[i].shape for i in own]), strict=True):
                out[i] = t
        return out

    def gather(self, tensors: Sequence[Tensor], what: str = "gathered") -> list[Tensor]:
        """Return every tensor joined along its first axis, whose length may differ by process."""
        if self.is_single:
            return list(tensors)
        return [torch.cat(parts) for parts in self.gather_parts(tensors, what)]

    def gather_parts(self, tensors: Sequence[Tensor], what: str = "gathered") -> list[list[Tensor]]:
        """Return every tensor as all processes have it, in the order of their ranks.

        Dtypes and further axes are the same everywhere; all are on one device.
        """
        if self.is_single:
            return [[t] for t in tensors]
        lengths = torch.tensor([len(t) for t in tensors], device=self.device)
        every = self._gather(lengths, what).view(self.size, len(tensors)).tolist()
        like = [
            [t.new_empty((own[i], *t.shape[1:]), device="meta") for i, t in enumerate(tensors)]
            for own in every
        ]
        own = to_bytes(tensors, tensors[0].device)
        flat = own.new_zeros(max(sum(_aligned(t.nbytes) for t in some) for some in like))
        flat[: len(own)] = own
        found = self._gather(flat, what).view(self.size, -1)
        parts = [from_bytes(part, some) for part, some in zip(found, like, strict=True)]
        return [list(some) for some in zip(*parts, strict=True)]

    def exchange(
        self, tensors: Sequence[Tensor], owners: Sequence[int], what: str = "exchanged"
    ) -> None:
        """Copy every tensor from the process that owns it to all others, in place.

        Shapes, dtypes and owners are the same everywhere.
        """
        if self.is_single:
            return
        for device in dict.fromkeys(t.device for t in tensors):
            here = [(t, r) for t, r in zip(tensors, owners, strict=True) if t.device == device]
            by_rank = [[t for t, owner in here if owner == rank] for rank in range(self.size)]
            lengths = [sum(_aligned(t.nbytes) for t in own) for own in by_rank]
            cut, mine = _gathered_length(lengths), to_bytes(by_rank[self.rank], device)
            every = [mine.new_empty(0)] * self.size
            if cut:
                flat = mine.new_zeros(cut)
                flat[: len(mine)] = mine[:cut]
                every = list(self._gather(flat, what).view(self.size, -1))
            for rank in [rank for rank, n in enumerate(lengths) if n > cut]:
                rest = mine[cut:] if rank == self.rank else mine.new_empty(lengths[rank] - cut)
                self._broadcast(rest, rank, what)
                every[rank] = torch.cat([every[rank], rest])
            for rank, own in enumerate(by_rank):
                if own and rank != self.rank:
                    torch._foreach_copy_(own, from_bytes(every[rank], own))

    def scatter(self, t: Tensor, owner: int | None, what: str = "scattered") -> Tensor:
        """Return the owner's tensor as a `DTensor`, cut along its longest axis.

        Elsewhere it shows shape and dtype. Without an owner all processes have it.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        given = t.contiguous() if owner in (None, self.rank) else t.new_empty(t.shape)
        assert self.group is not None
        mesh = DeviceMesh.from_group(self.group, t.device.type)
        cut = [Shard(t.shape.index(max(t.shape)))]
        sent = (self.size - 1) / self.size * t.nbytes if owner == self.rank else 0.0
        return self._send(
            what, sent, lambda: distribute_tensor(given, mesh, cut, src_data_rank=owner)
        )

    def broadcast_first(self, tensors: Sequence[Tensor], what: str = "adopted") -> None:
        """Copy the tensors of the first process to all others, in place."""
        self.exchange([t.detach() for t in tensors], [0] * len(tensors), what)

    def sum_numbers(self, numbers: Sequence[float], what: str = "sums") -> list[float]:
        """Return the sums of numbers over all processes, in double precision."""
        if self.is_single:
            return list(numbers)
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return self.sum([own], what)[0].tolist()

    def average_gradients(self, params: Iterable[Tensor]) -> None:
        """Let p.grad be the mean over all processes, of which those without one count as zero."""
        held = list(params)
        if self.is_single or not held:
            return
        given = [torch.zeros_like(p) if p.grad is None else p.grad for p in held]
        some = torch.tensor([p.grad is not None for p in held], device=given[0].device)
        *total, counts = self.sum([*given, some.double()], "gradients")
        for p, g, count in zip(held, total, counts.tolist(), strict=True):
            p.grad = g.div_(self.size) if count else None

    # --- decisions ------------------------------------------------------------------------------

    def all_agree(self, flag: bool | Tensor, what: str = "decisions") -> Any:
        """Return whether the flag is true on all processes; a tensor stays on its device."""
        if self.is_single:
            return flag
        if isinstance(flag, Tensor):
            own = flag.to(torch.int32)
            self._send(what, 0.0, lambda: self._reduce(own, "MIN"))
            return own.bool()
        return bool(self.all_agree(torch.tensor(flag, device=self.device), what))

    def broadcast_object(self, value: T, what: str = "decisions") -> T:
        """Return the first process's value, any object that can be pickled."""
        if self.is_single:
            return value
        held: list[Any] = [value]
        first = {"group": self.group, "group_src": 0}
        self._send(what, 0.0, lambda: dist.broadcast_object_list(held, **first))
        return held[0]

    def gather_objects(self, value: T, what: str = "decisions") -> list[T]:
        """Return every process's value, any object that can be pickled."""
        if self.is_single:
            return [value]
        held: list[Any] = [None] * self.size
        self._send(what, 0.0, lambda: dist.all_gather_object(held, value, self.group))
        return held

    def compare(
        self,
        values: Sequence[object],
        flags: Sequence[bool] = (),
        checksums: Sequence[Tensor] = (),
    ) -> tuple[list[bool], list[bool]]:
        """Return which values are the same on all processes, and which flags are true on all.

        Values are compared by `repr` without addresses, and after them checksums: numbers on a
        device, or vectors of which each process gives some entries, and a negative one elsewhere.
        """
        codes = torch.tensor([crc32(_shown(value).encode()) for value in values])
        vectors = [t.reshape(-1).to(self.device) for t in (codes.long(), *checksums)]
        none = torch.iinfo(torch.int64).max
        signed = [torch.where(t < 0, none, one) for t in vectors for one in (t, -t)]
        least = torch.cat([torch.tensor(flags, dtype=torch.int64, device=self.device), *signed])
        if not self.is_single:
            self._send("decisions", 0.0, lambda: self._reduce(least, "MIN"))
        found = iter(least.tolist())
        held = [bool(next(found)) for _ in flags]
        same: list[list[bool]] = []
        for t in vectors:
            low, high = ([next(found) for _ in range(len(t))] for _ in range(2))
            same.append([a in (-b, none) for a, b in zip(low, high, strict=True)])
        alike = [*same[0], *map(all, same[1:])]
        return alike, held

    def require_same(self, what: str, values: Mapping[str, object], remedy: str) -> None:
        """Raise on all processes where they do not have the same values, naming those."""
        if self.is_single:
            return
        every = self.gather_objects({name: _shown(value) for name, value in values.items()})
        names = dict.fromkeys(name for own in every for name in own)
        for name in names:
            found = [own.get(name, "nothing") for own in every]
            if len({*found}) > 1:
                other = next(i for i, value in enumerate(found) if value != found[0])
                raise PullbackError(
                    f"The processes differ in {what}",
                    f"{name} is {found[0]} on process 0 and {found[other]} on process {other}",
                    remedy,
                )

    @contextmanager
    def raise_together(self, doing: str = "go on") -> Iterator[None]:
        """Raise on all processes where the body, in which nothing is sent, raised on one.

        The others say what it was `doing`.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as own:
            error = own
            if self.is_single:
                raise
        if self.all_agree(error is None):
            return
        found = self.gather_objects(None if error is None else f"{error}")
        if error is not None:
            raise error
        rank, said = next((i, text) for i, text in enumerate(found) if text is not None)
        raise PullbackError(
            f"Process {rank} could not {doing}",
            said.rstrip("."),
            "Mend what it says; see its error",
        )

    # --- the group ------------------------------------------------------------------------------

    def _reduce(self, t: Tensor, operation: str = "SUM", *, later: bool = False) -> Any:
        return dist.all_reduce(t, getattr(dist.ReduceOp, operation), self.group, async_op=later)

    def _broadcast(self, t: Tensor, rank: int, what: str) -> None:
        given = {"group": self.group, "group_src": rank}
        self._send(what, t.nbytes, lambda: dist.broadcast(t, **given))

    def _gather(self, t: Tensor, what: str) -> Tensor:
        out = t.new_empty(self.size * t.numel())
        sent = (self.size - 1) * t.nbytes
        parts = list(out.view(self.size, -1).unbind())
        self._send(what, sent, lambda: dist.all_gather(parts, t.reshape(-1), self.group))
        return out

    def _send(self, what: str, sent: float, call: Callable[[], Any]) -> Any:
        own, start = self._traffic.setdefault(what, Traffic()), perf_counter()
        work = call()
        own.calls += 1
        own.bytes += sent
        own.seconds += perf_counter() - start
        return work


def _default(several: bool) -> Processes:
    return Processes(dist.group.WORLD if several and dist.is_initialized() else None)


# --- which group --------------------------------------------------------------------------------


def unwrap_distributed(model: nn.Module) -> nn.Module:
    """Return the module that `DistributedDataParallel` calls, or the model itself."""
    outer = model
    while (inner := getattr(outer, "_orig_mod", None)) is not None:  # behind torch.compile
        outer = inner
    return outer.module if isinstance(outer, nn.parallel.DistributedDataParallel) else model


def active_wrapper() -> Any:
    """Return the `DistributedDataParallel` whose forward pass is under way, if there is one."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def find_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group of a wrapper: DistributedDataParallel's own, or that of a mesh of shards."""
    if not dist.is_available():
        return None
    while (inner := getattr(model, "_orig_mod", None)) is not None:  # behind torch.compile
        model = inner
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    for p in model.parameters():
        if (mesh := getattr(p, "device_mesh", None)) is not None:
            return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
    return None


def find_processes(
    model: nn.Module, group: dist.ProcessGroup | None, who: str, keyword: str = "group"
) -> Processes:
    """Return the processes of a given group, else those of the model's wrapper.

    Raise if several processes run and there is neither a group, by this `keyword`, nor a wrapper.
    """
    group = find_group(model) if group is None else group
    if group is None:
        refuse_unknown_group(who, "the model is not wrapped", keyword)
    return Processes(group)


def refuse_unknown_group(who: str, why: str, keyword: str = "group") -> None:
    """Raise if several processes run, of which an optimizer knows nothing."""
    if dist.is_available() and dist.is_initialized() and (size := dist.get_world_size()) > 1:
        raise PullbackError(
            f"{who} was not told how the {size} processes work together",
            f"{why}, so that replicas would drift apart",
            f"Wrap the model first, {who}(DistributedDataParallel(model), ...); or give "
            f"{keyword}=torch.distributed.group.WORLD once the processes have met, where "
            f"Lightning, Accelerate or Trainer wraps it later; or {keyword}=torch.distributed."
            "new_group([rank], use_local_synchronization=True) where each trains by itself",
        )


# --- flat buffers -------------------------------------------------------------------------------


def _by_kind(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """Yield the places of tensors of one dtype and device."""
    kinds: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        kinds.setdefault((t.dtype, t.device), []).append(i)
    return kinds.values()


_CALL = 2**22  # bytes that take about as long as one more call
_ALIGNED = 16  # bytes


def _gathered_length(lengths: Sequence[int]) -> int:
    """Return how many of every process's bytes are gathered, and padded to it.

    The rest of longer ones is sent by broadcasts, each a call.
    """

    def cost(cut: int) -> float:
        rest = [n - cut for n in lengths if n > cut]
        return (len(lengths) - 1) * cut + sum(n + _CALL for n in rest)

    return min({0, *lengths}, key=cost)


def _aligned(count: int) -> int:
    """Return the bytes that a tensor takes in a buffer, where any dtype may follow."""
    return -(-count // _ALIGNED) * _ALIGNED


def to_bytes(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of tensors of any dtypes, one after the other."""
    parts = [torch.empty(0, dtype=torch.uint8, device=device)]
    for t in tensors:
        flat = t.detach().reshape(-1).view(torch.uint8)
        parts += [flat, flat.new_zeros(_aligned(len(flat)) - len(flat))]
    return torch.cat(parts)


def from_bytes(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors like these from their bytes, as views."""
    out, at = [], 0
    for t in like:
        out.append(buffer[at : at + t.nbytes].view(t.dtype).view(t.shape))
        at += _aligned(t.nbytes)
    return out


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of these shapes; what is left over is padding."""
    counts = [shape.numel() for shape in shapes]
    parts = flat[: sum(counts)].split(counts)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _shown(value: object) -> str:
    """A value in words; the address of a function is another one in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
