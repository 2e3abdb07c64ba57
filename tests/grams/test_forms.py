"""The four forms are one G; the laws run on each, and on random matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pullback as pb
from pullback.grams import Dense, Gram, Kernel, Operator, Rows
from pullback.testing import assert_close, check_gram


def matrix(n: int, p: int, rank: int | None = None, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, p, generator=generator, dtype=torch.float64)
    if rank is None:
        return a
    b = torch.randn(n, rank, generator=generator, dtype=torch.float64)
    return b @ torch.randn(rank, p, generator=generator, dtype=torch.float64)


def forms(a: Tensor) -> dict[str, Gram]:
    project = a.matmul
    lift = a.T.matmul
    return {
        "rows": Rows(a),
        "kernel": Kernel(a @ a.T, project, lift, a.shape[1]),
        "dense": Dense(a.T @ a, len(a)),
        "matrix_free": Operator(project, lift, (a.shape[0], a.shape[1]), a.dtype, a.device),
    }


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (1, 4), (4, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_laws(shape: tuple[int, int], form: str) -> None:
    check_gram(forms(matrix(*shape))[form])


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_laws_of_a_deficient_gram(form: str) -> None:
    check_gram(forms(matrix(5, 6, rank=2))[form])
    check_gram(forms(torch.zeros(2, 3).double())[form])


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 1000), st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_forms_agree_on_random_matrices(n: int, p: int, seed: int, scale: float) -> None:
    a = scale * matrix(n, p, seed=seed)
    v = matrix(p, 1, seed=seed + 1)[:, 0]
    want = a.T @ (a @ v)
    for name, gram in forms(a).items():
        assert_close(gram.matvec(v), want, 1e-12, f"{name}: G v")
        assert_close(gram.trace(), a.square().sum(), 1e-12, f"{name}: tr G")
        assert (gram.count, gram.size) == (n, p)


def test_the_trace_of_many_rows_is_estimated() -> None:
    """Beyond 256 rows an operator's trace is a seeded estimate, close and repeatable."""
    a = matrix(400, 5)
    gram = forms(a)["matrix_free"]
    assert_close(gram.trace(), a.square().sum(), 0.2, "estimated trace")
    assert float(gram.trace()) == float(gram.trace())


def test_what_a_form_holds_is_declared() -> None:
    for name, gram in forms(matrix(2, 5)).items():
        assert gram.structure.holds == ("operator" if name == "matrix_free" else name)
        assert gram.structure.exact
        assert gram.structure.low_rank


@pytest.mark.parametrize("wrong", [lambda: Rows(torch.ones(3)), lambda: Dense(torch.ones(2, 3))])
def test_wrong_shapes_are_refused(wrong) -> None:
    with pytest.raises(pb.PullbackError, match="matrix"):
        wrong()


def test_the_laws_catch_wrong_grams() -> None:
    a = matrix(3, 5)

    class Skew(Dense):
        def matvec(self, v: Tensor) -> Tensor:
            return self._g @ v + torch.arange(len(v)).to(v)

    wrong: list[tuple[str, Gram]] = [
        ("matvec", Skew(a.T @ a, 3)),
        ("symmetric", Dense(torch.triu(a.T @ a), 3)),
        ("semidefinite", Dense(-torch.eye(5).double(), 3)),
        ("matvec", Kernel(a @ a.T, a.matmul, lambda c: 2 * (a.T @ c), 5)),
        ("trace", Kernel(a @ a.T + torch.eye(3), a.matmul, a.T.matmul, 5)),
        ("kernel", Kernel((a @ a.T).diagonal().diag(), a.matmul, a.T.matmul, 5)),
    ]
    for message, gram in wrong:
        with pytest.raises(AssertionError, match=message):
            check_gram(gram)
