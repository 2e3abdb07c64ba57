"""How many directions of parameter space do nothing, and how many of them symmetry explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

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
        reasons.extend(_reasons(example, at, j, orbits, nullity - independent))
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


def _reasons(
    example: Example, at: FunctionLinearization, j: Tensor, orbits: Orbits, missing: int
) -> list[str]:
    out = []
    n, p = j.shape
    if n < p:
        out.append(f"the example has {n} outputs for {p} parameters: nullity ≥ {p - n} anyway")
    different = len(torch.unique(j, dim=0))
    if n >= p > different:
        out.append(f"only {different} of the example's {n} outputs are different functions of w")
    idle = _idle(at, j, orbits)
    if idle:
        out.append(f"{idle} further directions are parameters that nothing depends on here")
    on, off, few, total = count_fixed_units(example)
    if off:
        out.append(f"{off} of {total} units are off on the whole example: their weights do nothing")
    if on:
        out.append(f"{on} of {total} units are on on the whole example: linear, so that they mix")
    if few:
        out.append(f"{few} of {total} units change side at a few places only: too few samples")
    if any(m.training for m in example.model.modules() if isinstance(m, _BatchNorm)):
        out.append("on one batch, a batch norm's gain undoes a rescaling before it, eps and all")
    other = len(out) > bool(idle)
    if missing > idle and not other:
        out.append(
            "a symmetry that the graph does not show (rotations of a residual stream that only "
            "norms read, a bias before a fixed shift or behind a fixed factor, outputs that no "
            "reader tells apart), or a bound that the example does not reach"
        )
    if missing < 0:
        out.append("fewer than there are generators: J or the generators are badly conditioned")
    return out


def _idle(at: FunctionLinearization, j: Tensor, orbits: Orbits) -> int:
    """How many entries of parameters that no action moves have no influence on the outputs."""
    moved = {n for actions in orbits.components for a in actions for n in a.names}
    still = at.space.split((j.abs().amax(0) == 0)[None].to(j))
    return sum(int(t.sum()) for n, t in still.items() if n not in moved)


_BENT = (
    *("relu", "leaky_relu", "_prelu_kernel", "rrelu_with_noise"),
    *("threshold", "clamp", "clamp_min", "hardtanh"),
)
_FEW = 8


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(getattr(func, "_opname", "")).rstrip("_") in _BENT:
            self.seen.append(args[0].detach().clone())
        return func(*args, **(kwargs or {}))


def count_fixed_units(example: Example) -> tuple[int, int, int, int]:
    """How many units are always on, always off, change side at few places; and how many exist."""
    named = dict(example.model.named_parameters())
    params = {n: named[n].detach().double() for n in example.params}
    with torch.no_grad(), _Watch() as watch:
        example(params)
    on = off = few = total = 0
    for x in (x for x in watch.seen if x.ndim):
        # channels stand second in images, last elsewhere
        units = x.movedim(1 if x.ndim >= 4 else -1, 0)
        units = units.reshape(len(units), -1)
        active = (units > 0).sum(1)
        rare = torch.minimum(active, units.shape[1] - active)
        on += int((active == units.shape[1]).sum())
        off += int((active == 0).sum())
        few += int(((rare > 0) & (rare <= _FEW)).sum())
        total += len(units)
    return on, off, few, total
