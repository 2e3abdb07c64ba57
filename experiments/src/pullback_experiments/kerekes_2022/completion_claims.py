"""What figure 5 and section 4 are said to show, with the numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..framework.results import Results
from ..framework.tabular import Table
from .search import FISHERS

Found = tuple[str, bool, str]


def medians(results: Results, *key: str, name: str = "error") -> np.ndarray:
    """By number of observations, over seeds."""
    return np.median([r[name] for r in results.of(*key)], 0)


def claims(results: Results, config: dict[str, Any]) -> list[Found]:
    """Figure 5's caption, and the search."""
    depths = config["depths"]
    deep = {d: medians(results, "EGD", f"L={d}") for d in depths if d > 1}
    direct = medians(results, "EGD", "L=1")
    natural = np.array([medians(results, "NGD", f"L={d}") for d in depths])
    ranks = [medians(results, "EGD", f"L={d}", name="rank")[-1] for d in deep]
    most = max(e[-1] for e in deep.values())
    return [
        (
            "EGD with L ≥ 2 completes the matrix from enough entries",
            bool(most < 0.05 and max(ranks) < 2 * config["rank"]),
            f"errors at most {most:.1g}, effective rank at most {max(ranks):.1f}",
        ),
        _sooner(results, deep, config),
        (
            "EGD with L = 1 leaves what is not observed",
            bool(direct.min() > 0.99),
            f"errors at least {direct.min():.2f}",
        ),
        (
            "NGD at any depth works like EGD with L = 1, and does not complete",
            bool(natural.min() > 0.9),
            f"errors {natural.min():.2f} to {natural.max():.2f}",
        ),
        _control(results, deep),
        _search(results, 0, False),
        _search(results, 1, False),
        _damped(results),
    ]


def _sooner(results: Results, deep: dict[int, np.ndarray], config: dict[str, Any]) -> Found:
    nuclear = medians(results, "nuclear norm")

    def needed(errors: np.ndarray) -> float:
        enough = [n for n, e in zip(config["counts"], errors, strict=True) if e < 0.1]
        return float(enough[0]) if enough else float("inf")

    counts = {f"L = {d}": needed(e) for d, e in deep.items()} | {"nuclear norm": needed(nuclear)}
    words = ", ".join(f"{name} {n:g}" for name, n in counts.items())
    holds = min(needed(e) for d, e in deep.items() if d > 2) < needed(nuclear)
    return "deep EGD needs fewer entries than the nuclear norm", holds, f"error < 0.1 from {words}"


def _control(results: Results, deep: dict[int, np.ndarray]) -> Found:
    """How far the start moves the errors, beside how far depth 1 → L does."""
    gaps = [
        float(np.abs(medians(results, "EGD, collapsed start", f"L={d}") - deep[d]).mean())
        for d in (2, 3)
    ]
    effect = [float((1 - deep[d]).mean()) for d in (2, 3)]
    words = f"{gaps[0]:.2f} and {gaps[1]:.2f} on average"
    words += f", the dynamics {effect[0]:.2f} and {effect[1]:.2f}"
    holds = all(g < 0.25 * e for g, e in zip(gaps, effect, strict=True))
    return "a start collapsed from deeper models changes little", holds, words


def best(results: Results, fisher: str, damped: bool) -> float:
    """The smallest error of trials that fit the observations, median over seeds."""

    def of(record: Any) -> float:
        some = [
            t["error"]
            for t in record["trials"]
            if t["fisher"] == fisher
            and (t["damping"] > 0) == damped
            and t["error"] is not None
            and t["training"] < 0.1
        ]
        return min(some, default=float("inf"))

    return float(np.median([of(r) for r in results.of("search")]))


def _beside(results: Results) -> str:
    euclidean = np.median([r["euclidean"] for r in results.of("search")], 0)
    return f"EGD {euclidean[0]:.2g} (L = 2) and {euclidean[1]:.2g} (L = 3)"


def _search(results: Results, which: int, damped: bool) -> Found:
    error = best(results, FISHERS[which], damped)
    claim = f"no setting of undamped NGD, Fisher matrix of {FISHERS[which]}, completes"
    return claim, error > 0.8, f"best error {error:.2g}; {_beside(results)}"


def _damped(results: Results) -> Found:
    errors = [best(results, f, True) for f in FISHERS]
    words = f"best error {errors[0]:.2g} (all entries) and {errors[1]:.2g} (observed ones)"
    return "nor of damped NGD", min(errors) > 0.8, f"{words}; {_beside(results)}"


def tables(results: Results, config: dict[str, Any]) -> list[Table]:
    """Errors, and effective ranks."""
    keys: list[tuple[str, tuple[str, ...]]] = [
        (f"EGD, L = {d}", ("EGD", f"L={d}")) for d in config["depths"]
    ]
    collapsed = config["collapsed"]
    keys += [
        (f"EGD, L = {d}, start of {collapsed}", ("EGD, collapsed start", f"L={d}")) for d in (2, 3)
    ]
    keys += [(f"NGD, L = {d}", ("NGD", f"L={d}")) for d in config["depths"]]
    keys.append(("nuclear norm", ("nuclear norm",)))
    columns = ["method", *(str(n) for n in config["counts"])]
    over = f"by number of observations, medians over {len(results.seeds)} seeds"
    return [
        Table(columns, [[n, *medians(results, *k, name=what).tolist()] for n, k in keys], title)
        for what, title in (
            ("error", f"Relative error on unobserved entries, {over}"),
            ("rank", f"Effective rank, {over}"),
        )
    ]
