"""Weights of conditions in the loss: balanced ones, and those that data choose for a prior."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._core.processes import Processes
from ...optim import Term
from ..problem.conditions import Condition, Data, Equation, Prior
from ..problem.problem import Problem
from .residual import LocalResidual
from .sites import Sites

_HEAVIEST = 1e6


def balanced(problem: Problem, sites: Mapping[str, Sites]) -> dict[str, float]:
    """The weights of conditions; balanced ones by how strongly an error would be seen.

    A wave with the domain's own lengths, ∂ᵢ ~ π/Lᵢ, has residuals of some size in the equation and
    of another on the boundary. Their ratio is a boundary's weight, rounded down to a power of ten.
    Squared it would count errors of the solution alike, and 1 counts residuals alike.
    """
    equations = [c for c in problem.conditions if isinstance(c, Equation) and c.on is None]
    seen = sum(_visibility(problem, c, sites[c.name]) * c.weight for c in equations)
    out = {}
    for c in problem.conditions:
        out[c.name] = c.weight
        if c.balanced and equations:
            ratio = seen / _visibility(problem, c, sites[c.name])
            if math.isfinite(ratio) and ratio > 0:
                power = math.floor(math.log10(ratio) / 2)
                out[c.name] = min(max(10.0**power, 1 / _HEAVIEST), _HEAVIEST)
    return out


def _visibility(problem: Problem, condition: Condition, sites: Sites) -> float:
    """Mean square of a condition's terms for a wave with the domain's own lengths."""
    local = LocalResidual(problem, condition, sites)
    waves = (math.pi / (problem.domain.high - problem.domain.low)).tolist()
    space = problem.coordinates.space

    def size(index: Any) -> float:
        if index is None:
            return sum(waves[i] ** 2 for i in space)
        return math.prod(waves[i] for i in index)

    ones = torch.ones_like(sites[0].x[:, 0])
    slopes = local.slopes({key: ones * size(key[2]) for key in local.keys})[1]
    total = sum(float(s.square().mean(0).sum()) * size(k[2]) ** 2 for k, s in slopes.items())
    return total if math.isfinite(total) and total > 0 else float("nan")


_RIDGE = 1e-12  # of the largest entry: directions that neither equation nor prior see


_FACTORS = [10.0 ** (k / 4) for k in range(-8, 5)]  # what is known here holds nearby alone


def evidence(
    terms: Sequence[tuple[Condition, Term]], params: Mapping[str, Tensor], processes: Processes
) -> float:
    r"""The factor by which the prior's weight should change: where the data's evidence is largest.

    Let A_e, A_p, A_d be the weighted rows of equations, prior and data, and z their values. Around
    the parameters the first two say that a change δ is normal with mean δ₀ and, up to the noise's
    variance, precision K = A_eᵀA_e + s A_pᵀA_p. Data then are a Gaussian process with noise,

        ν = z_d + A_d δ₀,   C = 1 + A_d K⁻¹ A_dᵀ,   −2 log p = n log νᵀC⁻¹ν + log det C + const,

    whose smallest −2 log p over a grid of s is taken.
    """
    free = {n: p for n, p in params.items() if p.requires_grad}
    size = sum(p.numel() for p in free.values())
    like = torch.zeros(0, dtype=torch.float64, device=next(iter(free.values())).device)
    grams = {kind: like.new_zeros(size, size + 1) for kind in ("equations", "prior")}
    rows, values = [like.new_zeros(0, size)], [like]
    for condition, item in terms:
        linear = item.map.linearize(free)
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
