"""The benchmark set: methods as options of `solve`, runs that pause, claims on made-up curves."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pullback_experiments import Paused, pde_benchmarks
from pullback_experiments.framework.experiment import Context
from pullback_experiments.framework.store import Results, Store
from pullback_experiments.pde_benchmarks.experiment import (
    claims,
    final,
    find_median_seconds,
    solve_setup,
)
from pullback_experiments.pde_benchmarks.methods import (
    ADAM,
    GAUSS_NEWTON,
    GOALS,
    LBFGS,
    METHODS,
    QUICK,
    SLABS,
    TARGETS,
)
from pullback_experiments.problems import SETUPS, setup

(OURS,) = pde_benchmarks.EXPERIMENTS


def context(tmp_path: Path, **more: object) -> Context:
    outcome = Results(Store(tmp_path / "r.json", {}), [0], True)
    return Context(0, torch.device("cpu"), True, tmp_path / "place", outcome, **more)  # pyright: ignore


def test_every_problem_of_the_set_has_a_set_up() -> None:
    assert {*TARGETS, *GOALS, *QUICK, *SLABS} <= set(SETUPS)
    assert {name for name in TARGETS if setup(name).options.get("slabs")} == set(SLABS)
    assert not set(OURS.problems) & set(SLABS)


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_every_method_lowers_the_loss(method: object, tmp_path: Path) -> None:
    assert method in METHODS
    actual = setup("ritz")
    options = method.options(*method.rates[-1:])  # pyright: ignore[reportAttributeAccessIssue]
    chosen = {**actual.options, **options, "points": 60, "steps": 10}
    record = solve_setup(actual, chosen, 60.0, context(tmp_path))
    assert record["step"][-1] == 10
    assert record["seconds"] == sorted(record["seconds"])
    assert record["error"][-1] < record["error"][0]


def test_a_run_pauses_and_goes_on(tmp_path: Path) -> None:
    actual = setup("ritz")
    options = {**actual.options, "points": 60, "steps": 12}
    with pytest.raises(Paused):
        solve_setup(actual, options, 60.0, context(tmp_path, deadline=time.monotonic() - 1))
    record = solve_setup(actual, options, 60.0, context(tmp_path))
    fresh = solve_setup(
        actual, options, 60.0, replace(context(tmp_path), checkpoint_folder=tmp_path / "other")
    )
    assert record["step"][-1] == fresh["step"][-1] == 12
    assert math.isclose(record["error"][-1], fresh["error"][-1], rel_tol=1e-9)


def curve(*errors: float) -> list[dict[str, list[float]]]:
    return [{"error": list(errors), "seconds": [float(i) for i in range(len(errors))]}]


def test_claims() -> None:
    actual = {
        "poisson2d": {GAUSS_NEWTON: curve(1, 1e-10), ADAM: curve(1, 1e-2), LBFGS: curve(1, 1e-4)},
        "heat1d": {GAUSS_NEWTON: curve(1, 1e-5), ADAM: curve(1, math.nan), LBFGS: curve(1, 1e-3)},
    }
    ahead, poisson, heat = claims(actual, TARGETS, missed=["heat1d"])
    assert [c.holds for c in (ahead, poisson, heat)] == [True, True, False]
    assert [c.agrees for c in (ahead, poisson, heat)] == [False, True, True]
    assert (poisson.numbers, heat.numbers) == ("1.0e-10, reached in 1 s", "1.0e-05")
    assert len(claims(actual, {})) == 1
    actual["heat1d"][LBFGS] = curve(1, 5e-5)
    assert not claims(actual, {})[0].holds
    assert final(curve(1, math.nan)) == math.inf
    assert find_median_seconds(curve(1, 1e-3, 1e-6), 1e-3) == 1.0
    assert find_median_seconds(curve(1, 1e-3), 1e-9) == math.inf
