"""What a step costs, and what it is worth."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from ..races.checks import final, find_crossing, title
from .numbers import Rows, record, seconds, size, times

KFAC = {  # label, batch, parameters
    "autoencoder": ("autoencoder 784-1000-500-250-30", "512", 2_837_314),
    "convnet": ("small convnet", "128", 66_570),
    "resnet50": ("ResNet-50", "64", 25_557_032),
    "gpt2": ("GPT-2 small, bf16", "8×1024", 124_475_904),
}
EXACT = {
    "cifar-mlp": ("MLP 3072-2634-…-444-10", "256"),
    "wide-mlp": ("MLP 3072-5120⁴-10", "512"),
    "resnet18": ("ResNet-18 (group norm)", "128"),
}


def costs() -> Rows:
    """Return steps of exact methods and slices in multiples of a first-order step."""
    rows = [["method", "model", "parameters", "batch", "time", "memory", "where"]]
    for key, (label, batch) in EXACT.items():
        one = record("scale_h200")["results"][key]
        memory = one["peak_bytes"]["natural gradient"] / one["peak_bytes"]["SGD"]
        method = "exact, sample space"
        more = [label, size(one["parameters"]), batch, times(one["ratio"]), times(memory)]
        rows.append([method, *more, "H200"])
    one = record("slices-cuda")["results"]["mlp"]
    more = ["MLP 3072-2634-…-444-10", size(one["parameters"]), "128"]
    for method, route in (("`SliceSGD`", "units"), ("`SliceSGD(every=10)`", "units, every 10")):
        cell = times(one["captured training step"]["ratio"][route]["ratio"])
        rows.append([method, *more, cell, "–", "H200"])
    ours, adam = (float(_yin(name)[-1]) for name in ("E-NGD, target ratio", "Adam"))
    ratio = times(ours / adam)
    more = ["2-20-20-1, Poisson", "501", "all points"]
    rows.append(["exact, pseudo-inverse", *more, ratio, "–", "CPU"])
    return rows


def _yin(method: str) -> list[str]:
    """A method's row of the Poisson experiment: name, loss, error, ..., ms per step."""
    rows = record("yin-2024-poisson")["summary"]["tables"][0]["rows"]
    return next(row for row in rows if row[0] == method)


ASKED = {
    "kfac-cpu": ("every step", "10/100"),
    "kfac-cuda": ("10/100", "statistics"),
}
SAID = {
    "statistics": "a statistics step",
}


def kfac() -> Rows:
    rows = [["× the baseline's step", "K-FAC", "GPU alone", "straightforward", "floor"]]
    measures = ("ratio", "kernels", "naive", "floor")
    for name, steps in ASKED.items():
        where = ""
        if name == "kfac-cuda":
            where = ", H200"
        for key, one in record(name)["results"].items():
            label, batch, _ = KFAC[key]
            for step in steps:
                cells = [one.get(measure, {}).get(step) for measure in measures]
                what = f"{label}, batch {batch}{where}, {SAID.get(step, step)}"
                rows.append([what, *map(_format_ratio, cells)])
    return rows


def _format_ratio(ratio: float | None) -> str:
    """Return a ratio with two digits; a dash where it was not measured."""
    if ratio is None:
        return "–"
    return f"{ratio:.2f}"


def rules() -> Rows:
    """Time and peak memory of K-FAC's rules at their default schedules."""
    names = {"resnet50": "ResNet-50", "gpt2": "GPT-2 small"}
    head = ["rule"]
    for label in names.values():
        head += [f"{label}, time", f"{label}, memory"]
    eigenbasis = ["`Eigenbasis`"]
    spectral = ["`Spectral`"]
    natural = ["`Natural`"]
    for name in names:
        ratios = record("kfac-cuda")["results"][name]["ratio"]
        eigenbasis += [times(ratios["eigenbasis, run"]), times(ratios["eigenbasis, memory"])]
        spectral += _list_spectral_costs(name)
        natural += [times(ratios["10/100"]), times(ratios["memory"])]
    return [head, eigenbasis, spectral, natural]


def _list_spectral_costs(model: str) -> list[str]:
    """Return time and peak memory of the spectral rule, which has a newer record of its own."""
    results = record("kfac-parts-cuda")["results"][model]
    ours = results["spectral, all parts"]
    memory = ours["MiB"] / results["spectral, baseline"]["MiB"]
    return [times(ours["ratio"]), times(memory)]


#: rows of ours that the page has apart: fewer steps, other rates, and starts that are not default
_APART = {
    title(name)
    for name in (
        "kfac-rate-0.5",
        "kfac-rate-2",
        "kfac, 0.8",
        "kfac-adapt-0.99",
        "kfac-gentle-start",
        "kfac-two-sided-gentle-start",
        "kfac-two-sided-gentle-start, 0.85",
        "kfac-two-sided-often",
        "kfac-two-sided-often, 0.85",
        "kfac-two-sided-often-gentle-start",
        "kfac-two-sided-often-gentle-start, 0.85",
        "kfac-plain-start",
        "kfac-two-sided-plain-start",
    )
}


def race_text() -> Rows:
    """Optimizers of the race on text, the lowest loss first, with the rates that they tried."""
    head = ["optimizer", "rate", "steps", "held-out loss", "ms a step", "seeds", "rates, seed 0"]
    return [head, *_list_entrants("race-text")]


def race_text_larger() -> Rows:
    """Optimizers of the races on text with larger networks, the lowest loss first."""
    head = ["parameters", "optimizer", "rate", "steps", "held-out loss", "ms a step", "seeds"]
    rows = [[*head, "rates, seed 0"]]
    for parameters, name in (("85.7M", "race-text-large"), ("303M", "race-text-largest")):
        rows += [[parameters, *row] for row in _list_entrants(name)]
    return rows


def _list_entrants(name: str) -> Rows:
    """Return the optimizers of a race on text, the lowest loss first, with their rates.

    Some rows of ours are left out: the page has them apart.
    """
    losses, rates = (table["rows"] for table in record(name)["summary"]["tables"])
    tried: dict[str, list[str]] = {}
    for optimizer, rate, loss in rates:
        tried.setdefault(optimizer, []).append(f"{rate}: {loss}")
    rows = []
    for optimizer, rate, steps, loss, _, _, ms, seeds in sorted(losses, key=_read_loss):
        if optimizer in _APART:
            continue
        searched = ", ".join(tried.get(optimizer, ["–"]))
        rows.append([optimizer, rate, steps, loss, ms, seeds, searched])
    return rows


def _read_loss(row: list[str]) -> float:
    """Return the held-out loss in a row of a race's table."""
    _, _, _, loss, *_ = row
    return float(loss)


def race_images() -> Rows:
    """Every optimizer of the races on images."""
    rows = [["network", "optimizer", "rate", "steps", "test loss", "accuracy", "ms a step"]]
    for losses in record("race-images")["summary"]["tables"][:2]:
        network = losses["title"].split()[0].rstrip(":")
        for optimizer, rate, steps, loss, accuracy, _, ms, _ in losses["rows"]:
            rows.append([network, optimizer, rate, steps, loss, accuracy, ms])
    return rows


@dataclass(frozen=True)
class RaceRow:
    """A row of the README: one of ours beside a rival.

    Attributes:
        label: of the row.
        race: whose record it is of.
        task: of the race.
        rival, ours: entrants.
        rival_pace: the entrant that was timed in the rival's place, if not itself.
    """

    label: str
    race: str
    task: str
    rival: str
    ours: str = "kfac"
    rival_pace: str | None = None


_SMALL = ("race-text", "text")
_LARGE = ("race-text-large", "text-large")
_LARGEST = ("race-text-largest", "text-largest")
_SHORT = ("race-text-short", "text-short")
_HALF = "normuon-0.9-half"
_AS_LONG = "normuon-0.9-muon-length"
RACES = [
    RaceRow("decoder 10.9M, NorMuon", *_SMALL, _HALF, rival_pace="normuon-0.9"),
    RaceRow('10.9M, NorMuon, `rule="two-sided"`', *_SMALL, _HALF, "kfac-two-sided", "normuon-0.9"),
    RaceRow("10.9M, AdamW", *_SMALL, "adamw"),
    RaceRow("85.7M, NorMuon", *_LARGE, _AS_LONG, rival_pace="normuon-0.9"),
    RaceRow("303M, NorMuon", *_LARGEST, _AS_LONG, rival_pace=_HALF),
    RaceRow("303M, 150 steps, NorMuon", *_SHORT, _AS_LONG, rival_pace=_HALF),
]


def races() -> Rows:
    """Return final losses beside a tuned rival's, and what K-FAC takes to reach the rival's."""
    rows = [["task, rival", "its rate", "its loss", "`KFAC`", "steps to its loss", "seconds"]]
    for race in RACES:
        rows.append([race.label, *_compare_with_rival(race)])
    table = record("kfac-shakespeare")["summary"]["tables"][0]["rows"]
    losses_of = {row[0]: row[2] for row in table}
    lost = ["characters 4.8M, AdamW, natural rule", "–", losses_of["AdamW"]]
    rows.append([*lost, losses_of["K-FAC"], "never", "never"])
    return rows


def _compare_with_rival(race: RaceRow) -> list[str]:
    """Return the rival's rate and loss, our loss, and steps and seconds to the rival's loss.

    Runs are those of full length, of which the median curve is meant.
    """
    theirs = _read_runs(race, race.rival)
    ours = _read_runs(race, race.ours)
    level = final(theirs)
    losses = [f"{theirs[0]['lr']:g}", f"{level:.4f}", f"{final(ours):.4f}"]
    steps = find_crossing(ours, level, "step")
    if steps == inf:
        return [*losses, "never", "never"]
    rival_steps = theirs[0]["steps"]
    our_seconds = steps * _read_pace(race, race.ours)
    rival_seconds = rival_steps * _read_pace(race, race.rival_pace or race.rival)
    times_of_both = f"{seconds(our_seconds)}/{seconds(rival_seconds)}"
    return [*losses, f"{steps:.0f}/{rival_steps}", times_of_both]


def _read_runs(race: RaceRow, entrant: str) -> list[dict[str, Any]]:
    """Return an entrant's runs of full length."""
    runs = record(race.race)["runs"]
    return [run["record"] for run in runs if run["key"] == [race.task, entrant]]


def _read_pace(race: RaceRow, entrant: str) -> float:
    """Return an entrant's seconds for a step."""
    runs = record(race.race)["runs"]
    (pace,) = (r["record"] for r in runs if r["key"] == ["pace", race.task, entrant])
    return pace["ms"] / 1000
