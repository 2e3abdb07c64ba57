"""The records in experiments/results belong to code that there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pullback_experiments import registry
from pullback_experiments.framework.checkout import RESULTS
from pullback_experiments.framework.store import list_differences, normalize_config

RECORDS = sorted(RESULTS.glob("*.json"))
#: records of programs that are neither an experiment nor a benchmark: record ↦ module
OTHERS = {"vmc-j1j2-cuda": "quantum_spins/device.py"}


def test_configurations_are_those_of_the_code() -> None:
    """Parts that may grow, such as methods, must agree in the entries that both have."""
    paths = {path.stem: path for path in RECORDS}
    compared = 0
    for experiment in map(registry.find, registry.names()):
        for quick in (False, True):
            path = paths.get(experiment.stem(quick))
            if path is None:
                continue
            recorded = json.loads(path.read_text("utf-8"))["config"]
            current = normalize_config(experiment.config(quick))
            assert not list_differences(recorded, current, experiment.open_parts), path.name
            compared += 1
    assert compared > 30


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_record_has_a_program_that_writes_it(path: Path) -> None:
    if path.stem in OTHERS:
        assert (Path(registry.__file__).parent / OTHERS[path.stem]).exists()
        return
    experiments = {name + suffix for name in registry.names() for suffix in ("", "-quick")}
    benchmarks = registry.list_benchmarks()
    name = path.stem.replace("_", "-")
    assert name in experiments or any(
        name == benchmark or name.startswith(f"{benchmark}-") for benchmark in benchmarks
    )


def test_arrays_lie_beside_a_record() -> None:
    folders = {path.stem for path in RESULTS.glob("*.arrays")}
    assert folders <= {path.stem for path in RECORDS}
