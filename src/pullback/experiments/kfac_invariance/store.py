"""Results on disk: finished runs are kept, so that more seeds may be added."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..._core.errors import PullbackError
from ..environment import environment
from .run import Record

_TEXT: dict[str, Any] = {"ensure_ascii": False}

#: network, method, seed
Name = tuple[str, str, int]


class Store:
    """Records by network, method and seed in one JSON file, for one configuration."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.config = path, config
        self.runs: dict[Name, Record] = {}
        self.environment = environment()
        if path.exists():
            self._read()

    def _read(self) -> None:
        state = json.loads(self.path.read_text("utf-8"))
        if state["config"] != self.config:
            raise PullbackError(
                f"{self.path} holds results of another configuration",
                "runs of both cannot be compared",
                "Use another folder (--out), or delete the file",
            )
        self.environment = state["environment"]
        for run in state["runs"]:
            name = run.pop("net"), run.pop("method"), run.pop("seed")
            self.runs[name] = Record(**run)

    def save(self, checks: Iterable[Any] = ()) -> None:
        """Write the file in one piece; one line per run."""
        runs = ",\n".join(
            "  " + _line({"net": net, "method": method, "seed": seed, **vars(record)})
            for (net, method, seed), record in self.runs.items()
        )
        head = {"config": self.config, "environment": self.environment}
        text = json.dumps({**head, "checks": [vars(c) for c in checks]}, indent=1, **_TEXT)[:-2]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(f'{text},\n "runs": [\n{runs}\n ]\n}}\n', "utf-8")
        draft.replace(self.path)


def _line(run: dict[str, Any]) -> str:
    return json.dumps(run, **_TEXT)
