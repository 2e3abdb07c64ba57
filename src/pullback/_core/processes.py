"""Several processes that act as one: a `torch.distributed` group, and what is sent in it.

Every method but the constructor is collective: all processes of the group call it, in the same
order. With one process each method returns its arguments, and nothing is sent. The argument
`purpose` names the entry of `traffic()` under which a call is counted.
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
from torch import Tensor

from .buffers import (
    concatenate,
    count_padded_bytes,
    from_bytes,
    group_by_dtype_and_device,
    split_into_shapes,
    to_bytes,
)
from .errors import PullbackError

S = TypeVar("S")
T = TypeVar("T")

#: what a process reports for an entry of which it has no number, when minima are taken
_ABSENT = torch.iinfo(torch.int64).max


@dataclass
class Traffic:
    """What one process sent: calls, bytes, and the seconds that the host spent in them.

    Bytes are those of ring algorithms: 2(n−1)/n of the size of a summed buffer, (n−1)/n of a
    gathered one, the whole size of a broadcast one. Messages of a few numbers count as calls only.
    """

    calls: int = 0
    bytes: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class MessageCosts:
    """How messages are cut into calls."""

    #: bytes that take about as long to send as one more call takes to start: 40 µs at 100 GB/s
    bytes_per_call: int = 2**22
    #: one padded reduce-scatter replaces a reduction per owner up to this ratio of padded to real
    #: length: beyond it more than half of what is sent is padding
    largest_padding: float = 2.0


_COSTS = MessageCosts()


class Pending(Generic[T]):
    """A result that is under way between processes; `wait` returns it."""

    def __init__(
        self, result: Callable[[], T], works: Sequence[Any] = (), traffic: Traffic | None = None
    ) -> None:
        self._result = result
        self._works = works
        self._traffic = traffic

    def wait(self) -> T:
        """Return the result; on CUDA the device waits, and the host goes on."""
        start = perf_counter()
        for work in self._works:
            work.wait()
        if self._traffic is not None:
            self._traffic.seconds += perf_counter() - start
        self._works = ()
        self._traffic = None
        return self._result()

    def then(self, change: Callable[[T], S]) -> Pending[S]:
        """Return a pending result to which `change` is applied after the wait."""
        return Pending(lambda: change(self._result()), self._works, self._traffic)


class Processes:
    """The processes of a group; without a group, or with a group of one, this process alone."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, traffic: dict[str, Traffic] | None = None
    ) -> None:
        self.group = group
        self.rank = 0
        self.size = 1
        if group is not None:
            self.rank = dist.get_rank(group)
            self.size = dist.get_world_size(group)
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
        return _restore_default, (self.size > 1,)

    @property
    def is_single(self) -> bool:
        """Return True if there is no other process."""
        return self.size == 1

    @property
    def device(self) -> torch.device:
        """The device from which numbers that belong to no tensor are sent."""
        if self.group is None or "cpu" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def traffic(self) -> dict[str, Traffic]:
        """Return what this process sent so far, by purpose."""
        return {purpose: replace(traffic) for purpose, traffic in self._traffic.items()}

    def with_group(self, group: dist.ProcessGroup) -> Processes:
        """Return the processes of another group, whose traffic is counted here too."""
        return Processes(group, self._traffic)

    def join_subgroup(self, subgroups: Sequence[Sequence[int]]) -> Processes:
        """Return the subgroup, given by its ranks, to which this process belongs.

        Its traffic is counted here too. All processes of the program call this method, since a
        group may have to be made.
        """
        own_ranks = next(ranks for ranks in subgroups if self.rank in ranks)
        if len(own_ranks) == self.size:
            return self
        if len(own_ranks) == 1:
            return Processes()
        if self.size != dist.get_world_size():
            raise PullbackError(
                "The group cannot be divided",
                f"it has {self.size} of {dist.get_world_size()} processes, and the others would "
                "have to take part",
                "Let all processes train together, or leave workers out",
            )
        global_ranks = dist.get_process_group_ranks(self.group)
        groups: dict[tuple[int, ...], Any] = {}
        for ranks in subgroups:
            groups[tuple(ranks)] = dist.new_group([global_ranks[rank] for rank in ranks])
        return self.with_group(groups[tuple(own_ranks)])

    def duplicate(self) -> Processes | None:
        """Return a new group of the same processes, or None where it cannot be made.

        The order of calls in it does not depend on other groups. All processes of the program take
        part, so that a group of some of them has no duplicate. It lasts until `destroy`.
        """
        if self.is_single or self.group is None or self.size != dist.get_world_size():
            return None
        group: Any = self.group
        options = getattr(group._get_backend(self.device), "options", None)
        timeout = getattr(options, "_timeout", None)  # None is torch's default
        duplicate: Any = dist.new_group(timeout=timeout, backend=dist.get_backend(group))
        return self.with_group(duplicate)

    @property
    def is_freed_alone(self) -> bool:
        """Return True if one process may destroy the group without the others, as with gloo."""
        return self.group is not None and dist.get_backend(self.group) == "gloo"

    def destroy(self) -> None:
        """Destroy a group that `duplicate` has made; all processes call this."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    # --- tensors --------------------------------------------------------------------------------

    def sum(self, tensors: Sequence[Tensor], purpose: str = "sums") -> list[Tensor]:
        """Return the sums of the tensors over all processes, the same bits everywhere."""
        return self.launch_sum(tensors, purpose).wait()

    def launch_sum(self, tensors: Sequence[Tensor], purpose: str = "sums") -> Pending[list[Tensor]]:
        """Start `sum` and return at once; the tensors may be changed meanwhile."""
        if self.is_single or not tensors:
            return Pending(lambda: list(tensors))
        sums: list[Any] = [None] * len(tensors)
        works = []
        for positions in group_by_dtype_and_device(tensors):
            flat = concatenate([tensors[i] for i in positions])
            call = partial(self._all_reduce, flat, is_async=True)
            sent = 2 * (self.size - 1) / self.size * flat.nbytes
            works.append(self._make_counted_call(purpose, sent, call))
            views = split_into_shapes(flat, [tensors[i].shape for i in positions])
            for i, view in zip(positions, views, strict=True):
                sums[i] = view
        return Pending(lambda: sums, works, self._traffic[purpose])

    def sum_to(
        self, tensors: Sequence[Tensor], owners: Sequence[int], purpose: str = "sums"
    ) -> list[Tensor]:
        """Return sums over all processes of the tensors that this process owns.

        The others are returned as they are.

        Shapes, dtypes and owners are the same everywhere.
        """
        sums = list(tensors)
        if self.is_single:
            return sums
        for positions in group_by_dtype_and_device(tensors):
            by_owner: list[list[int]] = [[] for _ in range(self.size)]
            for i in positions:
                by_owner[owners[i]].append(i)
            empty = tensors[positions[0]].new_empty(0)
            flats = [concatenate([empty, *(tensors[i] for i in owned)]) for owned in by_owner]
            flat = self._reduce_to_owners(flats, purpose)
            owned = by_owner[self.rank]
            views = split_into_shapes(flat, [tensors[i].shape for i in owned])
            for i, view in zip(owned, views, strict=True):
                sums[i] = view
        return sums

    def _reduce_to_owners(self, flats: Sequence[Tensor], purpose: str) -> Tensor:
        """Return the sum over all processes of `flats[rank]`, which may be padded at the end.

        There is one such tensor for each owner.
        """
        longest = max(map(len, flats))
        total = sum(map(len, flats))
        if self.size * longest > _COSTS.largest_padding * total:
            for rank, flat in enumerate(flats):
                if len(flat):
                    call = partial(dist.reduce, flat, group=self.group, group_dst=rank)
                    self._make_counted_call(purpose, flat.nbytes, call)
            return flats[self.rank]
        padded = flats[0].new_zeros(self.size, longest)
        for row, flat in zip(padded, flats, strict=True):
            row[: len(flat)] = flat
        own_sum = padded.new_empty(longest)
        call = partial(dist.reduce_scatter_tensor, own_sum, padded.view(-1), group=self.group)
        self._make_counted_call(purpose, (self.size - 1) / self.size * padded.nbytes, call)
        return own_sum

    def gather(self, tensors: Sequence[Tensor], purpose: str = "gathered") -> list[Tensor]:
        """Return every tensor joined along its first axis, whose length may differ by process."""
        if self.is_single:
            return list(tensors)
        return [torch.cat(pieces) for pieces in self.gather_parts(tensors, purpose)]

    def gather_parts(
        self, tensors: Sequence[Tensor], purpose: str = "gathered"
    ) -> list[list[Tensor]]:
        """Return for every tensor the list of what all processes pass, in the order of ranks.

        First axes may differ in length; dtypes and further axes are the same everywhere. All
        tensors are on one device.
        """
        if self.is_single:
            return [[tensor] for tensor in tensors]
        own_lengths = torch.tensor([len(tensor) for tensor in tensors], device=self.device)
        lengths = self._all_gather(own_lengths, purpose).view(self.size, len(tensors)).tolist()
        templates = [_with_lengths(tensors, of_rank) for of_rank in lengths]
        own_bytes = to_bytes(tensors, tensors[0].device)
        padded = own_bytes.new_zeros(max(map(count_padded_bytes, templates)))
        padded[: len(own_bytes)] = own_bytes
        buffers = self._all_gather(padded, purpose).view(self.size, -1)
        by_rank = [from_bytes(*pair) for pair in zip(buffers, templates, strict=True)]
        return [list(pieces) for pieces in zip(*by_rank, strict=True)]

    def exchange(
        self, tensors: Sequence[Tensor], owners: Sequence[int], purpose: str = "exchanged"
    ) -> None:
        """Copy every tensor from the process that owns it to all others, in place.

        Shapes, dtypes and owners are the same everywhere.
        """
        if self.is_single:
            return
        by_device: dict[torch.device, list[list[Tensor]]] = {}
        for tensor, owner in zip(tensors, owners, strict=True):
            by_rank = by_device.setdefault(tensor.device, [[] for _ in range(self.size)])
            by_rank[owner].append(tensor)
        for device, by_rank in by_device.items():
            self._exchange_on_device(by_rank, device, purpose)

    def _exchange_on_device(
        self, by_rank: Sequence[list[Tensor]], device: torch.device, purpose: str
    ) -> None:
        """`exchange` tensors of one device, listed by the rank of their owner.

        The first bytes of all processes, up to a common length, are gathered in one call. What
        some processes have beyond it is broadcast by each of them.
        """
        lengths = [count_padded_bytes(owned) for owned in by_rank]
        common = _choose_gathered_length(lengths)
        own_bytes = to_bytes(by_rank[self.rank], device)
        buffers = [own_bytes.new_empty(0)] * self.size
        if common:
            padded = own_bytes.new_zeros(common)
            padded[: len(own_bytes)] = own_bytes[:common]
            buffers = list(self._all_gather(padded, purpose).view(self.size, -1))
        for rank, length in enumerate(lengths):
            if length <= common:
                continue
            if rank == self.rank:
                remainder = own_bytes[common:]
            else:
                remainder = own_bytes.new_empty(length - common)
            self._broadcast(remainder, rank, purpose)
            buffers[rank] = torch.cat([buffers[rank], remainder])
        for rank, owned in enumerate(by_rank):
            if owned and rank != self.rank:
                torch._foreach_copy_(owned, from_bytes(buffers[rank], owned))

    def scatter(self, tensor: Tensor, owner: int | None, purpose: str = "scattered") -> Tensor:
        """Return the owner's tensor as a `DTensor`, cut along its longest axis.

        On other processes the argument only shows shape and dtype. With the owner None all
        processes have the tensor, and nothing is sent.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Shard, distribute_tensor

        assert self.group is not None
        if owner in (None, self.rank):
            content = tensor.contiguous()
        else:
            content = tensor.new_empty(tensor.shape)
        mesh = DeviceMesh.from_group(self.group, tensor.device.type)
        placements = [Shard(tensor.shape.index(max(tensor.shape)))]
        sent = 0.0
        if owner == self.rank:
            sent = (self.size - 1) / self.size * tensor.nbytes
        call = partial(distribute_tensor, content, mesh, placements, src_data_rank=owner)
        return self._make_counted_call(purpose, sent, call)

    def broadcast_first(self, tensors: Sequence[Tensor], purpose: str = "adopted") -> None:
        """Copy the tensors of the first process to all others, in place."""
        self.exchange([tensor.detach() for tensor in tensors], [0] * len(tensors), purpose)

    def sum_numbers(self, numbers: Sequence[float], purpose: str = "sums") -> list[float]:
        """Return the sums of numbers over all processes, in double precision."""
        if self.is_single:
            return list(numbers)
        own_numbers = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return self.sum([own_numbers], purpose)[0].tolist()

    def average_gradients(self, params: Iterable[Tensor]) -> None:
        """Set p.grad to its mean over all processes, where a missing gradient counts as zero.

        A parameter without a gradient on any process keeps None.
        """
        params = list(params)
        if self.is_single or not params:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        is_present = torch.tensor([p.grad is not None for p in params], device=gradients[0].device)
        *totals, counts = self.sum([*gradients, is_present.double()], "gradients")
        for p, total, count in zip(params, totals, counts.tolist(), strict=True):
            p.grad = None
            if count:
                p.grad = total.div_(self.size)

    # --- decisions ------------------------------------------------------------------------------

    def all_agree(self, flag: bool | Tensor, purpose: str = "decisions") -> Any:
        """Return True if the flag is true on all processes; a tensor stays on its device."""
        if self.is_single:
            return flag
        if isinstance(flag, Tensor):
            least = flag.to(torch.int32)
            self._make_counted_call(purpose, 0.0, lambda: self._all_reduce(least, "MIN"))
            return least.bool()
        return bool(self.all_agree(torch.tensor(flag, device=self.device), purpose))

    def broadcast_object(self, value: T, purpose: str = "decisions") -> T:
        """Return the first process's value, any object that can be pickled."""
        if self.is_single:
            return value
        box: list[Any] = [value]
        call = partial(dist.broadcast_object_list, box, group=self.group, group_src=0)
        self._make_counted_call(purpose, 0.0, call)
        return box[0]

    def gather_objects(self, value: T, purpose: str = "decisions") -> list[T]:
        """Return every process's value, any object that can be pickled."""
        if self.is_single:
            return [value]
        values: list[Any] = [None] * self.size
        self._make_counted_call(
            purpose, 0.0, lambda: dist.all_gather_object(values, value, self.group)
        )
        return values

    def compare(
        self,
        values: Sequence[object],
        flags: Sequence[bool] = (),
        checksums: Sequence[Tensor] = (),
    ) -> tuple[list[bool], list[bool]]:
        """Return two lists: which values and checksums all processes share, and which flags.

        The first has a True for every value, then every checksum, that is the same everywhere; the
        second one for every flag that is true everywhere.

        Values are compared by `repr` without addresses. A checksum is a number on a device, or a
        vector of which each process has some entries, and gives negative numbers for the others.
        All comparisons are one minimum over the processes: x and −x have the minima a and −b
        where the numbers lie between a and b, and a = b says that they are all the same.
        """
        codes = torch.tensor([crc32(_describe(value).encode()) for value in values])
        vectors = [v.reshape(-1).to(self.device) for v in (codes.long(), *checksums)]
        pieces = [torch.tensor(flags, dtype=torch.int64, device=self.device)]
        for vector in vectors:
            pieces.append(torch.where(vector < 0, _ABSENT, vector))
            pieces.append(torch.where(vector < 0, _ABSENT, -vector))
        minima = torch.cat(pieces)
        if not self.is_single:
            self._make_counted_call("decisions", 0.0, lambda: self._all_reduce(minima, "MIN"))
        numbers = iter(minima.tolist())
        all_true = [bool(next(numbers)) for _ in flags]
        is_same: list[list[bool]] = []
        for vector in vectors:
            low = [next(numbers) for _ in range(len(vector))]
            negative_high = [next(numbers) for _ in range(len(vector))]
            pairs = zip(low, negative_high, strict=True)
            is_same.append([a in (-b, _ABSENT) for a, b in pairs])
        return [*is_same[0], *map(all, is_same[1:])], all_true

    def require_same(self, what: str, values: Mapping[str, object], remedy: str) -> None:
        """Raise on all processes unless they have the same values; name the first that differs."""
        if self.is_single:
            return
        by_rank = self.gather_objects({name: _describe(value) for name, value in values.items()})
        names: dict[str, None] = {}
        for described in by_rank:
            names.update(dict.fromkeys(described))
        for name in names:
            words = [described.get(name, "nothing") for described in by_rank]
            if len(set(words)) == 1:
                continue
            other = next(rank for rank, word in enumerate(words) if word != words[0])
            raise PullbackError(
                f"The processes differ in {what}",
                f"{name} is {words[0]} on process 0 and {words[other]} on process {other}",
                remedy,
            )

    @contextmanager
    def raise_together(self, doing: str = "go on") -> Iterator[None]:
        """Raise on all processes if the body raised on one of them; nothing is sent in the body.

        Processes whose body did not raise say that another one could not do what `doing` names.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as own_error:
            error = own_error
            if self.is_single:
                raise
        if self.all_agree(error is None):
            return
        messages = self.gather_objects(None if error is None else f"{error}")
        if error is not None:
            raise error
        rank = next(rank for rank, message in enumerate(messages) if message is not None)
        raise PullbackError(
            f"Process {rank} could not {doing}",
            str(messages[rank]).rstrip("."),
            "Mend what it says; see its error",
        )

    # --- calls of torch.distributed -------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, operation: str = "SUM", *, is_async: bool = False) -> Any:
        operator = getattr(dist.ReduceOp, operation)
        return dist.all_reduce(tensor, operator, self.group, async_op=is_async)

    def _broadcast(self, tensor: Tensor, rank: int, purpose: str) -> None:
        call = partial(dist.broadcast, tensor, group=self.group, group_src=rank)
        self._make_counted_call(purpose, tensor.nbytes, call)

    def _all_gather(self, tensor: Tensor, purpose: str) -> Tensor:
        """Return the entries of all processes' tensors, one process after the other."""
        gathered = tensor.new_empty(self.size * tensor.numel())
        rows = list(gathered.view(self.size, -1).unbind())
        sent = (self.size - 1) * tensor.nbytes
        self._make_counted_call(
            purpose, sent, lambda: dist.all_gather(rows, tensor.reshape(-1), self.group)
        )
        return gathered

    def _make_counted_call(self, purpose: str, sent: float, call: Callable[[], Any]) -> Any:
        """Make a call of `torch.distributed`; count it, its bytes and its time in `traffic()`."""
        traffic = self._traffic.setdefault(purpose, Traffic())
        start = perf_counter()
        work = call()
        traffic.calls += 1
        traffic.bytes += sent
        traffic.seconds += perf_counter() - start
        return work


def _restore_default(several: bool) -> Processes:
    """Return all processes of the program if a pickle had several, else this one alone."""
    if several and dist.is_initialized():
        return Processes(dist.group.WORLD)
    return Processes()


def _with_lengths(tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Return tensors without memory, like these but with first axes of these lengths."""
    templates = []
    for tensor, length in zip(tensors, lengths, strict=True):
        templates.append(tensor.new_empty((length, *tensor.shape[1:]), device="meta"))
    return templates


def _choose_gathered_length(lengths: Sequence[int]) -> int:
    """Return the number of bytes, of every process, that are gathered in one call.

    Shorter buffers are padded to it. The remainders of longer ones are broadcast, a call for each.
    """

    def cost(common: int) -> float:
        broadcast = [length for length in lengths if length > common]
        remainders = sum(length - common + _COSTS.bytes_per_call for length in broadcast)
        return (len(lengths) - 1) * common + remainders

    return min({0, *lengths}, key=cost)


def _describe(value: object) -> str:
    """Return `repr` without addresses, which are others in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
