"""Experiments run, resume, refuse and stop as promised."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch

import pullback
from pullback import PullbackError
from pullback.cli import files
from pullback_experiments import Context, Item, Paused, registry
from pullback_experiments.commands.report import collect_entries
from pullback_experiments.framework import environment, executor, experiment, progress
from pullback_experiments.framework.check import ExitStatus
from pullback_experiments.framework.store import Store, checkpoints

from .small import Small, quiet, said


def state(out: Path, name: str = "small") -> dict:
    return json.loads((out / f"{name}.json").read_text("utf-8"))


def test_a_run_leaves_results_figures_and_a_verdict(tmp_path: Path) -> None:
    console = quiet()
    outcome = executor.run(Small(drawn=True), out=tmp_path, console=console)
    assert outcome.status == 0
    assert (outcome.finished, outcome.total, outcome.seeds) == (6, 6, (0, 1, 2))
    assert outcome.verdict is not None
    assert outcome.verdict.outcome == "reproduced"
    names = {p.name for p in outcome.files}
    assert names == {f"small{x}" for x in (".json", ".png", ".svg", "-again.png", "-again.svg")}
    assert (tmp_path / "small.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (tmp_path / "small.svg").read_bytes()
    record = state(tmp_path)
    assert {"torch", "commit", "threads"} <= set(record["environments"][0])
    assert record["summary"]["complete"] == [0, 1, 2]
    assert record["summary"]["seconds"] >= 0
    assert all(run["took"] >= 0 for run in record["runs"])
    assert "faster <i>indeed</i>" in said(console)
    assert "Ends [of] runs" in said(console)


def test_finished_items_are_not_done_again_and_more_seeds_are_added(tmp_path: Path) -> None:
    first = Small()
    executor.run(first, seeds=[0, 1], out=tmp_path)
    repeated = Small()
    assert executor.run(repeated, seeds=[1, 2], out=tmp_path).status == 0
    assert repeated.finished == [("lr 0.1", 2), ("lr 0.5", 2)]
    record = state(tmp_path)
    assert len(record["runs"]) == 6
    assert record["summary"]["asked"] == [1, 2]


def test_seeds_beside_those_asked_for_are_named_and_not_called_missing(tmp_path: Path) -> None:
    executor.run(Small(), seeds=[0, 1], out=tmp_path)
    console = quiet()
    assert executor.run(Small(), seeds=[2], out=tmp_path, console=console).beside == (0, 1)
    assert "Seeds 0-1 are finished too and were not asked for" in said(console)
    page = collect_entries(tmp_path)[0][0]
    assert "missing" not in page.html
    assert "Seeds 0-1 are finished too" in page.html
    assert "pullback run small --out" in page.html  # all of them, so no --seeds
    assert page.seeds == "2, partial"
    assert executor.run(Small(), out=tmp_path).beside == ()
    assert collect_entries(tmp_path)[0][0].seeds == "0-2"


def test_what_a_seed_gives_does_not_depend_on_the_order(tmp_path: Path) -> None:
    executor.run(Small(), out=tmp_path / "a")
    torch.manual_seed(99)
    executor.run(Small(), seeds=[2], out=tmp_path / "b")
    one = {(r["key"][0], r["seed"]): r["record"] for r in state(tmp_path / "a")["runs"]}
    two = {(r["key"][0], r["seed"]): r["record"] for r in state(tmp_path / "b")["runs"]}
    assert two == {k: v for k, v in one.items() if k[1] == 2}


def test_items_leave_the_callers_random_numbers_and_threads_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    executor.run(Small(), out=tmp_path)
    assert torch.rand(1) == want
    assert torch.get_num_threads() == threads


def test_status_says_whether_checks_are_as_recorded(tmp_path: Path) -> None:
    outcome = executor.run(Small(bad=True), out=tmp_path)
    assert outcome.status == 1
    assert outcome.verdict is not None
    assert outcome.verdict.outcome == "not reproduced"


def test_sizes_that_cannot_tell_are_not_judged(tmp_path: Path) -> None:
    console = quiet()
    outcome = executor.run(Small(bad=True, judged=False), out=tmp_path, console=console)
    assert outcome.status == 0
    assert outcome.verdict is None
    assert not outcome.checks
    assert "No claim was judged" in said(console)
    assert state(tmp_path)["summary"]["verdict"] is None
    assert Small().smoke().judged


def test_another_configuration_is_refused_and_methods_may_come_and_go(tmp_path: Path) -> None:
    executor.run(Small(), out=tmp_path)
    with pytest.raises(PullbackError, match=r"another configuration: steps differ"):
        executor.run(Small(steps=9), out=tmp_path)
    more = Small(rates=(0.1, 0.3, 0.5))
    assert executor.run(more, out=tmp_path).status == 0
    assert {name for name, _ in more.finished} == {"lr 0.3"}
    fewer = Small(rates=(0.1, 0.3))
    assert executor.run(fewer, out=tmp_path).status == 0
    assert not fewer.finished
    assert set(state(tmp_path)["config"]["methods"]) == {"lr 0.1", "lr 0.3", "lr 0.5"}


def test_a_changed_method_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "r.json", {"methods": {"a": 1}}, {}, frozenset({"methods"})).save()
    with pytest.raises(PullbackError, match="methods 'a' differ"):
        Store(tmp_path / "r.json", {"methods": {"a": 2}}, {}, frozenset({"methods"}))
    with pytest.raises(PullbackError, match="methods differ"):
        Store(tmp_path / "r.json", {"methods": {"a": 1, "b": 2}})


def test_quick_is_kept_apart(tmp_path: Path) -> None:
    outcome = executor.run(Small(), True, out=tmp_path)
    assert outcome.seeds == (0,)
    assert (tmp_path / "small-quick.json").exists()
    assert not (tmp_path / "small.json").exists()


def test_an_item_done_once_comes_first_and_is_seen_by_others(tmp_path: Path) -> None:
    ours = Small(once=True)
    assert executor.run(ours, out=tmp_path).status == 0
    assert ours.finished[0] == ("reference", 0)
    assert [name for name, _ in ours.finished].count("reference") == 1
    plain = Small()
    executor.run(plain, out=tmp_path / "b")
    (one,) = [r for r in state(tmp_path)["runs"] if r["key"] == ["lr 0.1"] and r["seed"] == 1]
    (two,) = [r for r in state(tmp_path / "b")["runs"] if r["key"] == ["lr 0.1"] and r["seed"] == 1]
    assert one["record"]["loss"][0] == pytest.approx(9 * two["record"]["loss"][0])


class Few(Small):
    """The higher rate for one seed alone."""

    def items(self, quick: bool) -> list[Item]:
        first, *others = super().items(quick)
        return [first, *(replace(item, seeds=(1,)) for item in others)]


def test_an_item_may_be_for_some_seeds_alone(tmp_path: Path) -> None:
    ours = Few()
    outcome = executor.run(ours, out=tmp_path)
    assert (outcome.finished, outcome.total, outcome.seeds) == (4, 4, (0, 1, 2))
    assert ours.finished == [("lr 0.1", 0), ("lr 0.1", 1), ("lr 0.5", 1), ("lr 0.1", 2)]
    assert len(outcome.checks) == 1


class Clock:
    """Time that passes only where somebody says so."""

    def __init__(self) -> None:
        self.time = 0.0

    def monotonic(self) -> float:
        return self.time

    def second(self, key: str, context: Context) -> None:
        """An item that takes a second."""
        self.time += 1

    def parts(self, count: int) -> Callable[[str, Context], None]:
        """An item of so many seconds that saves after each, and pauses where the time is over."""

        def work(key: str, context: Context) -> None:
            file = context.folder() / "part"
            if file.exists():
                counted = int(file.read_text())
            else:
                counted = 0
            while counted < count:
                self.time += 1
                counted += 1
                file.write_text(str(counted))
                context.watch(counted / count, f"part {counted}")
                if context.due and counted < count:
                    raise Paused

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    actual = Clock()
    for module in (executor, experiment, progress):
        monkeypatch.setattr(module, "time", actual)
    return actual


def test_the_time_may_run_out_between_items(tmp_path: Path, clock: Clock) -> None:
    console = quiet()
    outcome = executor.run(Small(before=clock.second), out=tmp_path, console=console, seconds=3.5)
    assert outcome.status == ExitStatus.UNFINISHED
    # the fourth would end after 4 s, and items are known to take one
    assert outcome.finished == 3
    assert "Unfinished: 3 of 6 items, 1 of 3 seeds" in said(console)
    assert state(tmp_path)["summary"]["items"] == [3, 6]
    # the seed that is complete is judged
    assert outcome.seeds == (0,)
    assert len(outcome.checks) == 1
    assert state(tmp_path)["summary"]["complete"] == [0]
    remaining_run = Small()
    assert executor.run(remaining_run, out=tmp_path, seconds=60).status == 0
    assert len(remaining_run.finished) == 3


def test_every_slice_gets_on_even_if_it_is_short(tmp_path: Path, clock: Clock) -> None:
    for outcome in range(1, 4):
        assert (
            executor.run(Small(before=clock.second), out=tmp_path, seconds=0.1).finished == outcome
        )


def test_an_item_with_checkpoints_goes_on_where_it_was(tmp_path: Path, clock: Clock) -> None:
    class Long(Small):
        def items(self, quick: bool) -> list[Item]:
            return [replace(item, resumable=True) for item in super().items(quick)]

    statuses = []
    for _ in range(3):
        ours = Long(before=clock.parts(4))
        statuses.append(executor.run(ours, seeds=[0], out=tmp_path, seconds=3).status)
    # 3 of the first; its last and 2 of the second; its last 2
    assert statuses == [ExitStatus.UNFINISHED, ExitStatus.UNFINISHED, 0]
    assert [run["took"] for run in state(tmp_path)["runs"]] == [4, 4]
    assert not (tmp_path / "small.work").exists()


def test_checkpoints_of_another_configuration_are_refused(tmp_path: Path, clock: Clock) -> None:
    ours = Small(rates=(0.1,), before=clock.parts(50))
    assert executor.run(ours, seeds=[0], out=tmp_path, seconds=5).status == ExitStatus.UNFINISHED
    (tmp_path / "small.json").unlink()
    with pytest.raises(PullbackError, match=r"checkpoints of another configuration: steps differ"):
        executor.run(replace(ours, steps=9), seeds=[0], out=tmp_path)
    (tmp_path / "small.work" / "configuration").write_text("{")
    with pytest.raises(PullbackError, match=r"checkpoints of another configuration"):
        executor.run(ours, seeds=[0], out=tmp_path)


def test_arrays_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(PullbackError, match="configuration cannot be saved: a are arrays"):
        Store(tmp_path / "r.json", {"a": np.zeros(3)})
    Store(tmp_path / "r.json", {"a": (1, np.float64(2)), "b": float("inf")}).save()
    Store(tmp_path / "r.json", {"a": [1, 2.0], "b": float("inf")})


def test_an_interruption_leaves_finished_items(tmp_path: Path) -> None:
    def interrupt(key: str, context: Context) -> None:
        if (key, context.seed) == ("lr 0.5", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor.run(Small(before=interrupt), out=tmp_path)
    assert len(state(tmp_path)["runs"]) == 3
    remaining_run = Small()
    assert executor.run(remaining_run, out=tmp_path).status == 0
    assert len(remaining_run.finished) == 3


def test_a_killed_process_leaves_finished_items(tmp_path: Path) -> None:
    """The process ends at once, without cleaning up."""
    code = (
        "import os, sys; from pathlib import Path; from tests.experiments.small import Small\n"
        "from pullback_experiments import run\n"
        "def die(key, context):\n    if context.seed == 1: os._exit(9)\n"
        "run(Small(before=die), out=Path(sys.argv[1]))"
    )
    root = Path(__file__).parents[2]
    outcome = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=False)
    assert outcome.returncode == 9
    remaining_run = Small()
    assert executor.run(remaining_run, out=tmp_path).status == 0
    assert len(remaining_run.finished) == 4


def test_a_full_disk_leaves_the_previous_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.run(Small(drawn=True), seeds=[0], out=tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(PullbackError, match=r"No space left on device.*--out"):
            executor.run(Small(), seeds=[0, 1], out=tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    assert executor.run(Small(), seeds=[0, 1], out=tmp_path).status == 0


def test_a_file_that_cannot_be_completed_is_not_there(tmp_path: Path) -> None:
    def halfway(file: IO[bytes]) -> None:
        file.write(b"x" * 100_000)
        raise OSError(28, "No space left on device")

    (tmp_path / "x").write_text("before")
    with pytest.raises(PullbackError, match="could not be written: No space left"):
        files.write(tmp_path / "x", halfway)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["before"]
    with pytest.raises(PullbackError, match="could not be written"):
        files.write(tmp_path / "x" / "y", halfway)


HELD = (
    '{"format": "pullback results 1", "about": {"name": "small"}, "config": {}, "summary": {}, '
    '"environments": [%s], "runs": [{"key": ["a"], "seed": 0, "environment": 0, "record": {}, %s}]}'
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[1]", "holds no results"),
        ('{"config": {}, "runs": []}', "holds no results"),
        ('{"format": "pullback results 1", "runs": [{}]}', "changed by hand"),
        ('{"format": "pullback results 1", "runs": 3}', "changed by hand"),
        (
            '{"format": "pullback results 1", "about": {}, "config": {}, "environments": [], '
            '"summary": {}, "runs": [{"key": ["a"], "seed": 0, "took": 1, "environment": 0, '
            '"record": {}}]}',
            "malformed",
        ),
        (b"\xff\xfe\x00", "cannot be read"),
        (HELD % ("{}", '"took": 1e999'), "malformed"),
        (HELD % ("{}", '"took": null, "arrays": 3'), "malformed"),
        (HELD % ("3", '"took": 1'), "environments malformed"),
        (HELD % ('{"threads": NaN}', '"took": 1'), "changed by hand"),
        (HELD % ('{"host": "\\ud800"}', '"took": 1'), "changed by hand"),
    ],
)
def test_unreadable_and_foreign_files_are_refused(
    content: str | bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "small.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    with pytest.raises(PullbackError, match=words):
        executor.run(Small(), out=tmp_path)
    assert path.read_bytes() == before


def test_results_of_another_experiment_are_refused(tmp_path: Path) -> None:
    executor.run(Small(), out=tmp_path)
    (tmp_path / "small.json").rename(tmp_path / "other.json")
    with pytest.raises(PullbackError, match="another experiment: they are of 'small'"):
        executor.run(Small(name="other"), out=tmp_path)


def test_lost_arrays_are_named(tmp_path: Path) -> None:
    executor.run(Small(), out=tmp_path)
    victim = next((tmp_path / "small.arrays").iterdir())
    victim.write_bytes(b"nothing")
    with pytest.raises(PullbackError, match=victim.name):
        executor.run(Small(), out=tmp_path)


def test_damaged_arrays_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.json", {})
    name = (("k",), 0)
    store.put(name, {"x": np.random.default_rng(0).normal(size=500), "y": np.ones(3)}, 1.0, {})
    (victim,) = tmp_path.rglob("*.npz")
    sound = victim.read_bytes()
    reasons = []
    for position in range(0, len(sound), 7):
        victim.write_bytes(
            sound[:position] + bytes([sound[position] ^ 0x55]) + sound[position + 1 :]
        )
        try:
            store.record(name)
        except PullbackError as error:
            reasons.append(error.why)
    assert len(reasons) > len(sound) // 7 * 0.9
    assert all("missing or damaged" in why for why in reasons)


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    store = Store(tmp_path / "r.json", {})
    record = {
        "file": np.arange(6, dtype=np.float32).reshape(2, 3),  # a name that savez takes itself
        "deep": [{"x": torch.eye(2)}, np.int64(3), float("nan"), float("-inf")],
        "none": None,
        "words": ("a", True),
    }
    store.put((("k", "é/.."), 1), record, 0.5, {"torch": "2"})
    actual = Store(tmp_path / "r.json", {}).record((("k", "é/.."), 1))
    np.testing.assert_array_equal(actual["file"], record["file"])
    assert actual["file"].dtype == np.float32
    np.testing.assert_array_equal(actual["deep"][0]["x"], np.eye(2))
    assert actual["deep"][1] == 3
    assert np.isnan(actual["deep"][2])
    assert actual["deep"][3] == -np.inf
    assert actual["words"] == ["a", True]
    assert [p.parent for p in tmp_path.rglob("*.npz")] == [tmp_path / "r.arrays"]


@pytest.mark.parametrize("record", [{"a": object()}, {1: 2}, {"a": {"float": 1}}, {"a": {1, 2}}])
def test_records_that_no_file_can_hold_are_refused(record: dict, tmp_path: Path) -> None:
    store = Store(tmp_path / "r.json", {})
    with pytest.raises(PullbackError, match="cannot be saved"):
        store.put((("k",), 1), record, 0.0, {})
    assert not (tmp_path / "r.json").exists()


def test_two_processes_may_share_a_folder(tmp_path: Path) -> None:
    one, two = (Store(tmp_path / "r.json", {"a": 1}) for _ in range(2))
    one.put((("k",), 0), {"x": 1}, 1.0, {"host": "one"})
    two.put((("k",), 1), {"x": 2}, 1.0, {"host": "two"})
    one.put((("k",), 2), {"x": 3}, 1.0, {"host": "one"})
    record = json.loads((tmp_path / "r.json").read_text())
    assert {r["seed"] for r in record["runs"]} == {0, 1, 2}
    hosts = {r["seed"]: record["environments"][r["environment"]]["host"] for r in record["runs"]}
    assert hosts == {0: "one", 1: "two", 2: "one"}


PUTTING = """
import sys
from pathlib import Path
from pullback_experiments.framework.store import Store

store = Store(Path(sys.argv[1]), {})
for seed in range(40):
    store.put(((sys.argv[2],), seed), {"x": seed}, 1.0, {})
"""


def test_processes_that_save_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PUTTING, str(tmp_path / "r.json")]
    others = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [p.wait(120) for p in others] == [0, 0]
    assert len(Store(tmp_path / "r.json", {})) == 80


def test_checkpoints_outlive_another_process_that_ends_before_they_are_written(
    tmp_path: Path, clock: Clock
) -> None:
    def other(key: str, context: Context) -> None:
        with checkpoints(Store(tmp_path / "small.json", ours.config(False), {"name": "small"})):
            pass  # it comes and goes, and there is no checkpoint yet
        clock.parts(4)(key, context)

    ours = Small(rates=(0.1,), before=other)
    assert executor.run(ours, seeds=[0], out=tmp_path, seconds=3).status == ExitStatus.UNFINISHED
    assert executor.run(ours, seeds=[0], out=tmp_path).finished == 1
    assert not (tmp_path / "small.work").exists()


def test_a_folder_of_checkpoints_may_be_cleared_by_another(tmp_path: Path) -> None:
    def clear_folder(key: str, context: Context) -> None:
        shutil.rmtree(context.checkpoint_folder.parent, ignore_errors=True)

    assert executor.run(Small(before=clear_folder), out=tmp_path).status == 0


def test_items_need_names_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(PullbackError, match="share a name"):
        executor.run(Small(rates=(0.1, 0.1)), out=tmp_path)


def test_no_such_device_and_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(PullbackError, match="--device cpu"):
        executor.run(Small(), out=tmp_path, device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(PullbackError, match="'cuda' cannot be used"):
            executor.run(Small(), out=tmp_path, device="cuda")
    for other in ("meta", "hpu", "privateuseone", ""):
        with pytest.raises(PullbackError, match=f"'{other}' cannot be used.{{,99}}--device cpu"):
            executor.run(Small(), out=tmp_path, device=other)
    (tmp_path / "file").write_text("")
    with pytest.raises(PullbackError, match="--out"):
        executor.run(Small(), out=tmp_path / "file")


def test_items_that_stay_on_the_cpu_refuse_another_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "require_device", torch.device)
    with pytest.raises(PullbackError, match="compute on the CPU"):
        executor.run(Small(anywhere=False), out=tmp_path, device="cuda")
    assert not list(tmp_path.iterdir())
    staying = {n for n in registry.names() if not registry.find(n).anywhere}
    yin = {f"yin-2024-{n}" for n in ("shallow", "deep", "poisson")}
    assert staying == yin | {
        "luk-grosse-2018",
        "demo",
        "pde-honesty",
        "pde-quasi-newton",
        "pde-stuck",
        "pde-unseen-seeds",
    }


def test_the_registry_names_what_folders_hold() -> None:
    for folder, names in registry.FOLDERS.items():
        actual = __import__(f"pullback_experiments.{folder}", fromlist=["x"]).EXPERIMENTS
        assert tuple(e.name for e in actual) == names
        for one in actual:
            assert registry.find(one.name) is one
            for quick in (True, False):
                json.dumps(one.config(quick))
                assert list(one.items(quick))


def test_nearest_names_are_offered() -> None:
    with pytest.raises(PullbackError, match=r"the nearest are luk-grosse-2018, \S+, \S+\. "):
        registry.find("luk-gros-2018")


def test_run_is_the_same_from_the_module(tmp_path: Path) -> None:
    assert executor.run(Small(), out=tmp_path).status == 0


def test_commit_only_of_its_own_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pullback, "__file__", str(tmp_path / "__init__.py"))
    assert environment.commit() is None
