"""Results on disk: written after every run, so that an interrupted experiment goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..._core.errors import PullbackError
from ..environment import environment
from .runs import Record


def surroundings() -> dict[str, Any]:
    """What the times depend on."""
    here = environment()
    return {**here, "threads": 1, "cores": os.cpu_count(), "seconds": "of the CPU"}


class Store:
    """{method: {seed: record}} in one JSON file, for one configuration."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path, self.config = path, config
        self.runs: dict[str, dict[int, Record]] = {}
        self.checks: list[dict[str, Any]] = []
        self.environment = surroundings()
        if path.exists():
            self._read()

    def _read(self) -> None:
        state = json.loads(self.path.read_text())
        changed = _changed(state["config"], json.loads(json.dumps(self.config)))
        if changed:
            raise PullbackError(
                f"{self.path} holds results of another configuration",
                f"{', '.join(changed)} differ, so the runs cannot be compared",
                "Use another folder (--out), or delete the file",
            )
        self.environment = state["environment"]
        self.runs = {
            method: {int(seed): Record(**record) for seed, record in seeds.items()}
            for method, seeds in state["runs"].items()
        }

    def has(self, method: str, seed: int) -> bool:
        """Whether this run is done."""
        return seed in self.runs.get(method, {})

    def put(self, method: str, seed: int, record: Record) -> None:
        """Keep a run, on disk as well."""
        self.runs.setdefault(method, {})[seed] = record
        self.save()

    def of(self, method: str, seeds: list[int]) -> list[Record]:
        """The runs of a method, in the order of the seeds."""
        return [self.runs[method][seed] for seed in seeds]

    def save(self) -> None:
        """Write the file in one piece; one line per run."""
        runs = ",\n".join(
            f"  {json.dumps(method)}: {{\n"
            + ",\n".join(
                f'   "{seed}": {json.dumps(record.as_dict())}'
                for seed, record in sorted(seeds.items())
            )
            + "\n  }"
            for method, seeds in self.runs.items()
        )
        head = {"config": self.config, "environment": self.environment, "checks": self.checks}
        text = json.dumps(head, indent=1, ensure_ascii=False)[:-2]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(f'{text},\n "runs": {{\n{runs}\n }}\n}}\n')
        draft.replace(self.path)


def _changed(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs; a method that only one of them has may come or go."""
    methods = old["methods"].keys() & new["methods"].keys()
    out = [key for key in new if key != "methods" and old.get(key) != new[key]]
    return out + sorted(m for m in methods if old["methods"][m] != new["methods"][m])
