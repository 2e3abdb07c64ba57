r"""How smooth a field is that noisy data determine: the weight of a prior by the data's evidence.

Let A_e, A_p, A_d be the weighted rows of equations, prior and data, and z their values. Around the
parameters the first two say that a change δ is normal with precision K = A_eᵀA_e + s A_pᵀA_p, and
mean δ₀, up to the noise's variance τ. Data then have the marginal likelihood of a Gaussian process:

    ν = z_d + A_d δ₀,   C = 1 + A_d K⁻¹ A_dᵀ,   −2 log p = n log νᵀC⁻¹ν + log det C + const.

Its smallest value over a grid of s is the factor by which the prior's weight should change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .._core.processes import Processes
from ..optim import Term
from .conditions import Condition, Data, Prior

_RIDGE = 1e-12  # of the largest entry: directions that neither equation nor prior see
_FACTORS = [10.0 ** (k / 4) for k in range(-8, 5)]  # what is known here holds nearby alone


def evidence(
    terms: Sequence[tuple[Condition, Term]], params: Mapping[str, Tensor], processes: Processes
) -> float:
    """The factor by which the prior's weight should change, at these parameters and weights."""
    free = {n: p for n, p in params.items() if p.requires_grad}
    size = sum(p.numel() for p in free.values())
    like = torch.zeros(0, dtype=torch.float64, device=next(iter(free.values())).device)
    grams = {kind: like.new_zeros(size, size + 1) for kind in ("equations", "prior")}
    rows, values = [like.new_zeros(0, size)], [like]
    for condition, term in terms:
        linear = term.map.linearize(free)
        a, z = linear.rows().detach().double(), linear.value.detach().flatten().double()
        if isinstance(condition, Data):
            rows.append(a)
            values.append(z)
        else:
            kind = "prior" if isinstance(condition, Prior) else "equations"
            grams[kind] += a.T @ torch.cat([a, z[:, None]], 1)
    equations, prior = processes.sum([grams["equations"], grams["prior"]])
    data, misfit = processes.gather([torch.cat(rows), torch.cat(values)])
    return min(_FACTORS, key=lambda s: _marginal(equations + s * prior, data, misfit))


def _marginal(known: Tensor, a: Tensor, z: Tensor) -> float:
    """−2 log p, from K with its right-hand side."""
    k, g = known[:, :-1].clone(), known[:, -1]
    k.diagonal().add_(_RIDGE * k.diagonal().max())
    lower = torch.linalg.cholesky_ex(k).L
    spread = torch.linalg.solve_triangular(lower, a.T, upper=False)  # L⁻¹A_dᵀ
    start = torch.linalg.solve_triangular(lower, -g[:, None], upper=False)[:, 0]
    c = spread.T @ spread
    c.diagonal().add_(1.0)
    root = torch.linalg.cholesky_ex(c).L
    off = torch.linalg.solve_triangular(root, (z + spread.T @ start)[:, None], upper=False)
    cost = len(z) * off.square().sum().log() + 2 * root.diagonal().log().sum()
    return float(cost) if torch.isfinite(cost) else float("inf")
