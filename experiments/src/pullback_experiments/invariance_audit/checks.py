"""The claims, with the numbers that decide them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pullback.geometry.charts.transformations import standard
from pullback.geometry.invariance.table import shown
from pullback.geometry.invariance.verdict import SLACK, Verdict

from ..framework.check import Check

Row = Mapping[str, Any]
#: records of all seeds, by network and optimizer
Found = Mapping[tuple[str, str], list[Row]]

NATURAL, DAMPED = "NGD, pseudo-inverse", "NGD, damped"
KFAC, TIKHONOV = ("K-FAC, undamped", "K-FAC, invariant"), "K-FAC, Tikhonov"
RULES, SLICED = ("K-FAC, eigenbasis", "K-FAC, spectral"), "SliceSGD"
PLAIN = ("SGD", "Adam", "L-BFGS", "Muon")
AFFINE = ("input whitening", "per-layer affine", "neuron rescaling")
_RANKS = {str(v): i for i, v in enumerate((Verdict.EXACT, Verdict.FIRST_ORDER))}


def claims(found: Found) -> list[Check]:
    """What the two papers say, and what they say of others."""

    def rows(
        net: str, names: Iterable[str], kinds: Iterable[str] | None = None, place: str = "batch"
    ) -> list[Row]:
        return [
            r
            for name in names
            for r in found[net, name]
            if r["place"] == place and (kinds is None or r["transformation"] in kinds)
        ]

    both = [r for net in ("leaky", "tanh") for r in rows(net, [NATURAL])]
    superfluous = rows("leaky", [NATURAL], (*AFFINE, "elementwise"), "parameters")
    nonlinear = [r for net in ("leaky", "tanh") for r in rows(net, [NATURAL], ["elementwise"])]
    linear = rows("tanh", [NATURAL], AFFINE)
    layered = [r for net in ("leaky", "tanh") for r in rows(net, KFAC, AFFINE)]
    damped = [r for net in ("leaky", "tanh") for r in rows(net, [DAMPED, TIKHONOV], AFFINE)]
    sliced = rows("leaky", [SLICED], ["neuron rescaling", "neuron permutation"])
    whitened = rows("leaky", [SLICED], ["input whitening"])
    turned = [r for net in ("leaky", "tanh") for r in rows(net, RULES, ["input rotation"])]
    plain = [r for net in ("leaky", "tanh") for r in rows(net, PLAIN, (*AFFINE, "elementwise"))]
    return [
        _check("Theorem 2: on the model the natural gradient is the same in all coordinates",
               both, {"exact", "first order"}),
        _check("with superfluous parameters it is another vector on the parameter space",
               superfluous, {"not invariant"}),
        _check("finite steps differ under a nonlinear change", nonlinear, {"first order"}),
        _agreed("without superfluous parameters a step of any size agrees under affine changes",
                linear),
        _check("K-FAC, undamped or damped invariantly, agrees under affine changes of layers",
               layered, {"exact"}, of_paper=False),
        _check("damping by the identity breaks both", damped, {"not invariant"}, of_paper=False),
        _check("SGD, Adam, L-BFGS and Muon depend on coordinates",
               plain, {"not invariant"}, of_paper=False),
        _check("SliceSGD does not see how units are scaled or ordered",
               sliced, {"exact"}, of_paper=False),
        _check("and depends on other affine changes as SGD does",
               whitened, {"not invariant"}, of_paper=False),
        _check("K-FAC's eigenbasis and spectral rules do not see turns of the inputs",
               turned, {"exact"}, of_paper=False),
    ]  # fmt: skip


def _check(claim: str, rows: list[Row], allowed: set[str], *, of_paper: bool = True) -> Check:
    other = [r for r in rows if r["verdict"] not in allowed]
    values = [r["direction"] for r in rows]
    numbers = f"{len(rows) - len(other)} of {len(rows)} audits; mismatch as η → 0 "
    numbers += f"{shown(min(values))} to {shown(max(values))}" if values else "unknown"
    return Check(claim, bool(rows) and not other, numbers, of_paper=of_paper)


def _agreed(claim: str, rows: list[Row]) -> Check:
    """Single steps only: along a run units saturate, and parameters become superfluous."""
    sizes = [k.removeprefix("mismatch ") for k in (rows[0] if rows else ()) if "mismatch" in k]
    pairs = [(r[f"mismatch {s}"], r[f"round-off {s}"]) for r in rows for s in sizes]
    held = sum(m <= SLACK * off for m, off in pairs)
    numbers = f"{held} of {len(pairs)} steps"
    if pairs:
        numbers += f"; mismatch up to {shown(max(m for m, _ in pairs))}"
    return Check(claim, bool(pairs) and held == len(pairs), numbers, of_paper=False)


def worst(found: Found, net: str) -> dict[tuple[str, str], tuple[Verdict, str] | None]:
    """The worst verdict over seeds, with the largest mismatch; None where there is none."""
    out: dict[tuple[str, str], tuple[Verdict, str] | None] = {}
    for (where, name), rows in found.items():
        for kind in standard() if where == net else ():
            mine = [r for r in rows if r["place"] == "batch" and r["transformation"] == kind.name]
            last = max(mine, key=lambda r: _RANKS.get(r["verdict"], 2), default=None)
            largest = max((r["direction"] for r in mine), default=0.0)
            told = None if last is None else (Verdict(last["verdict"]), shown(largest))
            out[name, kind.name] = told
    return out
