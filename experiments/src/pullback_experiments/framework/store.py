"""Results on disk: one JSON file per experiment, an npz for each item that has arrays.

    NAME.json             configuration, environments, items, then checks, tables, figures
    NAME.arrays/*.npz     arrays of the items

Every save replaces the file in one piece, so that an interruption or a full disk leaves what was
finished before. Processes that share a folder save one after the other, and each takes over what
the others saved. A file of another configuration is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pullback import PullbackError
from pullback.cli import files

from . import records
from .records import Record

FORMAT = "pullback results 1"

#: the words that name an item, such as network and method
Key = tuple[str, ...]
#: an item and its seed, or None of an item that is done once for all seeds
Name = tuple[Key, int | None]


_REMEDY = "Use another folder (--out), or move the file away"


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; {} if that is no mapping. Raise if it is unreadable."""
    try:
        state = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = f"it is unreadable or cut off ({error})"
        raise PullbackError(f"{path} cannot be read", why, _REMEDY) from None
    if isinstance(state, dict):
        return state
    return {}


def read(path: Path) -> dict[str, Any]:
    """Return the content of a results file; refuse other files."""
    state = read_json(path)
    if (version := state.get("format")) != FORMAT:
        why = f'its "format" is not {FORMAT!r}'
        if isinstance(version, str) and version.startswith("pullback"):
            why += f" but {version!r}, of another version of pullback"
        raise PullbackError(f"{path} holds no results of an experiment", why, _REMEDY)
    try:
        _verify_types(state)
        for run in state["runs"]:
            _verify(run, len(state["environments"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _make_malformed_error(path, error) from None
    return state


def _verify_types(state: dict[str, Any]) -> None:
    """Raise TypeError if an entry of the file is of another type than it was written with."""
    types = {"config": dict, "environments": list, "about": dict, "summary": dict}
    wrong = [key for key, kept_type in types.items() if not isinstance(state[key], kept_type)]
    if wrong:
        raise TypeError(f"{', '.join(wrong)} malformed")
    if not all(isinstance(e, dict) for e in state["environments"]):
        raise TypeError("environments malformed")


def _make_malformed_error(path: Path, error: Exception) -> PullbackError:
    why = f"it is incomplete or was changed by hand ({error})"
    return PullbackError(f"{path} cannot be read", why, _REMEDY)


class Store:
    """Records by item and seed, for one configuration.

    Args:
        path: of the JSON file.
        config: everything that records depend on.
        about: what the experiment is, in words.
        open_parts: mappings of the configuration whose entries may come and go, such as methods;
            entries on both sides must agree.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        about: Mapping[str, Any] | None = None,
        open_parts: frozenset[str] = frozenset(),
    ) -> None:
        self.path = path
        self.about = dict(about or {})
        self.config = normalize_config(config)
        self.environments: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.open_parts = open_parts
        self._runs: dict[Name, dict[str, Any]] = {}
        self._lines: dict[Name, str] = {}
        self._stamp_read: object = None
        self._merge()

    def reread(self) -> None:
        """Take over the items that other processes have saved since this one read the file."""
        with lock_folder(self.path.parent):
            self._merge()

    def _merge(self) -> None:
        """Take over what is on disk, another process's items included."""
        if not self.path.exists() or (stamp := self._stamp()) == self._stamp_read:
            return
        state = read(self.path)  # another process may write meanwhile, and then it is read again
        try:
            json.dumps(state, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:  # a page can show it, and no file can hold it
            raise _make_malformed_error(self.path, error) from None
        self._refuse_others(state)
        old = state["config"]
        for open_part in self.open_parts & old.keys() & self.config.keys():
            self.config[open_part] = {**old[open_part], **self.config[open_part]}
        first = not self._runs
        if first:
            self.environments = state["environments"]
            self.summary = state["summary"]
        numbers = [self._place(e) for e in state["environments"]]
        for run in state["runs"]:
            name = _name(run)
            if name not in self._runs:
                self._keep(name, {**run, "environment": numbers[run["environment"]]})
        self._stamp_read = stamp

    def _refuse_others(self, state: dict[str, Any]) -> None:
        """Raise if the file is of another experiment or of another configuration."""
        whose = state["about"].get("name")
        if whose != self.about.get("name"):
            raise PullbackError(
                f"{self.path} holds results of another experiment",
                f"they are of {whose!r}",
                _REMEDY,
            )
        if differ := list_differences(state["config"], self.config, self.open_parts):
            raise PullbackError(
                f"{self.path} holds results of another configuration",
                f"{', '.join(differ)} differ, so the runs cannot be compared",
                _REMEDY,
            )

    def _stamp(self) -> object:
        at = self.path.stat()
        return at.st_mtime_ns, at.st_size, at.st_ino

    def _place(self, environment: dict[str, Any]) -> int:
        if environment not in self.environments:
            self.environments.append(environment)
        return self.environments.index(environment)

    def _keep(self, name: Name, run: dict[str, Any]) -> None:
        self._runs[name] = run
        self._lines[name] = json.dumps(run, ensure_ascii=False, allow_nan=False)

    def __contains__(self, name: Name) -> bool:
        return name in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def seeds(self) -> list[int]:
        """Return the seeds of which some item is done."""
        return sorted({seed for _, seed in self._runs if seed is not None})

    def took(self, name: Name) -> float | None:
        """Return the seconds of an item, None where they are not known."""
        return self._runs[name]["took"]

    def record(self, name: Name) -> Record:
        """Return the record of an item."""
        run = self._runs[name]
        file = run.get("arrays")
        path = self.path
        arrays: records.Arrays = {}
        try:
            if file is not None:
                path = self._folder / Path(file).name
                arrays = records.load(path)
            return records.join(run["record"], arrays)
        except records.DAMAGED as error:
            why = f"it is missing or damaged ({error})"
            raise PullbackError(
                f"{path} cannot be read", why, f"Restore it, or move {self.path} away"
            ) from None

    @property
    def _folder(self) -> Path:
        return self.path.with_suffix(".arrays")

    def put(
        self, name: Name, record: Mapping[str, Any], took: float, environment: dict[str, Any]
    ) -> None:
        """Save an item: its arrays first, then the file that names them."""
        content, arrays = records.split(record)
        key, seed = name
        run: dict[str, Any] = {"key": list(key), "seed": seed, "took": round(took, 4)}
        run["environment"] = self._place(environment)
        if arrays:
            run["arrays"] = f"{slug(name)}.npz"
            files.write(self._folder / run["arrays"], lambda f: records.save(f, arrays))
        self._keep(name, {**run, "record": content})
        self.save()

    def save(self) -> None:
        """Write the file in one piece; one line per item."""
        files.make_folder(self.path.parent)
        with lock_folder(self.path.parent):
            self._save()

    def _save(self) -> None:
        self._merge()
        head = {
            "format": FORMAT,
            "about": self.about,
            "config": self.config,
            "environments": self.environments,
            "summary": self.summary,
        }
        text = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False)[:-2]
        lines = ",\n".join(f"  {line}" for line in self._lines.values())
        files.write_text(self.path, f'{text},\n "runs": [\n{lines}\n ]\n}}\n')
        self._stamp_read = self._stamp()


def slug(name: Name) -> str:
    """Return a unique file name for an item.

    >>> slug((("tanh MLP", "K-FAC, undamped"), 3))
    'tanh-mlp-k-fac-undamped-seed3-...'
    """
    key, seed = name
    words = re.sub(r"[^a-z0-9]+", "-", " ".join(key).lower()).strip("-")[:60]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:6]
    if seed is None:
        return f"{words}-{digest}"
    return f"{words}-seed{seed}-{digest}"


def _name(run: dict[str, Any]) -> Name:
    key = tuple(map(str, run["key"]))
    if run["seed"] is None:
        return key, None
    return key, int(run["seed"])


def _verify(run: dict[str, Any], environments: int) -> None:
    """Refuse an item without name, record, time or environment."""
    key, _ = _name(run)
    sound = key and isinstance(run["record"], dict) and run["environment"] in range(environments)
    sound = sound and isinstance(run.get("arrays", ""), str)
    seconds = run["took"]
    if not sound or (seconds is not None and not math.isfinite(seconds)):
        raise TypeError(f"the item {key} is malformed")


def normalize_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration as it would be read from a file."""
    content, arrays = records.split(config)
    if arrays:
        raise PullbackError(
            "The configuration cannot be saved",
            f"{', '.join(arrays)} are arrays",
            "Say how they are made instead",
        )
    return json.loads(json.dumps(content))


def list_differences(
    old: dict[str, Any], new: dict[str, Any], open_parts: frozenset[str]
) -> list[str]:
    """Return what differs, by name."""
    out = []
    for key in sorted(old.keys() | new.keys()):
        one = old.get(key)
        two = new.get(key)
        if key in open_parts and isinstance(one, dict) and isinstance(two, dict):
            out += sorted(f"{key} {k!r}" for k in one.keys() & two.keys() if one[k] != two[k])
        elif one != two:
            out.append(key)
    return out


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process uses the folder, and lock it meanwhile.

    The operating system locks the folder itself. No file is left, and the lock ends with the
    process, even a killed one. Windows and some network drives have no such locks: nothing is
    locked there.
    """
    with _open_folder(folder) as file:
        _acquire_lock(file, "wait")
        yield


@contextmanager
def share_folder(folder: Path) -> Iterator[Callable[[], bool]]:
    """Share the folder with other processes; yield a function that says if this is the last."""
    with _open_folder(folder) as file:
        _acquire_lock(file, "share")
        yield lambda: _acquire_lock(file, "try")


def _acquire_lock(file: int | None, how: Literal["wait", "share", "try"]) -> bool:
    """Return True unless the lock was refused."""
    if file is None or sys.platform == "win32":
        return True
    import fcntl

    flags = {"wait": fcntl.LOCK_EX, "share": fcntl.LOCK_SH, "try": fcntl.LOCK_EX | fcntl.LOCK_NB}
    try:
        fcntl.flock(file, flags[how])
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@contextmanager
def _open_folder(folder: Path) -> Iterator[int | None]:
    try:
        file = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        file = None
    try:
        yield file
    finally:
        if file is not None:
            os.close(file)


class Results:
    """Records by item, over the seeds that are complete.

    Attributes:
        seeds: every item is done for each of them.
        quick: whether the short version ran.
    """

    def __init__(self, store: Store, seeds: Sequence[int], quick: bool) -> None:
        self.seeds = tuple(seeds)
        self.quick = quick
        self._store = store

    def of(self, *key: str) -> list[Record]:
        """Return the records of an item, in the order of the seeds it is done for."""
        return [self._store.record((key, s)) for s in self.seeds if (key, s) in self._store]

    def once(self, *key: str) -> Record:
        """Return the record of an item that is done once for all seeds."""
        return self._store.record((key, None))

    def took(self, *key: str) -> list[float]:
        """Return the seconds of an item, in the order of the seeds."""
        seconds = [self._store.took((key, seed)) for seed in self.seeds]
        return [t for t in seconds if t is not None]

    def has(self, *key: str, seed: int | None = None) -> bool:
        """Return True if an item is done for this seed, or once for all."""
        return (key, seed) in self._store


class Available(Results):
    """Whatever is done, of complete and of other seeds: an item may have any number of records."""

    def __init__(self, store: Store, quick: bool) -> None:
        super().__init__(store, store.seeds(), quick)


_CONFIG = "configuration"


@contextmanager
def checkpoints(store: Store) -> Iterator[Path]:
    """Return NAME.work beside NAME.json; refuse checkpoints of another configuration.

    It goes once there are no checkpoints in it and no other process is about to write some.
    """
    folder = store.path.with_suffix(".work")
    _check(folder, store)
    with share_folder(files.make_folder(folder)) as last:
        files.write_text(folder / _CONFIG, json.dumps(store.config, ensure_ascii=False))
        try:
            yield folder
        finally:
            if last() and not any(p.is_dir() for p in folder.glob("*")):
                shutil.rmtree(folder, ignore_errors=True)


def _check(folder: Path, store: Store) -> None:
    if not any(p.is_dir() for p in folder.glob("*")):
        return
    try:
        old = json.loads((folder / _CONFIG).read_text("utf-8"))
        differ = list_differences(old, store.config, store.open_parts)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        differ = [str(error)]
    if differ:
        raise PullbackError(
            f"{folder} holds checkpoints of another configuration",
            f"{', '.join(differ)} differ",
            "Move it away to start these items over",
        )
