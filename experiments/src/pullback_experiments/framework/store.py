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
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pullback import PullbackError
from pullback.cli import files

from . import arrays, locks, plain
from .configuration import changed, settled
from .plain import Record

FORMAT = "pullback results 1"

#: the words that name an item, such as network and method
Key = tuple[str, ...]
#: an item and its seed, or None of an item that is done once for all seeds
Name = tuple[Key, int | None]


_REMEDY = "Use another folder (--out), or move the file away"


def content(path: Path) -> dict[str, Any]:
    """What a JSON file holds; refused where it is unreadable or no mapping."""
    try:
        state = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = f"it is unreadable or cut off ({error})"
        raise PullbackError(f"{path} cannot be read", why, _REMEDY) from None
    return state if isinstance(state, dict) else {}


def read(path: Path) -> dict[str, Any]:
    """The content of a results file; refused where it is none."""
    state = content(path)
    if (found := state.get("format")) != FORMAT:
        why = f'its "format" is not {FORMAT!r}'
        if isinstance(found, str) and found.startswith("pullback"):
            why += f" but {found!r}, of another version of pullback"
        raise PullbackError(f"{path} holds no results of an experiment", why, _REMEDY)
    try:
        kinds = {"config": dict, "environments": list, "about": dict, "summary": dict}
        if wrong := [k for k, kind in kinds.items() if not isinstance(state[k], kind)]:
            raise TypeError(f"{', '.join(wrong)} malformed")
        if not all(isinstance(e, dict) for e in state["environments"]):
            raise TypeError("environments malformed")
        for run in state["runs"]:
            _verify(run, len(state["environments"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _malformed(path, error) from None
    return state


def _malformed(path: Path, error: Exception) -> PullbackError:
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
        self.path, self.about = path, dict(about or {})
        self.config = settled(config)
        self.environments: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.open_parts = open_parts
        self._runs: dict[Name, dict[str, Any]] = {}
        self._lines: dict[Name, str] = {}
        self._seen: object = None
        self._merge()

    def _merge(self) -> None:
        """Take over what is on disk, another process's items included."""
        if not self.path.exists() or self._stamp() == self._seen:
            return
        state = read(self.path)
        try:
            json.dumps(state, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:  # a page can show it, and no file can hold it
            raise _malformed(self.path, error) from None
        old, whose = state["config"], state["about"].get("name")
        if whose != self.about.get("name"):
            raise PullbackError(
                f"{self.path} holds results of another experiment",
                f"they are of {whose!r}",
                _REMEDY,
            )
        if differ := changed(old, self.config, self.open_parts):
            raise PullbackError(
                f"{self.path} holds results of another configuration",
                f"{', '.join(differ)} differ, so the runs cannot be compared",
                _REMEDY,
            )
        for part in self.open_parts & old.keys() & self.config.keys():
            self.config[part] = {**old[part], **self.config[part]}
        first = not self._runs
        if first:
            self.environments, self.summary = state["environments"], state["summary"]
        places = [self._place(e) for e in state["environments"]]
        for run in state["runs"]:
            name = _name(run)
            if name not in self._runs:
                self._keep(name, {**run, "environment": places[run["environment"]]})
        self._seen = self._stamp()

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
        """Those of which some item is done."""
        return sorted({seed for _, seed in self._runs if seed is not None})

    def took(self, name: Name) -> float | None:
        """Seconds of an item, None where they are not known."""
        return self._runs[name]["took"]

    def record(self, name: Name) -> Record:
        """What an item gave."""
        run = self._runs[name]
        file = run.get("arrays")
        path = self.path if file is None else self._folder / Path(file).name
        try:
            return plain.join(run["record"], {} if file is None else arrays.load(path))
        except arrays.DAMAGED as error:
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
        """Keep an item, on disk as well: its arrays first, then the file that names them."""
        content, found = plain.split(record)
        key, seed = name
        run: dict[str, Any] = {"key": list(key), "seed": seed, "took": round(took, 4)}
        run["environment"] = self._place(environment)
        if found:
            run["arrays"] = f"{slug(name)}.npz"
            files.write(self._folder / run["arrays"], lambda f: arrays.save(f, found))
        self._keep(name, {**run, "record": content})
        self.save()

    def save(self) -> None:
        """Write the file in one piece; one line per item."""
        files.folder(self.path.parent)
        with locks.alone(self.path.parent):
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
        self._seen = self._stamp()


def slug(name: Name) -> str:
    """A file name for an item, unique although words are simplified.

    >>> slug((("tanh MLP", "K-FAC, undamped"), 3))
    'tanh-mlp-k-fac-undamped-seed3-...'
    """
    key, seed = name
    words = re.sub(r"[^a-z0-9]+", "-", " ".join(key).lower()).strip("-")[:60]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:6]
    return f"{words}{'' if seed is None else f'-seed{seed}'}-{digest}"


def _name(run: dict[str, Any]) -> Name:
    seed = run["seed"]
    return tuple(map(str, run["key"])), None if seed is None else int(seed)


def _verify(run: dict[str, Any], environments: int) -> None:
    """Refuse an item without name, record, time or environment."""
    key, _ = _name(run)
    sound = key and isinstance(run["record"], dict) and run["environment"] in range(environments)
    sound = sound and isinstance(run.get("arrays", ""), str)
    if not sound or not math.isfinite(0.0 if run["took"] is None else run["took"]):
        raise TypeError(f"the item {key} is malformed")
