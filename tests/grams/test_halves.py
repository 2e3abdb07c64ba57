"""Cholesky factors by halves: against LAPACK's, at bad conditions, and what fails is told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pullback.grams.kronecker import halves, inverses
from tests.pairs import all_pairs

DOUBLE = torch.float64


def matrices(count: int, n: int, decades: float = 1.0, seed: int = 0) -> Tensor:
    """Positive definite, with eigenvalues from 1 down to 10^-decades."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(count, n, n, dtype=DOUBLE, generator=g))[0]
    m = (q * torch.logspace(0, -decades, n, dtype=DOUBLE)) @ q.mT
    return (m + m.mT) / 2


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves of tiny matrices too, down to a few rows."""
    sizes = {"_PAYS": True, "_LARGE": 4, "_LEAF": 3, "_WIDE": 1, "_STRIP": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(halves, name, value)


@given(st.integers(1, 3), st.integers(1, 60), st.integers(0, 999))
@settings(max_examples=60, deadline=None)
def test_every_size(count: int, n: int, seed: int) -> None:
    m = matrices(count, n, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        lower, info = halves.factorized(m.clone())
    assert not info.any()
    torch.testing.assert_close(lower, torch.linalg.cholesky(m), rtol=1e-10, atol=1e-10)
    assert torch.equal(lower, lower.tril())


@pytest.mark.parametrize("n", [640, 785])
@pytest.mark.parametrize("decades", [1, 5])
def test_single_precision_is_as_good_as_lapack(
    monkeypatch: pytest.MonkeyPatch, n: int, decades: int
) -> None:
    monkeypatch.setattr(halves, "_PAYS", True)
    m = matrices(1, n, decades).float()
    want = torch.linalg.inv(m.double())
    found = inverses([m], shifts=[torch.zeros(1)])
    lapack = torch.cholesky_inverse(torch.linalg.cholesky(m)).double()
    error, usual = ((x.double() - want).norm() / want.norm() for x in (found.sides[0], lapack))
    assert found.failed == [False]
    assert error <= 3 * usual + 1e-6


@pytest.mark.parametrize(
    ("at", "what", "factors"),
    all_pairs([0, 5, 11, 19], [-1.0, 0.0, float("nan"), float("inf")], [False, True]),
)
def test_what_fails_is_told_and_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, at: int, what: float, factors: bool
) -> None:
    small(monkeypatch)
    good, poor = matrices(1, 20), matrices(3, 20, seed=1)
    poor[1, at, :] = poor[1, :, at] = 0
    poor[1, at, at] = what
    found = inverses([good, poor], factors=factors)
    assert found.failed == [False, True]
    want = torch.linalg.cholesky(good) if factors else torch.linalg.inv(good)
    torch.testing.assert_close(found.sides[0], want)
    kept = poor[[0, 2]]
    want = torch.linalg.cholesky(kept) if factors else torch.linalg.inv(kept)
    torch.testing.assert_close(found.sides[1][[0, 2]], want)


@pytest.mark.parametrize("singular", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_sides_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, singular: bool, scaled: bool, shifted: bool
) -> None:
    small(monkeypatch)
    every = [matrices(2, 5), matrices(1, 140), matrices(1, 13)]
    kept = [m.clone() for m in every]
    scales = [2.0, 0.5, 3.0] if scaled else None
    shifts = [torch.rand(len(m), dtype=DOUBLE) for m in every] if shifted else None
    found = inverses(every, scales=scales, shifts=shifts, singular=singular)
    assert not any(found.failed)
    for i, m in enumerate(kept):
        dense = m / (scales[i] if scales else 1.0)
        if shifts:
            dense = dense + shifts[i][:, None, None] * torch.eye(m.shape[-1], dtype=DOUBLE)
        torch.testing.assert_close(found.sides[i], torch.linalg.inv(dense))
    assert all(torch.equal(a, b) for a, b in zip(every, kept, strict=True))
