"""Sketched: orthogonal transforms, and the sketched problem solved exactly."""

from __future__ import annotations

import pytest
import torch

import pullback as pb
from pullback.solvers import Sketched, sketched
from pullback.solvers.sketched import ColumnSketch, RowSketch
from pullback.testing import assert_close
from tests.pairs import all_pairs
from tests.solvers.helpers import hold, random, vector


def test_a_row_sketch_adds_signed_rows_into_buckets() -> None:
    sketch = RowSketch.draw(12, 4, random(1, 1), torch.Generator().manual_seed(0))
    a = random(12, 5)
    matrix = torch.zeros(4, 12).double()
    matrix[sketch.bucket, torch.arange(12)] = sketch.sign
    assert_close(sketch(a), matrix @ a, 1e-14, "Π A")
    assert_close(sketch(a[:, 0]), matrix @ a[:, 0], 1e-14, "Π r")
    assert set(sketch.sign.tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize(("p", "count"), [(10, 4), (2, 1), (300, 47), (300, 299), (2000, 10)])
def test_a_column_sketch_has_orthonormal_columns(p: int, count: int) -> None:
    sketch = ColumnSketch.draw(p, count, random(1, 1), torch.Generator().manual_seed(0))
    omega = sketch.expand(torch.eye(count).double()).T  # (p, count)
    assert_close(omega.T @ omega, torch.eye(count).double(), 1e-13, "ΩᵀΩ = I")
    assert bool(omega.any(1).all())  # every column of A has a share
    x = random(3, p)
    assert_close(sketch.compress(x), x @ omega, 1e-13, "x Ω")
    assert_close(sketch.compress(x[0]), x[0] @ omega, 1e-13, "one row")
    assert_close(sketch.expand(x[0, :count]), omega @ x[0, :count], 1e-13, "Ω y")


def test_a_column_sketch_keeps_lengths() -> None:
    """The mean over draws of ‖xᵀΩ‖² is k/p of ‖x‖², for spread and for single entries."""
    x = torch.stack([torch.ones(300).double() / 300**0.5, torch.eye(300).double()[7]])
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(200):
        sketch = ColumnSketch.draw(300, 60, x, generator)
        shares.append(sketch.compress(x).square().sum(1))
    mean = torch.stack(shares).mean(0)
    assert_close(mean, torch.full((2,), 0.2).double(), 0.02, "k/p")


@pytest.mark.parametrize(
    ("rows", "columns", "damping", "form"),
    all_pairs([8, None], [5, None], [0.0, 0.1], ["rows", "kernel", "matrix_free"]),
)
def test_it_solves_the_sketched_problem(rows, columns, damping: float, form: str) -> None:
    """x = Ω y with y the damped least-squares solution of Π A Ω y = Π r."""
    a = random(20, 9)
    r = vector(20)
    solver = Sketched(rows, columns, seed=3)
    state = solver.init(hold(a, form))
    if state.rows is None:
        pi = torch.eye(20).double()
    else:
        pi = state.rows(torch.eye(20).double())
    eye = torch.eye(9).double()
    if state.columns is None:
        omega = eye
    else:
        omega = state.columns.compress(eye)
    small = pi @ a @ omega
    k = small.shape[1]
    if damping:
        inverse = torch.linalg.inv(small.T @ small + damping * torch.eye(k).double())
    else:
        inverse = torch.linalg.pinv(small.T @ small, hermitian=True)
    from_r = solver.solve(state, a.T @ r, damping, whitened=r).x
    assert_close(from_r, omega @ inverse @ small.T @ pi @ r, 1e-8, "from r")
    from_g = solver.solve(state, a.T @ r, damping).x
    assert_close(from_g, omega @ inverse @ omega.T @ a.T @ r, 1e-8, "from g")


@pytest.mark.parametrize("rows", [20, 100, None])
def test_a_complete_sketch_is_exact(rows: int | None) -> None:
    a = random(20, 9)
    r = vector(20)
    solver = Sketched(rows, 9)
    x = solver.solve(solver.init(hold(a, "rows")), a.T @ r, whitened=r).x
    assert_close(x, torch.linalg.pinv(a) @ r, 1e-11, "A⁺r")


def test_each_init_draws_anew_and_its_number_repeats_it() -> None:
    a = random(20, 9)
    solver = Sketched(rows=6, seed=0)
    one = solver.init(hold(a, "rows"))
    two = solver.init(hold(a, "rows"))
    assert one.rows is not None
    assert two.rows is not None
    assert not torch.equal(one.rows.bucket, two.rows.bucket)
    fresh = Sketched(rows=6, seed=0)
    fresh.seek(1)
    repeated = fresh.init(hold(a, "rows"))
    assert repeated.rows is not None
    assert torch.equal(repeated.rows.bucket, two.rows.bucket)
    assert torch.equal(repeated.rows.sign, two.rows.sign)
    other = Sketched(rows=6, seed=1).init(hold(a, "rows"))
    assert other.rows is not None
    assert not torch.equal(other.rows.bucket, two.rows.bucket), "seed and number are no sum"


def test_sketches_keep_lengths_in_the_mean() -> None:
    """E[ΠᵀΠ] = I: the sketched Gram is unbiased."""
    a = random(30, 4)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(4, 4).double()
    for _ in range(800):
        small = RowSketch.draw(30, 10, a, generator)(a)
        total += small.T @ small / 800
    assert_close(total, a.T @ a, 0.1, "E[(ΠA)ᵀΠA] = AᵀA")


def test_unusable_arguments_are_refused() -> None:
    for wrong in ({"rows": 0}, {"columns": -1}):
        with pytest.raises(pb.PullbackError, match="positive"):
            Sketched(**wrong)
    with pytest.raises(pb.PullbackError, match="rows"):
        Sketched().init(hold(random(3, 4), "dense"))


def test_rows_are_compressed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sketch = ColumnSketch.draw(10, 4, random(1, 1), torch.Generator().manual_seed(0))
    x = random(7, 10)
    whole = sketch.compress(x)
    limits = sketched.SketchSizes(most_entries=25)  # two rows
    monkeypatch.setattr(sketched, "_SIZES", limits)
    assert_close(sketch.compress(x), whole, 1e-14, "x Ω")
    assert sketch.compress(x[0]).shape == (4,)
    assert sketch.compress(x[:0]).shape == (0, 4)
