"""The symmetries of a network at its parameters, found in its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._core.capture import Selector, unwrap_model
from .._core.errors import PullbackError, refuse_unknown
from .actions.charts import ChartAction, in_parameters, with_values
from .actions.scaling import Action, Scaling, two_sided
from .graph import layers, pointwise, structural
from .graph.ledger import Readers
from .graph.mixings import mixings, scalings
from .graph.shifts import shifts, streams
from .graph.tracing import Example, guess_input, trace
from .graph.walk import Walk
from .orbits import Orbits, SymmetryRank, rank
from .slices import Retraction, Slice, make_slice
from .verify import Rejected, Verified, summarize_rejections, verify_actions

#: importing these registers the rules for operations
RULE_BOOKS = (layers, pointwise, structural)

Group = Literal["neuron", "layer"]

SPECIALIZED = "the model looks at the values of its inputs: the graph is that of the example's"

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
        """The actions that multiply some weights and divide others: what slices are made for."""
        return two_sided(self.actions)

    @property
    def dimension(self) -> int:
        """How many generators there are."""
        return sum(a.dimension for a in self.actions)

    def generators(self) -> Tensor:
        """Z, (number of generators, number of parameters): J Zᵀ = 0."""
        p = sum(w.numel() for w in self.params.values())
        if self.dimension * p > _LARGEST:
            raise PullbackError(
                "The generators do not fit in a matrix",
                f"it would be {self.dimension} × {p}",
                "Use horizontal(v), orbit(alpha), or actions[i].tangent(params, element)",
            )
        if not p:
            return torch.zeros(0, 0)
        return Orbits(self.actions, self.params).generators(self.actions, list(self.params))

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
        return make_slice(kind, self.scalings, self.example.model)

    def retract_(self, kind: str = "balanced") -> Retraction:
        """Move the model's parameters onto a slice; the function does not change."""
        return self.slice(kind).retract_()

    def project(self, v: Tensor, kind: str = "balanced") -> Tensor:
        """v orthogonally onto the tangent space of a slice at the parameters, (p,)."""
        return self.slice(kind).project(v)

    def rank(self) -> SymmetryRank:
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


def find(
    model: nn.Module,
    example: Any = None,
    *,
    group: Group = "neuron",
    output: Selector = None,
    actions: Sequence[Action] | None = None,
) -> Symmetry:
    r"""The continuous symmetries of w ↦ model(example) that the model's graph shows.

    Positive scalings of units, invertible matrices between linear maps, gains, shifts and constants
    that other parameters take over. Every generator is verified: ‖J Z‖ at round-off on the example,
    in float64; what fails is in `.rejected`.

    Args:
        model: any module; in its present mode (train, eval).
        example: an input, a tuple of arguments or a dict of keyword arguments. Without one,
            random numbers of the shape that the first layer suggests.
        group: "neuron" scales each unit by itself, "layer" all units of a layer alike.
        output: which tensor of a structured output counts; by default all of them.
        actions: what to verify, such as `Scaling`s, in place of what the graph suggests: for
            models that cannot be traced.

    Raises:
        PullbackError: if the operations that run depend on the values of parameters or of what is
            computed from them. Where they depend on the example's, `.notes` says that the
            symmetries are those of such inputs.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> find(net, torch.randn(7, 3)).generators().shape
    torch.Size([9, 53])
    """
    refuse_unknown("group", group, ("neuron", "layer"))
    model = unwrap_model(model)
    run = Example(model, guess_input(model) if example is None else example, output)
    if not run.params:
        return Symmetry(run, [], [], ["no parameter requires a gradient"])
    if actions is not None:
        return _verified(run, actions, group, [])
    walk = Walk()
    graph, specialized = trace(run)
    walk.run(graph, run)
    notes = [SPECIALIZED, *walk.notes] if specialized else walk.notes
    params = with_values(run.params, walk.matrices)
    readers = Readers(walk.ledger)
    mixed = mixings(walk, readers)  # first: their scales are not counted again
    found = [*scalings(walk), *mixed, *shifts(walk, readers, params), *streams(readers, params)]
    return _verified(run, [in_parameters(a, walk.matrices) for a in found], group, notes)


def _verified(run: Example, actions: Sequence[Action], group: Group, notes: list[str]) -> Symmetry:
    """Keep the actions that are symmetries; for "layer", with one factor per scaling."""
    accepted, rejected = verify_actions(run, actions)
    if group == "layer":  # sums of verified generators
        accepted = [Verified(_merged(v.action), v.residual) for v in accepted]
    if not accepted:
        notes = [*notes, "no symmetry was found"]
    return Symmetry(run, accepted, rejected, notes)


def _merged(action: Action) -> Action:
    if isinstance(action, ChartAction):
        return ChartAction(_merged(action.inner), action.charts)
    return action.merged() if isinstance(action, Scaling) else action


def scalings_of(symmetry: Any, model: nn.Module | None) -> tuple[list[Scaling], nn.Module]:
    """Return the two-sided scalings of a `Symmetry`, a module or a list, and the model."""
    if isinstance(symmetry, nn.Module):
        symmetry, model = None, symmetry
    if model is None:
        model = getattr(getattr(symmetry, "example", None), "model", None)
    if model is None:
        raise PullbackError(
            "The model is not known",
            "an optimizer has its parameters only, and symmetries are those of a network",
            "Pass symmetry=pb.symmetry.find(model, x), or symmetry=model",
        )
    if symmetry is None:
        symmetry = find(unwrap_model(model))
    return two_sided(getattr(symmetry, "actions", symmetry)), model
