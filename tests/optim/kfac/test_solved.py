"""Directions from Cholesky factors: against dense Kronecker solves; gradients stay as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pullback.optim.kfac.blocks.inverse import Inverse, solved

DOUBLE = torch.float64


def matrices(count: int, n: int) -> Tensor:
    x = torch.randn(count, n, 2 * n, dtype=DOUBLE)
    return x @ x.mT / n + torch.eye(n, dtype=DOUBLE)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("diagonal", ["", "left", "right", "both"])
@pytest.mark.parametrize("turned", [False, True])
def test_factors_solve_for_both_sides(groups: int, bias: bool, diagonal: str, turned: bool) -> None:
    torch.manual_seed(0)
    o, i = 5, 7
    dense, held = [], []
    for n, name in ((o, "left"), (i + bias, "right")):
        if diagonal in (name, "both"):
            d = torch.rand(groups, n, dtype=DOUBLE) + 0.1
            dense.append(torch.diag_embed(d))
            held.append(1 / d)
        else:
            dense.append(matrices(groups, n))
            held.append(torch.linalg.cholesky(dense[-1]))
    v = (
        torch.randn(groups, i, o, dtype=DOUBLE).mT
        if turned
        else torch.randn(groups, o, i, dtype=DOUBLE)
    )
    b = torch.randn(groups, o, dtype=DOUBLE) if bias else None
    kept = v.clone()
    found = solved(Inverse(*held, factors=True), v, b)
    whole = v if b is None else torch.cat([v, b[..., None]], 2)
    for g in range(groups):
        gram = torch.kron(dense[0][g], dense[1][g])
        want = torch.linalg.solve(gram, whole[g].flatten()).view(o, -1)
        torch.testing.assert_close(found[0][g], want[:, :i])
        if bias:
            torch.testing.assert_close(found[1][g], want[:, i])
    assert torch.equal(v, kept)
