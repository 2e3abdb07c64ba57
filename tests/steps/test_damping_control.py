"""Trust in the quadratic model: damping by the ratio, and the clip in its norm."""

from __future__ import annotations

import pytest
import torch

from pullback import PullbackError
from pullback.steps import RatioDamping
from pullback.steps.wrappers import clip_factor


@pytest.mark.parametrize(
    ("ratio", "factor"),
    [(float("nan"), 2.0), (-1.0, 2.0), (0.24, 2.0), (0.25, 1.0), (0.75, 1.0), (0.76, 1 / 3)],
)
def test_the_damping_follows_the_ratio(ratio: float, factor: float) -> None:
    assert RatioDamping().next(0.5, ratio) == 0.5 * factor
    grown = 8.0 if factor > 1 else factor
    assert RatioDamping().next(0.5, ratio, increase=8.0) == 0.5 * grown


def test_the_damping_stays_in_its_bounds() -> None:
    control = RatioDamping(smallest=0.4, largest=0.6)
    assert control.next(0.5, 0.0) == 0.6
    assert control.next(0.5, 1.0) == 0.4


@pytest.mark.parametrize(
    "bad",
    [
        *({"low": 0.8}, {"increase": 0.5}, {"increase": float("inf")}, {"decrease": 0.0}),
        *({"decrease": 1.5}, {"smallest": -1.0}, {"largest": 0.0}, {"low": float("nan")}),
        {"increase": "2"},
    ],
    ids=str,
)
def test_unusable_numbers_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(PullbackError, match="low ≤ high"):
        RatioDamping(**bad)


@pytest.mark.parametrize("length", [0.0, 1e-40, 0.09, 0.25, 1.0, 1e30, float("inf")])
def test_a_clipped_vector_is_as_long_as_it_may_be(length: float) -> None:
    factor = clip_factor(torch.tensor(length), 0.25)
    assert factor.shape == ()
    if length <= 0.25:
        want = 1.0
    else:
        want = (0.25 / length) ** 0.5
    assert float(factor) == pytest.approx(want, rel=1e-6)


def test_a_length_that_is_not_a_number_stays_visible() -> None:
    assert bool(clip_factor(torch.tensor(torch.nan), 1.0).isnan())
