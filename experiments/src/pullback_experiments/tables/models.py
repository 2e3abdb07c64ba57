"""Models that others wrote: the blocks that are found, what a step costs, and how they train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..benchmarks.third_party_others import FIRST, SECOND
from .numbers import Rows, record, size, times

KINDS = ("kronecker", "units", "diagonal")
NAMES = ("SGD", "Adam", "KFAC")


def models() -> Rows:
    """Small configurations on a CPU: shares of blocks, costs, and losses after 30 steps."""
    head = ["model", "parameters", "Kronecker, units, diagonal", "10/100", "default"]
    rows = [[*head, *NAMES[:2], f"`{NAMES[2]}`"]]
    for model, one in record("third-party")["results"].items():
        if one["refused"]:
            rows.append([model, "–", one["refused"], *["–"] * 5])
            continue
        ratio = [times(one["ratio"][schedule]) for schedule in ("10/100", "default")]
        shares = _shares(one["shares"])
        rows.append([model, size(one["parameters"]), shares, *ratio, *_losses(one)])
    return rows


def models_others() -> Rows:
    """Models in no other table, in the order of their two lists: losses after 30 steps."""
    rows = [["model", "list", *NAMES[:2], f"`{NAMES[2]}`"]]
    results = record("third-party-others")["results"]
    for number, names in (("first", FIRST), ("second", SECOND)):
        rows += [[model, number, *_losses(results[model])] for model in names if model in results]
    return rows


def models_real() -> Rows:
    """Three models at their full sizes on an H200, beside the benchmark's own classes."""
    rows = [["", "natural", "default", "natural, the benchmark's class"]]
    own_names = {"GPT-2": "gpt2", "ResNet-50": "resnet50"}
    for model, one in record("third-party-real-cuda")["results"].items():
        ratio = one["ratio"]
        first = one["first step"]
        shares = _shares(first["natural"]["shares"])
        key = own_names.get(model.partition(",")[0])
        if key is None:
            twin = {}
        else:
            twin = record("kfac-cuda")["results"][key]["ratio"]
        label = f"{model}, {size(one['parameters'])}: Kronecker, units, diagonal"
        rows.append([label, shares, "", ""])
        for what, column in (("a step", "{}, run"), ("memory", "{}, memory")):
            if what == "a step":
                natural = column.format("10/100")
            else:
                natural = "memory"
            cells = [ratio[natural], ratio[column.format("default")], twin.get(natural)]
            rows.append([what, *(times(cell) for cell in cells)])
        steps = [f"{first[rule]['ratio']:.1f}" for rule in ("natural", "default")]
        rows.append(["first step, in later statistics steps", *steps, ""])
    return rows


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{100 * shares[block]:.1f}" for block in KINDS) + " %"


def _losses(one: Mapping[str, Any]) -> list[str]:
    """The losses at the best rates, the lowest in bold."""
    scores = [_best(one["scores"][name]) for name in NAMES]
    shown = [f"{s:.3f}" if s >= 5e-4 else "0" for s in scores]
    return [f"**{t}**" if s == min(scores) else t for t, s in zip(shown, scores, strict=True)]


def _best(scores: Mapping[str, float | None]) -> float:
    return min(score for score in scores.values() if score is not None)
