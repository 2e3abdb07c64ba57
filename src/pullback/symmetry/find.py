"""The symmetries of a network, from its graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from .._core.capture import Selector, plain
from .._core.errors import PullbackError, refuse_unknown
from .actions.charts import ChartAction, in_parameters, with_values
from .actions.scaling import Action, Scaling, two_sided
from .candidates.mixings import mixings, scalings
from .candidates.shifts import shifts, streams
from .graph.tracing import Example, guess_input, trace
from .graph.walk import Walk
from .orbits.verify import verify_actions
from .rules import contractions, norms, pointwise, structural
from .symmetry import Symmetry

#: importing these registers the rules for operations
RULE_BOOKS = (contractions, norms, pointwise, structural)

Group = Literal["neuron", "layer"]

SPECIALIZED = "the model looks at the values of its inputs: the graph is that of the example's"


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
    model = plain(model)
    run = Example(model, guess_input(model) if example is None else example, output)
    if not run.params:
        return Symmetry(run, [], [], ["no parameter requires a gradient"])
    if actions is not None:
        return _verified(run, actions, group, [])
    walk = Walk()
    graph, specialized = trace(run)
    walk.run(graph, run)
    notes = [SPECIALIZED, *walk.notes] if specialized else walk.notes
    return _verified(run, candidates(walk, run), group, notes)


def candidates(walk: Walk, run: Example) -> list[Action]:
    """What the graph suggests."""
    params = with_values(run.params, walk.matrices)
    mixed = mixings(walk)  # first: their scales are not counted again
    found = [
        *scalings(walk),
        *mixed,
        *shifts(walk, params),
        *streams(walk.ledger, params),
    ]
    return [in_parameters(action, walk.matrices) for action in found]


def _verified(run: Example, actions: Sequence[Action], group: Group, notes: list[str]) -> Symmetry:
    """Keep the actions that are symmetries; for "layer", with one factor per scaling."""
    accepted, rejected = verify_actions(run, actions)
    if group == "layer":
        actions = [_merged(v.action) for v in accepted]
        accepted, more = verify_actions(run, actions)
        rejected = [*rejected, *more]
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
        symmetry = find(plain(model))
    found = getattr(symmetry, "actions", getattr(symmetry, "scalings", symmetry))
    return two_sided(found), model
