"""The races: corpus, networks, the loop, and claims on made-up curves."""

import json
import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pullback._core.errors import PullbackError
from pullback_experiments.framework import executor
from pullback_experiments.learning import data
from pullback_experiments.races import EXPERIMENTS, Race, checks, experiment
from pullback_experiments.races.bracket import bracket
from pullback_experiments.races.checks import Lead, final, find_crossing
from pullback_experiments.races.loop import RaceTask, run
from pullback_experiments.races.networks import Decoder, ImageData, ResNet, VisionTransformer
from pullback_experiments.races.optimizers import OPTIMIZERS, hidden
from pullback_experiments.races.tasks import TASKS, Corpus, python_files

CPU = torch.device("cpu")
OURS = ("kfac-spectral",)


# --- data -----------------------------------------------------------------------------------


def test_windows_are_seen_once_and_files_held_out() -> None:
    corpus = Corpus(torch.arange(101, dtype=torch.uint8), torch.arange(120, 201, dtype=torch.uint8))
    actual = corpus.batches(length=10, batch=2, steps=5, seed=0, device=CPU, held_out=4)
    assert actual.passes == 1
    batches = actual.of(range(5))
    starts = [int(x[0]) for x in chain.from_iterable(xs for xs, _ in batches)]
    assert sorted(starts) == list(range(0, 100, 10))
    for x, y in batches:
        torch.testing.assert_close(x + 1, y)
    ((x, y),) = actual.held_out(100)
    assert x[:, 0].tolist() == [120, 140, 160, 180]
    torch.testing.assert_close(x + 1, y)
    assert [int(x[0, 0]) for x, _ in actual.held_out(1)] == [120, 140, 160, 180]


def test_short_texts_are_seen_again_and_shorter_ones_refused() -> None:
    text = torch.arange(41, dtype=torch.uint8)
    batches = Corpus(text, text).batches(
        length=10, batch=4, steps=3, seed=1, device=CPU, held_out=9
    )
    assert batches.passes == 3
    for x, _ in batches.of(range(3)):
        assert sorted(x[:, 0].tolist()) == [0, 10, 20, 30]
    with pytest.raises(PullbackError, match="too short"):
        Corpus(text, text[:5]).batches(length=10, batch=1, steps=1, seed=0, device=CPU, held_out=1)


def test_the_standard_library_is_enough_for_quick_runs() -> None:
    corpus = python_files(4_000_000, packages=False)
    assert corpus.size >= 4_000_000
    assert 0.03 < len(corpus.held_out) / corpus.size < 0.1
    assert b"import" in bytes(corpus.held_out.tolist())
    repeated = python_files.__wrapped__(4_000_000, packages=False)
    assert torch.equal(repeated.train, corpus.train)


def test_batches_of_images_follow_from_the_seed() -> None:
    source = ImageData(lambda: data.generate_pictures((3, 32, 32)), batch=16)
    one, two, other = (source(20, seed, CPU)[0].of(range(20)) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(one, two, strict=True))
    assert not torch.equal(one[0][0], other[0][0])
    assert source(3, 0, CPU)[0].of(range(2, 3))[0][0].shape == (16, 3, 32, 32)


# --- networks and optimizers ----------------------------------------------------------------


def test_the_decoder_sees_the_past_alone_and_has_no_biases() -> None:
    torch.manual_seed(0)
    net = Decoder(256, 12, 16, 2, 2)
    assert not any("bias" in name for name, _ in net.named_parameters())
    x = torch.randint(256, (2, 12))
    changed = x.clone()
    changed[:, 7] = 3
    torch.testing.assert_close(net(x)[:, :7], net(changed)[:, :7])
    assert not torch.allclose(net(x)[:, 7:], net(changed)[:, 7:])


def test_sizes() -> None:
    with torch.device("meta"):
        names = ("text", "text-large", "text-largest", "resnet", "vit")
        sizes = {n: _count(TASKS[n].model()) for n in names}
    assert sizes["text"] == 10_916_736
    assert sizes["text-large"] == 85_740_288
    assert sizes["text-largest"] == 303_088_640
    assert sizes["resnet"] == 11_173_962
    assert 2.6e6 < sizes["vit"] < 2.8e6


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "outer"),
    [
        (Decoder(256, 8, 8, 1, 2), {"tokens.weight", "positions.weight", "head.weight"}),
        (ResNet(width=4, depths=(1, 1)), {"stem.weight", "head.weight"}),
        (VisionTransformer(10, 8, 1, 2), {"patches.weight", "positions.weight", "head.weight"}),
    ],
)
def test_adamw_takes_first_and_last_layers(model: nn.Module, outer: set[str]) -> None:
    inner = {id(p) for p in hidden(model)}
    left = {n for n, p in model.named_parameters() if p.ndim > 1 and id(p) not in inner}
    assert left == outer
    for name in ("muon", "soap"):
        optimizers = OPTIMIZERS[name](model, 0.1, {})
        groups = list(chain.from_iterable(o.param_groups for o in optimizers))
        trained = chain.from_iterable(g["params"] for g in groups)
        assert sorted(map(id, trained)) == sorted(map(id, model.parameters()))
        assert all((g["weight_decay"] == 0) == (g["params"][0].ndim < 2) for g in groups)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_decay_as_a_race_says(name: str) -> None:
    if name == "muon-torch":
        model = VisionTransformer(10, 8, 1, 2)
    else:
        model = ResNet(width=4, depths=(1, 1))
    optimizers = OPTIMIZERS[name](model, 0.1, {"weight_decay": 0.3})
    decays = {}
    for group in chain.from_iterable(o.param_groups for o in optimizers):
        decays |= {id(p): group["weight_decay"] for p in group["params"]}
    assert all(decays[id(p)] == 0.3 for p in model.parameters() if p.ndim > 1)
    if name not in {"sgd", "kfac-natural"}:
        assert all(decays[id(p)] == 0 for p in model.parameters() if p.ndim == 1)


def _small(**changes: Any) -> RaceTask:
    source = ImageData(lambda: data.generate_pictures((3, 32, 32), 4, 64), batch=32)
    model = lambda: VisionTransformer(4, 16, 1, 2, 16)  # noqa: E731
    return replace(RaceTask("small", model, source, 9, evaluations=3), **changes)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "muon-torch"])
def test_every_optimizer_learns_something(name: str) -> None:
    rate = {"sgd": 0.3, "kfac-natural": 0.1}.get(name, 0.01)
    if name == "kfac-natural":
        settings = {"kl_clip": 1e-2, "damping": 0.1}
    else:
        settings = {}
    record = run(_small(), name, rate, seed=0, device=CPU, settings=settings)
    assert record["step"] == [0, 3, 6, 9]
    assert record["seconds"] == sorted(record["seconds"])
    assert record["final"] == record["held-out loss"][-1] < record["held-out loss"][0]


def test_runs_repeat_and_have_schedules_of_their_own() -> None:
    one, two = (run(_small(), "adamw", 0.01, seed=3, device=CPU) for _ in range(2))
    assert one["held-out loss"] == two["held-out loss"]
    short = run(_small(clip=1e-9), "sgd", 0.1, seed=3, device=CPU, steps=6)
    assert short["step"] == [0, 2, 4, 6]
    assert math.isclose(short["final"], one["held-out loss"][0], rel_tol=1e-2)  # clipped away


# --- claims ---------------------------------------------------------------------------------


def _run(losses: list[float], steps: int, ms: float) -> dict[str, Any]:
    at = [round(steps * i / (len(losses) - 1)) for i in range(len(losses))]
    seconds = [ms * s / 1e3 for s in at]
    kfac_row = {"method": "kfac-spectral", "lr": 0.1, "steps": steps, "ms": ms, "accuracy": [0.5]}
    return {**kfac_row, "step": at, "seconds": seconds, "held-out loss": losses}


def test_curves_are_interpolated() -> None:
    runs = [_run([4.0, 2.0, 1.0], 100, 10.0)] * 2 + [_run([4.0, math.nan], 50, 10.0)]
    assert final(runs) == 1.0
    assert find_crossing(runs[:2], 1.5, "step") == 75
    assert find_crossing(runs[:2], 1.5, "seconds") == 0.75
    assert find_crossing(runs[:2], 9.0, "step") == 0
    assert find_crossing(runs[:2], 0.9, "step") == math.inf


def test_leads() -> None:
    actual = {
        "muon": [_run([4.0, 2.0, 1.0], 100, 10.0)] * 3,
        "kfac-spectral": [_run([4.0, 1.9, 0.98], 100, 12.0)] * 3,
        "kfac-spectral, 0.8": [_run([4.0, 1.9, 1.0], 80, 12.0)] * 3,
    }
    claims = Lead("muon", below=0.01, steps=0.8, seconds=1.0).judge_claims(actual, OURS)
    assert [holds for _, holds, _ in claims] == [True, True, True]
    actual["kfac-two-sided, 0.8"] = actual.pop("kfac-spectral, 0.8")
    claims = Lead("muon", steps=0.8, by="kfac-two-sided").judge_claims(actual, OURS)
    assert [holds for _, holds, _ in claims] == [True]
    assert claims[0][0].startswith("Runs of K-FAC, two-sided reach")
    del actual["kfac-two-sided, 0.8"]
    claims = Lead("muon", below=0.03, steps=0.8, seconds=1.0).judge_claims(actual, OURS)
    assert [holds for _, holds, _ in claims] == [False, False, False]
    assert "never" not in claims[1][2]
    assert len(checks.table(actual, "x").rows) == 2


@pytest.mark.parametrize("race", EXPERIMENTS, ids=lambda race: race.name)
def test_claims_are_about_entrants_whose_runs_can_meet_them(race: Race) -> None:
    assert {*race.entrants, *race.quick_entrants} <= set(OPTIMIZERS)
    assert {lead.rival for lead in race.leads} <= set(race.entrants)
    assert all(entrant.fixed for entrant in race.entrants.values() if entrant.shares)
    shares = list(chain.from_iterable(entrant.shares for entrant in race.entrants.values()))
    if shares:  # otherwise claims are about the way of full runs
        assert min(shares) <= max(lead.steps for lead in race.leads if lead.steps)


@pytest.mark.parametrize("best", [0.07, 1.0, 3.0, 30.0])
def test_a_search_ends_with_the_best_rate_inside(best: float) -> None:
    rates: list[float] = []

    def train(rate: float) -> dict[str, float]:
        rates.append(rate)
        return {"lr": rate, "final": abs(math.log(rate / best))}

    runs = bracket(train, 1.0)
    assert sorted(rates) == [run["lr"] for run in runs]
    losses = [run["final"] for run in runs]
    assert 0 < losses.index(min(losses)) < len(losses) - 1


def test_a_search_gives_up_and_takes_divergence_for_the_worst() -> None:
    assert len(bracket(lambda rate: {"lr": rate, "final": -rate}, 1.0)) == 8
    runs = bracket(lambda rate: {"lr": rate, "final": math.nan if rate > 2 else -rate}, 1.0)
    assert [run["lr"] for run in runs] == [1.0, 2.0, 4.0]


class _Counted:
    """Runs of a race in place of training: the loss depends on rate and seed alone."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, int]] = []

    def __call__(self, task: Any, method: str, lr: float, **options: Any) -> dict[str, Any]:
        self.calls.append((method, lr, options["seed"]))
        count = task.evaluations
        steps = options["steps"]
        last = abs(math.log(lr / 0.01)) + 0.001 * options["seed"] + 1
        return {
            **{"method": method, "lr": lr, "steps": steps, "final": last, "ms": 10.0},
            "step": [round(steps * i / count) for i in range(count + 1)],
            "seconds": [0.01 * steps * i / count for i in range(count + 1)],
            "held-out loss": [last + count - i for i in range(count + 1)],
            "accuracy": [0.5] * (count + 1),
        }


def test_the_pace_of_uneven_steps_is_that_of_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    counted = _Counted()

    def run(*args: Any, **options: Any) -> dict[str, Any]:
        lengths.append(options["steps"])
        return counted(*args, **options)

    monkeypatch.setattr(experiment, "run", run)
    race = replace(next(r for r in EXPERIMENTS if r.name == "race-text"), judged=False)
    executor.run(race, out=tmp_path, only=["kfac-two-sided-often"])
    assert lengths[:2] == [120, 680]


def test_a_race_reuses_its_search_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = _Counted()
    monkeypatch.setattr(experiment, "run", counted)
    race = replace(next(r for r in EXPERIMENTS if r.name == "race-text-large"), judged=False)
    first = executor.run(race, out=tmp_path, only=["kfac"])
    assert first.finished < first.total
    assert {method for method, _, _ in counted.calls} == {"kfac"}
    with pytest.raises(PullbackError, match="their words are"):
        executor.run(race, out=tmp_path, only=["lion"])
    outcome = executor.run(race, out=tmp_path)
    assert outcome.finished == outcome.total
    timed = [entrant for entrant in race.entrants.values() if entrant.pace_of is None]
    paces = sum(1 if entrant.is_even else 2 for entrant in timed)
    assert len(counted.calls) == len(set(counted.calls)) + paces + 7  # and shorter runs
    state = json.loads((tmp_path / "race-text-large.json").read_text("utf-8"))
    rates = next(t for t in state["summary"]["tables"] if "rates" in t["title"])
    assert [row[1] for row in rates["rows"][:3]] == ["0.004", "0.008", "0.016"]
    runs = {(*run["key"], run["seed"]): run["record"] for run in state["runs"]}
    assert runs["text-large", "normuon-0.9", 2]["lr"] == 0.008
