"""The error of a solution, estimated from its residuals and its tangents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.space import ParameterSpace
from ...maps.jets import Unsupported
from ..discretization.term import build_term
from ..discretization.trial import Trial
from ..networks.modules import Slabs
from ..networks.windows import restrict_to_window
from ..problem.conditions import Dirichlet, Energy
from ..problem.problem import Problem
from .validation import Validation

_LARGEST = 2000  # parameters up to which the error equation is solved


_CUT = 1e-10  # singular values below this share of the largest are left out


_LOOSE = 1e-4  # the share of the tangents, or of an unknown, that such directions may move


_FEWEST, _SEED = 500, 104_729  # points of a condition, and their seed


_ZERO = 1e-300  # the least size of a solution


_SAMPLES = 2000  # points at which an error is measured


@dataclass(frozen=True)
class Estimate:
    """The error of a solution by its own tangents.

    Attributes:
        error: estimated relative L² error, all fields together; infinite where the conditions do
            not determine them.
        spread: standard errors of the unknown coefficients, by name; infinite likewise.
        affine: whether the problem is linear; otherwise the error must be small for this to hold.
    """

    error: float
    spread: Mapping[str, float]
    affine: bool


class ErrorField:
    """The error e from A δ = r at fresh points, e = T δ, where T are the fields' tangents.

    For a linear equation L u = f the error solves L e = r, with r the residual. What no tangent
    explains, r − A δ, adds at most its norm times max ‖T δ‖/‖A δ‖, the equation's stability as far
    as the tangents see it. Directions δ with A δ = 0 change nothing, unless a condition is missing:
    then T δ is another solution.

    Attributes:
        explained: the mean square of T δ over the domain, all fields together.
        rest: that of what the unexplained residual may add; infinite where directions that no
            residual sees move the fields.
        size: that of the solution.
        spread: standard errors of the unknown coefficients, by name.
        corrected: the solution without T δ.
    """

    def __init__(self, problem: Problem, trial: Trial, weights: Mapping[str, float]) -> None:
        params: dict[str, Tensor] = {n: p for n, p in trial.named_parameters() if p.requires_grad}
        count = max(2 * sum(p.numel() for p in params.values()), _FEWEST)
        counts = {c.name: count for c in problem.conditions}
        validation = Validation(problem, trial, counts, weights, _SEED)
        with torch.enable_grad():
            linears = []
            for c in problem.conditions:
                sites = validation.points(c, 1, count)
                found = build_term(problem, c, trial, sites, weights[c.name])
                linears.append(found.map.linearize(params))
            a = torch.cat([x.rows() for x in linears]).double()
            r = torch.cat([x.value.flatten() for x in linears]).double()
            tangents, values = _tangents(problem, trial, params)
        u, s, vh = torch.linalg.svd(a, full_matrices=False)
        kept = s > _CUT * s[0]
        unseen = vh[~kept].T
        loose = float(_norm(tangents @ unseen)) > _LOOSE * float(_norm(tangents))
        u, s, v = u[:, kept], s[kept], vh[kept].T
        reach = tangents @ v / s  # the field of each singular direction
        coefficients = u.T @ r
        stability = inf if loose else _norm(reach)
        self.explained = float((reach @ coefficients).square().sum())
        self.rest = float(stability * (r - u @ coefficients).norm()) ** 2
        self.size = float(values.square().sum())
        self.spread = _spread(params, unseen, v, s, u, r)
        space = ParameterSpace(params)
        self.corrected = Corrected(trial, space.split((v @ (coefficients / s)).to(space.dtype)))


class Corrected(nn.Module):
    """u − T δ: the solution without an error that its tangents explain."""

    def __init__(self, trial: Trial, move: dict[str, Tensor]) -> None:
        super().__init__()
        self.trial, self._move = trial, move

    def forward(self, x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise Unsupported("a tangent")

        def fields(params: dict[str, Tensor]) -> Tensor:
            return self.trial.apply_to(params, x)

        named = dict(self.trial.named_parameters())
        point = {n: named[n].detach() for n in self._move}
        found = torch.func.jvp(fields, (point,), (self._move,))
        return found[0] - found[1]


def estimate(
    problem: Problem, trial: Trial, weights: Mapping[str, float], affine: bool
) -> Estimate | None:
    """The error by the network's own tangents; None for energies and above 2000 parameters.

    With slabs of time each one's error begins with the last one's at its end.
    """
    network = trial.network
    pieces = network.networks if isinstance(network, Slabs) else [network]
    most = max(sum(p.numel() for p in piece.parameters()) for piece in pieces)
    if most > _LARGEST or any(isinstance(c, Energy) for c in problem.conditions):
        return None
    if not isinstance(network, Slabs):
        found = ErrorField(problem, trial, weights)
        error = (found.explained**0.5 + found.rest**0.5) / max(found.size**0.5, _ZERO)
        return Estimate(error, found.spread, affine)
    unknowns = {n: p.item() for n, p in trial.unknowns.items()}
    before, carried, total, size, spread = None, 0.0, 0.0, 0.0, {}
    for piece, (start, end) in zip(network.networks, pairwise(network.edges.tolist()), strict=True):
        part = restrict_to_window(problem, start, end, before)
        found = ErrorField(part, Trial(piece, unknowns, next(piece.parameters())), weights)
        carried += found.rest**0.5
        total += (end - start) * (found.explained**0.5 + carried) ** 2
        size += (end - start) * found.size
        before, spread = found.corrected, found.spread
    return Estimate((total / max(size, _ZERO)) ** 0.5, spread, affine)


def _tangents(problem: Problem, trial: Trial, params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """∂u/∂w and u of all fields over the domain; constants of free fields are left out."""
    rows, values = [], []
    for name in problem.fields:
        field = Dirichlet(0.0, field=name, on=problem.domain)
        x = problem.domain.sample(_SAMPLES, "sobol", seed=3)
        like = next(iter(params.values()))
        linear = build_term(
            problem, field, trial, (x.to(like.dtype, like.device),), 1.0
        ).map.linearize(params)
        row, value = linear.rows().double(), linear.value.flatten().double()
        if name in problem.free:
            row, value = row - row.mean(0), value - value.mean()
        rows.append(row)
        values.append(value)
    return torch.cat(rows), torch.cat(values)


def _norm(matrix: Tensor) -> Tensor:
    """The largest singular value; zero where there is none."""
    return torch.linalg.matrix_norm(matrix, 2) if matrix.numel() else matrix.new_zeros(())


def _spread(
    params: dict[str, Tensor], unseen: Tensor, v: Tensor, s: Tensor, u: Tensor, r: Tensor
) -> dict[str, float]:
    """Standard errors of the unknowns: √Σ (A⁺)²ᵢ rᵢ², with n/(n − rank) for what was fitted.

    That of an unknown which moves in a direction that no residual sees is infinite.
    """
    at, out = 0, {}
    share = len(r) / max(1, len(r) - len(s))
    for name, p in params.items():
        if name.startswith("unknowns."):
            row = (v[at] / s) @ u.T
            error = float(((row * r).square().sum() * share).sqrt())
            loose = float(unseen[at].norm()) > _LOOSE
            out[name.removeprefix("unknowns.")] = inf if loose else error
        at += p.numel()
    return out
