"""How many directions of parameter space do nothing, and how many of them symmetry explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._core.graph import unfused_attention
from ...maps import FunctionLinearization
from ..actions.scaling import Action
from ..graph.tracing import Example
from .tangents import Orbits

_LARGEST = 2**24  # entries of J or Z that are decomposed
_RTOL = 1e-10
_SHORT = 1e-4  # of the longest row of J


@dataclass(frozen=True)
class Rank:
    """Symmetry against the kernel of J at w on the example.

    Attributes:
        generators: k, counted with repetitions.
        independent: the numerical rank of the (k, p) matrix of generators; None where that is
            too large to find.
        parameters: p.
        outputs: numbers that the model returns on the example, N·m.
        nullity: p − rank J; None where J is too large.
        unexplained: nullity − independent.
        reasons: what may explain the difference, or why something was skipped.
    """

    generators: int
    independent: int | None
    parameters: int
    outputs: int
    nullity: int | None
    unexplained: int | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"generators   {self.generators}, independent {_said(self.independent)}",
            f"nullity of J {_said(self.nullity)} of {self.parameters} parameters",
            f"unexplained  {_said(self.unexplained)}",
        ]
        return "\n".join([*lines, *(f"  {r}" for r in self.reasons)])


def _said(count: int | None) -> str:
    return "skipped" if count is None else str(count)


def rank(actions: Sequence[Action], example: Example, params: Mapping[str, Tensor]) -> Rank:
    """Both ranks, in float64."""
    wide = {n: w.detach().double() for n, w in params.items()}
    p, k = sum(w.numel() for w in wide.values()), sum(a.dimension for a in actions)
    if not wide:
        return Rank(0, 0, 0, 0, 0, 0, ("no parameter requires a gradient",))
    with unfused_attention():
        at = FunctionLinearization(example, wide)
        n = at.value.numel()
        j = at.rows() if n * p <= _LARGEST else None
    orbits = Orbits(actions, wide)
    independent, reasons = _independent(orbits)
    if j is None:
        reasons.append(f"skipped: J is {n} × {p}, too large; use fewer samples or a smaller model")
        return Rank(k, independent, p, n, None, None, tuple(reasons))
    if not bool(torch.isfinite(j).all()):
        reasons.append("skipped: J is not finite on the example")
        return Rank(k, independent, p, n, None, None, tuple(reasons))
    nullity = p - _rank(j)
    if independent is None:
        return Rank(k, None, p, n, nullity, None, tuple(reasons))
    if nullity != independent:
        reasons.extend(_reasons(n, p, nullity - independent))
    return Rank(k, independent, p, n, nullity, nullity - independent, tuple(reasons))


def _independent(orbits: Orbits) -> tuple[int | None, list[str]]:
    """The numerical rank of the generators, component by component."""
    total = 0
    for component in orbits.components:
        if not orbits.blocked(component):
            k = sum(a.dimension for a in component)
            return None, [f"skipped: {k} generators that overlap are too many to decompose"]
        sigma = torch.linalg.svdvals(orbits.triangle(component)[0])
        total += int((sigma > _RTOL * sigma.amax()).sum()) if len(sigma) else 0
    return total, []


def _rank(j: Tensor) -> int:
    """The numerical rank, of rows of length 1; rows that are shorter by far may be round-off."""
    if not j.numel():
        return 0
    length = j.norm(dim=1, keepdim=True)
    length = length.clamp(min=_SHORT * float(length.amax()))
    sigma = torch.linalg.svdvals(j / torch.where(length > 0, length, 1.0))
    return int((sigma > max(j.shape) * 10 * torch.finfo(j.dtype).eps * sigma[0]).sum())


def _reasons(outputs: int, parameters: int, missing: int) -> list[str]:
    """What may explain a difference between the nullity and the independent generators."""
    if missing < 0:
        return ["fewer than there are generators: J or the generators are badly conditioned"]
    out = []
    if outputs < parameters:
        few = f"the example has {outputs} outputs for {parameters} parameters"
        out.append(f"{few}: nullity ≥ {parameters - outputs} anyway")
    return [
        *out,
        "units that are always on or off on the example (on they are linear and mix, off their "
        "weights do nothing), repeated inputs, or a symmetry that the graph does not show",
    ]
