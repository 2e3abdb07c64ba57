"""What a step costs, and what it is worth."""

from __future__ import annotations

from dataclasses import dataclass

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


def race_text() -> Rows:
    """Optimizers of the race on text, the lowest loss first, with the rates that they tried.

    Rows of one seed, with other rates of ours, are left out.
    """
    head = ["optimizer", "rate", "steps", "held-out loss", "ms a step", "seeds", "rates, seed 0"]
    rows = _list_entrants("race-text")
    return [head, *(row for row in rows if row[5] != "1")]


def race_text_larger() -> Rows:
    """Optimizers of the races on text with larger networks, the lowest loss first.

    Other rates of ours, of one seed, are left out.
    """
    head = ["parameters", "optimizer", "rate", "steps", "held-out loss", "ms a step", "seeds"]
    rows = [[*head, "rates, seed 0"]]
    for parameters, name in (("85.7M", "race-text-large"), ("303M", "race-text-largest")):
        for row in _list_entrants(name):
            if not row[0].endswith("the rate"):
                rows.append([parameters, *row])
    return rows


def _list_entrants(name: str) -> Rows:
    """Return the optimizers of a race on text, the lowest loss first, with their rates."""
    losses, rates = (table["rows"] for table in record(name)["summary"]["tables"])
    tried: dict[str, list[str]] = {}
    for optimizer, rate, loss in rates:
        tried.setdefault(optimizer, []).append(f"{rate}: {float(loss):.3f}")
    rows = []
    for optimizer, rate, steps, loss, _, _, ms, seeds in sorted(losses, key=lambda row: row[3]):
        searched = ", ".join(tried.get(optimizer, ["–"]))
        rows.append([optimizer, rate, steps, loss, ms, seeds, searched])
    return rows


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
        record: of the race.
        title: of its table.
        rival, ours: titles of entrants.
        subject: of the claim on how soon ours is at the rival's loss.
    """

    label: str
    record: str
    title: str
    rival: str
    ours: str = "K-FAC"
    subject: str = "K-FAC's rules"


_NORMUON = "NorMuon, AdamW at half its rate"
_SMALL = ("race-text", "Decoder of 6 layers")
RACES = [
    RaceRow("decoder 10.9M, NorMuon", *_SMALL, _NORMUON),
    RaceRow(
        '10.9M, NorMuon, `rule="two-sided"`',
        *_SMALL,
        _NORMUON,
        ours="K-FAC, two-sided",
        subject="Runs of K-FAC, two-sided",
    ),
    RaceRow("10.9M, AdamW", *_SMALL, "AdamW"),
    RaceRow("85.7M, Muon", "race-text-large", "Decoder of 12 layers", "Muon, momentum 0.9"),
    RaceRow(
        "303M, Muon", "race-text-largest", "Decoder of 24 layers", "Muon, AdamW at half its rate"
    ),
    RaceRow("303M, 150 steps, NorMuon", "race-text-short", "Decoder of 24 layers", _NORMUON),
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
    """Return the rival's rate and loss, K-FAC's loss, and steps and seconds to the rival's loss."""
    rival = race.rival
    summary = record(race.record)["summary"]
    table_rows = next(t["rows"] for t in summary["tables"] if t["title"].startswith(race.title))
    runs = {row[0]: row for row in table_rows}
    ours = runs[race.ours]
    claim = f"{race.title}: {race.subject} reach the final loss of {rival} in"
    numbers = next(c["numbers"] for c in summary["checks"] if c["claim"].startswith(claim))
    steps, _, rival_steps, *_ = numbers.split()
    rival_seconds = seconds(float(rival_steps) * float(runs[rival][6]) / 1000)
    losses = [runs[rival][1], runs[rival][3], ours[3]]
    if steps == "never":
        return [*losses, "never", "never"]
    our_seconds = seconds(float(steps) * float(ours[6]) / 1000)
    return [*losses, f"{float(steps):.0f}/{rival_steps}", f"{our_seconds}/{rival_seconds}"]
