"""The Kronecker Gram: every view is that of ⊕ R ⊗ C, and sides invert safely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pullback as pb
from pullback.grams import Kronecker
from pullback.grams.kronecker import (
    EigenBlock,
    FactorInverses,
    Pair,
    Units,
    factor_matrix,
    invert_factors,
    merge_pairs,
)
from pullback.testing import assert_close, check_gram
from tests.pairs import each_once

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def symmetric(groups: int, n: int, rank: int | None = None, seed: int = 0) -> Tensor:
    a = draw(groups, n, n + 2 if rank is None else rank, seed=seed)
    return a @ a.mT / n


def orthogonal(groups: int, n: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(draw(groups, n, n, seed=seed))[0]


BLOCKS: dict[str, Any] = {
    "pair": Pair(symmetric(1, 3), symmetric(1, 4, seed=1)),
    "groups": Pair(symmetric(2, 3), symmetric(2, 2, seed=1)),
    "diagonal left": Pair(symmetric(2, 3).diagonal(dim1=1, dim2=2), symmetric(2, 2, seed=1)),
    "diagonal right": Pair(symmetric(1, 3), symmetric(1, 2).diagonal(dim1=1, dim2=2)),
    "two diagonals": Pair(draw(1, 3).square(), draw(1, 2, seed=1).square()),
    "singular": Pair(symmetric(1, 4, 2), symmetric(1, 3, 1, seed=1)),
    "units": Units(symmetric(5, 2)),
    "single entries": Units(draw(4, 1, 1).square()),
    "rotated": EigenBlock(orthogonal(2, 3), orthogonal(2, 2), draw(2, 3, 2).square()),
    "rotated, one basis": EigenBlock(None, orthogonal(1, 2), draw(1, 3, 2).square()),
    "plain matrices": (symmetric(1, 3)[0], symmetric(1, 2, seed=1)[0]),
    "plain diagonal": (draw(3).square(), symmetric(1, 2, seed=1)[0]),
}


def dense(block: Any) -> Tensor:
    """Kronecker products by `torch.kron`, entry by entry."""
    if isinstance(block, Units):
        return torch.block_diag(*block.matrices)
    if isinstance(block, EigenBlock):
        return dense_of_eigenvalues(block)
    if isinstance(block, Pair):
        left, right = block.output_factor, block.input_factor
    else:
        left, right = block
    pieces = zip(as_matrices(left), as_matrices(right), strict=True)
    return torch.block_diag(*[torch.kron(a, b) for a, b in pieces])


def dense_of_eigenvalues(block: EigenBlock) -> Tensor:
    """(U ⊗ W) diag(λ) (U ⊗ W)ᵀ of every group; a basis that is None is the identity."""
    groups, o, i = block.eigenvalues.shape
    output_basis = block.output_basis
    if output_basis is None:
        output_basis = torch.eye(o, dtype=DOUBLE).expand(groups, o, o)
    input_basis = block.input_basis
    if input_basis is None:
        input_basis = torch.eye(i, dtype=DOUBLE).expand(groups, i, i)
    matrices = []
    for u, w, values in zip(output_basis, input_basis, block.eigenvalues, strict=True):
        basis = torch.kron(u.contiguous(), w.contiguous())
        matrices.append(basis @ torch.diag(values.flatten()) @ basis.T)
    return torch.block_diag(*matrices)


def as_matrices(factor: Tensor) -> Tensor:
    """Return (groups, n, n) of a matrix, of groups of them, or of diagonals."""
    if factor.ndim == 1:
        factor = torch.diag(factor)
    if factor.ndim == 2 and factor.shape[0] != factor.shape[1]:
        factor = torch.diag_embed(factor)
    if factor.ndim == 2:
        factor = factor[None]
    return factor.contiguous()


@pytest.mark.parametrize("name", BLOCKS)
def test_laws(name: str) -> None:
    gram = Kronecker([BLOCKS[name]])
    check_gram(gram)
    assert_close(gram.dense(), dense(BLOCKS[name]), 1e-12, "dense")
    assert gram.structure.kronecker
    assert not gram.structure.exact


@pytest.mark.parametrize(("name", "damping"), each_once(BLOCKS, [0.0, 1e-3, 1.0]))
def test_solve(name: str, damping: float) -> None:
    gram = Kronecker([BLOCKS[name]])
    g = dense(BLOCKS[name])
    v = draw(gram.size, seed=5)
    want = torch.linalg.pinv(
        g + damping * torch.eye(len(g), dtype=DOUBLE), hermitian=True, rtol=1e-12
    )
    assert_close(gram.solve(v, damping), want @ v, 1e-8, "(G + λ)⁺v")


def test_blocks_stand_where_the_index_says() -> None:
    blocks = [BLOCKS["groups"], BLOCKS["units"], BLOCKS["rotated"]]
    size = sum(len(dense(b)) for b in blocks)
    index = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    gram = Kronecker(blocks, index)
    want = torch.empty(size, size, dtype=DOUBLE)
    want[index[:, None], index] = torch.block_diag(*map(dense, blocks))
    check_gram(gram)
    assert_close(gram.dense(), want, 1e-12, "dense")
    v = draw(size)
    assert_close(
        gram.solve(v, 0.1),
        torch.linalg.solve(want + 0.1 * torch.eye(size, dtype=DOUBLE), v),
        1e-9,
        "solve",
    )


def test_solvers_take_it() -> None:
    gram = Kronecker([BLOCKS["pair"], BLOCKS["groups"]])
    v = draw(gram.size)
    g = gram.dense()
    solver = pb.solvers.Cholesky()
    solution = solver.solve(solver.init(gram), v, 0.1)
    assert_close(
        solution.x,
        torch.linalg.solve(g + 0.1 * torch.eye(len(g), dtype=DOUBLE), v),
        1e-9,
        "Cholesky",
    )


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 999)
)
@settings(max_examples=60, deadline=None)
def test_merged_keeps_partial_traces(groups: int, o: int, i: int, roles: int, seed: int) -> None:
    pairs = [
        Pair(symmetric(groups, o, seed=seed + 2 * k), symmetric(groups, i, seed=seed + 2 * k + 1))
        for k in range(roles)
    ]
    one = merge_pairs(pairs)
    for g in range(groups):
        actual = torch.kron(one.output_factor[g], one.input_factor[g]).view(o, i, o, i)
        want = sum(torch.kron(p.output_factor[g], p.input_factor[g]) for p in pairs)
        want = torch.as_tensor(want).view(o, i, o, i)
        for axes in ("aibi->ab", "aiaj->ij"):
            assert_close(torch.einsum(axes, actual), torch.einsum(axes, want), 1e-12, axes)


def test_merged_of_alike_sides_is_their_sum() -> None:
    """Σ R_u ⊗ C with one C is a Kronecker product, and found as one; diagonals add to matrices."""
    c = symmetric(1, 3)
    pairs = [Pair(symmetric(1, 4, seed=k), c) for k in range(3)]
    want = sum(p.dense() for p in pairs)
    assert_close(merge_pairs(pairs).dense(), torch.as_tensor(want), 1e-12, "one right side")
    mixed = merge_pairs([pairs[0], Pair(draw(1, 4).square(), c)])
    want = pairs[0].dense() + Pair(torch.diag_embed(draw(1, 4).square()), c).dense()
    assert_close(mixed.dense(), want, 1e-12, "a diagonal and a matrix")
    nothing = merge_pairs(
        [Pair(0 * pairs[0].output_factor, c), Pair(0 * pairs[0].output_factor, c)]
    )
    assert nothing.dense().count_nonzero() == 0
    zero = torch.zeros_like(c)
    crossed = merge_pairs(
        [Pair(pairs[0].output_factor, zero), Pair(torch.zeros_like(pairs[0].output_factor), c)]
    )
    assert crossed.dense().count_nonzero() == 0


def plain(arguments: list[Tensor], *, singular: bool = False) -> FactorInverses:
    """The inverses of sides as they are."""
    shifts = [torch.zeros(len(side), dtype=side.dtype) for side in arguments]
    return invert_factors(arguments, [1.0] * len(arguments), shifts, singular=singular)


def test_sides_invert_together_and_report() -> None:
    good = symmetric(2, 3)
    other = symmetric(1, 3, seed=1)
    poor = symmetric(1, 3, 2, seed=2)
    line = draw(1, 4).square() + 0.1
    hole = torch.tensor([[1.0, 0.0, 2.0]], dtype=DOUBLE)
    matrices = [good, line, other, poor, hole]
    inverses = plain(matrices)
    assert inverses.failed == [False, False, False, True, True]
    assert_close(inverses.matrices[0], torch.linalg.inv(good), 1e-9, "groups")
    assert_close(inverses.matrices[1], 1 / line, 1e-12, "diagonal")
    assert_close(inverses.matrices[2], torch.linalg.inv(other), 1e-9, "the same size")
    inverses = plain(matrices, singular=True)
    assert inverses.failed == [False] * 5
    assert inverses.ranks[:3] == [None, None, None]
    assert inverses.ranks[3] is not None
    assert inverses.ranks[3].tolist() == [2]
    assert_close(
        inverses.matrices[3], torch.linalg.pinv(poor, hermitian=True), 1e-7, "on the range"
    )
    assert_close(inverses.matrices[4], torch.tensor([[1.0, 0.0, 0.5]], dtype=DOUBLE), 1e-12, "hole")
    broken = plain([torch.full((1, 2, 2), torch.nan, dtype=DOUBLE)], singular=True)
    assert broken.failed == [True]


def test_one_matrix_of_a_group_may_be_singular() -> None:
    stack = torch.cat([symmetric(1, 3), symmetric(1, 3, 1, seed=2)])
    inverses = plain([stack], singular=True)
    assert_close(
        inverses.matrices[0], torch.linalg.pinv(stack, hermitian=True, rtol=1e-12), 1e-7, "range"
    )


def test_zero_sides_are_no_trouble() -> None:
    zero = Pair(torch.zeros(1, 2, 2, dtype=DOUBLE), symmetric(1, 3))
    v = draw(1, 2, 3)
    assert zero.solve(v).count_nonzero() == 0
    assert_close(zero.solve(v, 2.0), v / 2, 1e-12, "only the damping")
    empty = Units(torch.zeros(3, 1, 1, dtype=DOUBLE))
    assert empty.solve(draw(3, 1)).count_nonzero() == 0


def test_shifted_and_multiply() -> None:
    v = draw(2, 3, 4)
    left = symmetric(2, 3)
    right = symmetric(2, 4, seed=1)
    by = torch.tensor([0.5, 2.0], dtype=DOUBLE)
    assert_close(
        factor_matrix.multiply(left, v, right),
        torch.einsum("gab,gbc,gcd->gad", left, v, right),
        1e-12,
        "RVC",
    )
    want = left + by[:, None, None] * torch.eye(3, dtype=DOUBLE)
    assert_close(factor_matrix.add_identity(left, by), want, 1e-12, "matrix")
    line = factor_matrix.diagonal(left)
    assert_close(
        factor_matrix.to_matrix(factor_matrix.add_identity(line, by)),
        torch.diag_embed(line + by[:, None]),
        1e-12,
        "diagonal",
    )
    assert_close(factor_matrix.trace(left), torch.einsum("gii->g", left), 1e-12, "trace")


@pytest.mark.parametrize(
    ("block", "what"),
    [
        ((symmetric(2, 3), symmetric(1, 3)), "The Kronecker factors do not fit together"),
        ((draw(1, 2, 3), symmetric(1, 3)), "A Kronecker factor is not square"),
        ((symmetric(1, 3),), "A block is not usable"),
        (3.0, "A block is not usable"),
        (("R", "C"), "A block is not usable"),
    ],
)
def test_bad_blocks_are_refused(block: Any, what: str) -> None:
    with pytest.raises(pb.PullbackError) as caught:
        Kronecker([block])
    assert caught.value.what == what


@pytest.mark.parametrize("damping", [1e-12, 1e-6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_gains_and_shifts_invert_by_elimination(dtype: torch.dtype, damping: float) -> None:
    """Singular pairs, and pairs that round-off left indefinite, stay within 1/damping."""
    v = draw(50, 2).to(dtype)
    singular = v[:, :, None] * v[:, None]
    regular = symmetric(50, 2).to(dtype)
    regular += 0.1 * torch.eye(2, dtype=dtype)
    inverse = Units(regular).inverse(damping)
    want = torch.linalg.inv(regular.double() + damping * torch.eye(2, dtype=DOUBLE))
    torch.testing.assert_close(inverse.double(), want, rtol=1e-4, atol=1e-4)
    for m in (singular, torch.zeros_like(singular)):
        inverse_of_units = Units(m).inverse(damping).double()
        assert torch.isfinite(inverse_of_units).all()
        assert torch.equal(inverse_of_units, inverse_of_units.mT)
        values = torch.linalg.eigvalsh(inverse_of_units)
        assert (values[:, 1] <= 3.01 / damping).all()
