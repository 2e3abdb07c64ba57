"""Who does which part of a common work, and who holds its result.

The processes form teams of `workers`. Every part belongs to one team, and one of its members does
it. All of the team hold the result; other teams are sent what is made of it. One team of all
processes holds everything everywhere; teams of one hold least.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from .checks import refuse_number
from .errors import PullbackError
from .processes import Processes

K = TypeVar("K", bound=Hashable)


class Placement(Generic[K]):
    """The owners of parts, placed by cost: the longest processing time first."""

    def __init__(self, processes: Processes, workers: int | None = None) -> None:
        size = processes.size
        workers = size if workers is None else workers
        refuse_number("workers", workers, least=1, whole=True)
        if size % workers:
            raise PullbackError(
                "The processes cannot be divided into teams",
                f"workers={workers} does not divide {size}",
                "Give a divisor of the number of processes; None is all of them",
            )
        self.workers, self._rank = workers, processes.rank
        #: the processes that hold the same results, and those of the same seat in all teams
        self._team = processes.join_subgroup(
            [range(i, i + workers) for i in range(0, size, workers)]
        )
        self._across = processes.join_subgroup(
            [range(seat, size, workers) for seat in range(workers)]
        )
        self.owners: dict[K, int] = {}
        self._loads = [0.0] * size

    @property
    def has_several_teams(self) -> bool:
        """Whether there are several teams."""
        return not self._across.is_single

    def owns(self, key: K) -> bool:
        """Whether this process does the part."""
        return self.owners[key] == self._rank

    def holds(self, key: K) -> bool:
        """Whether this process has the result."""
        return self.owners[key] // self.workers == self._rank // self.workers

    def assign(self, costs: Mapping[K, tuple[Hashable, float]]) -> None:
        """Place parts that have no owner yet, by kind and cost; those of one kind go together."""
        kinds: dict[Hashable, list[K]] = {}
        for key, (kind, _) in costs.items():
            if key not in self.owners:
                kinds.setdefault(kind, []).append(key)
        pieces: list[tuple[float, list[K]]] = []
        for some in kinds.values():
            length = -(-len(some) // len(self._loads))
            for start in range(0, len(some), length):
                piece = some[start : start + length]
                pieces.append((len(piece) * costs[piece[0]][1], piece))
        for cost, piece in sorted(pieces, key=lambda piece: -piece[0]):
            owner = self._loads.index(min(self._loads))
            self._loads[owner] += cost
            self.owners |= dict.fromkeys(piece, owner)

    def send_within(self, held: Mapping[K, Sequence[Tensor]], what: str) -> None:
        """Copy tensors, by part, from the owner to the others of its team, in place."""
        seats = [self.owners[key] % self.workers for key, own in held.items() for _ in own]
        self._team.exchange([t for own in held.values() for t in own], seats, what)

    def send_across(self, held: Mapping[K, Sequence[Tensor]], what: str) -> None:
        """Copy tensors, by part, from the team that holds the result to all others, in place."""
        teams = [self.owners[key] // self.workers for key, own in held.items() for _ in own]
        self._across.exchange([t for own in held.values() for t in own], teams, what)
