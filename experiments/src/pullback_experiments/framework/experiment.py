"""What an experiment is: its words, its items, its judgment. `executor.py` runs it."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from .check import Check, Conclusion, conclude
from .curves import Chart
from .records import Record
from .store import Key, Results, Store
from .tabular import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Paused(Exception):
    """An item stops here: its time is over and its checkpoint is saved."""


@dataclass(frozen=True)
class Context:
    """What an item may know of the run that it is part of.

    Attributes:
        seed: of this item; 0 where it is done once for all seeds.
        device: where to compute.
        quick: whether this is the short version.
        checkpoint_folder: of this item, kept until it is finished; `folder()` makes it.
        finished: what is finished, so that an item can build on one before it.
        deadline: when the time is over, by `time.monotonic()`, or None.
        watch: (share done, a few words) ↦ nothing; shown as progress.
    """

    seed: int
    device: torch.device
    quick: bool
    checkpoint_folder: Path
    finished: Results
    deadline: float | None = None
    watch: Callable[[float, str], None] = field(default=lambda share, words: None)

    def folder(self) -> Path:
        """Return the folder of checkpoints."""
        self.checkpoint_folder.mkdir(parents=True, exist_ok=True)
        return self.checkpoint_folder

    @property
    def left(self) -> float:
        """Return the seconds until the time is over, ∞ without a limit."""
        if self.deadline is None:
            return math.inf
        return self.deadline - time.monotonic()

    @property
    def due(self) -> bool:
        """Return True if the time is over: save a checkpoint and `raise Paused`."""
        return self.left <= 0


@dataclass(frozen=True)
class Item:
    """A piece of work that is done for every seed, and kept once it is done.

    Attributes:
        key: words that name it, such as (network, method).
        work: context ↦ record; depends on nothing but the configuration and the context.
        once: done once, before the seeds: a search for settings, a reference solution.
        resumable: goes on from its checkpoint after `Paused`, so it may start at any time.
        seeds: it is done for these alone, where not for all.
        after: items without a seed that it builds on, so that it may run beside all others. By
            default every item without a seed comes first, and these come one after the other.
    """

    key: Key
    work: Callable[[Context], Mapping[str, Any]]
    once: bool = False
    resumable: bool = False
    seeds: Sequence[int] | None = None
    after: Sequence[Key] | None = None

    def applies(self, seed: int) -> bool:
        """Return True if the item has to be done for this seed."""
        return self.seeds is None or seed in self.seeds

    @property
    def keeps_order(self) -> bool:
        """Return True if the item waits for items without a seed that stand before it."""
        return self.once and self.after is None

    def run(self, context: Context) -> tuple[Record, float]:
        """Return the record and its seconds; random numbers depend on the seed alone.

        Seconds before a pause count; they are kept beside the checkpoint.
        """
        start = time.monotonic()
        before = _before(context.checkpoint_folder)
        try:
            if context.device.type == "cuda":
                devices = [context.device]
            else:
                devices = []
            with torch.random.fork_rng(devices):
                torch.manual_seed(context.seed)
                record = dict(self.work(context))
        except Paused:
            spent = before + time.monotonic() - start
            (context.folder() / "seconds").write_text(f"{spent:.4f}")
            raise
        return record, before + time.monotonic() - start


def _before(folder: Path) -> float:
    """Return the seconds that a paused item had taken."""
    try:
        return float((folder / "seconds").read_text())
    except (OSError, ValueError):
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """One figure, table or theorem of a paper, to be repeated.

    Subclasses say three things: what results depend on (`config`), what there is to do (`items`),
    and what the results say (`judge`). Most also `draw`, and give `curves` and `tables`.

    Attributes:
        name: what the command line calls it.
        paper, figure, claim: what it repeats, and what that is said to show, in a sentence.
        about: what else a reader of its results must know.
        seeds, quick_seeds: where nothing else is asked for.
        open_parts: parts of the configuration whose entries may come and go, such as methods.
        threads: of the CPU while an item works; None for torch's own.
        judged: whether its sizes can tell; those of `smoke` mostly cannot.
        anywhere: whether `--device` moves its work; what measures CPU seconds stays there.
    """

    name: str
    paper: str
    figure: str
    claim: str
    about: str = ""
    seeds: Sequence[int] = tuple(range(10))
    quick_seeds: Sequence[int] = (0,)
    open_parts: frozenset[str] = frozenset({"methods"})
    threads: int | None = 1
    judged: bool = True
    anywhere: bool = True

    @abstractmethod
    def config(self, quick: bool) -> dict[str, Any]:
        """Return everything that results depend on, in types that JSON has."""

    @abstractmethod
    def items(self, quick: bool) -> Iterable[Item]:
        """Return the items; each one runs for every seed before the next seed starts."""

    @abstractmethod
    def judge(self, results: Results) -> list[Check]:
        """Return the claims with their numbers; none where this run cannot decide them."""

    def require_data(self, quick: bool) -> None:
        """Raise, before anything is run, if data are missing that a later item needs."""
        return

    def draw(self, results: Results) -> Mapping[str, Figure]:
        """Return figures by the suffix of their name, "" for the only one."""
        return {}

    def curves(self, results: Results) -> Sequence[Chart]:
        """Return the charts of all that is done; `results.of` may have fewer seeds."""
        return []

    def tables(self, results: Results) -> list[Table]:
        """Return the tables of the report."""
        return []

    def verdict(self, checks: Sequence[Check]) -> Conclusion | None:
        """Return "reproduced", "differs" or "not reproduced", and why."""
        return conclude(checks)

    def line(self, record: Record) -> str:
        """Return one line about an item that is done."""
        return ""

    def smoke(self) -> Self:
        """Return a copy whose quick version takes seconds: it tests that the code runs."""
        return self

    def stem(self, quick: bool) -> str:
        """Return the name of its files."""
        if quick:
            return f"{self.name}-quick"
        return self.name

    def open_store(self, quick: bool, out: Path) -> Store:
        """Return the results in a folder; refuse those of another experiment."""
        about = {k: getattr(self, k) for k in ("name", "paper", "figure", "claim", "about")}
        about |= {"quick": quick, "seeds": self.choose_seeds(None, quick)}
        path = out / f"{self.stem(quick)}.json"
        return Store(path, self.config(quick), about, self.open_parts)

    def choose_seeds(self, seeds: Sequence[int] | None, quick: bool) -> list[int]:
        """Return the seeds of a run: those asked for, or all of the version."""
        if seeds is not None:
            return list(dict.fromkeys(seeds))
        if quick:
            return list(self.quick_seeds)
        return list(self.seeds)
