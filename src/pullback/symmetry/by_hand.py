"""Symmetries that a user names: which layers lie on both sides of a homogeneous activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._core.capture import plain
from .._core.errors import PullbackError
from .actions.scaling import Leg, Scaling
from .find import Group, build
from .graph.tracing import Example, guess_input
from .symmetry import Symmetry

Names = str | Sequence[str]


def by_hand(
    model: nn.Module,
    pairs: Sequence[tuple[Names, Names]],
    example: Any = None,
    *,
    group: Group = "neuron",
) -> Symmetry:
    """Scalings of the outputs of one layer against the inputs of the next, verified like others.

    Args:
        model: any module that can be run, traceable or not.
        pairs: names of modules, (before, after); either may be several, whose units are the same
            (a skip connection, several readers).
        example: as in `find`.
        group: as in `find`.

    >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> by_hand(net, [("0", "2")], torch.randn(5, 3)).generators().shape
    torch.Size([4, 26])
    """
    model = plain(model)
    run = Example(model, guess_input(model) if example is None else example)
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2:
            raise PullbackError(
                f"{pair!r} is no pair of layers", "two sides are scaled", "Use ('fc1', 'fc2')"
            )
    actions = [_scaling(model, run, _many(a), _many(b)) for a, b in pairs]
    return build(run, list(actions), group, ["the pairs were named by hand"])


def _many(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _scaling(model: nn.Module, run: Example, before: list[str], after: list[str]) -> Scaling:
    modules = dict(model.named_modules())
    for name in (*before, *after):
        if name not in modules:
            raise PullbackError(
                f"The model has no module {name!r}",
                f"it has {', '.join(n for n in modules if n)}",
                "Name modules as model.named_modules() does",
            )
    held = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    sizes = {_outputs(modules[n], n) for n in before}
    if len(sizes) != 1:
        raise PullbackError(
            f"{', '.join(before)} have different numbers of units",
            f"found {sorted(sizes)}",
            "Name layers whose outputs are added",
        )
    units = sizes.pop()
    legs: list[Leg] = []
    for name in before:
        for key, unit in _rows(modules[name], units).items():
            legs.append(_leg(modules[name], name, key, unit, 1, held))
    for name in after:
        legs.append(
            _leg(modules[name], name, "weight", _columns(modules[name], name, units), -1, held)
        )
    about = f"scaling of {', '.join(before)} against {', '.join(after)}, by hand"
    return Scaling(units, legs, about)


def _leg(
    module: nn.Module, name: str, key: str, unit: Tensor, power: int, held: dict[int, str]
) -> Leg:
    parameter = getattr(module, key)
    if id(parameter) not in held:
        raise PullbackError(
            f"{name}.{key} cannot move",
            "it is frozen, or not a parameter itself",
            "Unfreeze it, or leave the pair out",
        )
    return Leg(held[id(parameter)], unit, power)


def _outputs(module: nn.Module, name: str) -> int:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise PullbackError(
            f"{name!r} has no weight",
            f"it is a {type(module).__name__}",
            "Name linear, convolution, embedding or norm layers",
        )
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return module.out_channels
    return weight.shape[1] if isinstance(module, nn.Embedding) else weight.shape[0]


def _rows(module: nn.Module, units: int) -> dict[str, Tensor]:
    """Which unit each entry of weight and bias leads into."""
    line = torch.arange(units)
    weight = module.weight
    assert isinstance(weight, Tensor)
    tail = [1] * (weight.ndim - 2)
    if isinstance(module, nn.Embedding):
        return {"weight": line[None]}
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        unit = line.view(module.groups, 1, -1).expand(-1, weight.shape[0] // module.groups, -1)
        unit = unit.flatten(0, 1).reshape(weight.shape[0], weight.shape[1], *tail)
    else:
        unit = line.view(-1, *[1] * (weight.ndim - 1))
    out = {"weight": unit}
    return out if getattr(module, "bias", None) is None else {**out, "bias": line}


def _columns(module: nn.Module, name: str, units: int) -> Tensor:
    """Which unit each entry of a weight reads; flattened images give one run of columns each."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        _outputs(module, name)
        if isinstance(weight, Tensor) and len(weight) == units:
            return torch.arange(units)
    assert isinstance(weight, Tensor)
    tail = [1] * (weight.ndim - 2)
    groups = int(getattr(module, "groups", 1))
    turned = isinstance(module, nn.modules.conv._ConvTransposeNd)
    inputs = weight.shape[0] if turned else weight.shape[1] * groups
    if inputs % units:
        raise PullbackError(
            f"{name!r} does not read {units} units",
            f"it has {inputs} inputs",
            "Name the layer that reads the activations of the one before",
        )
    unit = torch.arange(inputs) // (inputs // units)
    if turned:
        return unit.view(-1, 1, *tail)
    rows = unit.view(groups, 1, -1).expand(-1, weight.shape[0] // groups if groups > 1 else 1, -1)
    return rows.flatten(0, 1).reshape(-1, weight.shape[1], *tail)
