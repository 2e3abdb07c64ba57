"""Items in processes of their own: the same records, and an interruption that loses nothing."""

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pullback import PullbackError
from pullback_experiments import Item, Paused, registry
from pullback_experiments.framework import executor, parallel
from pullback_experiments.framework.experiment import Context
from pullback_experiments.framework.parallel import Job
from pullback_experiments.framework.progress import Estimates, Progress
from pullback_experiments.framework.store import Name

from .small import Small, quiet, said

NAME = "kerekes-2022-support"


def records(out: Path) -> dict[tuple[Any, ...], Any]:
    record = json.loads((out / f"{NAME}-quick.json").read_text("utf-8"))
    return {(*run["key"], run["seed"]): run["record"] for run in record["runs"]}


@pytest.mark.slow
def test_two_processes_make_the_records_of_one(tmp_path: Path) -> None:
    ours = registry.find(NAME)
    console = quiet()
    executor.run(ours, True, [0], tmp_path / "one")
    outcome = executor.run(ours, True, [0], tmp_path / "two", console, workers=2)
    assert outcome.status == 0
    assert outcome.finished == outcome.total
    assert records(tmp_path / "one") == records(tmp_path / "two")
    assert f"[{outcome.total}/{outcome.total}]" in said(console)
    assert not (tmp_path / "two" / f"{NAME}-quick.work").exists()


def test_no_more_processes_than_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def none(workers: int, threads: int | None) -> None:
        asked.append(workers)
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "processes", none)
    with pytest.raises(KeyboardInterrupt):
        executor.run(registry.find(NAME), True, [0], tmp_path, workers=100_000)
    assert asked[0] < 10


class _Pool:
    """Worker processes that only write down what they should start."""

    def __init__(self) -> None:
        self.names: list[Any] = []

    @property
    def free(self) -> bool:
        return len(self.names) < 3

    def start(self, started: Job) -> None:
        self.names.append(started.name)


@dataclass(frozen=True, kw_only=True)
class _Staged(Small):
    """The slow rate waits for a search, which is done once and beside others; the fast does not."""

    def items(self, quick: bool) -> list[Item]:
        waiting, free = super().items(quick)
        search = Item(("search",), lambda context: {"found": 1}, once=True, after=())
        return [search, replace(waiting, after=[("search",)]), replace(free, after=())]


def test_items_start_when_those_that_they_build_on_are_done(tmp_path: Path) -> None:
    experiment = _Staged()
    store = experiment.open_store(False, tmp_path)
    plan = executor.RunPlan(experiment, False, [0], store, torch.device("cpu"))
    progress = Progress(quiet(), "staged", 3)
    doing = executor.Executor(plan, tmp_path, progress, Estimates([]), None)
    waiting = deque(plan.names)
    pool = _Pool()
    doing._fill(pool, waiting)
    assert pool.names == [(("search",), None), (("lr 0.5",), 0)]
    assert list(waiting) == [(("lr 0.1",), 0)]
    store.put((("search",), None), {"found": 1}, 0.0, {})
    doing._fill(pool, waiting)
    assert pool.names[-1] == (("lr 0.1",), 0)
    left_over: deque[Name] = deque([(("lr 0.1",), 0)])
    fresh = _Staged().open_store(False, tmp_path / "fresh")
    doing.plan = executor.RunPlan(experiment, False, [0], fresh, torch.device("cpu"))
    doing._fill(_Pool(), left_over)  # nothing is under way that it could wait for
    assert not left_over


def test_an_experiment_that_processes_cannot_find_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PullbackError, match=r"several processes.*Use one worker"):
        executor.run(Small(), out=tmp_path, workers=2)
    assert not list(tmp_path.iterdir())
    with pytest.raises(PullbackError, match="several processes"):
        executor.run(registry.find("luk-grosse-2018").smoke(), True, out=tmp_path, workers=2)


def test_errors_come_back_from_a_process() -> None:
    error = pickle.loads(pickle.dumps(PullbackError("what", "why", "remedy")))
    assert (error.what, error.why, error.remedy) == ("what", "why", "remedy")
    assert str(error) == "what: why. remedy"


def job(tmp_path: Path, until: float | None = None) -> Job:
    return Job("small", False, tmp_path, (("lr 0.1",), 1), (0, 1), "cpu", tmp_path / "place", until)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Small]:
    """The experiment that a process finds."""
    ours = [Small()]
    monkeypatch.setattr(registry, "find", lambda name: ours[0])
    parallel._open_store.cache_clear()
    return ours


def test_what_a_process_does(tmp_path: Path, registered: list[Small]) -> None:
    sent = pickle.loads(pickle.dumps(parallel._run_item(job(tmp_path))))
    record, took = parallel.rebuild_record(sent)
    assert took > 0
    assert isinstance(record["path"], np.ndarray)
    separate = Small()
    executor.run(separate, seeds=[1], out=tmp_path / "alone")
    (one,) = [
        run
        for run in json.loads((tmp_path / "alone" / "small.json").read_text())["runs"]
        if run["key"] == ["lr 0.1"]
    ]
    assert one["record"]["loss"] == record["loss"]


def test_a_process_pauses_when_the_time_is_over(tmp_path: Path, registered: list[Small]) -> None:
    def late(key: str, context: Context) -> None:
        assert context.due
        raise Paused

    registered[0] = Small(before=late)
    assert parallel._run_item(job(tmp_path, until=time.time() - 1)) is None
    assert (tmp_path / "place" / "seconds").exists()


def test_a_process_that_dies_is_reported() -> None:
    with parallel.processes(1, 1) as pool:
        pool._running[pool._pool.submit(os._exit, 9)] = (("k",), 0)  # pyright: ignore
        with pytest.raises(PullbackError, match="fewer --workers"):
            list(pool.wait_for_finished())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals to groups of processes")
def test_an_interruption_ends_the_processes_and_keeps_what_is_finished(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pullback", "run", "kerekes-2022-support", "--seeds",
        "0-300", "--workers", "2", "--out", str(tmp_path),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=heard,
    )  # fmt: skip
    file = tmp_path / "kerekes-2022-support.json"
    try:
        deadline = time.monotonic() + 100
        while not file.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        out, err = process.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, err
    assert "the same command goes on" in out
    assert "Traceback" not in err
    assert len(json.loads(file.read_text("utf-8"))["runs"]) >= 1
    assert has_ended(process.pid)


@pytest.mark.skipif(sys.platform == "win32", reason="signals to processes")
@pytest.mark.slow
def test_processes_end_when_the_first_one_is_killed(tmp_path: Path) -> None:
    lines = (
        "import os, time\n"
        "from pullback_experiments.framework import parallel\n"
        "if __name__ == '__main__':\n"
        "    with parallel.processes(1, 1) as pool:\n"
        "        print(pool._pool.submit(os.getpid).result(), flush=True)\n"
        "        pool._pool.submit(time.sleep, 600)\n"
        "        time.sleep(600)\n"
    )
    script = tmp_path / "first.py"
    script.write_text(lines)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        second = int(first.stdout.readline())
        first.kill()
        # the pipe is closed once nobody holds its other end
        assert first.stdout.read() == ""
    if sys.platform == "linux":
        wait_for_end(second)


@pytest.mark.skipif(sys.platform == "win32", reason="signals to processes")
def test_a_process_never_hears_an_interruption_and_the_first_one_does() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("the tests run in the background, where interruptions are ignored")
    masked = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    command = [sys.executable, "-c", masked]
    collected = []

    def start() -> None:
        with parallel._deaf():
            signal.raise_signal(signal.SIGINT)
            collected.append(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )

    with pytest.raises(KeyboardInterrupt):
        start()
    assert [line.strip() for line in collected] == ["True"]


def heard() -> None:
    """A process that was started in the background ignores interruptions, and so do its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_end(process: int) -> None:
    """Wait until a process that need not be a child has ended: it closes its files before that."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process)
        select.select([descriptor], [], [])
        os.close(descriptor)


def has_ended(group: int) -> bool:
    """Whether a group of processes is gone, after ten seconds at most."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
