"""Results of several folders in one."""

import json
from pathlib import Path

import pytest

from pullback import PullbackError
from pullback_experiments import merge as module
from pullback_experiments.framework import executor
from pullback_experiments.merge import main, merge

from .small import Small, quiet


def test_seeds_of_several_folders_are_one_run(tmp_path: Path) -> None:
    small = Small()
    for seed in (0, 1, 2):
        executor.run(small, False, [seed], tmp_path / str(seed), quiet())
    sources = [tmp_path / str(seed) for seed in (0, 1, 2)]
    assert merge(small, sources, tmp_path / "all") == [0, 1, 2]
    actual = len(small.finished)
    outcome = executor.run(small, False, None, tmp_path / "all", quiet())
    assert (outcome.status, outcome.seeds) == (0, (0, 1, 2))
    assert len(small.finished) == actual, "something was done again"
    whole = Small()
    executor.run(whole, False, None, tmp_path / "whole", quiet())
    states = [json.loads((tmp_path / d / "small.json").read_text()) for d in ("all", "whole")]
    records = [{(*r["key"], r["seed"]): r["record"] for r in state["runs"]} for state in states]
    assert records[0] == records[1]
    repeated = merge(small, sources, tmp_path / "all")
    assert repeated == [0, 1, 2]


def test_other_results_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PullbackError, match="no results of small"):
        merge(Small(), [tmp_path / "none"], tmp_path / "all")
    executor.run(Small(steps=7), False, [0], tmp_path / "other", quiet())
    with pytest.raises(PullbackError, match="another configuration"):
        merge(Small(), [tmp_path / "other"], tmp_path / "all")
    monkeypatch.setattr(module.registry, "find", lambda name: Small())
    with pytest.raises(SystemExit, match="another configuration"):
        main(["small", str(tmp_path / "other"), "--out", str(tmp_path / "all")])


def test_the_command_says_which_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.registry, "find", lambda name: Small())
    executor.run(Small(), True, [4], tmp_path / "part", quiet())
    main(["small", str(tmp_path / "part"), "--out", str(tmp_path / "all"), "--quick"])
    assert "seeds 4" in capsys.readouterr().out
    assert (tmp_path / "all" / "small-quick.json").is_file()
