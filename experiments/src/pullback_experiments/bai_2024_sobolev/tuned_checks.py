"""What the small networks say: epochs to K-FAC's own mark, and where the runs end."""

from __future__ import annotations

from collections.abc import Sequence

from ..framework.check import Check, recorded
from ..framework.plain import Record
from ..framework.results import Results
from ..framework.tabular import Table
from .curves import clearly_fewer, counted, epochs, final

OWN, SHARED, SECOND = "own settings", "K-FAC's settings", "second settings"
Verdict = tuple[str, bool, str]
PER_NETWORK = 6  # claims


def runs_of(results: Results, net: str, method: str, settings: str) -> list[Record]:
    """The records; at K-FAC's settings K-FAC is at its own."""
    return results.of(net, method, OWN if method == "K-FAC" else settings)


def mark(results: Results, net: str) -> float:
    """The training loss at which K-FAC, tuned, is after half of its epochs (median)."""
    runs = runs_of(results, net, "K-FAC", OWN)
    half = len(runs[0]["epoch"]) // 2
    return final([{**r, "train loss": r["train loss"][: half + 1]} for r in runs], "train loss")


def judged(results: Results, nets: Sequence[str], held: Sequence[bool]) -> list[Check]:
    """For every network: faster at K-FAC's settings, as good; and at its own, in either metric."""
    claims: list[Verdict] = []
    for net in nets:
        claims += [
            _sooner(results, net, "Sobolev", SHARED),
            _similar(results, net),
            _sooner(results, net, "Sobolev", OWN),
            _sooner(results, net, "Sobolev–Fisher", OWN),
            _sooner(results, net, "Sobolev–Fisher, short", OWN),
            _than_second(results, net),
        ]
    ours = {PER_NETWORK * i + j for i in range(len(nets)) for j in (2, 3, 4, 5)}
    return recorded(claims, held, ours=ours)


def _sooner(results: Results, net: str, method: str, settings: str) -> Verdict:
    level = mark(results, net)
    a = epochs(runs_of(results, net, method, settings), "train loss", level)
    b = epochs(runs_of(results, net, "K-FAC", OWN), "train loss", level)
    claim = f"{net}: {method} at {settings} needs clearly fewer epochs than K-FAC to its mark"
    return claim, clearly_fewer(a, b), f"{counted(a)} and {counted(b)} to a loss of {level:.3g}"


def _than_second(results: Results, net: str) -> Verdict:
    """Against K-FAC at its second-best settings, by the same mark."""
    level = mark(results, net)
    a = epochs(results.of(net, "Sobolev", OWN), "train loss", level)
    b = epochs(results.of(net, "K-FAC", SECOND), "train loss", level)
    claim = f"{net}: Sobolev at {OWN} needs clearly fewer epochs than K-FAC at its second-best"
    return claim, clearly_fewer(a, b), f"{counted(a)} and {counted(b)} to a loss of {level:.3g}"


def _similar(results: Results, net: str) -> Verdict:
    one, two = (
        final(runs_of(results, net, method, SHARED), "test accuracy")
        for method in ("Sobolev", "K-FAC")
    )
    claim = f"{net}: final test accuracies are similar, within a point"
    return claim, abs(one - two) <= 0.01, f"{one:.3f} and {two:.3f}"


def table(results: Results, net: str, methods: Sequence[str]) -> Table:
    """Every method at both settings."""
    level, rows = mark(results, net), []
    for method in methods:
        for settings in (SHARED, OWN) if method != "K-FAC" else (OWN, SECOND):
            runs = results.of(net, method, settings)
            lr, damping = runs[0]["settings"]
            rows.append(
                [
                    method,
                    settings,
                    f"{lr:g}",
                    f"{damping:g}",
                    counted(epochs(runs, "train loss", level)),
                    f"{final(runs, 'train loss'):.4f}",
                    f"{final(runs, 'test loss'):.3f}",
                    f"{final(runs, 'test accuracy'):.3f}",
                ]
            )
    columns = ["method", "settings", "lr", "damping", f"epochs to {level:.3g}"]
    columns += ["train loss", "test loss", "test accuracy"]
    return Table(columns, rows, f"{net}: medians over {len(results.seeds)} seeds", text=2)
