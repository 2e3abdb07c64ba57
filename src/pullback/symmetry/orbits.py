"""The tangent space of the orbits: vectors orthogonal to it, and how much of J's kernel it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.graph import disable_fused_attention
from .._core.space import ParameterSpace
from ..grams import Operator
from ..maps import FunctionLinearization
from ..solvers import ConjugateGradient
from .actions.scaling import Action, connected
from .graph.tracing import Example

_LARGEST = 2**25  # entries of a component's generators that are decomposed
_LARGEST_J = 2**24  # entries of J that are decomposed
_RTOL = 1e-10
_SHORT = 1e-4  # of the longest row of J


class Orbits:
    """Zᵀ of some actions at w: products with it, and the projection onto its range.

    Actions that move different parameters are orthogonal, so each component is treated by itself:
    by a singular value decomposition where it is small, by conjugate gradients on ZZᵀ elsewhere.
    """

    def __init__(self, actions: Sequence[Action], params: Mapping[str, Tensor]) -> None:
        self.space = ParameterSpace(params)
        self.params = {n: w.detach().to(self.space.dtype) for n, w in params.items()}
        #: actions that are connected by parameters they both move
        self.components = [
            [actions[i] for i in some] for some in connected(a.names for a in actions)
        ]

    def generators(self, actions: Sequence[Action], names: Sequence[str]) -> Tensor:
        """Z of some actions, (k, Σ sizes of these parameters)."""
        sizes = [self.params[n].numel() for n in names]
        out = self.space.zeros(sum(a.dimension for a in actions), sum(sizes))
        pieces, start = dict(zip(names, out.split(sizes, 1), strict=True)), 0
        for action in actions:
            for n, z in action.generators(self.params).items():
                pieces[n][start : start + action.dimension] = z.reshape(action.dimension, -1)
            start += action.dimension
        return out

    def horizontal(self, v: Tensor | Mapping[str, Tensor]) -> Tensor:
        """v − Zᵀ(ZZᵀ)⁺Z v, (p,): v less its part along the orbits."""
        flat = self.space.flatten(v) if isinstance(v, Mapping) else v
        if flat.shape != (self.space.size,):
            raise PullbackError(
                f"The vector has shape {tuple(flat.shape)}",
                f"the model has {self.space.size} parameters that require gradients",
                f"Pass ({self.space.size},) or a dict by name",
            )
        pieces = self.space.split(flat.to(device=self.space.device, dtype=self.space.dtype))
        for actions in self.components:
            names, basis = _names(actions), self.basis(actions)
            if basis is None:
                along = self._iterated(actions, pieces)
            else:
                part = torch.cat([pieces[n].flatten() for n in names])
                split = (basis.mT @ (basis @ part)).split([pieces[n].numel() for n in names])
                along = dict(zip(names, split, strict=True))
            pieces |= {n: pieces[n] - x.view_as(pieces[n]) for n, x in along.items()}
        return self.space.flatten(pieces)

    def basis(self, actions: Sequence[Action], rtol: float | None = None) -> Tensor | None:
        """Orthonormal rows that span the tangents of a component; None where that is too large.

        Generators of length 1 with singular values below rtol·σ_max count as dependent.
        """
        names, k = _names(actions), sum(a.dimension for a in actions)
        if k * sum(self.params[n].numel() for n in names) > _LARGEST:
            return None
        rows = self.generators(actions, names)
        length = rows.norm(dim=1, keepdim=True)
        _, sigma, basis = torch.linalg.svd(
            rows / torch.where(length > 0, length, 1.0), full_matrices=False
        )
        cut = max(rows.shape) * torch.finfo(rows.dtype).eps if rtol is None else rtol
        return basis[sigma > cut * sigma[0]]

    def _iterated(self, actions: Sequence[Action], v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zᵀc with ZZᵀc = Z v by preconditioned conjugate gradients; consistent, so c exists."""
        names, k = _names(actions), sum(a.dimension for a in actions)
        component = ParameterSpace({n: self.params[n] for n in names})
        gram = Operator(
            lambda c: component.flatten(self._move(actions, c)),
            lambda flat: self._pair(actions, component.split(flat)),
            (component.size, k),
            self.space.dtype,
            self.space.device,
        )
        # the mean of (ZZᵀs)∘s over random signs s estimates the diagonal
        signs = 2.0 * torch.randint(0, 2, (8, k), generator=torch.Generator().manual_seed(3)) - 1
        diagonal = torch.stack([gram.matvec(s) * s for s in signs.to(self.space.zeros(0))]).sum(0)
        scale = torch.where(diagonal != 0, diagonal.abs(), 1.0)
        solver = ConjugateGradient(0.0, tol=1e-14, preconditioner=lambda c: c / scale)
        return self._move(actions, solver.solve(gram, self._pair(actions, v)).x)

    def _pair(self, actions: Sequence[Action], v: Mapping[str, Tensor]) -> Tensor:
        """Z v, (k,)."""
        return torch.cat([a.pairing(self.params, v) for a in actions])

    def _move(self, actions: Sequence[Action], c: Tensor) -> dict[str, Tensor]:
        """Zᵀc, by name."""
        out = {n: torch.zeros_like(self.params[n]) for n in _names(actions)}
        for action, piece in zip(actions, c.split([a.dimension for a in actions]), strict=True):
            for n, t in action.tangent(self.params, piece).items():
                out[n] = out[n] + t
        return out


def _names(actions: Sequence[Action]) -> list[str]:
    return list(dict.fromkeys(n for a in actions for n in a.names))


@dataclass(frozen=True)
class SymmetryRank:
    """Symmetry against the kernel of J at w on the example.

    Attributes:
        generators: k, counted with repetitions.
        independent: the numerical rank of the (k, p) matrix of generators; None where that is
            too large to find.
        parameters: p.
        outputs: numbers that the model returns on the example, N·m.
        nullity: p − rank J; None where J is too large.
        reasons: what may explain the difference, or why something was skipped.
    """

    generators: int
    independent: int | None
    parameters: int
    outputs: int
    nullity: int | None
    reasons: tuple[str, ...]

    @property
    def unexplained(self) -> int | None:
        """The nullity less the independent generators."""
        if self.nullity is None or self.independent is None:
            return None
        return self.nullity - self.independent

    def __str__(self) -> str:
        counts = self.independent, self.nullity, self.unexplained
        independent, nullity, unexplained = ("skipped" if c is None else c for c in counts)
        lines = [
            f"generators   {self.generators}, independent {independent}",
            f"nullity of J {nullity} of {self.parameters} parameters",
            f"unexplained  {unexplained}",
        ]
        return "\n".join([*lines, *(f"  {r}" for r in self.reasons)])


def rank(actions: Sequence[Action], example: Example, params: Mapping[str, Tensor]) -> SymmetryRank:
    """Both ranks, in float64."""
    wide = {n: w.detach().double() for n, w in params.items()}
    p, k = sum(w.numel() for w in wide.values()), sum(a.dimension for a in actions)
    if not wide:
        return SymmetryRank(0, 0, 0, 0, 0, ("no parameter requires a gradient",))
    with disable_fused_attention():
        at = FunctionLinearization(example, wide)
        n = at.value.numel()
        j = at.rows() if n * p <= _LARGEST_J else None
    reasons: list[str] = []
    orbits = Orbits(actions, wide)
    bases = [orbits.basis(component, _RTOL) for component in orbits.components]
    found = [len(b) for b in bases if b is not None]
    independent = sum(found) if len(found) == len(bases) else None
    if independent is None:
        reasons.append("skipped: generators that overlap are too many to decompose")
    nullity = None
    if j is None:
        reasons.append(f"skipped: J is {n} × {p}, too large; use fewer samples or a smaller model")
    elif not bool(torch.isfinite(j).all()):
        reasons.append("skipped: J is not finite on the example")
    else:
        nullity = p - _rank(j)
        if independent is not None and nullity != independent:
            reasons.extend(_reasons(n, p, nullity - independent))
    return SymmetryRank(k, independent, p, n, nullity, tuple(reasons))


def _rank(j: Tensor) -> int:
    """The numerical rank, of rows of length 1; rows that are shorter by far may be round-off."""
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
