"""Every row of the changes takes a step on a tiny decoder, and rows that do not pay end."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pullback_experiments.benchmarks import race_changes
from pullback_experiments.benchmarks.race_changes import (
    ALL_ROWS,
    LEAST_GAIN,
    LR,
    UNCHANGED,
    ChangeRun,
    _select_paying,
)
from pullback_experiments.races.loop import cross_entropy
from pullback_experiments.races.networks import Decoder
from pullback_experiments.races.tasks import VOCABULARY


@pytest.mark.parametrize("row", ALL_ROWS)
def test_every_row_takes_a_step(row: str) -> None:
    torch.manual_seed(0)
    model = Decoder(VOCABULARY, length=8, width=16, depth=1, heads=2)
    start = [p.detach().clone() for p in model.parameters()]
    optimizers = ALL_ROWS[row](model, LR, {})
    texts = torch.randint(VOCABULARY, (2, 9))
    cross_entropy(model(texts[:, :-1]), texts[:, 1:]).backward()
    for optimizer in optimizers:
        optimizer.step()
    for before, after in zip(start, model.parameters(), strict=True):
        assert bool(after.isfinite().all())
        assert not torch.equal(before, after)


def test_rows_that_gain_enough_go_on_beside_the_unchanged_one() -> None:
    finals = {
        UNCHANGED: 1.0,
        "momentum 0.85": 1.0 - 2 * LEAST_GAIN,
        "momentum 0.95": 1.0 - LEAST_GAIN / 2,
        "damping 0.05": 1.0 + LEAST_GAIN,
    }
    runs = [ChangeRun(row, "text", 640, 0, "cpu") for row in [*finals, "damping 0.02"]]
    results = {f"{row}, seed 0": {"final": final} for row, final in finals.items()}
    failed = {"damping 0.02, seed 0": {"error": "RuntimeError()"}}
    assert _select_paying(runs, results | failed) == [UNCHANGED, "momentum 0.85"]


def test_the_two_sided_rule_is_judged_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the row that gains enough on it has a second seed; its record is one of its own."""
    best = "the two-sided rule, warmup=20"

    def train_all(
        runs: Sequence[ChangeRun], workers: int
    ) -> Iterator[tuple[ChangeRun, dict[str, Any]]]:
        for one in runs:
            yield one, {"final": 1.0 - 2 * LEAST_GAIN * (one.row == best)}

    monkeypatch.setattr(race_changes, "_train_all", train_all)
    monkeypatch.setattr(race_changes, "RESULTS", tmp_path)
    race_changes.main(["--two-sided", "--seeds", "0", "1"])
    record = json.loads((tmp_path / "race-changes-two-sided.json").read_text("utf-8"))
    assert record["steps"] == 680
    second = [name for name in record["results"] if name.endswith("seed 1")]
    assert second == ["the two-sided rule, seed 1", f"{best}, seed 1"]
    assert len(record["results"]) == len(race_changes.TWO_SIDED_ROWS) + 2
