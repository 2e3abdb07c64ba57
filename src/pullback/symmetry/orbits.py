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
from .actions.action import Action
from .actions.components import connected_components
from .graph.example import Example


@dataclass(frozen=True)
class OrbitLimits:
    """Sizes and tolerances of decompositions.

    Attributes:
        generator_entries: of a component's generators that are decomposed: 256 MiB in float64.
            Larger components are solved by conjugate gradients.
        jacobian_entries: of a Jacobian that is decomposed: 128 MiB in float64.
        rank_tolerance: of singular values of unit generators that count as dependent. Generators
            in float64 are exact to about 1e-13 of their length.
        shortest_row: of the longest row of J. Rows that are shorter are not lengthened to 1: in
            float32, of 1e-7, they may have fewer than three correct digits.
        probes: random signs that estimate a diagonal; eight give it within a factor of about 2,
            which suffices for a preconditioner.
    """

    generator_entries: int = 2**25
    jacobian_entries: int = 2**24
    rank_tolerance: float = 1e-10
    shortest_row: float = 1e-4
    probes: int = 8


LIMITS = OrbitLimits()


class Orbits:
    """Zᵀ of some actions at w: products with it, and the projection onto its range.

    Actions that move different parameters are orthogonal, so each component is treated by itself:
    by a singular value decomposition where it is small, by conjugate gradients on ZZᵀ elsewhere.

    Attributes:
        space: of the parameters.
        params: by name, in one dtype.
        components: actions that are connected by parameters they both move.
    """

    def __init__(self, actions: Sequence[Action], params: Mapping[str, Tensor]) -> None:
        self.space = ParameterSpace(params)
        self.params = {name: w.detach().to(self.space.dtype) for name, w in params.items()}
        self.components: list[list[Action]] = []
        for indices in connected_components(action.names for action in actions):
            self.components.append([actions[i] for i in indices])

    def generators(self, actions: Sequence[Action], names: Sequence[str]) -> Tensor:
        """Z of some actions, (k, Σ sizes of these parameters)."""
        sizes = [self.params[name].numel() for name in names]
        matrix = self.space.zeros(_count_generators(actions), sum(sizes))
        columns = dict(zip(names, matrix.split(sizes, 1), strict=True))
        start = 0
        for action in actions:
            end = start + action.dimension
            for name, generators in action.generators(self.params).items():
                columns[name][start:end] = generators.reshape(action.dimension, -1)
            start = end
        return matrix

    def horizontal(self, v: Tensor | Mapping[str, Tensor]) -> Tensor:
        """v − Zᵀ(ZZᵀ)⁺Z v, (p,): v less its part along the orbits."""
        if isinstance(v, Mapping):
            v = self.space.flatten(v)
        if v.shape != (self.space.size,):
            raise PullbackError(
                f"The vector has shape {tuple(v.shape)}",
                f"the model has {self.space.size} parameters that require gradients",
                f"Pass ({self.space.size},) or a dict by name",
            )
        pieces = self.space.split(v.to(device=self.space.device, dtype=self.space.dtype))
        for actions in self.components:
            for name, tangent in self._project(actions, pieces).items():
                pieces[name] = pieces[name] - tangent.view_as(pieces[name])
        return self.space.flatten(pieces)

    def _project(self, actions: Sequence[Action], v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of v along the orbits of a component, by name."""
        basis = self.basis(actions)
        if basis is None:
            return self._project_iteratively(actions, v)
        names = _list_names(actions)
        flat = torch.cat([v[name].flatten() for name in names])
        tangents = (basis.mT @ (basis @ flat)).split([v[name].numel() for name in names])
        return dict(zip(names, tangents, strict=True))

    def basis(self, actions: Sequence[Action], rtol: float | None = None) -> Tensor | None:
        """Orthonormal rows that span the tangents of a component; None where that is too large.

        Generators of length 1 with singular values below rtol·σ_max count as dependent.
        """
        names = _list_names(actions)
        entries = _count_generators(actions) * sum(self.params[name].numel() for name in names)
        if entries > LIMITS.generator_entries:
            return None
        rows = self.generators(actions, names)
        lengths = rows.norm(dim=1, keepdim=True)
        unit_rows = rows / torch.where(lengths > 0, lengths, 1.0)
        _, sigma, basis = torch.linalg.svd(unit_rows, full_matrices=False)
        if rtol is None:
            rtol = max(rows.shape) * torch.finfo(rows.dtype).eps
        return basis[sigma > rtol * sigma[0]]

    def _project_iteratively(
        self, actions: Sequence[Action], v: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Zᵀc with ZZᵀc = Z v by preconditioned conjugate gradients; consistent, so c exists."""
        names = _list_names(actions)
        count = _count_generators(actions)
        component = ParameterSpace({name: self.params[name] for name in names})
        gram = Operator(
            lambda c: component.flatten(self._combine_generators(actions, c)),
            lambda flat: self._pair_with_generators(actions, component.split(flat)),
            (component.size, count),
            self.space.dtype,
            self.space.device,
        )
        # The mean of (ZZᵀs)∘s over random signs s estimates the diagonal.
        generator = torch.Generator().manual_seed(3)
        signs = 2.0 * torch.randint(0, 2, (LIMITS.probes, count), generator=generator) - 1
        signs = signs.to(self.space.zeros(0))
        diagonal = torch.stack([gram.matvec(s) * s for s in signs]).sum(0)
        scale = torch.where(diagonal != 0, diagonal.abs(), 1.0)
        solver = ConjugateGradient(0.0, tol=1e-14, preconditioner=lambda c: c / scale)
        solution = solver.solve(gram, self._pair_with_generators(actions, v))
        return self._combine_generators(actions, solution.x)

    def _pair_with_generators(self, actions: Sequence[Action], v: Mapping[str, Tensor]) -> Tensor:
        """Z v, (k,)."""
        return torch.cat([action.pairing(self.params, v) for action in actions])

    def _combine_generators(self, actions: Sequence[Action], c: Tensor) -> dict[str, Tensor]:
        """Zᵀc, by name."""
        combination = {name: torch.zeros_like(self.params[name]) for name in _list_names(actions)}
        pieces = c.split([action.dimension for action in actions])
        for action, piece in zip(actions, pieces, strict=True):
            for name, tangent in action.tangent(self.params, piece).items():
                combination[name] = combination[name] + tangent
        return combination


def _list_names(actions: Sequence[Action]) -> list[str]:
    """Return the parameters that actions move, each once."""
    names: dict[str, None] = {}
    for action in actions:
        names.update(dict.fromkeys(action.names))
    return list(names)


def _count_generators(actions: Sequence[Action]) -> int:
    return sum(action.dimension for action in actions)


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
        lines = [
            f"generators   {self.generators}, independent {_format_count(self.independent)}",
            f"nullity of J {_format_count(self.nullity)} of {self.parameters} parameters",
            f"unexplained  {_format_count(self.unexplained)}",
        ]
        lines.extend(f"  {reason}" for reason in self.reasons)
        return "\n".join(lines)


def _format_count(count: int | None) -> str:
    return "skipped" if count is None else str(count)


def compare_ranks(
    actions: Sequence[Action], example: Example, params: Mapping[str, Tensor]
) -> SymmetryRank:
    """Return the rank of the generators and the nullity of J, in float64."""
    if not params:
        return SymmetryRank(0, 0, 0, 0, 0, ("no parameter requires a gradient",))
    params = {name: w.detach().double() for name, w in params.items()}
    parameter_count = sum(w.numel() for w in params.values())
    reasons: list[str] = []
    independent = _count_independent(Orbits(actions, params), reasons)
    with disable_fused_attention():
        linearization = FunctionLinearization(example, params)
        output_count = linearization.value.numel()
        nullity = None
        if output_count * parameter_count <= LIMITS.jacobian_entries:
            nullity = _find_nullity(linearization.rows(), reasons)
        else:
            reasons.append(
                f"skipped: J is {output_count} × {parameter_count}, too large; use fewer samples "
                "or a smaller model"
            )
    if nullity is not None and independent is not None and nullity != independent:
        reasons.extend(_explain_gap(output_count, parameter_count, nullity - independent))
    return SymmetryRank(
        _count_generators(actions),
        independent,
        parameter_count,
        output_count,
        nullity,
        tuple(reasons),
    )


def _count_independent(orbits: Orbits, reasons: list[str]) -> int | None:
    """Return the rank of all generators; None, with a reason, where a component is too large."""
    total = 0
    for component in orbits.components:
        basis = orbits.basis(component, LIMITS.rank_tolerance)
        if basis is None:
            reasons.append("skipped: generators that overlap are too many to decompose")
            return None
        total += len(basis)
    return total


def _find_nullity(jacobian: Tensor, reasons: list[str]) -> int | None:
    """Return p − rank J; None, with a reason, where J is not finite.

    Rows of J are brought to length 1, but for those that are much shorter than the longest.
    """
    if not bool(torch.isfinite(jacobian).all()):
        reasons.append("skipped: J is not finite on the example")
        return None
    lengths = jacobian.norm(dim=1, keepdim=True)
    lengths = lengths.clamp(min=LIMITS.shortest_row * float(lengths.amax()))
    sigma = torch.linalg.svdvals(jacobian / torch.where(lengths > 0, lengths, 1.0))
    cut = max(jacobian.shape) * 10 * torch.finfo(jacobian.dtype).eps
    return jacobian.shape[1] - int((sigma > cut * sigma[0]).sum())


def _explain_gap(output_count: int, parameter_count: int, gap: int) -> list[str]:
    """Return what may explain that the nullity exceeds the independent generators by this much."""
    if gap < 0:
        return ["fewer than there are generators: J or the generators are badly conditioned"]
    reasons = []
    if output_count < parameter_count:
        reasons.append(
            f"the example has {output_count} outputs for {parameter_count} parameters: "
            f"nullity ≥ {parameter_count - output_count} anyway"
        )
    reasons.append(
        "units that are always on or off on the example (on they are linear and mix, off their "
        "weights do nothing), repeated inputs, or a symmetry that the graph does not show"
    )
    return reasons
