"""Where processes meet on the way out: who inverts which block, and who holds the inverse.

The processes form teams of `workers`. A block belongs to one team, and one of its members inverts
it. All of the team hold the inverse and precondition the block's gradient; other teams receive the
direction. One team of all processes sends no directions; teams of one hold least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ...._core.processes import Processes
from ....grams.kronecker.inverse import Inverse
from ....grams.kronecker.packed import memory
from .average import Average
from .factor import SPECTRUM, BlockKey
from .preconditioner import Preconditioner, placeholder


class Placement:
    """The owners of blocks, placed by cost: the longest processing time first."""

    def __init__(self, processes: Processes, workers: int | None = None) -> None:
        size = processes.size
        workers = size if workers is None else workers
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise PullbackError(
                "workers is not usable", f"got {workers!r}", "Give a number of processes"
            )
        if size % workers:
            raise PullbackError(
                "The processes cannot be divided into teams",
                f"workers={workers} does not divide {size}",
                "Give a divisor of the number of processes; None is all of them",
            )
        self._size, self.workers, self._rank = size, workers, processes.rank
        self._processes = processes
        #: the processes that hold the same inverses, and those of the same seat in all teams
        self.team = processes.divide([range(i, i + workers) for i in range(0, size, workers)])
        self.across = processes.divide([range(seat, size, workers) for seat in range(workers)])
        self.owners: dict[BlockKey, int] = {}
        self._loads = [0.0] * size

    def inverts(self, key: BlockKey) -> bool:
        """Whether this process inverts the block."""
        return self._size == 1 or self.owners[key] == self._rank

    def holds(self, key: BlockKey) -> bool:
        """Whether this process has the block's inverse."""
        return self.team_of(key) == self._rank // self.workers

    def team_of(self, key: BlockKey) -> int:
        """Return the number of the team that holds the block's inverse."""
        return 0 if self.workers == self._size else self.owners[key] // self.workers

    def assign(self, own: Preconditioner, keys: Iterable[BlockKey]) -> None:
        """Place blocks that have no owner yet; those of one shape go together."""
        kinds: dict[Any, list[BlockKey]] = {}
        for key in sorted(keys, key=lambda key: key.names):
            if key not in self.owners:
                kinds.setdefault((own.shapes[key], own.inverses[key].kind), []).append(key)
        parts: list[tuple[float, list[BlockKey]]] = []
        for some in kinds.values():
            length = -(-len(some) // self._size)
            for start in range(0, len(some), length):
                part = some[start : start + length]
                parts.append((len(part) * _cost(own, part[0]), part))
        for cost, part in sorted(parts, key=lambda part: -part[0]):
            owner = self._loads.index(min(self._loads))
            self._loads[owner] += cost
            self.owners |= dict.fromkeys(part, owner)

    # --- what is sent ---------------------------------------------------------------------------

    def renew(
        self,
        own: Preconditioner,
        averages: Mapping[BlockKey, Average],
        keys: Sequence[BlockKey],
        value: float,
    ) -> None:
        """Prepare these blocks, each by its owner, and send them to those who hold them."""
        if self._size == 1:
            own.renew(averages, keys, value)
            return
        for key in keys:
            own.notes.pop(key, None)
        failure: Exception | None = None
        try:
            own.renew(averages, [k for k in keys if self.inverts(k)], value)
        except Exception as error:
            failure = error
        mine = [k for k in keys if self.inverts(k) and failure is None]
        ends = {k: (k in own.ready, own.notes.get(k), _form(own.inverses[k])) for k in mine}
        every = self._processes.values((ends, failure and repr(failure)))
        for rank, (_, said) in enumerate(every):
            if said is not None:
                raise PullbackError(
                    f"Process {rank} could not renew its inverses", said, "See its own error"
                ) from failure
        for key in [k for k in keys if not self.inverts(k)]:
            ready, note, form = every[self.owners[key]][0][key]
            if note is not None:
                own.notes[key] = note
            if ready and key not in own.ready:
                own.ready.add(key)
                own.regroup()
            if form != _form(own.inverses[key]):
                own.inverses[key] = _room(own.inverses[key], form, held=self.holds(key))
                own.regroup()
        self.send(own, keys)

    def send(self, own: Preconditioner, keys: Sequence[BlockKey]) -> None:
        """Send what the owners of these blocks have renewed to the other members of their teams."""
        tensors, owners = [], []
        for key in [k for k in keys if k in own.ready and self.holds(k)]:
            for name, t in own.inverses[key].tensors().items():
                if name not in own.untouched:
                    tensors.append(t)
                    owners.append(self.owners[key] % self.workers)
            if key in own.spectra:  # carried to new bases
                tensors.append(memory(own.spectra[key].value[SPECTRUM]))
                owners.append(self.owners[key] % self.workers)
        self.team.exchange(tensors, owners, "inverses")

    def release(self, own: Preconditioner) -> None:
        """Give up the memory of inverses that other teams hold."""
        for key in own.inverses:
            if key not in own.absent and key in self.owners and not self.holds(key):
                own.change(key, placeholder)
                own.absent.add(key)

    def collect(self, own: Preconditioner) -> None:
        """Bring the inverses of all teams here; `release` gives them up again."""
        keys = sorted((k for k in own.ready if k in self.owners), key=lambda key: key.names)
        tensors, owners = [], []
        for key in keys:
            if key in own.absent:
                own.change(key, Tensor.contiguous)
            for t in own.inverses[key].tensors().values():
                tensors.append(t)
                owners.append(self.team_of(key))
        own.absent.clear()
        own.regroup()
        self.across.exchange(tensors, owners, "state")

    def complete(
        self,
        own: Preconditioner,
        found: dict[str, Tensor],
        stacks: list[Tensor],
        gradients: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the directions of this team's blocks together with those of other teams."""
        if self.across.alone:
            return found, stacks
        names, owners, tensors = [], [], []
        for key in sorted(own.ready, key=lambda key: key.names):
            for name in key.names:
                if name in gradients:
                    like = torch.empty_like(gradients[name], dtype=own.inverses[key].dtype)
                    names.append(name)
                    owners.append(self.team_of(key))
                    tensors.append(like.copy_(found[name]) if self.holds(key) else like)
        self.across.exchange(tensors, owners, "directions")
        every = dict(zip(names, tensors, strict=True))
        return {n: every[n] for n in gradients if n in every}, tensors


def _cost(own: Preconditioner, key: BlockKey) -> float:
    """Return about how many products it takes to invert a block, and to apply the inverse."""
    held, entries = own.inverses[key], prod(own.shapes[key])
    dense = [t.shape for t in (held.left, held.right) if t is not None and t.ndim == 3]
    return sum(groups * float(n) ** 3 + entries * n for groups, n, _ in dense) + entries


def _form(inverse: Inverse) -> tuple[dict[str, Any], bool]:
    """Return shapes and dtypes of an inverse's tensors, and whether they are factors."""
    form = {n: (tuple(t.shape), t.dtype) for n, t in inverse.tensors().items()}
    return form, inverse.factors


def _room(mine: Inverse, form: tuple[dict[str, Any], bool], *, held: bool) -> Inverse:
    """Return an inverse of this form, with memory of its own where it is `held` here."""
    device = next(iter(mine.tensors().values())).device
    room: dict[str, Any] = {"left": None}
    for name, (shape, dtype) in form[0].items():
        one = torch.zeros((), dtype=dtype, device=device)
        room[name] = one.expand(shape).clone() if held else one.expand(shape)
    return Inverse(**room, factors=form[1])
