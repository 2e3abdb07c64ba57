"""The symmetries of a network at its parameters, found in its graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._core.capture import Selector, unwrap_model
from .._core.errors import PullbackError, refuse_unknown
from .actions.action import Action
from .actions.charts import ChartAction, in_parameters, with_values
from .actions.scaling import Scaling, two_sided
from .graph import rules
from .graph.example import Example
from .graph.example_input import guess_input
from .graph.mixings import find_mixings
from .graph.readers import Readers
from .graph.scalings import find_scalings
from .graph.shifts import find_shifts
from .graph.streams import find_stream_shifts
from .graph.trace import trace
from .graph.walk import Walk
from .orbits import Orbits, SymmetryRank, compare_ranks
from .slices import Retraction, Slice, make_slice
from .verify import Rejected, Verified, summarize_rejections, verify_actions

#: importing these registers the rules for operations
RULE_BOOKS = (rules.layers, rules.normalization, rules.pointwise, rules.reductions, rules.structure)

Group = Literal["neuron", "layer"]

SPECIALIZED = "the model looks at the values of its inputs: the graph is that of the example's"


@dataclass(frozen=True)
class SymmetryLimits:
    """Sizes above which `Symmetry` refuses to form something.

    Attributes:
        generator_entries: of the matrix of all generators: 16 GiB in float64.
    """

    generator_entries: int = 2**31


LIMITS = SymmetryLimits()


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
        self.example = example
        self.verified = tuple(verified)
        self.actions: tuple[Action, ...] = tuple(v.action for v in verified)
        self.rejected = tuple(rejected)
        self.notes = tuple(notes)

    @property
    def params(self) -> dict[str, Tensor]:
        """The model's parameters that require gradients."""
        parameters = dict(self.example.model.named_parameters())
        return {name: parameters[name] for name in self.example.params}

    @property
    def scalings(self) -> list[Scaling]:
        """The actions that multiply some weights and divide others. Slices are made for these."""
        return two_sided(self.actions)

    @property
    def dimension(self) -> int:
        """Return the number of generators."""
        return sum(a.dimension for a in self.actions)

    def generators(self) -> Tensor:
        """Z, (number of generators, number of parameters): J Zᵀ = 0."""
        parameter_count = sum(w.numel() for w in self.params.values())
        if self.dimension * parameter_count > LIMITS.generator_entries:
            raise PullbackError(
                "The generators do not fit in a matrix",
                f"it would be {self.dimension} × {parameter_count}",
                "Use horizontal(v), orbit(alpha), or actions[i].tangent(params, element)",
            )
        if not parameter_count:
            return torch.zeros(0, 0)
        return Orbits(self.actions, self.params).generators(self.actions, list(self.params))

    def orbit(self, alpha: Tensor | float) -> dict[str, Tensor]:
        """exp(Σ α_i Z_i)·w, action by action: all parameters, for α (k,) or one number for all.

        Scalings multiply by e^α.
        """
        params = {name: w.detach() for name, w in self.params.items()}
        pieces = self._read_element(alpha).split([action.dimension for action in self.actions])
        for action, piece in zip(self.actions, pieces, strict=True):
            params.update(action.act(params, piece))
        return {name: w.clone() for name, w in params.items()}

    @torch.no_grad()
    def move_(self, alpha: Tensor | float) -> None:
        """Put the model's parameters at `orbit(alpha)`."""
        for w, moved in zip(self.params.values(), self.orbit(alpha).values(), strict=True):
            w.copy_(moved)

    def _read_element(self, alpha: Tensor | float) -> Tensor:
        """Return an element (k,) of the Lie algebra in the parameters' dtype, float32 at least."""
        first = next(iter(self.params.values()), torch.zeros(()))
        element = torch.as_tensor(alpha, dtype=torch.promote_types(first.dtype, torch.float32))
        element = element.to(first.device)
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
        return compare_ranks(self.actions, self.example, self.params)

    def report(self) -> str:
        """Return a table: action, dimension, residual, parameters; then refusals by reason."""
        lines = self._format_verified_actions()
        lines += [f"rejected  {line}" for line in summarize_rejections(self.rejected)]
        lines += [f"note  {note}" for note in self.notes]
        return "\n".join(lines)

    def _format_verified_actions(self) -> list[str]:
        """Return a table of the verified actions, by lines."""
        table = [("symmetry", "dimension", "‖JZ‖", "parameters")]
        for verified in self.verified:
            action = verified.action
            names = ", ".join(action.names[:4])
            if len(action.names) > 4:
                names += ", …"
            table.append((action.about, str(action.dimension), f"{verified.residual:.0e}", names))
        about_width, dimension_width, residual_width = (
            max(map(len, column)) for column in list(zip(*table, strict=True))[:3]
        )
        return [
            f"{about:{about_width}}  {dimension:{dimension_width}}  {residual:{residual_width}}  "
            f"{names}"
            for about, dimension, residual, names in table
        ]

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
    if example is None:
        example = guess_input(model)
    run = Example(model, example, output)
    if not run.params:
        return Symmetry(run, [], [], ["no parameter requires a gradient"])
    if actions is not None:
        return _verify(run, actions, group, [])
    candidates, notes = _read_candidates(run)
    return _verify(run, candidates, group, notes)


def _read_candidates(run: Example) -> tuple[list[Action], list[str]]:
    """Return the actions that the graph of the model's call suggests, and notes on it."""
    traced = trace(run)
    walk = Walk()
    walk.run(traced.graph, run)
    notes = list(walk.notes)
    if traced.is_specialized:
        notes.insert(0, SPECIALIZED)
    params = with_values(run.params, walk.matrices)
    readers = Readers(walk.ledger)
    # Mixings come first because they contain scalings, which are not counted again.
    mixings = find_mixings(walk, readers)
    candidates = [
        *find_scalings(walk),
        *mixings,
        *find_shifts(walk, readers, params),
        *find_stream_shifts(readers, params),
    ]
    return [in_parameters(action, walk.matrices) for action in candidates], notes


def _verify(run: Example, actions: Sequence[Action], group: Group, notes: list[str]) -> Symmetry:
    """Return the `Symmetry` of the actions that pass; for "layer", with one factor per scaling."""
    accepted, rejected = verify_actions(run, actions)
    if group == "layer":  # sums of verified generators
        accepted = [Verified(_merge_units(v.action), v.residual) for v in accepted]
    if not accepted:
        notes = [*notes, "no symmetry was found"]
    return Symmetry(run, accepted, rejected, notes)


def _merge_units(action: Action) -> Action:
    """Return a scaling with one factor for all units; other actions as they are."""
    if isinstance(action, ChartAction):
        return ChartAction(_merge_units(action.inner), action.charts)
    if isinstance(action, Scaling):
        return action.merged()
    return action


def read_scalings(symmetry: Any, model: nn.Module | None) -> tuple[list[Scaling], nn.Module]:
    """Return the two-sided scalings of a `Symmetry`, a module or a list, and the model."""
    if isinstance(symmetry, nn.Module):
        model = symmetry
        symmetry = None
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
