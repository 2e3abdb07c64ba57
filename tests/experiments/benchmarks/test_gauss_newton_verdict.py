"""The judgement of outer steps and passes, on a record that is made up."""

from typing import Any

import pytest

from pullback_experiments.benchmarks import gauss_newton_verdict as verdict
from pullback_experiments.benchmarks.gauss_newton_inner import OuterRun
from pullback_experiments.tables.numbers import record


def make_run(final: float, inner: int, outer: int, *, lr: float = 0.01, size: int = 16) -> Any:
    plan = OuterRun("text", "kfac", lr, inner, outer, size, seed=0, device="cpu")
    return {**vars(plan), "passes": plan.passes, "final": final}


ORDINARY = [make_run(3.0, 0, 20), make_run(2.5, 0, 40), make_run(2.0, 0, 160)]
SMALL = [make_run(2.6, 0, 40, size=1), make_run(1.8, 0, 320, size=1)]


def test_steps_and_passes_to_the_same_loss() -> None:
    runs = [*ORDINARY, *SMALL, make_run(2.25, 20, 10), make_run(2.4, 20, 10, lr=0.02)]
    (one,) = verdict.compare(runs)
    assert one.run["lr"] == 0.01  # the better rate
    assert one.ordinary.low == pytest.approx(80)  # halfway between 40 and 160 in the logarithm
    assert one.ordinary_passes.high == pytest.approx(80 * 16)
    assert one.small is not None
    assert one.small.low == pytest.approx(40 * 8 ** (0.35 / 0.8))
    steps, passes, small = verdict.judge(runs)
    assert steps.holds  # 8 times
    assert passes.holds  # 10·(1 + 5/3·19) = 327
    assert not small.holds
    head, row = verdict.list_rows(runs)
    assert row == ["10×16", "20 of K-FAC", "2.250", "80", "327", "1280", "99"]
    assert len(head) == len(row)


def test_losses_beyond_the_lengths_on_record_bound_the_ratio() -> None:
    ahead, *_ = verdict.judge([*ORDINARY, make_run(1.5, 5, 20)])
    assert ahead.holds
    assert ahead.numbers == "20 beside >160"
    behind, *_ = verdict.judge([*ORDINARY, make_run(3.5, 5, 20)])
    assert not behind.holds
    assert behind.numbers == "20 beside ≤20"


def test_an_inner_step_takes_its_share_of_the_batch() -> None:
    plan = OuterRun("text", "kfac", 0.01, 5, 2, 16, seed=0, device="cpu")
    assert plan.share == 3
    assert plan.passes == pytest.approx(2 * 3 * (1 + 4 * 5 / 3))
    assert OuterRun("text", "kfac", 0.01, 60, 2, 16, seed=0, device="cpu").share == 1


def test_claims_on_record_are_known_to_hold_or_not() -> None:
    runs = list(record("gauss-newton-inner")["results"].values())
    surprises = [str(check) for check in verdict.judge(runs) if not check.agrees]
    assert not surprises  # NOT_HOLDING lists the claims that do not hold
