"""A network's group of symmetries at its parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.space import ParameterSpace
from .actions.scaling import Action, Scaling, two_sided
from .graph.tracing import Example
from .orbits.ranks import Rank, rank
from .orbits.tangents import Orbits
from .orbits.verify import Rejected, Verified, summarize_rejections
from .slices.equal_norm import make_slice
from .slices.slice import Retraction, Slice

_LARGEST = 2**31  # entries of a matrix of generators that may be formed


class Symmetry:
    r"""Verified group actions that do not change the model's function.

    Vectors are flat, (p,), in the order of the named parameters that require gradients. The
    k generators are tangents of the orbits through w = the model's parameters *now*.

    Attributes:
        actions: the verified group actions.
        rejected: what the graph suggested and verification refused.
        notes: anything else worth knowing.
    """

    def __init__(
        self,
        example: Example,
        verified: Sequence[Verified],
        rejected: Sequence[Rejected],
        notes: Sequence[str] = (),
    ) -> None:
        self.example, self.verified = example, tuple(verified)
        self.actions: tuple[Action, ...] = tuple(v.action for v in verified)
        self.rejected, self.notes = tuple(rejected), tuple(notes)

    @property
    def params(self) -> dict[str, Tensor]:
        """The model's parameters that require gradients."""
        named = dict(self.example.model.named_parameters())
        return {n: named[n] for n in self.example.params}

    @property
    def scalings(self) -> list[Scaling]:
        """The actions that scale whole parameters entry by entry: what slices are made for."""
        plain = [a for a in self.actions if isinstance(a, Scaling)]
        return [a for a in plain if all(leg.complete for leg in a.legs)]

    @property
    def dimension(self) -> int:
        """How many generators there are."""
        return sum(a.dimension for a in self.actions)

    def generators(self) -> Tensor:
        """Z, (number of generators, number of parameters): J Zᵀ = 0."""
        params = self.params
        p = sum(w.numel() for w in params.values())
        if self.dimension * p > _LARGEST:
            raise PullbackError(
                "The generators do not fit in a matrix",
                f"it would be {self.dimension} × {p}",
                "Use horizontal(v), orbit(alpha), or actions[i].tangent(params, element)",
            )
        if not params:
            return torch.zeros(0, 0)
        space = ParameterSpace(params)
        out = space.zeros(self.dimension, p)
        index, start = space.index(), 0
        for action in self.actions:
            rows = slice(start, start + action.dimension)
            for name, z in action.generators(params).items():
                out[rows, index[name]] = z.reshape(action.dimension, -1).to(out)
            start = rows.stop
        return out

    def orbit(self, alpha: Tensor | float) -> dict[str, Tensor]:
        """exp(Σ α_i Z_i)·w, action by action: all parameters, for α (k,) or one number for all.

        Scalings multiply by e^α.
        """
        params = {n: w.detach() for n, w in self.params.items()}
        element = self._element(alpha)
        start = 0
        for action in self.actions:
            piece = element[start : start + action.dimension]
            params.update(action.act(params, piece))
            start += action.dimension
        return {n: w.clone() for n, w in params.items()}

    @torch.no_grad()
    def move_(self, alpha: Tensor | float) -> None:
        """Put the model's parameters at `orbit(alpha)`."""
        for w, moved in zip(self.params.values(), self.orbit(alpha).values(), strict=True):
            w.copy_(moved)

    def _element(self, alpha: Tensor | float) -> Tensor:
        one = next(iter(self.params.values()), torch.zeros(()))
        element = torch.as_tensor(alpha, dtype=torch.promote_types(one.dtype, torch.float32))
        element = element.to(one.device)
        if element.ndim == 0:
            element = element.expand(self.dimension)
        if element.shape != (self.dimension,):
            raise PullbackError(
                f"An element of the group has shape {tuple(element.shape)}",
                f"there are {self.dimension} generators",
                f"Pass ({self.dimension},) or one number",
            )
        return element

    def horizontal(self, v: Tensor | Mapping[str, Tensor]) -> Tensor:
        """v − Zᵀ(ZZᵀ)⁺Z v: the part of v orthogonal to the orbits, (p,)."""
        return Orbits(self.actions, self.params).horizontal(v)

    def slice(self, kind: str = "balanced") -> Slice:
        """A slice of the scalings' orbits: "balanced", "layer-balanced" or "equal-norm"."""
        return make_slice(kind, two_sided(self.actions), self.example.model)

    def retract_(self, kind: str = "balanced") -> Retraction:
        """Move the model's parameters onto a slice; the function does not change."""
        return self.slice(kind).retract_()

    def project(self, v: Tensor, kind: str = "balanced") -> Tensor:
        """v orthogonally onto the tangent space of a slice at the parameters, (p,)."""
        return self.slice(kind).project(v)

    def rank(self) -> Rank:
        """Independent generators, and the numerical nullity of J on the example."""
        return rank(self.actions, self.example, self.params)

    def report(self) -> str:
        """A table: action, dimension, residual, parameters; then what was refused, by reason."""
        table = [("symmetry", "dimension", "‖JZ‖", "parameters")]
        for v in self.verified:
            names = ", ".join(v.action.names[:4]) + (", …" if len(v.action.names) > 4 else "")
            table.append((v.action.about, str(v.action.dimension), f"{v.residual:.0e}", names))
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line[:3], widths, strict=True)), line[3]])
            for line in table
        ]
        lines += [f"rejected  {line}" for line in summarize_rejections(self.rejected)]
        return "\n".join([*lines, *(f"note  {n}" for n in self.notes)])

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"Symmetry({len(self.actions)} actions, {self.dimension} generators)"
