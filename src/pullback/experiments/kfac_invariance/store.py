"""Results on disk: finished runs are kept, so that more seeds may be added."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..._core.errors import PullbackError
from ..environment import environment
from ..record import write
from .run import Record

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
        """Write the file."""
        runs = [
            {"net": net, "method": method, "seed": seed, **vars(record)}
            for (net, method, seed), record in self.runs.items()
        ]
        content = {"config": self.config, "environment": self.environment}
        write(self.path, {**content, "checks": [vars(c) for c in checks], "runs": runs})
