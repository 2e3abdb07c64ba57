"""What can be said of a solution without knowing the true one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .conditions import Dirichlet, Energy
from .discretize import Trial, term
from .problem import Problem
from .validation import Residual, Validation

_LARGEST = 2000  # parameters up to which the error equation is solved
_CUT = 1e-10  # singular values below this share of the largest are left out
_SAMPLES = 2000  # points at which an error is measured


@dataclass(frozen=True)
class Estimate:
    """The error of a solution by its own tangents.

    Attributes:
        error: estimated relative L² error, all fields together.
        spread: standard errors of the unknown coefficients, by name.
        affine: whether the problem is linear; otherwise the error must be small for this to hold.
    """

    error: float
    spread: Mapping[str, float]
    affine: bool


@dataclass(frozen=True)
class Check:
    """A table to judge a solution by; `print` it.

    Attributes:
        name: of the problem.
        stopped: the run's verdict.
        residuals: every condition at fresh points.
        estimate: of the error, where there is one.
        unknowns: coefficients that were found.
        difference: relative L² difference to another solution, where one was given.
        error: the true one, where it is known.
    """

    name: str
    stopped: str
    residuals: Mapping[str, Residual]
    estimate: Estimate | None = None
    unknowns: Mapping[str, float] = field(default_factory=dict)
    difference: float | None = None
    error: float | None = None

    def __str__(self) -> str:
        head = ("condition", "residual", "largest", "its terms", "relative")
        rows = [
            (n, *(f"{v:.1e}" for v in (r.rms, r.largest, r.size, r.relative)))
            for n, r in self.residuals.items()
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [f"{self.name}: {self.stopped}"]
        for row in (head, *rows):
            cells = zip(row[1:], widths[1:], strict=True)
            lines.append("  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in cells)]))
        if self.estimate is not None:
            kind = "" if self.estimate.affine else " (linearized)"
            lines.append(f"estimated error{kind}: {self.estimate.error:.1e}")
        for name, value in self.unknowns.items():
            spread = self.estimate.spread.get(name) if self.estimate else None
            lines.append(f"{name} = {value:.6g}" + ("" if spread is None else f" ± {spread:.1g}"))
        if self.difference is not None:
            lines.append(f"difference to the other solution: {self.difference:.1e}")
        if self.error is not None:
            lines.append(f"true error: {self.error:.1e}")
        return "\n".join(lines)

    __repr__ = __str__


def estimate(
    problem: Problem,
    trial: Trial,
    validation: Validation,
    residuals: Mapping[str, Residual],
) -> Estimate | None:
    """The error e from A δ = r at fresh points, e = T δ, where T are the fields' tangents.

    For a linear equation L u = f the error solves L e = r, with r the residual. What no tangent
    explains, r − A δ, adds at most its norm times max ‖T δ‖/‖A δ‖, the equation's stability as far
    as the tangents see it. None for energies and above 2000 parameters.
    """
    params: dict[str, Tensor] = {n: p for n, p in trial.named_parameters() if p.requires_grad}
    size = sum(p.numel() for p in params.values())
    if size > _LARGEST or any(isinstance(c, Energy) for c in problem.conditions):
        return None
    with torch.enable_grad():
        linears = [
            term(
                problem, c, trial, validation.points(c, 1, max(2 * size, 500)),
                validation.weights[c.name],
            ).map.linearize(params)
            for c in problem.conditions
        ]  # fmt: skip
        a = torch.cat([x.rows() for x in linears]).double()
        r = torch.cat([x.value.flatten() for x in linears]).double()
        tangents, values = _tangents(problem, trial, params, validation)
    u, s, vh = torch.linalg.svd(a, full_matrices=False)
    kept = s > _CUT * s[0]
    u, s, v = u[:, kept], s[kept], vh[kept].T
    reach = tangents @ v / s  # the field of each singular direction
    coefficients = u.T @ r
    explained = (reach @ coefficients).norm()
    rest = (r - u @ coefficients).norm()
    stability = torch.linalg.matrix_norm(reach, 2)
    error = float((explained + stability * rest) / values.norm())
    affine = all(x.affine for x in residuals.values())
    return Estimate(error, _spread(trial, params, v, s, u, r), affine)


def _tangents(
    problem: Problem, trial: Trial, params: dict[str, Tensor], validation: Validation
) -> tuple[Tensor, Tensor]:
    """∂u/∂w and u of all fields over the domain; constants of free fields are left out."""
    rows, values = [], []
    for name in problem.fields:
        field = Dirichlet(0.0, field=name, on=problem.domain)
        x = problem.domain.sample(_SAMPLES, "sobol", seed=3)
        like = next(iter(params.values()))
        linear = term(problem, field, trial, (x.to(like.dtype, like.device),), 1.0).map.linearize(
            params
        )
        row, value = linear.rows().double(), linear.value.flatten().double()
        if name in problem.free:
            row, value = row - row.mean(0), value - value.mean()
        rows.append(row)
        values.append(value)
    return torch.cat(rows), torch.cat(values)


def _spread(
    trial: Trial, params: dict[str, Tensor], v: Tensor, s: Tensor, u: Tensor, r: Tensor
) -> dict[str, float]:
    """Standard errors of the unknowns: √Σ (A⁺)²ᵢ rᵢ², with n/(n − rank) for what was fitted."""
    at, out = 0, {}
    share = len(r) / max(1, len(r) - len(s))
    for name, p in params.items():
        if name.startswith("unknowns."):
            row = (v[at] / s) @ u.T
            out[name.removeprefix("unknowns.")] = float(((row * r).square().sum() * share).sqrt())
        at += p.numel()
    return out
