"""The assignment of tasks to processes: which process does a task, and which have its result.

The processes form teams of `workers`. Every task belongs to one team, and one member of the team,
the owner, does it. All members of the team have the result; other teams receive what is computed
from it. With one team of all processes every process has all results; teams of one need the least
memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from .checks import require_number
from .errors import PullbackError
from .processes import Processes

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class _Bundle(Generic[K]):
    """Tasks of one kind that go to the same owner, and their cost together."""

    keys: list[K]
    cost: float


class Placement(Generic[K]):
    """The owners of tasks, by the rule of the longest processing time first."""

    def __init__(self, processes: Processes, workers: int | None = None) -> None:
        size = processes.size
        if workers is None:
            workers = size
        require_number("workers", workers, least=1, whole=True)
        if size % workers:
            raise PullbackError(
                "The processes cannot be divided into teams",
                f"workers={workers} does not divide {size}",
                "Give a divisor of the number of processes; None is all of them",
            )
        self.workers = workers
        self._rank = processes.rank
        teams = [range(first, first + workers) for first in range(0, size, workers)]
        seats = [range(seat, size, workers) for seat in range(workers)]
        #: the processes that have the same results
        self._team = processes.join_subgroup(teams)
        #: the processes of the same seat in all teams
        self._across = processes.join_subgroup(seats)
        self.owners: dict[K, int] = {}
        self._loads = [0.0] * size

    @property
    def has_several_teams(self) -> bool:
        """Return True if there is more than one team."""
        return not self._across.is_single

    def owns(self, key: K) -> bool:
        """Return True if this process does the task."""
        return self.owners[key] == self._rank

    def holds(self, key: K) -> bool:
        """Return True if this process has the result of the task."""
        return self.owners[key] // self.workers == self._rank // self.workers

    def assign(self, costs: Mapping[K, tuple[Hashable, float]]) -> None:
        """Give an owner to each task that has none; tasks of one kind stay together.

        Args:
            costs: task ↦ its kind and its cost; tasks of one kind have the same cost.
        """
        keys_by_kind: dict[Hashable, list[K]] = {}
        for key, (kind, _) in costs.items():
            if key not in self.owners:
                keys_by_kind.setdefault(kind, []).append(key)
        bundles = []
        for keys in keys_by_kind.values():
            length = -(-len(keys) // len(self._loads))
            cost = costs[keys[0]][1]
            for start in range(0, len(keys), length):
                bundle = keys[start : start + length]
                bundles.append(_Bundle(bundle, len(bundle) * cost))
        for bundle in sorted(bundles, key=lambda bundle: -bundle.cost):
            owner = self._loads.index(min(self._loads))
            self._loads[owner] += bundle.cost
            self.owners |= dict.fromkeys(bundle.keys, owner)

    def send_within(self, tensors: Mapping[K, Sequence[Tensor]], purpose: str) -> None:
        """Copy tensors, by task, from the owner to the other members of its team, in place."""
        flat, owners = self._flatten(tensors)
        self._team.exchange(flat, [owner % self.workers for owner in owners], purpose)

    def send_across(self, tensors: Mapping[K, Sequence[Tensor]], purpose: str) -> None:
        """Copy tensors, by task, from the team that has the result to all others, in place."""
        flat, owners = self._flatten(tensors)
        self._across.exchange(flat, [owner // self.workers for owner in owners], purpose)

    def _flatten(self, tensors: Mapping[K, Sequence[Tensor]]) -> tuple[list[Tensor], list[int]]:
        """Return the tensors of all tasks in one list, and the owner of each."""
        flat: list[Tensor] = []
        owners: list[int] = []
        for key, of_task in tensors.items():
            flat += of_task
            owners += [self.owners[key]] * len(of_task)
        return flat, owners
